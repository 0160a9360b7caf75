import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fef.routing.random import Random

MASK_BS = np.ones((4, 500), bool)


@pytest.fixture
def experts(make_context):
    def run(router, key=0, layer=0, train=True):
        ctx = dataclasses.replace(make_context(MASK_BS, train), key=jax.random.key(key), layer=jnp.int32(layer))
        assignment, _ = jax.jit(lambda: router({}, jnp.zeros((*MASK_BS.shape, 3)), ctx))()
        np.testing.assert_array_equal(assignment.weight_N, np.float32(1 / router.num_choices))
        assert assignment.valid_N.all() and assignment.aux_loss == 0
        return np.asarray(assignment.expert_N).reshape(*MASK_BS.shape, router.num_choices)

    return run


def test_all_experts_and_pairs_are_equally_likely(experts):
    # 2000 tokens with 2 of 4 experts: 12 ordered pairs, 166.7 each, standard deviation 12.4
    expert_BSK = experts(Random(4, 2))
    pairs = np.bincount((expert_BSK[..., 0] * 4 + expert_BSK[..., 1]).reshape(-1), minlength=16).reshape(4, 4)
    np.testing.assert_array_equal(np.diag(pairs), 0)  # two different ones
    np.testing.assert_allclose(pairs[~np.eye(4, dtype=bool)], 2000 / 12, atol=60)


def test_training_draws_anew_for_every_key_and_sequence(experts):
    first, again, other = (experts(Random(4, 1), key=key) for key in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert 0.7 < (first != other).mean() < 0.8  # 3/4 by chance
    assert 0.65 < (first[0] != first[1]).mean() < 0.85


def test_evaluation_has_one_draw_for_each_layer_and_seed(experts):
    first, other_key = (experts(Random(4, 1), key=key, train=False) for key in (0, 1))
    np.testing.assert_array_equal(first, other_key)
    np.testing.assert_array_equal(first, np.broadcast_to(first[:1], first.shape))
    for other in (
        experts(Random(4, 1), layer=1, train=False),
        experts(Random(4, 1, Random.Options(eval_seed=1)), train=False),
    ):
        assert 0.65 < (first != other).mean() < 0.85
