import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fef.routing.hash import Hash, mix


def plain_mix(word):
    word = (word + 0x9E3779B9) % 2**32
    word = (word ^ word >> 16) * 0x85EBCA6B % 2**32
    word = (word ^ word >> 13) * 0xC2B2AE35 % 2**32
    return word ^ word >> 16


@pytest.fixture
def experts(make_context):
    """Experts (len(ids), K) of token ids."""

    def run(router, ids, layer=0, train=True):
        ids_BS = jnp.asarray(ids, jnp.int32)[None]
        ctx = make_context(np.ones(ids_BS.shape), train)
        ctx = dataclasses.replace(ctx, token_ids_BS=ids_BS, layer=jnp.int32(layer))
        assignment, _ = jax.jit(lambda: router({}, jnp.zeros((*ids_BS.shape, 3)), ctx))()
        np.testing.assert_array_equal(assignment.weight_N, np.float32(1 / router.num_choices))
        assert assignment.valid_N.all() and assignment.aux_loss == 0
        return np.asarray(assignment.expert_N).reshape(-1, router.num_choices)

    return run


def test_the_hash_by_a_published_value():
    # fmix32(1) = 0x514E28B7; the addition is undone beforehand
    assert int(mix(jnp.uint32(1 - 0x9E3779B9 + 2**32))) == 0x514E28B7
    words = np.random.default_rng(0).integers(0, 2**32, 50)
    np.testing.assert_array_equal(mix(jnp.asarray(words, jnp.uint32)), [plain_mix(int(word)) for word in words])


@pytest.mark.parametrize(("seed", "layer"), [(0, 0), (7, 2)])
def test_the_table_by_plain_integers(experts, seed, layer):
    ids = [0, 1, 2, 3, 4, 5, 257, 50000]
    expected = []
    for token in ids:
        block, place = divmod(token, 4)
        table = plain_mix(plain_mix(plain_mix(seed) ^ layer) ^ block)
        order = sorted(range(4), key=lambda expert: plain_mix(table ^ expert))
        expected.append([order[place], order[(place + 1) % 4], order[(place + 2) % 4]])
    router = Hash(4, 3, Hash.Options(table_seed=seed))
    np.testing.assert_array_equal(experts(router, ids, layer), expected)


def test_ids_are_shared_out_evenly(experts):
    # 256 ids over 8 experts: 32 each, as first and as second choice
    expert = experts(Hash(8, 2), range(256))
    for choice in (0, 1):
        np.testing.assert_array_equal(np.bincount(expert[:, choice], minlength=8), [32] * 8)
    assert (expert[:, 0] != expert[:, 1]).all()


def test_layers_and_seeds_have_tables_of_their_own_and_evaluation_has_the_same(experts):
    ids = range(256)
    table = experts(Hash(8, 1), ids)
    np.testing.assert_array_equal(table, experts(Hash(8, 1), ids, train=False))
    for other in (experts(Hash(8, 1), ids, layer=1), experts(Hash(8, 1, Hash.Options(table_seed=1)), ids)):
        assert 0.75 < (table != other).mean() < 1  # 7/8 by chance
