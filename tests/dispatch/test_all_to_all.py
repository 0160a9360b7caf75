"""all_to_all: its sizes, its shifted exchange, and that each branch has the exchanges that the ledger counts."""

import functools
import re

import jax
import numpy as np
import pytest
from dispatch_harness import COMPILER_OPTIONS, Case, D, Variant, make_inputs, value_and_grads

from fef import sharding
from fef.dispatch.all_to_all import capacity_sizes, shifted_all_to_all
from fef.registry import scan
from fef.testing.workloads import workload

scan("fef.dispatch")


@pytest.mark.parametrize(
    ("num_rows", "num_tokens", "num_experts", "sizes"),
    [
        (2048, 1024, 16, [128, 160, 192, 256, 512, 1024]),  # K = 2: 1, 1.25, 1.5, 2 and 4 times 128, then E/K times
        (32, 16, 6, [6, 7, 8, 11, 16]),  # fractions are rounded up; 4 * 32 / 6 is more than any expert can get
        (16, 16, 4, [4, 5, 6, 8, 16]),
        (8, 4, 3, [3, 4]),
        (4, 4, 1, [4]),
        (5, 8, 4, [2, 3, 5]),  # irregular: fewer rows than tokens
    ],
)
def test_capacity_sizes(num_rows, num_tokens, num_experts, sizes):
    assert capacity_sizes(num_rows, num_tokens, num_experts) == sizes


@pytest.mark.parametrize("members", [1, 2, 4, 8])
def test_shifted_exchange_and_its_gradient_equal_the_native_ones(members):
    rng = np.random.default_rng(0)
    x, d_y = rng.normal(size=(2, members * members, 3)).astype(np.float32)

    def both(x_R3, d_y_R3):
        y, pull = jax.vjp(lambda x: shifted_all_to_all(x, "expert"), x_R3)
        wanted, pull_wanted = jax.vjp(lambda x: jax.lax.all_to_all(x, "expert", 0, 0), x_R3)
        return (y, *pull(d_y_R3)), (wanted, *pull_wanted(d_y_R3))

    run = sharding.island(sharding.make_mesh(members), both, sharding.EXPERTS, sharding.EXPERTS)
    got, wanted = jax.jit(run, compiler_options=COMPILER_OPTIONS)(x, d_y)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    swapped = x.reshape(members, members, 3).swapaxes(0, 1).reshape(x.shape)  # entry r of member m <-> entry m of r
    np.testing.assert_array_equal(got[0], swapped)


@pytest.mark.parametrize("rerun", [False, True])
def test_exchanges_are_those_in_the_ledger(rerun):
    """4 in a branch that keeps what it received, 5 in one that fetches it again, 2 more in a rerun."""
    lines = collectives("all_to_all", Case(members=4, experts=6, choices=2, tokens=16, rerun=rerun))
    for capacity, crossings in {6: 4, 7: 4, 8: 4, 11: 4, 16: 5}.items():
        of_this_size = [line for line in lines if line.endswith(f"-> tensor<4x2x{capacity}x{D}xf32>")]
        assert len(of_this_size) == crossings + 2 * rerun, capacity
    assert len([line for line in lines if line.endswith("-> tensor<4x2xi32>")]) == 1 + rerun


@pytest.mark.parametrize("rerun", [False, True])
def test_all_gather_has_the_collectives_in_its_ledger(rerun):
    """Three matrices are gathered, again in a rerun, and their gradients scattered."""
    lines = collectives("all_gather", Case(members=4, experts=6, choices=2, tokens=8, rerun=rerun))
    assert sum("all_gather" in line for line in lines) == 3 * (1 + rerun)
    assert sum("reduce_scatter" in line for line in lines) == 3


def collectives(name: str, case: Case) -> list[str]:
    """The lines of a layer's value and gradients, as JAX hands them to XLA, on which blocks of arrays move."""
    inputs = make_inputs(case, workload("balanced", case.members, case.tokens, case.experts, case.choices))
    step = functools.partial(value_and_grads, case, Variant(name, matmul="jax").make(case))
    text = jax.jit(step).lower(inputs).as_text()
    return re.findall(r"stablehlo\.(?:all_to_all|all_gather|reduce_scatter).*?-> tensor<[^>]*>", text, re.DOTALL)
