"""Sort, dispatch and combine against one-hot matrices."""

import functools

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


def onehot_moe(x_TD, weight_N, a: Assignment):
    """The same with one-hot matrices, no sort."""
    of_token_NT = jax.nn.one_hot(a.token_N, T) * a.valid_N[:, None]
    return of_token_NT.T @ (weight_N[:, None] * jnp.sin(of_token_NT @ x_TD * (1.0 + a.expert_N[:, None])))


@functools.partial(jax.jit, static_argnums=0)
def vjp(f, x, weight_N, g, *args):
    """(y, dx, dweight)"""
    y, pull_back = jax.vjp(lambda x, w: f(x, w, *args), x, weight_N)
    return (y, *pull_back(g))


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
def test_value_and_gradients_equal_one_hot_matrices(num_choices):
    a = random_assignment(num_choices)
    assert_close(*(vjp(f, tokens(), a.weight_N, tokens(4), a) for f in (moe, onehot_moe)))


@pytest.mark.parametrize("num_choices", [2, None])
def test_invalid_rows_add_exactly_zero(num_choices):
    a = random_assignment(num_choices)
    order = jax.jit(sort_by_expert, static_argnums=1)(a, E)
    is_used = np.arange(a.token_N.shape[0])[:, None] < int(order.counts_E.sum())
    rows = np.random.default_rng(5).normal(size=(a.token_N.shape[0], D)).astype(np.float32)

    def combine(rows, weight_N):
        return combine_rows(rows, assign_weight(a, weight_N), order, T)

    spoiled = (np.where(is_used, rows, np.nan), np.where(a.valid_N, a.weight_N, np.nan))
    got = vjp(combine, *spoiled, tokens())
    assert_close(got, vjp(combine, rows, a.weight_N, tokens()))
    assert not np.any(np.where(is_used, 0.0, got[1])) and not np.any(got[2][~np.asarray(a.valid_N)])

    used_tokens = np.isin(np.arange(T), np.asarray(a.token_N)[np.asarray(a.valid_N)])[:, None]
    gathered, dx, _ = vjp(
        lambda x, _: gather_rows(x, a, order), np.where(used_tokens, tokens(), np.nan), a.weight_N, spoiled[0]
    )
    assert np.all(np.isfinite(gathered)) and not np.any(np.where(is_used, 0.0, gathered))
    assert np.all(np.isfinite(dx)) and not np.any(np.where(used_tokens, 0.0, dx))


def test_identity_experts_give_the_input_back():
    a = random_assignment(2, all_valid=True)
    weight_N = jnp.tile(jnp.asarray([0.25, 0.75]), T)
    a, x = assign_weight(a, weight_N), tokens()

    @jax.jit
    def run(x):
        order = sort_by_expert(a, E)
        return combine_rows(gather_rows(x, a, order), a, order, T)

    np.testing.assert_allclose(run(x), x, rtol=1e-6)


def test_token_choice_has_no_scatter():
    run = jax.jit(lambda x, a: jax.vjp(lambda x, w: moe(x, w, a), x, a.weight_N)[1](x))
    assert "scatter" not in run.lower(tokens(), random_assignment(2)).as_text()
    assert "scatter" in run.lower(tokens(), random_assignment(None)).as_text()  # so the text would show one


@pytest.mark.parametrize("num_choices", [2, None])
def test_bfloat16(num_choices):
    a, x = random_assignment(num_choices), tokens().astype(jnp.bfloat16)

    @jax.jit
    def run(x):
        order = sort_by_expert(a, E)
        rows, gather_back = jax.vjp(lambda x: gather_rows(x, a, order), x)
        y, combine_back = jax.vjp(lambda r, w: combine_rows(r, assign_weight(a, w), order, T), rows, a.weight_N)
        drows, dweight = combine_back(y)
        return (rows, drows, *gather_back(drows)), (y, dweight), combine_rows(rows.astype(jnp.float32), a, order, T)

    narrow, wide, of_wide_rows = run(x)
    assert {array.dtype.name for array in narrow} == {"bfloat16"}
    assert {array.dtype.name for array in wide} == {"float32"}
    np.testing.assert_array_equal(wide[0], of_wide_rows)


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
        return vjp(moe, x, a.weight_N, x, a)

    alone = jax.tree.map(lambda *r: jnp.stack(r), *[one(x, a) for x, a in zip(x_RTD, members, strict=True)])
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

    def gather(x):
        return gather_rows(jnp.sin(x), a, order)

    def combine(x):
        return combine_rows(jnp.tile(jnp.sin(x), (2, 1)), a, order, T)

    for op, f in (("gather_rows", gather), ("combine_rows", combine)):
        with pytest.raises(TypeError, match="custom_vjp"):
            jax.jvp(f, (tokens(),), (tokens(),))
        with pytest.raises(NotImplementedError, match=f"{op} has first derivatives only"):
            jax.grad(lambda x, f=f: jax.grad(lambda x: (f(x) ** 2).sum())(x).sum())(tokens())
