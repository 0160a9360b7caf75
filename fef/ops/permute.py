"""Takes token rows to their experts' order and back, by gathers alone.

Letters: T tokens, D width, N assignments, K choices per token, E experts.

The transpose of a gather is a scatter-add, which is slow on CPUs. Here the sort that groups the rows by expert also
gives the inverse permutation, and with token choice (`assignment.num_choices` = K: the rows of token t stand at
t*K ... t*K + K-1) every transpose is again a gather, by the inverse, followed by a sum over K. Only irregular
assignments (num_choices None, as in expert choice) fall back to `jax.ops.segment_sum`.

Worked example, T = 3 tokens, K = 1, experts 1, 0, 1:

    order_N   = [1, 0, 2]      row 0 of the sorted rows is assignment 1, ...
    inverse_N = [1, 0, 2]      assignment 0 stands in sorted row 1, ...
    counts_E  = [1, 2]         expert 0 has row 0, expert 1 has rows 1 and 2

All functions work on the arrays of one member; under a mesh call them inside `jax.shard_map(..., check_vma=False)`.
Gradients: reverse mode, first order; forward mode (jvp) is refused by JAX, since the rules are `jax.custom_vjp`, and a
second derivative by a NotImplementedError. vmap is supported.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from fef.ops.first_order import first_order
from fef.routing import Assignment


@dataclasses.dataclass(frozen=True)
class Order:
    """How the assignments are sorted: by expert, in their own order within an expert, invalid ones last.

    Attributes:
      order_N: (N,) int32, the assignment that stands in each sorted row.
      inverse_N: (N,) int32, the sorted row of each assignment.
      counts_E: (E,) int32, rows of each expert; they add up to the number of valid assignments.
    """

    order_N: jax.Array
    inverse_N: jax.Array
    counts_E: jax.Array


jax.tree_util.register_dataclass(Order, data_fields=["order_N", "inverse_N", "counts_E"], meta_fields=[])


def sort_by_expert(assignment: Assignment, num_experts: int) -> Order:
    """Sorts the assignments by expert (stable; invalid ones last)."""
    key_N = jnp.where(assignment.valid_N, assignment.expert_N, num_experts)
    order_N = _stable_argsort(key_N, num_experts + 1)
    inverse_N = _stable_argsort(order_N, order_N.shape[0])
    bounds = jnp.searchsorted(_take(key_N, order_N), jnp.arange(num_experts + 1)).astype(jnp.int32)
    return Order(order_N, inverse_N, jnp.diff(bounds))


def _stable_argsort(key_N: jax.Array, num_keys: int) -> jax.Array:
    """Sorts int32 keys in [0, num_keys). XLA:CPU sorts one array five times as fast as an array with its positions,
    so both go into one integer where they fit."""
    num = key_N.shape[0]
    if num_keys * num > 2**32:
        return jnp.argsort(key_N, stable=True).astype(jnp.int32)
    packed_N = key_N.astype(jnp.uint32) * num + jnp.arange(num, dtype=jnp.uint32)
    return (jnp.sort(packed_N) % num).astype(jnp.int32)


def gather_rows(x_TD: jax.Array, assignment: Assignment, order: Order) -> jax.Array:
    """Returns the token's row for every assignment, sorted by expert: rows_ND[i] = x_TD[token_N[order_N[i]]].

    Args:
      x_TD: (T, D), any float dtype.
      assignment: whose tokens are taken.
      order: `sort_by_expert(assignment, E)`.

    Returns:
      rows_ND: (N, D), dtype of x_TD; rows of invalid assignments are zero.

    Gradient: with respect to x_TD, summed per token in float32; invalid rows give none.
    """
    _check_choices(assignment, x_TD.shape[0])
    return _gather(x_TD, assignment, order)


def combine_rows(rows_ND: jax.Array, assignment: Assignment, order: Order, num_tokens: int) -> jax.Array:
    """Returns the weighted sum of each token's rows: y_TD[t] = sum over its valid assignments n of weight_n row_n.

    Args:
      rows_ND: (N, D), sorted by expert, any float dtype.
      assignment: whose tokens and weights are used.
      order: `sort_by_expert(assignment, E)`.
      num_tokens: T.

    Returns:
      y_TD: (T, D) float32. Invalid rows add exactly 0, whatever they hold; tokens without rows get 0.

    Gradient: with respect to rows_ND and assignment.weight_N; 0 for invalid assignments.
    """
    _check_choices(assignment, num_tokens)
    return _combine(rows_ND, assignment.weight_N, assignment, order, num_tokens)


def _check_choices(assignment: Assignment, num_tokens: int) -> None:
    num_choices, num_rows = assignment.num_choices, assignment.token_N.shape[0]
    if num_choices is not None and num_choices * num_tokens != num_rows:
        raise ValueError(
            f"assignment.num_choices={num_choices} with {num_tokens} tokens means {num_choices * num_tokens} "
            f"assignments, but token_N has {num_rows}; set num_choices=None for irregular assignments"
        )


def _take(array: jax.Array, index_N: jax.Array) -> jax.Array:
    return array.at[index_N].get(mode="promise_in_bounds")


def _masked(valid_N: jax.Array, rows_ND: jax.Array) -> jax.Array:
    return jnp.where(valid_N[:, None], rows_ND, jnp.zeros((), rows_ND.dtype))


def _sorted_valid(order: Order) -> jax.Array:
    return jnp.arange(order.order_N.shape[0]) < order.counts_E.sum()


def _sum_per_token(
    rows_ND: jax.Array, weight_N: jax.Array | None, assignment: Assignment, order: Order, num_tokens: int
) -> jax.Array:
    """Sums sorted rows per token in float32, times their weight if given, leaving out invalid ones."""
    num_choices = assignment.num_choices
    if num_choices is None:
        rows_ND = _masked(_sorted_valid(order), rows_ND).astype(jnp.float32)
        if weight_N is not None:
            rows_ND = rows_ND * _take(jnp.where(assignment.valid_N, weight_N, 0.0), order.order_N)[:, None]
        return jax.ops.segment_sum(rows_ND, _take(assignment.token_N, order.order_N), num_tokens)
    inverse_TK = order.inverse_N.reshape(num_tokens, num_choices)
    valid_TK = assignment.valid_N.reshape(num_tokens, num_choices)
    sum_TD = jnp.zeros((num_tokens, rows_ND.shape[1]), jnp.float32)
    for k in range(num_choices):  # as one (T, K, D) array and a reduction, XLA:CPU takes three times as long
        own_TD = _masked(valid_TK[:, k], _take(rows_ND, inverse_TK[:, k])).astype(jnp.float32)
        if weight_N is not None:
            weight_T = jnp.where(valid_TK[:, k], weight_N.reshape(num_tokens, num_choices)[:, k], 0.0)
            own_TD = own_TD * weight_T[:, None]
        sum_TD = sum_TD + own_TD
    return sum_TD


@jax.custom_vjp
def _gather(x_TD: jax.Array, assignment: Assignment, order: Order) -> jax.Array:
    return _masked(_sorted_valid(order), _take(x_TD, _take(assignment.token_N, order.order_N)))


def _gather_fwd(x_TD: jax.Array, assignment: Assignment, order: Order) -> tuple[jax.Array, Any]:
    return _gather(x_TD, assignment, order), (x_TD[:, :0], assignment, order)


def _gather_bwd(residuals: Any, g_ND: jax.Array) -> Any:
    like_x, assignment, order = residuals
    g_ND = first_order("gather_rows", g_ND)
    dx_TD = _sum_per_token(g_ND, None, assignment, order, like_x.shape[0]).astype(like_x.dtype)
    return dx_TD, None, None


_gather.defvjp(_gather_fwd, _gather_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _combine(
    rows_ND: jax.Array, weight_N: jax.Array, assignment: Assignment, order: Order, num_tokens: int
) -> jax.Array:
    return _sum_per_token(rows_ND, weight_N, assignment, order, num_tokens)


def _combine_fwd(
    rows_ND: jax.Array, weight_N: jax.Array, assignment: Assignment, order: Order, num_tokens: int
) -> tuple[jax.Array, Any]:
    return _combine(rows_ND, weight_N, assignment, order, num_tokens), (rows_ND, weight_N, assignment, order)


def _combine_bwd(num_tokens: int, residuals: Any, g_TD: jax.Array) -> Any:
    rows_ND, weight_N, assignment, order = residuals
    rows_ND, weight_N, g_TD = first_order("combine_rows", (rows_ND, weight_N, g_TD))
    g_ND = _take(g_TD, _take(assignment.token_N, order.order_N))
    drows_ND = _masked(_sorted_valid(order), g_ND * _take(weight_N, order.order_N)[:, None]).astype(rows_ND.dtype)
    dot_N = jnp.sum(rows_ND.astype(jnp.float32) * g_ND, axis=1)
    dweight_N = jnp.where(assignment.valid_N, _take(dot_N, order.inverse_N), 0.0)
    return drows_ND, dweight_N, None, None


_combine.defvjp(_combine_fwd, _combine_bwd)
