"""What flows: for each remote expert of a member, the tokens or the weights.

Letters: E experts, R members; k counts the experts that are read, 0 ... E.

Weights hide under compute. Rows leave when the router has chosen, meet the experts at their homes, and their results
are waited for; meanwhile a member computes what it reads. So the time of a layer in which the experts of a set W are
read and the others visited is taken to be that of its two passes, and of each pass the largest of

    compute
    blocks / rate + (sent + visiting) / rate of rows
    2 max(sent, visiting) / rate of rows + served + 2 latency

where
    compute  = the busiest member's GEMMs, a third of them forward, two thirds backward
    served   = the part of the busiest home whose experts are visited
    blocks   = bytes on the busiest link: what a reader gets, what a home sends; backward, of gradients, the other way
    sent     = bytes of the rows that the member sends, D b each
    visiting = bytes of the rows that the busiest home is sent, from the mean of the others
    latency  of a crossing, if any row leaves

With the experts in the order of the member's own rows, most rows first (of equal ones those first whose homes come next
in rank order, so that members begin at different homes), W is the first k of them, and k is the best of all. Its own
experts a member does not send, but others may. A GEMM of n rows takes the time of n + half_rows rows at the full rate.

What others do is not known when a member chooses. Of all members' rows the last step's count is known, of the same
layer; in the first step each is taken to have this one's. The others are taken to read as many experts as this member:
those which in their mean have at least as many rows as the k-th of this member, and if these are fewer than k, also of
the rest; each with the same probability where there are more than are read. Compute is taken as if all chose like this
one: a visited expert has all members' rows, at its home alone, and one that is read has this member's rows at every
member.

By bytes, each expert is a matter of its own: its rows' bytes or its weights', whichever are fewer.

A member leaves at most `quota` rows for each home; of what exceeds it, the experts with most rows are read. So visitors
have a bounded place, and nothing is ever dropped.
"""

import dataclasses
import math

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

    @property
    def break_even(self) -> float:
        """T*, rows from which on reading an expert costs no more bytes than sending them."""
        return self.weight_bytes / self.row_bytes


def visit_by_bytes(rows_E: jax.Array, rank: jax.Array, layer: Layer) -> jax.Array:
    """(E,) bool: whose rows have fewer bytes than the weights.

    Args:
      rows_E: (E,) int32, this member's rows of each expert.
      rank: () int32, this member.
      layer: costs.
    """
    return _is_remote(rows_E, rank, layer) & (rows_E < math.ceil(layer.break_even))


def visit_by_time(
    rows_E: jax.Array, load_E: jax.Array, rank: jax.Array, layer: Layer, calibration: Calibration
) -> jax.Array:
    """(E,) bool: the choice with the least time of the layer; see the head of this file.

    Args:
      rows_E, rank, layer: as above.
      load_E: (E,) int32, rows of all members in the last step; zeros in the first.
      calibration: rates.
    """
    order_E = by_rows(rows_E, rank, layer)
    of_all_E = jnp.where(load_E.sum() > 0, jnp.maximum(load_E, rows_E), layer.table.num_members * rows_E)
    num_read = jnp.argmin(layer_seconds(rows_E, of_all_E, order_E, rank, layer, calibration))
    place_E = jnp.zeros_like(order_E).at[order_E].set(jnp.arange(order_E.shape[0]))
    return _is_remote(rows_E, rank, layer) & (place_E >= num_read)


def layer_seconds(
    rows_E: jax.Array,
    of_all_E: jax.Array,
    order_E: jax.Array,
    rank: jax.Array,
    layer: Layer,
    calibration: Calibration,
) -> jax.Array:
    """(E + 1,) float32: the layer's time when the first k experts of `order_E` are read, k = 0 ... E."""
    num_members, num_experts = layer.table.num_members, rows_E.shape[0]
    is_remote_E, rows_E, of_all_E = _is_remote(rows_E, rank, layer)[order_E], rows_E[order_E], of_all_E[order_E]
    home_E = jnp.asarray(layer.table.home_E)[order_E]
    home_ER = jax.nn.one_hot(home_E, num_members)

    def gemm_seconds(rows: jax.Array) -> jax.Array:
        return (rows + calibration.half_rows) * (rows > 0) * (layer.flops_per_row / calibration.flops)

    own_k = _first(gemm_seconds(rows_E))
    visited_ER = gemm_seconds(of_all_E)[:, None] * home_ER
    served_k = (visited_ER.sum(0)[None] - _first(visited_ER)).max(1)
    compute_k = own_k + served_k

    num_k = jnp.arange(num_experts + 1)
    is_read_kE = num_k[:, None] > jnp.arange(num_experts)[None]
    fewest_k = jnp.concatenate([jnp.full(1, jnp.inf), rows_E.astype(jnp.float32)])  # that are read
    rows_of_other_E = (of_all_E - rows_E) / max(num_members - 1, 1)
    is_candidate_kE = (rows_of_other_E[None] >= fewest_k[:, None]) & (rows_of_other_E > 0)[None]
    num_candidates_k, num_used = is_candidate_kE.sum(1), (rows_of_other_E > 0).sum()
    read_of_candidates_k = jnp.minimum(1.0, num_k / jnp.maximum(num_candidates_k, 1))
    read_of_rest_k = jnp.clip((num_k - num_candidates_k) / jnp.maximum(num_used - num_candidates_k, 1), 0.0, 1.0)
    read_by_other_kE = jnp.where(is_candidate_kE, read_of_candidates_k[:, None], read_of_rest_k[:, None])
    read_by_other_kE = read_by_other_kE * (rows_of_other_E > 0)[None]
    others_E = num_members - 1 - (home_E != rank)  # members, but for the home and this one

    read_kE = is_read_kE * is_remote_E[None]
    sent_kR = (read_kE + read_by_other_kE * others_E[None]) @ home_ER
    blocks_k = jnp.maximum(read_kE.sum(1), sent_kR.max(1))
    rows_sent_kE = (~is_read_kE) * (rows_E * is_remote_E)[None]
    sent_k = rows_sent_kE.sum(1)
    visiting_k = ((rows_sent_kE + (1 - read_by_other_kE) * (rows_of_other_E * others_E)[None]) @ home_ER).max(1)

    row_s = layer.units.row_bytes / calibration.row_bytes_per_s
    crossing_k = jnp.maximum(sent_k, visiting_k) * row_s + (visiting_k > 0) * calibration.latency_s

    def pass_seconds(share: float, block_bytes: int) -> jax.Array:
        wire_k = blocks_k * (block_bytes / calibration.bytes_per_s) + (sent_k + visiting_k) * row_s
        return jnp.maximum(jnp.maximum(compute_k * share, wire_k), 2 * crossing_k + served_k * share)

    return pass_seconds(1 / 3, layer.units.block_bytes) + pass_seconds(2 / 3, layer.units.gradient_bytes)


def by_rows(rows_E: jax.Array, rank: jax.Array, layer: Layer) -> jax.Array:
    """(E,) the experts, most rows first, and of equal ones in the order of their homes from this member on."""
    turn_E = (jnp.asarray(layer.table.home_E) - rank) % layer.table.num_members
    return jnp.lexsort((turn_E, -rows_E))


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
