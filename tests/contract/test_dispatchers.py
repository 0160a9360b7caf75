"""Every registered dispatcher that runs on CPUs, on stored assignments: value, gradients and what the ledger says."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dispatch_harness import (
    Case,
    D,
    F,
    Inputs,
    Result,
    Variant,
    assert_close,
    expected,
    make_inputs,
    run,
    variants_on_cpu,
)

from fef import sharding
from fef.dispatch.all_to_all import capacity_sizes
from fef.ffn import FFNS
from fef.native import build
from fef.pool.ledger import PURPOSES, bytes_by_purpose
from fef.routing import Assignment
from fef.testing.workloads import WORKLOADS, workload

GRAD_NORM_FILE = pathlib.Path(__file__).parents[1] / "cases" / "dispatch" / "grad_norm.json"
REFERENCE, ALL_GATHER, ALL_TO_ALL, POOLED = map(Variant, ("reference", "all_gather", "all_to_all", "pooled"))
POOLED_GET, SHIFTED = Variant("pooled", matmul="jax"), Variant("all_to_all", options=(("form", "shifted"),))
FLUID = Variant("fluid", options=(("cost", "bytes"),))
TOKENS = Variant("fluid", options=(("mode", "tokens"), ("room", 8.0)))
EACH_ROW, CROWDED, WEIGHTS = (
    Variant("fluid", options=options)
    for options in (
        (("mode", "tokens"), ("room", 8.0), ("deduplicate", False)),
        (("mode", "tokens"), ("room", 0.5)),
        (("mode", "weights"),),
    )
)
ALL_FLUID = [FLUID, TOKENS, EACH_ROW, CROWDED, WEIGHTS]

MAIN = "6 experts on 4 members"
# Sizes, assignments, and variants to be tried beside every registered dispatcher.
CASES: dict[str, tuple[Case, list[str], list[Variant]]] = {
    MAIN: (
        Case(members=4, experts=6, choices=2, tokens=8),
        [*WORKLOADS, "nothing valid", "all to experts 0 and 1", "one token in all"],
        [POOLED_GET, *ALL_FLUID],
    ),
    "1 member": (Case(1, 3, 2, 4), ["balanced", "hot_experts", "nothing valid"], [SHIFTED, TOKENS]),
    "7 experts on 2 members": (Case(2, 7, 2, 7), ["spread_hot", "zero_load", "7 and 5 tokens"], ALL_FLUID),
    "3 experts on 8 members": (Case(8, 3, 2, 4), ["hot_rank", "ragged_sources", "zero_load"], ALL_FLUID),
    "3 experts on 4 members, one choice": (
        Case(4, 3, 1, 4),
        ["balanced", "hot_experts", "burst"],
        [SHIFTED, *ALL_FLUID],
    ),
    "data axis of 2": (Case(2, 5, 2, 4, data=2), ["hot_rank", "ragged_sources", "zero_load"], [POOLED_GET, *ALL_FLUID]),
    "irregular": (Case(2, 4, 2, 4, regular=False), ["irregular", "nothing valid"], [POOLED_GET, *ALL_FLUID]),
    "recomputed": (Case(2, 5, 2, 4, rerun=True), ["balanced", "zero_load"], [POOLED_GET, *ALL_FLUID]),
    "gelu": (Case(4, 6, 2, 8, ffn="gelu"), ["hot_experts", "zero_load"], [POOLED_GET, *ALL_FLUID]),
    "relu": (Case(2, 5, 2, 4, ffn="relu"), ["spread_hot", "zero_load"], [POOLED_GET, *ALL_FLUID]),
    "clamped_swiglu": (
        Case(4, 6, 2, 8, ffn="clamped_swiglu"),
        ["hot_experts", "zero_load", "one token in all"],
        [POOLED_GET, SHIFTED, *ALL_FLUID],
    ),
    "clamped_swiglu, data axis of 2": (
        Case(2, 5, 2, 4, data=2, ffn="clamped_swiglu"),
        ["hot_rank", "ragged_sources"],
        [FLUID, TOKENS],
    ),
    "clamped_swiglu, bfloat16": (Case(2, 4, 2, 4, dtype="bfloat16", ffn="clamped_swiglu"), ["balanced"], [TOKENS]),
    "bfloat16": (Case(2, 4, 2, 4, dtype="bfloat16"), ["balanced", "hot_experts"], [TOKENS]),
}
PAIRS = [
    pytest.param(label, variant, id=f"{label}-{variant.label}")
    for label, (_, _, further) in CASES.items()
    for variant in [*variants_on_cpu(), *further]
]
every_pair = pytest.mark.parametrize(("label", "variant"), PAIRS)


@pytest.fixture(scope="module", autouse=True)
def built_library():
    build.build()


@functools.cache
def inputs_of(label: str) -> tuple[Case, dict[str, Inputs]]:
    case, names, _ = CASES[label]
    return case, {name: make_inputs(case, stored_assignment(case, name)) for name in names}


@functools.cache  # the tests look at the same results from several sides
def results_of(label: str, variant: Variant) -> dict[str, Result]:
    case, stored = inputs_of(label)
    return run(case, variant, stored)


def stored_assignment(case: Case, name: str) -> Assignment:
    """Of all members, on a leading axis."""
    members = case.members * case.data
    if name in WORKLOADS:
        return workload(name, members, case.tokens, case.experts, case.choices, step=3)
    if not case.regular:
        return irregular(case, all_valid=name != "nothing valid")
    assignment = workload("balanced", members, case.tokens, case.experts, case.choices)
    token_N, expert_N, valid_N = assignment.token_N, assignment.expert_N, assignment.valid_N
    if name == "all to experts 0 and 1":
        expert_N = np.broadcast_to(np.arange(token_N.shape[1]) % 2, token_N.shape)
    num_tokens_M = {"nothing valid": 0, "7 and 5 tokens": np.array([7, 5]), "one token in all": np.eye(members)[-1]}
    valid_N = valid_N & (token_N < np.reshape(num_tokens_M.get(name, case.tokens), (-1, 1)))
    return Assignment(token_N, expert_N.astype(np.int32), assignment.weight_N, valid_N, assignment.aux_loss, {}, None)


def irregular(case: Case, all_valid: bool) -> Assignment:
    """Experts take 4, 1, 0 and 2 different tokens of member 0 and 1, 0, 4, 2 of member 1; one place is unused."""
    rng = np.random.default_rng(0)
    token, expert = [], []
    for counts in ((4, 1, 0, 2), (1, 0, 4, 2)):
        of_expert = [rng.permutation(case.tokens)[:count] for count in counts]
        order = rng.permutation(sum(counts))
        token.append(np.append(np.concatenate(of_expert)[order], 3))
        expert.append(np.append(np.repeat(np.arange(case.experts), counts)[order], 0))
    token_N, expert_N = np.array(token, np.int32), np.array(expert, np.int32)
    weight_N = rng.uniform(0.2, 1, token_N.shape).astype(np.float32)
    valid_N = np.broadcast_to(np.arange(token_N.shape[1]) < 7 * all_valid, token_N.shape)
    return Assignment(token_N, expert_N, weight_N, valid_N, jnp.zeros(2), {}, None)


def counts_MP(case: Case, inputs: Inputs) -> np.ndarray:
    """Rows of each member for each position."""
    members, table = case.members * case.data, case.table
    _, expert_N, valid_N = inputs.ints
    member_N = np.repeat(np.arange(members), expert_N.size // members)
    rows_MP = np.zeros((members, table.num_positions), int)
    np.add.at(rows_MP, (member_N[valid_N], table.position_E[expert_N[valid_N]]), 1)
    return rows_MP


def test_every_kind_of_ffn_is_tried():
    assert {case.ffn for case, _, _ in CASES.values()} == set(FFNS)


@every_pair
def test_value_and_gradients(label, variant):
    case, stored = inputs_of(label)
    tolerance = 1e-5 if case.dtype == "float32" else 0.03
    for name, result in results_of(label, variant).items():
        assert result.y_TD.dtype == result.dx_TD.dtype == case.dtype
        assert_close(result, expected(case, stored[name]), name, tolerance)
        assert_close(result, results_of(label, REFERENCE)[name], f"{name}, against reference", tolerance)


@every_pair
def test_positions_without_tokens_get_a_gradient_of_exactly_zero(label, variant):
    case, stored = inputs_of(label)
    for name, result in results_of(label, variant).items():
        unused_P = counts_MP(case, stored[name]).sum(0) == 0
        for leaf in jax.tree.leaves(result.dexperts):
            assert not leaf[unused_P].any(), name


@every_pair
def test_gradient_norm_is_that_of_the_experts_alone(label, variant):
    """It depends neither on the number of members nor on empty positions (cases D-04)."""
    case, stored = inputs_of(label)
    tolerance = 1e-5 if case.dtype == "float32" else 0.02
    for name, result in results_of(label, variant).items():
        logical = jax.tree.map(lambda w: w[case.table.position_E], expected(case, stored[name]).dexperts)
        norm, wanted = optax.tree.norm(result.dexperts), optax.tree.norm(logical)
        np.testing.assert_allclose(norm, wanted, tolerance, err_msg=name)


@every_pair
def test_ledger(label, variant):
    """What moves to or from each member, by purpose and position; what is at home moves nothing."""
    case, stored = inputs_of(label)
    for name, result in results_of(label, variant).items():
        wanted_MQP = np.zeros_like(result.moved_MQP)
        for purpose, units in units_of(variant, case, stored[name]).items():
            wanted_MQP[:, PURPOSES.index(purpose)] = units
        rank_M = np.arange(len(wanted_MQP)) % case.members
        home_P = np.arange(case.table.num_positions) // case.table.per_member
        wanted_MQP *= (home_P != rank_M[:, None])[:, None]
        np.testing.assert_array_equal(result.moved_MQP, wanted_MQP, err_msg=name)


def units_of(variant: Variant, case: Case, inputs: Inputs) -> dict[str, int | np.ndarray]:
    """Units by purpose, the same everywhere or (members, positions)."""
    rows_MP = counts_MP(case, inputs)
    if variant.dispatcher == "all_gather":
        return {"weights": 1, "refetch": 1 * case.rerun, "gradients": 1}
    if variant.dispatcher == "all_to_all":
        num_rows = inputs.weight_N.size // len(rows_MP)
        sizes = capacity_sizes(num_rows, case.tokens, case.experts)
        capacity = min(size for size in sizes if size >= rows_MP.max())
        crossings = 4 if capacity <= -(-2 * num_rows // case.experts) else 5  # large ones are fetched again
        return {"tokens": (crossings + 2 * case.rerun) * capacity, "metadata": 4 * (1 + case.rerun)}
    if variant.dispatcher == "pooled":
        in_place = variant.matmul == "auto" and case.dtype == "float32"  # reads again instead of keeping a copy
        return {"weights": rows_MP > 0, "refetch": (rows_MP > 0) * (in_place + case.rerun), "gradients": rows_MP > 0}
    if variant.dispatcher == "fluid":
        return fluid_units(variant, case, inputs)
    assert variant == REFERENCE, f"say here what {variant.dispatcher} moves"
    return {}


def fluid_units(variant: Variant, case: Case, inputs: Inputs) -> dict[str, np.ndarray]:
    """As the choice of each member has it: what is read as with pooled, and rows at the first expert they go to.

    All members are on one host: where rows go there once, that is to all other members together.
    """
    dispatcher = variant.make(case)
    token_N, expert_N, valid_N = (array.reshape(case.members * case.data, -1) for array in inputs.ints)
    rows_MP, position_E = counts_MP(case, inputs), case.table.position_E
    read_MP, sent_MP = rows_MP > 0, np.zeros_like(rows_MP)
    quota, load_E = dispatcher.quota(token_N.shape[1]), np.zeros(case.table.num_experts, np.int32)
    for member, rows_P in enumerate(rows_MP):
        rank, kind = member % case.members, FFNS.get(case.ffn)
        is_visited_E = np.asarray(dispatcher.choose(rows_P[position_E], load_E, rank, kind, (D, F), quota))
        read_MP[member, position_E[is_visited_E]] = False
        seen = set()
        for expert in np.flatnonzero(is_visited_E):
            tokens = token_N[member][valid_N[member] & (expert_N[member] == expert)].tolist()
            new = set(tokens) - seen
            sent_MP[member, position_E[expert]] = len(new if dispatcher.options.deduplicate else tokens)
            seen |= new
    return {
        "weights": read_MP, "refetch": read_MP * (1 + case.rerun), "gradients": read_MP,
        "tokens": sent_MP * (4 + 2 * case.rerun),
    }  # fmt: skip


BYTES_BY_HAND = {  # of all members; R = 4, P = 8, D = 8, F = 12, float32; every member has 2 or 3 rows of each expert
    REFERENCE: {},
    ALL_GATHER: {"weights": 4 * 6 * 1152, "gradients": 4 * 6 * 1152},  # (R-1)/R P P_E b of each; P_E b = 3 * 96 * 4
    ALL_TO_ALL: {"tokens": 4 * 4 * 6 * 3 * 32, "metadata": 4 * 6 * 4},  # 4 (R-1)/R P C D b of each, with C = 3
    POOLED: {"weights": 18 * 1152, "refetch": 18 * 1152, "gradients": 18 * 1152},  # remote experts: 4, 4, 5 and 5
}


@pytest.mark.parametrize("variant", BYTES_BY_HAND, ids=lambda variant: variant.label)
def test_bytes_by_hand(variant):
    case, _ = inputs_of(MAIN)
    moved_QP = results_of(MAIN, variant)["balanced"].moved_MQP.sum(0)
    moved_bytes = bytes_by_purpose(moved_QP[None], variant.make(case).units.for_shapes(FFNS.get(case.ffn), D, F))
    assert {purpose: total for purpose, total in moved_bytes.items() if total} == BYTES_BY_HAND[variant]


@pytest.mark.parametrize("members", [1, 2, 4])
def test_clipping_by_the_norm_of_sharded_gradients(members):
    """cases D-04: each parameter counts once, wherever it lives."""
    given = json.loads(GRAD_NORM_FILE.read_text())
    mesh = sharding.make_mesh(members)
    specs = {"experts": sharding.EXPERTS, "dense": sharding.REPLICATED}
    grads = {"experts": given["expert_grads_one_scalar_per_expert"], "dense": given["dense_grads"]}
    grads = {name: jax.device_put(np.array(grad), sharding.named(mesh, specs[name])) for name, grad in grads.items()}
    clip = optax.clip_by_global_norm(given["clip_at"])
    clipped, norm = jax.jit(lambda grads: (clip.update(grads, clip.init(grads))[0], optax.tree.norm(grads)))(grads)
    np.testing.assert_allclose(norm, given["expected_global_norm"], rtol=1e-6)
    for name, grad in grads.items():
        np.testing.assert_allclose(clipped[name], np.asarray(grad) / 6, rtol=1e-6)
