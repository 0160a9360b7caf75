"""ragged_all_to_all: its values and gradients on an emulated collective, what the real one lowers to, the refusal."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dispatch_harness import COMPILER_OPTIONS, Case, Variant, assert_close, expected, make_inputs, value_and_grads
from jax.sharding import PartitionSpec

from fef import sharding
from fef.dispatch.ragged_all_to_all import Plan, RaggedAllToAll, exchange_rows, plans
from fef.pool.ledger import PURPOSES
from fef.registry import scan
from fef.routing import Assignment
from fef.testing.workloads import workload

scan("fef.dispatch")
RAGGED = Variant("ragged_all_to_all", matmul="jax")
MEMBERS = PartitionSpec("expert")


def emulated(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`jax.lax.ragged_all_to_all` as its docstring has it, by all_gather: for every row of the output, who sent it."""
    rank, num_members = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
    operands, first_SR, rows_SR, target_SR = (
        jax.lax.all_gather(a, axis_name) for a in (operand, input_offsets, send_sizes, output_offsets)
    )
    row_M = jnp.arange(output.shape[0])
    for source in range(num_members):
        offset_M = row_M - target_SR[source, rank]
        sent_M = (offset_M >= 0) & (offset_M < rows_SR[source, rank])
        taken_MD = operands[source].at[first_SR[source, rank] + offset_M].get(mode="clip")
        output = jnp.where(sent_M[:, None], taken_MD, output)
    # A receiver that expects another number of rows than were sent would make the real one undefined.
    return jnp.where(jnp.array_equal(rows_SR[:, rank], recv_sizes), output, jnp.nan)


@pytest.fixture
def emulation(monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated)


def on_members(num_members, body, *arrays):
    """Runs the body on each member's part of the arrays."""
    run = sharding.island(sharding.make_mesh(num_members), body, MEMBERS, MEMBERS)
    return jax.jit(run, compiler_options=COMPILER_OPTIONS)(*arrays)


def test_emulation_gives_the_example_of_the_jax_docstring():
    arrays = ([1, 2, 2, 3, 4, 0], [0] * 8, [0, 1, 0, 1], [1, 2, 1, 1], [0, 0, 1, 2], [1, 1, 2, 1])
    operand, output, *sizes = (jnp.array(a, jnp.int32) for a in arrays)

    def body(operand, output, *sizes):
        return emulated(operand[:, None].astype(jnp.float32), output[:, None], *sizes, axis_name="expert")[:, 0]

    np.testing.assert_array_equal(on_members(2, body, operand, output, *sizes), [1, 3, 0, 0, 2, 2, 4, 0])


def test_plans_of_the_worked_example():
    counts_SP = jnp.array([[3, 2], [1, 4]], jnp.int32)
    there, back = plans(counts_SP, jnp.int32(0))
    assert_plan(there, first=[0, 3], rows=[3, 2], target=[0, 0], received=[3, 1])
    assert_plan(back, first=[0, 3], rows=[3, 1], target=[0, 0], received=[3, 2])
    there, back = plans(counts_SP, jnp.int32(1))
    assert_plan(there, first=[0, 1], rows=[1, 4], target=[3, 2], received=[2, 4])
    assert_plan(back, first=[0, 2], rows=[2, 4], target=[3, 1], received=[1, 4])


def assert_plan(plan: Plan, **wanted):
    for name, values in wanted.items():
        np.testing.assert_array_equal(getattr(plan, f"{name}_R"), values, err_msg=name)


def test_gradient_of_an_exchange_is_the_opposite_exchange(emulation):
    """On 2 members with N = 4 rows and M = 6 places: what is sent has the cotangent of its place, the rest zero."""
    counts_SP = jnp.array([[2, 1], [0, 3]], jnp.int32)
    rows = jnp.arange(8, dtype=jnp.float32)[:, None] + 1
    d_received = 10 * (jnp.arange(12, dtype=jnp.float32)[:, None] + 1)

    def body(rows_ND, d_received_MD):
        there, back = plans(counts_SP, jax.lax.axis_index("expert"))
        received_MD, pull = jax.vjp(lambda rows_ND: exchange_rows(rows_ND, there, back, 6), rows_ND)
        return received_MD, pull(d_received_MD)[0]

    received, d_rows = on_members(2, body, rows, d_received)
    np.testing.assert_array_equal(received[:, 0], [1, 2, 0, 0, 0, 0, 3, 5, 6, 7, 0, 0])
    np.testing.assert_array_equal(d_rows[:, 0], [10, 20, 70, 0, 80, 90, 100, 0])


CASES = {
    "6 experts on 4 members": (Case(4, 6, 2, 6), ["balanced", "hot_rank", "ragged_sources", "zero_load"]),
    "3 experts on 4 members, one choice": (Case(4, 3, 1, 4), ["hot_experts"]),
    "1 member": (Case(1, 3, 2, 4), ["hot_experts"]),
    "data axis of 2": (Case(2, 5, 2, 4, data=2), ["hot_rank", "zero_load"]),
    "recomputed": (Case(2, 4, 2, 4, rerun=True), ["hot_rank"]),
}


@pytest.mark.parametrize("label", CASES)
def test_value_gradients_and_ledger(label, emulation):
    case, names = CASES[label]
    step = jax.jit(functools.partial(value_and_grads, case, RAGGED.make(case)), compiler_options=COMPILER_OPTIONS)
    members, table = case.members * case.data, case.table
    for name in names:
        inputs = make_inputs(case, workload(name, members, case.tokens, case.experts, case.choices))
        result = step(inputs)
        assert_close(result, expected(case, inputs), name)
        rows_MP = np.zeros((members, table.num_positions), int)
        _, expert_N, valid_N = inputs.ints
        member_N = np.repeat(np.arange(members), expert_N.size // members)
        np.add.at(rows_MP, (member_N[valid_N], table.position_E[expert_N[valid_N]]), 1)
        remote_MP = np.arange(table.num_positions) // table.per_member != np.arange(members)[:, None] % case.members
        moved = dict(zip(PURPOSES, np.asarray(result.moved_MQP).swapaxes(0, 1), strict=True))
        np.testing.assert_array_equal(moved.pop("tokens"), (4 + 2 * case.rerun) * rows_MP * remote_MP)
        np.testing.assert_array_equal(moved.pop("metadata"), 4 * case.members * (1 + case.rerun) * remote_MP)
        assert not any(units_MP.any() for units_MP in moved.values())


def test_irregular_assignment_and_invalid_places(emulation):
    """Both members send expert 0 (home: member 0) all of their tokens, the most that it may receive."""
    case = Case(2, 2, 2, 3, regular=False)
    token_N = np.array([[2, 0, 1, 1], [0, 1, 2, 0]], np.int32)
    expert_N = np.array([[0, 0, 0, 1], [0, 0, 0, 1]], np.int32)
    valid_N = np.array([[True] * 4, [True, True, True, False]])
    weight_N = np.full((2, 4), 0.5, np.float32)
    inputs = make_inputs(case, Assignment(token_N, expert_N, weight_N, valid_N, None, {}))
    step = jax.jit(functools.partial(value_and_grads, case, RAGGED.make(case)), compiler_options=COMPILER_OPTIONS)
    assert_close(step(inputs), expected(case, inputs), "irregular")


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("rerun", [False, True])
def test_lowers_to_the_real_collective(platform, rerun):
    """Two exchanges forward, two backward, two in a rerun; nothing else but the counts' all_gather leaves a member."""
    case = Case(4, 6, 2, 6, rerun=rerun)
    inputs = make_inputs(case, workload("balanced", 4, case.tokens, case.experts, case.choices))
    step = functools.partial(value_and_grads, case, RAGGED.make(case))
    text = jax.jit(step).trace(inputs).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("custom_call @ragged_all_to_all") == 4 + 2 * rerun
    assert text.count("stablehlo.all_gather") == 1 + rerun
    assert "stablehlo.all_to_all" not in text


def test_is_refused_on_cpus():
    with pytest.raises(ValueError, match="XLA:CPU has no ragged_all_to_all; use pooled, all_to_all") as caught:
        RaggedAllToAll.check_platform("cpu")
    assert "\n" not in str(caught.value)
    RaggedAllToAll.check_platform("cuda")
    RaggedAllToAll.check_platform("tpu")
