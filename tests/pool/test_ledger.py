"""The ledger, exactly: a small routing whose counts are done by hand, under remat and with microbatches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pool_programs as programs
import pytest

from fef.native import build
from fef.ops.read_ledger import read_ledger
from fef.ops.release import release
from fef.pool import errors
from fef.pool.ledger import (
    GRADIENTS,
    PURPOSES,
    REFETCH,
    WAITS,
    WEIGHTS,
    Units,
    bytes_by_leaf,
    bytes_by_purpose,
    bytes_received,
    relays,
)
from fef.pool.pool import Pool
from fef.pool.table import ExpertTable
from fef.sharding import REPLICATED, TOKENS, island, make_mesh

L, E, R, D, F, N = 2, 3, 2, 4, 6, 5
TABLE = ExpertTable(E, R)  # home [0, 0, 1]
SHAPES = ((D, F), (D, F), (F, D))
# Layer 0: member 0 uses experts 0, 2 and member 1 uses 0, 1. Layer 1: member 0 uses its own 1, member 1 uses 1, 2.
ROWS_LME = np.array([[[2, 0, 3], [1, 4, 0]], [[0, 5, 0], [0, 1, 2]]], np.int32)
# So member 0 reads expert 2 in layer 0, member 1 reads 0 and 1 in layer 0 and 1 in layer 1; the rest is at home.
REMOTE_MLE = np.array([[[0, 0, 1], [0, 0, 0]], [[1, 1, 0], [0, 1, 0]]])
X_ND = np.random.default_rng(0).normal(size=(R * N, D)).astype(np.float32)
WEIGHTS_3 = programs.random_weights(np.random.default_rng(1), L, TABLE, D, F)


@pytest.fixture(scope="module")
def mesh():
    build.build()
    return make_mesh(R)


@pytest.fixture(scope="module")
def handle(mesh):
    with Pool(mesh) as pool:
        yield pool.table("ffn", L, TABLE, SHAPES, jnp.float32)


def ledger_of(mesh, version_M4, after, is_released=False, layers=L, experts=E):
    def body(version_M4, after):
        after = release(version_M4[0], after) if is_released else after
        counts_LQE, waits_us_LW = read_ledger(version_M4[0], after, layers, experts)
        return counts_LQE[None], waits_us_LW[None]

    return island(mesh, body, (TOKENS, REPLICATED), (TOKENS, TOKENS))(version_M4, after)


def expected(weights=0, refetch=0, gradients=0):
    counts_MLQE = np.zeros((R, L, len(PURPOSES), E), np.int32)
    for purpose, factor in ((WEIGHTS, weights), (REFETCH, refetch), (GRADIENTS, gradients)):
        counts_MLQE[:, :, purpose] = factor * REMOTE_MLE
    return counts_MLQE


def ffn_layers(mesh, published, x_ND, remat=False):
    def layer(published, index, x_ND, rows_ME):
        return x_ND + programs.ffn_all(mesh, published, index, x_ND, rows_ME, F)

    layer = jax.checkpoint(layer) if remat else layer
    for index in range(L):
        x_ND = layer(published, index, x_ND, ROWS_LME[index])
    return (x_ND**2).sum()


@pytest.mark.parametrize(("remat", "refetch"), [(False, 1), (True, 2)])
def test_training_step(mesh, handle, remat, refetch):
    """The backward pass reads the weights a second time; remat reads them once more before."""

    @jax.jit
    def step(weights):
        publish = functools.partial(programs.publish_all, mesh, handle, num_parts=3)
        (version_M4, chain_M), collect = jax.vjp(lambda w: publish(w), weights)
        d_chain_M = jax.grad(lambda chain_M: ffn_layers(mesh, (version_M4, chain_M), X_ND, remat))(chain_M)
        grads = collect((np.zeros(version_M4.shape, jax.dtypes.float0), d_chain_M))
        return ledger_of(mesh, version_M4, after=sum(grad.sum() for grad in jax.tree.leaves(grads)))

    for _ in range(2):  # a new version begins at zero
        counts_MLQE, waits_us_MLW = step(WEIGHTS_3)
        np.testing.assert_array_equal(counts_MLQE, expected(weights=1, refetch=refetch, gradients=1))
        assert waits_us_MLW.shape == (R, L, len(WAITS)) and (np.asarray(waits_us_MLW) >= 0).all()
    assert bytes_by_purpose(np.asarray(counts_MLQE).sum(0), Units(3 * D * F * 4, 3 * D * F * 4, D * 4)) == {
        "weights": 4 * 288, "refetch": 4 * 288 * refetch, "gradients": 4 * 288, "tokens": 0, "metadata": 0,
        "missed": 0, "relayed": 0, "gathered": 0,
    }  # fmt: skip


def test_microbatches(mesh, handle):
    """Three microbatches under one version: the first read of a block is `weights`, all others are `refetch`."""

    @jax.jit
    def step(weights):
        publish = functools.partial(programs.publish_all, mesh, handle, num_parts=3)
        (version_M4, chain_M), collect = jax.vjp(lambda w: publish(w), weights)

        def add(d_chain_M, index):
            def loss(chain_M):
                return ffn_layers(mesh, programs.at_microbatch((version_M4, chain_M), index), X_ND)

            return d_chain_M + jax.grad(loss)(chain_M), None

        d_chain_M, _ = jax.lax.scan(add, jnp.zeros(R), jnp.arange(3))
        grads = collect((np.zeros(version_M4.shape, jax.dtypes.float0), d_chain_M))
        return ledger_of(mesh, version_M4, after=sum(grad.sum() for grad in jax.tree.leaves(grads)))[0]

    np.testing.assert_array_equal(step(WEIGHTS_3), expected(weights=1, refetch=3 + 2, gradients=3))


def test_evaluation(mesh, handle):
    """Only reads, then a release. get and pooled_ffn count alike; an expert named twice is read once."""

    @jax.jit
    def evaluate(weights):
        published = programs.publish_all(mesh, handle, weights, num_parts=3)
        loss = ffn_layers(mesh, published, X_ND)
        blocks = programs.get_all(mesh, published, 0, [[2, 2, -1], [2, -1, -1]], 3 * D * F)
        return ledger_of(mesh, published[0], loss + blocks.sum(), is_released=True)[0]

    wanted = expected(weights=1)
    wanted[0, 0, REFETCH, 2] = 1
    np.testing.assert_array_equal(evaluate(WEIGHTS_3), wanted)


def test_refusals(mesh, handle):
    version_M4, _ = jax.jit(lambda w: programs.publish_all(mesh, handle, w, num_parts=3))(WEIGHTS_3)
    for layers, experts in ((L + 1, E), (L, E + 1)):
        run = jax.jit(functools.partial(ledger_of, mesh, layers=layers, experts=experts))
        with pytest.raises((RuntimeError, ValueError)) as caught:
            jax.block_until_ready(run(version_M4, jnp.float32(0)))
        wanted = f"ledger: table ffn has 2 layers of 3 experts, asked for {layers} of {experts}"
        assert str(errors.as_pool_error(caught.value)) == wanted
    with pytest.raises((RuntimeError, ValueError)) as caught:
        jax.block_until_ready(
            jax.jit(functools.partial(ledger_of, mesh))(version_M4.at[:, 2].set(10**6), jnp.float32(0))
        )
    error = errors.as_pool_error(caught.value)
    assert type(error) is errors.StaleVersionError and "ledger: table ffn, version" in str(error)


def test_bytes_are_exact_beyond_32_bits():
    counts_LQE = np.zeros((2, len(PURPOSES), 3), np.int32)
    counts_LQE[0, 0] = 2**31 - 1
    counts_LQE[:, 1:, 2] = [[1, 2, 3, 4, 5, 6, 7], [10, 20, 30, 40, 50, 60, 70]]
    units = Units(block_bytes=2**33, gradient_bytes=100, row_bytes=10)
    assert bytes_by_purpose(counts_LQE, units) == {
        "weights": 3 * (2**31 - 1) * 2**33, "refetch": 11 * 2**33, "gradients": 2200, "tokens": 330, "metadata": 44,
        "missed": 55 * 2**33, "relayed": 66 * 2**33, "gathered": 7700,
    }  # fmt: skip


def test_bytes_received_from_each_member():
    """The routing above: member 0 reads a block of rank 1, member 1 three of rank 0; gradients go the other way."""
    counts_MLQP = np.zeros((R, L, len(PURPOSES), TABLE.num_positions), np.int32)
    counts_MLQP[..., TABLE.position_E] = expected(weights=1, refetch=2, gradients=1)
    received = bytes_received(counts_MLQP, R, Units(block_bytes=288, gradient_bytes=100, row_bytes=16))
    assert {purpose: bytes_MR.tolist() for purpose, bytes_MR in received.items()} == {
        "weights": [[0, 288], [3 * 288, 0]],
        "refetch": [[0, 2 * 288], [6 * 288, 0]],
        "gradients": [[0, 300], [100, 0]],
    }


def test_bytes_received_within_each_data_parallel_group():
    """2 groups of 2 members with 2 positions each; token rows go to the home of a position and come back."""
    counts_MLQP = np.zeros((4, 1, len(PURPOSES), 4), np.int32)
    tokens = PURPOSES.index("tokens")
    counts_MLQP[1, 0, tokens] = [3, 4, 0, 0]  # rank 1 of group 0 sends to rank 0; of 7 crossings 4 go there
    counts_MLQP[2, 0, tokens] = [0, 0, 0, 6]  # rank 0 of group 1 sends to rank 1
    counts_MLQP[3, 0, PURPOSES.index("metadata")] = [5, 0, 0, 0]
    received = bytes_received(counts_MLQP, 2, Units(block_bytes=1, gradient_bytes=1, row_bytes=10))
    assert {purpose: bytes_MR.tolist() for purpose, bytes_MR in received.items()} == {
        "tokens": [[0, 40], [30, 0], [0, 30], [30, 0]],
        "metadata": [[0, 0], [0, 0], [0, 0], [5, 0]],
    }


def test_who_relays_for_whom():
    """Hosts 0, 2 and 4 on one leaf, 1 on another and 3 on a third; host 0 has two members, of two positions each."""
    host_GR, leaf_of_host = np.array([[0, 0, 1, 2, 3, 4]]), [0, 1, 0, 2, 0]
    relay_GRP = relays(host_GR, leaf_of_host, positions=12)
    # Ranks 2 and 4 are elsewhere: their positions 4, 5 and 8, 9 come by hosts 0, 2, 4 in turn, whose ranks are 0, 3, 5.
    assert relay_GRP[0, 0].tolist() == relay_GRP[0, 5].tolist() == [0, 0, 1, 1, 0, 3, 3, 3, 3, 5, 5, 5]
    alone = np.repeat(np.arange(6), 2).tolist()
    assert relay_GRP[0, 2].tolist() == relay_GRP[0, 4].tolist() == alone
    both = relays(np.array([[0, 1], [2, 3]]), [0, 1, 1, 0], positions=2)
    assert both.tolist() == [[[0, 1]] * 2] * 2  # no member of a group has a neighbour in it


def test_bytes_by_leaf_and_by_way_of_the_relay():
    """4 hosts of a member with one position each, on leaves 0, 0, 1, 1: rank 0 relays position 2, rank 1 position 3."""
    leaf_GR = np.array([[0, 0, 1, 1]])
    relay_GRP = relays(np.array([[0, 1, 2, 3]]), [0, 0, 1, 1], positions=4)
    counts_MLQP = np.zeros((4, 1, len(PURPOSES), 4), np.int32)
    relayed, gathered, tokens = (PURPOSES.index(purpose) for purpose in ("relayed", "gathered", "tokens"))
    counts_MLQP[0, 0, WEIGHTS] = [0, 1, 1, 0]
    counts_MLQP[0, 0, relayed] = [0, 0, 0, 1]
    counts_MLQP[1, 0, relayed] = [0, 0, 1, 0]
    counts_MLQP[1, 0, gathered] = [0, 0, 1, 0]
    counts_MLQP[0, 0, GRADIENTS] = [0, 0, 1, 0]
    counts_MLQP[3, 0, tokens] = [2, 0, 4, 0]
    units = Units(block_bytes=1000, gradient_bytes=100, row_bytes=1)
    assert bytes_by_leaf(counts_MLQP, leaf_GR, units) == (1000 + 2000 + 100 + 4, 1000 + 100 + 2)
    received = bytes_received(counts_MLQP, 4, units, relay_GRP)
    assert {
        purpose: {(m, r): n for (m, r), n in np.ndenumerate(of_MR) if n} for purpose, of_MR in received.items()
    } == {
        "weights": {(0, 1): 1000, (0, 2): 1000},
        "gradients": {(2, 0): 100},
        "tokens": {(0, 3): 1, (3, 0): 1, (2, 3): 2, (3, 2): 2},
        "relayed": {(0, 1): 1000, (1, 0): 1000},
        "gathered": {(0, 1): 100},
    }
