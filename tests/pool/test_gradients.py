"""Gradients are summed in rank order, bit for bit, whatever the order in which they arrive."""

import jax
import jax.numpy as jnp
import numpy as np
import pool_programs as programs
import pytest

from fef.config import PoolConfig
from fef.native import build
from fef.pool.pool import Pool
from fef.pool.table import ExpertTable
from fef.sharding import make_mesh

L, R, D, n = 5, 4, 8, 3


@pytest.fixture(scope="module")
def mesh():
    build.build()
    return make_mesh(R)


@pytest.fixture
def chaos_pool(mesh, monkeypatch):
    """Random delays in every operation, and the least staging: two layers of five."""
    monkeypatch.setenv("FEF_CHAOS", "7")
    with Pool(mesh, PoolConfig()) as pool:
        assert pool.config.stages == 2
        yield pool


def linear_program(mesh, experts):
    """Gradients that are given: the loss is a weighted sum of the blocks read, at a weight for each place."""

    def loss(w_LPD, weights_LMnD, ids_LMn, handle):
        published = programs.publish_all(mesh, handle, (w_LPD,))
        total = jnp.float32(0)
        for layer in range(L):
            # The sum carries the layers' order: what a layer reads does not depend on another one.
            blocks_MnD = programs.get_all(mesh, published, layer, ids_LMn[layer], D)
            total += (blocks_MnD * weights_LMnD[layer]).sum()
        return total

    return jax.jit(jax.grad(loss))


def sums_in_rank_order(table, weights_LMnD, ids_LMn):
    """What numpy makes of it: first within a member, then over the members, always from the front."""
    sums = np.zeros((L, table.num_positions, D), np.float32)
    for layer in range(L):
        for expert in range(table.num_experts):
            total = None
            for member in range(R):
                rows = weights_LMnD[layer, member, ids_LMn[layer, member] == expert]
                if len(rows):
                    own = rows[0]
                    for row in rows[1:]:
                        own = own + row
                    total = own if total is None else total + own
            if total is not None:
                sums[layer, table.position_E[expert]] = total
    return sums


@pytest.mark.parametrize("experts", [3, 6])
def test_bit_identical_in_rank_order(mesh, chaos_pool, experts):
    table, rng = ExpertTable(experts, R), np.random.default_rng(experts)
    handle = chaos_pool.table("test", L, table, ((D,),), jnp.float32)
    run = linear_program(mesh, experts)
    w = programs.random_blocks(rng, L, table, (D,))
    for _ in range(6):
        ids = rng.integers(-1, experts, (L, R, n)).astype(np.int32)
        ids[1] = np.where(ids[1] == 1, 2, ids[1])
        ids[1, 2, 0] = 1  # used by one member only
        ids[2] = np.where(ids[2] == 0, -1, ids[2])  # used by nobody
        ids[3] = 1  # all of all members to one expert
        weights = (10.0 ** rng.integers(-4, 5, (L, R, n, D)) * rng.normal(size=(L, R, n, D))).astype(np.float32)
        wanted = sums_in_rank_order(table, weights, ids)
        assert not wanted[2, 0].any() and wanted[1, table.position_E[1]].any()
        np.testing.assert_array_equal(run(w, weights, ids, handle), wanted)


def test_ffn_repeats_bit_for_bit_under_chaos(mesh, monkeypatch):
    table, rng = ExpertTable(6, R), np.random.default_rng(0)
    d_expert, rows = 10, 9
    weights = programs.random_weights(rng, L, table, D, d_expert)
    x_ND = rng.normal(size=(R * rows, D)).astype(np.float32)
    rows_ME = np.stack([rng.multinomial(rows - 1, np.ones(6) / 6) for _ in range(R)])
    run = jax.jit(jax.value_and_grad(lambda w, x, h: programs.ffn_loss(mesh, h, w, x, rows_ME), argnums=(0, 1)))
    results = []
    for seed in ("", "1", "2", "3"):
        monkeypatch.setenv("FEF_CHAOS", seed)
        with Pool(mesh) as pool:
            handle = pool.table("ffn", L, table, ((D, d_expert), (D, d_expert), (d_expert, D)), jnp.float32)
            results += [run(weights, x_ND, handle) for _ in range(4)]
            jax.block_until_ready(results)
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, results[0])
    wanted = jax.value_and_grad(lambda w, x: programs.reference_ffn_loss(table, w, x, rows_ME), argnums=(0, 1))
    programs.assert_close(results[0], jax.jit(wanted)(weights, x_ND))


def test_data_parallel_groups_are_domains_of_their_own(monkeypatch):
    """2 x 2 members: the same experts in both groups, other tokens; gradients are added over `data` afterwards."""
    monkeypatch.setenv("FEF_CHAOS", "3")
    mesh, table, rng = make_mesh(R, data=2), ExpertTable(3, 2), np.random.default_rng(1)
    ids = rng.integers(-1, 3, (L, R, n)).astype(np.int32)
    weights = rng.integers(-5, 6, (L, R, n, D)).astype(np.float32)  # exact in any order
    w = programs.random_blocks(rng, L, table, (D,))
    with Pool(mesh) as pool:
        handle = pool.table("test", L, table, ((D,),), jnp.float32)
        got = linear_program(mesh, 3)(w, weights, ids, handle)
    np.testing.assert_array_equal(got, sums_in_rank_order(table, weights, ids))
