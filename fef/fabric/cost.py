"""What flows: for each remote expert of a member, the tokens or the weights.

Letters: E experts, R members.

Weights hide under compute and tokens do not: rows leave when the router has chosen, and their results are waited for.
So the time of a layer in which the experts of a set W are read and the others visited is taken to be

    max(compute / 3, blocks / rate) + max(2 compute / 3, gradients / rate) + rows / rate of rows + 4 latency

    compute   = the busiest member's GEMMs, a third of them forward, two thirds backward
    blocks    = |W| blocks' bytes, which come in the forward pass
    gradients = |W| gradients' bytes, which leave in the backward pass
    rows      = 4 (rows of the others) D b, there and back, forward and backward
    latency   of a crossing, if any row leaves

With the experts in the order of the member's own rows, most rows first, W is the first k of them, and k is the best of
all (its own experts it does not send, but others may). A GEMM of n rows takes the time of n + half_rows rows at the
full rate. What others do is not known when a member chooses. It is taken that they choose as this one: a visited expert
then sees all members' rows, at its home alone, and one that is read sees this member's rows at every member. Of all
members' rows the last step's count is known, of the same layer; in the first step each is taken to have this one's.

By bytes, each expert is a matter of its own: its rows' bytes or its weights', whichever are fewer.

A member leaves at most `quota` rows for each home; of what exceeds it, the experts with most rows are read. So visitors
have a bounded place, and nothing is ever dropped.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from fef.fabric.calibration import Calibration
from fef.pool.ledger import Units
from fef.pool.table import ExpertTable

CROSSINGS = 4  # of a row: x there, y back, dy there, dx back


@dataclasses.dataclass(frozen=True)
class Layer:
    """What the experts of a layer cost.

    Attributes:
      table: homes of the experts.
      units: bytes of a block, of its gradient, of a row.
      flops_per_row: of an expert FFN, forward and backward.
    """

    table: ExpertTable
    units: Units
    flops_per_row: float

    @property
    def weight_bytes(self) -> int:
        """To read an expert and to send its gradient."""
        return self.units.block_bytes + self.units.gradient_bytes

    @property
    def row_bytes(self) -> int:
        """Of one row on all its ways."""
        return CROSSINGS * self.units.row_bytes


def visit_by_bytes(rows_E: jax.Array, rank: jax.Array, layer: Layer) -> jax.Array:
    """(E,) bool: whose rows have fewer bytes than the weights.

    Args:
      rows_E: (E,) int32, this member's rows of each expert.
      rank: () int32, this member.
      layer: costs.
    """
    fewest_read = -(-layer.weight_bytes // layer.row_bytes)  # rows at which reading costs no more
    return _is_remote(rows_E, rank, layer) & (rows_E < fewest_read)


def visit_by_time(
    rows_E: jax.Array, load_E: jax.Array, rank: jax.Array, layer: Layer, calibration: Calibration
) -> jax.Array:
    """(E,) bool: the choice with the least time of the layer; see the head of this file.

    Args:
      rows_E, rank, layer: as above.
      load_E: (E,) int32, rows of all members in the last step; zeros in the first.
      calibration: rates.
    """
    is_remote_E = _is_remote(rows_E, rank, layer)
    order_E = jnp.argsort(-rows_E, stable=True)
    of_all_E = jnp.where(load_E.sum() > 0, jnp.maximum(load_E, rows_E), layer.table.num_members * rows_E)
    num_read = jnp.argmin(layer_seconds(rows_E, of_all_E, order_E, is_remote_E, layer, calibration))
    place_E = jnp.zeros_like(order_E).at[order_E].set(jnp.arange(order_E.shape[0]))
    return is_remote_E & (place_E >= num_read)


def layer_seconds(
    rows_E: jax.Array,
    of_all_E: jax.Array,
    order_E: jax.Array,
    is_remote_E: jax.Array,
    layer: Layer,
    calibration: Calibration,
) -> jax.Array:
    """(E + 1,) float32: the layer's time when the first k experts of `order_E` are read, k = 0 ... E."""
    num_members = layer.table.num_members
    rows_E, of_all_E, is_remote_E = rows_E[order_E], of_all_E[order_E], is_remote_E[order_E]
    home_E = jnp.asarray(layer.table.home_E)[order_E]

    def gemm_seconds(rows: jax.Array) -> jax.Array:
        return (rows + calibration.half_rows) * (rows > 0) * (layer.flops_per_row / calibration.flops)

    own_k = _first(gemm_seconds(rows_E))
    visited_ER = gemm_seconds(of_all_E)[:, None] * jax.nn.one_hot(home_E, num_members)
    compute_k = own_k + (visited_ER.sum(0)[None] - _first(visited_ER)).max(1)
    read_k = _first(is_remote_E.astype(jnp.float32))
    blocks_k = read_k * (layer.units.block_bytes / calibration.bytes_per_s)
    gradients_k = read_k * (layer.units.gradient_bytes / calibration.bytes_per_s)
    rows_sent_k = (rows_E * is_remote_E).sum() - _first(rows_E * is_remote_E)
    exposed_k = rows_sent_k * (layer.row_bytes / calibration.row_bytes_per_s)
    exposed_k += (rows_sent_k > 0) * (CROSSINGS * calibration.latency_s)
    return jnp.maximum(compute_k / 3, blocks_k) + jnp.maximum(compute_k * 2 / 3, gradients_k) + exposed_k


def _first(values_E: jax.Array) -> jax.Array:
    """Sums of the first 0 ... E."""
    return jnp.concatenate([jnp.zeros_like(values_E[:1]), jnp.cumsum(values_E, axis=0)])


def within_quota(is_visited_E: jax.Array, rows_E: jax.Array, layer: Layer, quota: int) -> jax.Array:
    """(E,) bool: `is_visited_E` without the experts with most rows of a home that would get more than `quota` rows."""
    order_E = jnp.argsort(-rows_E, stable=True)
    home_ER = jnp.asarray(np.eye(layer.table.num_members, dtype=np.int32)[layer.table.home_E])
    sent_ER = (jnp.where(is_visited_E, rows_E, 0)[:, None] * home_ER)[order_E]
    left_ER = jnp.cumsum(sent_ER[::-1], axis=0)[::-1]  # of this expert and all with fewer rows
    left_E = (left_ER * home_ER[order_E]).sum(1)
    return is_visited_E & jnp.zeros_like(is_visited_E).at[order_E].set(left_E <= quota)


def _is_remote(rows_E: jax.Array, rank: jax.Array, layer: Layer) -> jax.Array:
    """Experts of other members, with rows."""
    return (jnp.asarray(layer.table.home_E) != rank) & (rows_E > 0)
