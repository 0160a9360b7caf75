"""Sort, dispatch and combine against a loop over assignments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from fef.ops.permute import combine_rows, gather_rows, sort_by_expert
from fef.routing import Assignment

T, D, E = 7, 5, 4


def assign(token, expert, weight, valid, num_choices=None) -> Assignment:
    return Assignment(
        jnp.asarray(token, jnp.int32),
        jnp.asarray(expert, jnp.int32),
        jnp.asarray(weight, jnp.float32),
        jnp.asarray(valid, bool),
        jnp.zeros(()),
        {},
        num_choices,
    )


def random_assignment(num_choices: int | None, seed: int = 0, all_valid: bool = False) -> Assignment:
    """Token choice with K = num_choices, or irregular: any token any number of times, one of them never."""
    rng = np.random.default_rng(seed)
    num = 11 if num_choices is None else T * num_choices
    token = rng.integers(0, T - 1, num) if num_choices is None else np.repeat(np.arange(T), num_choices)
    valid = np.ones(num, bool) if all_valid else rng.uniform(size=num) < 0.7
    return assign(token, rng.integers(0, E, num), rng.normal(size=num), valid, num_choices)


def moe(x_TD, weight_N, assignment: Assignment, order=None):
    """Dispatch, an expert that depends on the sorted row's expert, combine."""
    assignment = assign_weight(assignment, weight_N)
    order = sort_by_expert(assignment, E)
    rows_ND = gather_rows(x_TD, assignment, order)
    ends_E = jnp.cumsum(order.counts_E)
    expert_N = jnp.sum(jnp.arange(rows_ND.shape[0])[:, None] >= ends_E[None], axis=1)
    rows_ND = jnp.where(expert_N[:, None] < E, jnp.sin(rows_ND * (1.0 + expert_N[:, None])), jnp.nan)
    return combine_rows(rows_ND, assignment, order, x_TD.shape[0])


def assign_weight(a: Assignment, weight_N) -> Assignment:
    return Assignment(a.token_N, a.expert_N, weight_N, a.valid_N, a.aux_loss, a.metrics, a.num_choices)


def loop_moe(x_TD, weight_N, a: Assignment):
    """The same, one assignment after the other, no sort."""
    y = jnp.zeros_like(x_TD)
    for n in range(a.token_N.shape[0]):
        if a.valid_N[n]:
            t = int(a.token_N[n])
            y = y.at[t].add(weight_N[n] * jnp.sin(x_TD[t] * (1.0 + float(a.expert_N[n]))))
    return y


def tokens(seed: int = 3):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(T, D)), jnp.float32)


def assert_close(got, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, wanted)


def test_worked_example():
    order = sort_by_expert(assign([0, 1, 2], [1, 0, 1], [1.0] * 3, [True] * 3, 1), 2)
    assert order.order_N.tolist() == [1, 0, 2]
    assert order.inverse_N.tolist() == [1, 0, 2]
    assert order.counts_E.tolist() == [1, 2]


def test_sort_is_stable_and_puts_invalid_assignments_last():
    valid = [True, True, False, True, True, False]
    order = jax.jit(lambda a: sort_by_expert(a, 4))(assign(range(6), [3, 0, 0, 3, 0, 1], [1.0] * 6, valid))
    assert order.order_N.tolist() == [1, 4, 0, 3, 2, 5]
    assert order.inverse_N.tolist() == [2, 0, 4, 3, 1, 5]
    assert order.counts_E.tolist() == [2, 0, 0, 2]
    assert {a.dtype.name for a in (order.order_N, order.inverse_N, order.counts_E)} == {"int32"}


def test_sort_of_more_assignments_than_fit_into_packed_keys():
    num = 70_000  # num * num > 2**32
    expert = np.random.default_rng(0).integers(0, 3, num)
    order = jax.jit(lambda a: sort_by_expert(a, 3))(assign(np.arange(num), expert, np.ones(num), np.ones(num, bool)))
    np.testing.assert_array_equal(order.order_N, np.argsort(expert, kind="stable"))
    np.testing.assert_array_equal(np.asarray(order.order_N)[np.asarray(order.inverse_N)], np.arange(num))
    np.testing.assert_array_equal(order.counts_E, np.bincount(expert))


@pytest.mark.parametrize("num_choices", [1, 3, None])
def test_value_and_gradients_equal_a_loop(num_choices):
    a, x = random_assignment(num_choices), tokens()
    g = tokens(4)
    y, pull_back = jax.vjp(jax.jit(lambda x, w: moe(x, w, a)), x, a.weight_N)
    wanted, loop_pull_back = jax.vjp(lambda x, w: loop_moe(x, w, a), x, a.weight_N)
    assert_close((y, *pull_back(g)), (wanted, *loop_pull_back(g)))


@pytest.mark.parametrize("num_choices", [2, None])
def test_invalid_rows_add_exactly_zero(num_choices):
    a = random_assignment(num_choices)
    order = sort_by_expert(a, E)
    is_used = np.arange(a.token_N.shape[0])[:, None] < int(order.counts_E.sum())
    rows = jnp.asarray(np.random.default_rng(5).normal(size=(a.token_N.shape[0], D)), jnp.float32)

    def run(rows, weight_N, g):
        y, pull_back = jax.vjp(lambda r, w: combine_rows(r, assign_weight(a, w), order, T), rows, weight_N)
        return (y, *pull_back(g))

    run = jax.jit(run)
    spoiled_weight = jnp.where(a.valid_N, a.weight_N, jnp.nan)
    got = run(jnp.where(is_used, rows, jnp.nan), spoiled_weight, tokens())
    assert_close(got, run(rows, a.weight_N, tokens()))
    assert not np.any(np.where(is_used, 0.0, got[1])) and not np.any(got[2][~np.asarray(a.valid_N)])

    x = jnp.where(jnp.isin(jnp.arange(T), a.token_N[a.valid_N])[:, None], tokens(), jnp.nan)
    assert not np.any(np.where(is_used, 0.0, gather_rows(x, a, order)))
    dx = jax.vjp(lambda x: gather_rows(x, a, order), tokens())[1](jnp.where(is_used, rows, jnp.nan))[0]
    assert np.all(np.isfinite(dx))


def test_identity_experts_give_the_input_back():
    a = random_assignment(2, all_valid=True)
    weight_N = jnp.tile(jnp.asarray([0.25, 0.75]), T)
    a, x = assign_weight(a, weight_N), tokens()
    order = sort_by_expert(a, E)
    np.testing.assert_allclose(combine_rows(gather_rows(x, a, order), a, order, T), x, rtol=1e-6)


def test_token_choice_has_no_scatter():
    run = jax.jit(lambda x, a: jax.vjp(lambda x, w: moe(x, w, a), x, a.weight_N)[1](x))
    assert "scatter" not in run.lower(tokens(), random_assignment(2)).as_text()
    assert "scatter" in run.lower(tokens(), random_assignment(None)).as_text()  # so the text would show one


@pytest.mark.parametrize("num_choices", [2, None])
def test_bfloat16(num_choices):
    a, x = random_assignment(num_choices), tokens().astype(jnp.bfloat16)
    order = sort_by_expert(a, E)
    rows, gather_back = jax.vjp(lambda x: gather_rows(x, a, order), x)
    y, combine_back = jax.vjp(lambda r, w: combine_rows(r, assign_weight(a, w), order, T), rows, a.weight_N)
    drows, dweight = combine_back(y)
    assert rows.dtype == drows.dtype == gather_back(drows)[0].dtype == jnp.bfloat16
    assert y.dtype == dweight.dtype == jnp.float32
    wide = combine_rows(rows.astype(jnp.float32), a, order, T)
    np.testing.assert_array_equal(y, wide)


def test_scan_over_layers_with_remat_inside_a_scan_over_microbatches():
    members = [random_assignment(2, seed) for seed in range(2)]
    assignments = jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)
    x_MTD = jnp.stack([tokens(seed) for seed in range(2)])

    def loss(one_layer, x_MTD, weight_MN):
        def microbatch(total, batch):
            x, w, a = batch
            layer = jax.checkpoint(lambda x, _: (jnp.tanh(x + one_layer(x, w, a)), None))
            return total + (jax.lax.scan(layer, x, length=2)[0] ** 2).sum(), None

        return jax.lax.scan(microbatch, 0.0, (x_MTD, weight_MN, assignments))[0]

    def onehot_moe(x, w, a):
        by_token = jax.nn.one_hot(a.token_N, T) * a.valid_N[:, None]
        return by_token.T @ (w[:, None] * jnp.sin(by_token @ x * (1.0 + a.expert_N[:, None])))

    got, wanted = (
        jax.jit(jax.value_and_grad(lambda x, w, f=f: loss(f, x, w), (0, 1)))(x_MTD, assignments.weight_N)
        for f in (moe, onehot_moe)
    )
    assert_close(got, wanted)


def test_vmap_and_shard_map_over_members():
    members = [random_assignment(2, seed) for seed in range(4)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)
    x_RTD = jnp.stack([tokens(seed) for seed in range(4)])

    def one(x, a):
        y, pull_back = jax.vjp(lambda x, w: moe(x, w, a), x, a.weight_N)
        return (y, *pull_back(y))

    alone = jax.tree.map(lambda *r: jnp.stack(r), *[jax.jit(one)(x, a) for x, a in zip(x_RTD, members, strict=True)])
    assert_close(jax.jit(jax.vmap(one))(x_RTD, stacked), alone)
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    spec = PartitionSpec("expert")
    island = jax.shard_map(
        lambda x, a: jax.tree.map(lambda r: r[None], one(x[0], jax.tree.map(lambda leaf: leaf[0], a))),
        mesh=mesh,
        in_specs=(spec, spec),
        out_specs=spec,
        check_vma=False,
    )
    assert_close(jax.jit(island)(x_RTD, stacked), alone)


def test_number_of_choices_that_does_not_fit():
    a = random_assignment(2)
    order = sort_by_expert(a, E)
    text = "num_choices=2 with 6 tokens means 12 assignments, but token_N has 14; set num_choices=None"
    with pytest.raises(ValueError, match=text):
        gather_rows(tokens()[:6], a, order)
    with pytest.raises(ValueError, match=text):
        combine_rows(jnp.zeros((14, D)), a, order, 6)


def test_forward_mode_and_second_derivatives_are_refused():
    a = random_assignment(2)
    order = sort_by_expert(a, E)
    gather = lambda x: gather_rows(jnp.sin(x), a, order)
    combine = lambda x: combine_rows(jnp.tile(jnp.sin(x), (2, 1)), a, order, T)
    for op, f in (("gather_rows", gather), ("combine_rows", combine)):
        with pytest.raises(TypeError, match="custom_vjp"):
            jax.jvp(f, (tokens(),), (tokens(),))
        with pytest.raises(NotImplementedError, match=f"{op} has first derivatives only"):
            jax.grad(lambda x, f=f: jax.grad(lambda x: (f(x) ** 2).sum())(x).sum())(tokens())
