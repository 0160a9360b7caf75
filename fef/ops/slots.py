"""Rows sorted by position <-> capacity slots, C places for every position. Each is the transpose of the other.

Worked example, P = 2 positions with 1 and 2 of N = 4 rows (one unused), C = 2:

    to_slots:    [a, b, c, -]          ->  [[a, 0], [b, c]]
    from_slots:  [[a', ?], [b', c']]   ->  [a', b', c', 0]

Gathers both ways: on CPUs the scatter that JAX would derive is slow. Arrays of one member. Reverse mode of any order;
jvp is refused by JAX (`jax.custom_vjp`).
"""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def to_slots(rows_ND: jax.Array, counts_P: jax.Array, capacity: int) -> jax.Array:
    """Returns slots_PCD; unused slots are zero. Rows beyond a position's C are not carried: choose C >= max(counts)."""
    first_P = jnp.cumsum(counts_P) - counts_P
    place_C = jnp.arange(capacity, dtype=jnp.int32)
    rows_PCD = rows_ND[jnp.minimum(first_P[:, None] + place_C[None, :], rows_ND.shape[0] - 1)]
    return jnp.where((place_C[None, :] < counts_P[:, None])[..., None], rows_PCD, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def from_slots(slots_PCD: jax.Array, counts_P: jax.Array, num_rows: int) -> jax.Array:
    """Returns rows_ND; rows beyond the sum of the counts are zero."""
    num_positions, capacity, _ = slots_PCD.shape
    ends_P = jnp.cumsum(counts_P)
    row_N = jnp.arange(num_rows, dtype=jnp.int32)
    position_N = jnp.searchsorted(ends_P, row_N, side="right", method="compare_all")
    position_N = jnp.minimum(position_N, num_positions - 1)
    place_N = row_N - (ends_P - counts_P)[position_N]
    used_N = (row_N < ends_P[-1]) & (place_N < capacity)
    flat = slots_PCD.reshape(num_positions * capacity, -1)
    return jnp.where(used_N[:, None], flat[jnp.where(used_N, position_N * capacity + place_N, 0)], 0)


def _to_slots_fwd(rows_ND, counts_P, capacity):
    return to_slots(rows_ND, counts_P, capacity), (counts_P, jnp.zeros((rows_ND.shape[0], 0)))


def _to_slots_bwd(capacity, residuals, d_slots_PCD):
    counts_P, like_N0 = residuals
    return from_slots(d_slots_PCD, counts_P, like_N0.shape[0]), None


def _from_slots_fwd(slots_PCD, counts_P, num_rows):
    return from_slots(slots_PCD, counts_P, num_rows), (counts_P, jnp.zeros((slots_PCD.shape[1], 0)))


def _from_slots_bwd(num_rows, residuals, d_rows_ND):
    counts_P, like_C0 = residuals
    return to_slots(d_rows_ND, counts_P, like_C0.shape[0]), None


to_slots.defvjp(_to_slots_fwd, _to_slots_bwd)
from_slots.defvjp(_from_slots_fwd, _from_slots_bwd)
