"""ragged_all_to_all: tokens travel to the homes of their experts and back, in exact rows, without padding.

Rows sorted by expert are sorted by home too, so each member sends every home one slice and gets one from every member.
Received rows are (source, expert) runs, which the grouped matmul takes as they are. For accelerators: XLA:CPU has no
such collective.

Worked example, 2 members with one expert each: member 0 has 3 rows of expert 0 and 2 of expert 1, member 1 has 1 and 4.

    counts_SP (on both)      [[3, 2], [1, 4]]
    member 0 sends           rows 0-2 to itself, rows 3-4 to member 1, which puts them at its row 0
    member 0 receives        3 rows of its own at row 0, 1 row of member 1 at row 3

Payload per member and layer, forward and backward: 4 D b bytes for every row whose expert lives elsewhere, which is
4 (R-1)/R N D b where the load is even; half of it more when the layer is recomputed.
Memory: a member has room for all rows that could reach it, R min(N, T P/R), as a token takes an expert at most once.

Source: D. Lepikhin et al., "GShard", 2020, section 3.2 (two all-to-alls), without its capacity; T. Gale et al.,
"MegaBlocks: Efficient Sparse Training with Mixture-of-Experts", 2023 (no token is dropped or padded).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from fef.config import UserError
from fef.dispatch import DISPATCHERS
from fef.dispatch.base import Dispatcher
from fef.experts import Experts
from fef.ops.expert_ffn import expert_ffn
from fef.ops.grouped_matmul import Segments
from fef.ops.permute import combine_rows, gather_rows, sort_by_expert
from fef.routing import Assignment


@dataclasses.dataclass(frozen=True)
class Plan:
    """One exchange as one member sees it; entry r is the slice to, or from, member r. All (R,) int32.

    Attributes:
      first_R: first row of the slice that is sent to r, in this member's rows.
      rows_R: its number of rows.
      target_R: its first row on r.
      received_R: number of rows that r sends here.
    """

    first_R: jax.Array
    rows_R: jax.Array
    target_R: jax.Array
    received_R: jax.Array


jax.tree_util.register_dataclass(Plan, [field.name for field in dataclasses.fields(Plan)], meta_fields=[])


@DISPATCHERS.register("ragged_all_to_all")
class RaggedAllToAll(Dispatcher):
    """Exact rows through two ragged all-to-alls each way (accelerators only)."""

    @classmethod
    def check_platform(cls, platform: str) -> None:
        if platform == "cpu":
            raise UserError(
                "the ragged_all_to_all dispatcher does not run on cpu, as XLA:CPU has no ragged_all_to_all; "
                "use pooled, all_to_all, all_gather or reference there"
            )

    def __call__(self, x_TD: jax.Array, assignment: Assignment, experts: Experts, layer: jax.Array) -> tuple:
        order = sort_by_expert(assignment, self.table.num_experts)
        counts_P = self.counts_P(order)
        counts_SP = jax.lax.all_gather(counts_P, "expert")
        there, back = plans(counts_SP, jax.lax.axis_index("expert"))
        rows_ND = gather_rows(x_TD, assignment, order)
        num_members, per_member = self.table.num_members, self.table.per_member
        num_received = num_members * min(rows_ND.shape[0], x_TD.shape[0] * per_member)

        received = exchange_rows(rows_ND, there, back, num_received)
        computed = expert_ffn(received, experts, self._runs(counts_SP), self.matmul, self.device)
        returned_ND = exchange_rows(computed, back, there, rows_ND.shape[0])
        y_TD = combine_rows(returned_ND, assignment, order, x_TD.shape[0])

        forwards = 1 + self.rerun
        moved_QP = self.moved(tokens=2 * (forwards + 1) * counts_P, metadata=4 * num_members * forwards)
        return y_TD.astype(x_TD.dtype), moved_QP

    def _runs(self, counts_SP: jax.Array) -> Segments:
        """The received rows: by source, then by position of this member."""
        per_member = self.table.per_member
        first = jax.lax.axis_index("expert") * per_member
        counts_SL = jax.lax.dynamic_slice_in_dim(counts_SP, first, per_member, axis=1)
        position_SL = jnp.broadcast_to(jnp.arange(per_member, dtype=jnp.int32), counts_SL.shape)
        rows_G = counts_SL.reshape(-1)
        return Segments(_starts(rows_G), rows_G, position_SL.reshape(-1))


def plans(counts_SP: jax.Array, rank: jax.Array) -> tuple[Plan, Plan]:
    """How `rank` sends its rows to the homes, and how it sends the results back.

    Args:
      counts_SP: (R, P) int32, rows of each member for each position, positions sorted by home.
      rank: () int32.
    """
    num_members = counts_SP.shape[0]
    rows_SR = counts_SP.reshape(num_members, num_members, -1).sum(-1, dtype=jnp.int32)
    sent_from_SR = _starts(rows_SR, axis=1)  # where the slice begins on its source
    put_at_SR = _starts(rows_SR, axis=0)  # and on its home: behind those of the sources before
    there = Plan(sent_from_SR[rank], rows_SR[rank], put_at_SR[rank], rows_SR[:, rank])
    back = Plan(put_at_SR[:, rank], rows_SR[:, rank], sent_from_SR[:, rank], rows_SR[rank])
    return there, back


def _starts(rows: jax.Array, axis: int = 0) -> jax.Array:
    return jnp.cumsum(rows, axis=axis, dtype=jnp.int32) - rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def exchange_rows(rows_ND: jax.Array, there: Plan, back: Plan, num_received: int) -> jax.Array:
    """Sends slices of rows to the other members. Inside an island.

    Args:
      rows_ND: (N, D).
      there: what goes where.
      back: the opposite exchange.
      num_received: M, at least the number of rows that arrive.

    Returns:
      (M, D), dtype of rows_ND; rows to which nothing came are zero.

    Sharding: per member. Gradient: in rows_ND, by the opposite exchange; zero for rows that were not sent. Reverse mode
      of any order; jvp is refused by JAX (`jax.custom_vjp`).
    """
    empty_MD = jnp.zeros((num_received, rows_ND.shape[1]), rows_ND.dtype)
    return jax.lax.ragged_all_to_all(
        rows_ND, empty_MD, there.first_R, there.rows_R, there.target_R, there.received_R, axis_name="expert"
    )


def _exchange_fwd(rows_ND: jax.Array, there: Plan, back: Plan, num_received: int) -> tuple:
    return exchange_rows(rows_ND, there, back, num_received), (rows_ND[:, :0], there, back)


def _exchange_bwd(num_received: int, residuals: tuple, d_received_MD: jax.Array) -> tuple:
    like_N0, there, back = residuals
    return exchange_rows(d_received_MD, back, there, like_N0.shape[0]), None, None


exchange_rows.defvjp(_exchange_fwd, _exchange_bwd)
