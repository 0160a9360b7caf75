"""all_to_all: tokens travel to the homes of their experts and back, in padded capacity rows.

Each member puts its rows into C slots per position, an all-to-all carries them to the homes, these compute, and a
second one carries the results back. Nothing is dropped: C is the smallest of a few sizes that holds the largest count
of any member and expert in this step, one decision for all members.

Payload per member and layer, forward and backward: 4 (R-1)/R P C D b bytes; 5 instead of 4 in the two largest sizes,
where the received rows are fetched again rather than kept for the backward pass; 2 more when the layer is recomputed.

Forms: `native`, one XLA all-to-all; `shifted`, R-1 permutes by 1, 2, ... R-1 ranks, which on XLA:CPU over Gloo comes
closer to the wire's rate, because a pair of ranks never exchanges both ways at once.

Source: D. Lepikhin et al., "GShard", 2020, section 3.2 (capacity slots and two all-to-alls).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fef.config import Section, knob
from fef.dispatch import DISPATCHERS
from fef.dispatch.base import Dispatcher
from fef.experts import Experts
from fef.ops.expert_ffn import expert_ffn
from fef.ops.grouped_matmul import Segments
from fef.ops.permute import combine_rows, gather_rows, sort_by_expert
from fef.ops.slots import from_slots, to_slots
from fef.routing import Assignment
from fef.sharding import AXES

_FACTORS = (1.0, 1.25, 1.5, 2.0, 4.0)  # of the mean count N/E; a last size holds any count
_KEPT_FACTOR = 2.0  # received rows are kept for the backward pass up to here: every size kept costs memory in each step


@DISPATCHERS.register("all_to_all")
class AllToAll(Dispatcher):
    """Padded capacity rows through two all-to-alls each way."""

    @dataclasses.dataclass(unsafe_hash=True)
    class Options(Section):
        form: str = knob(
            "native", "run", "native (one XLA all-to-all) or shifted (R-1 permutes)", choices=("native", "shifted")
        )

    def __call__(self, x_TD: jax.Array, assignment: Assignment, experts: Experts, layer: jax.Array) -> tuple:
        order = sort_by_expert(assignment, self.table.num_experts)
        counts_P = self.counts_P(order)
        num_rows, num_tokens = order.order_N.shape[0], x_TD.shape[0]
        sizes = capacity_sizes(num_rows, num_tokens, self.table.num_experts)
        choice = jnp.searchsorted(jnp.asarray(sizes), jax.lax.pmax(counts_P.max(), AXES), side="left")

        rows_ND = gather_rows(x_TD, assignment, order)
        counts_RL = _native_all_to_all(counts_P.reshape(-1, self.table.per_member))
        kept = [capacity <= _size(_KEPT_FACTOR, num_rows, self.table.num_experts) for capacity in sizes]
        policies = [jax.checkpoint_policies.save_only_these_names("received") if k else None for k in kept]
        branches = [
            jax.checkpoint(functools.partial(self._through, capacity), policy=policy)
            for capacity, policy in zip(sizes, policies, strict=True)
        ]
        rows_ND = jax.lax.switch(choice, branches, rows_ND, counts_P, counts_RL, experts)
        y_TD = combine_rows(rows_ND, assignment, order, num_tokens)

        crossings = jnp.asarray([4 if k else 5 for k in kept])[choice] + 2 * self.rerun
        moved_QP = self.moved(tokens=crossings * jnp.asarray(sizes)[choice], metadata=4 * (1 + self.rerun))
        return y_TD.astype(x_TD.dtype), moved_QP

    def _through(self, capacity: int, rows_ND, counts_P, counts_RL, experts: Experts) -> jax.Array:
        """There, through the experts, and back, with C = capacity."""
        per_member, d_model = self.table.per_member, rows_ND.shape[1]
        slots_PCD = to_slots(rows_ND, counts_P, capacity)
        received = self._exchange(slots_PCD.reshape(-1, per_member, capacity, d_model))
        received = checkpoint_name(received, "received")
        position_L = jnp.arange(per_member, dtype=jnp.int32)
        segments = Segments(
            first_G=jnp.arange(counts_RL.size, dtype=jnp.int32) * capacity,
            rows_G=counts_RL.reshape(-1),
            expert_G=jnp.broadcast_to(position_L, counts_RL.shape).reshape(-1),
        )
        computed = expert_ffn(received.reshape(-1, d_model), experts, segments, self.matmul, self.device)
        returned = self._exchange(computed.reshape(received.shape))
        return from_slots(returned.reshape(slots_PCD.shape), counts_P, rows_ND.shape[0])

    def _exchange(self, x_R: jax.Array) -> jax.Array:
        """Entry r of the result is what member r had at this member's entry."""
        if self.options.form == "native":
            return _native_all_to_all(x_R)
        return shifted_all_to_all(x_R, "expert")


def capacity_sizes(num_rows: int, num_tokens: int, num_experts: int) -> list[int]:
    """The sizes C to choose from, ascending; the last holds every case, as an expert sees a token at most once."""
    largest = min(num_rows, num_tokens)
    sizes = {min(largest, _size(factor, num_rows, num_experts)) for factor in _FACTORS}
    return sorted(sizes | {largest})


def _size(factor: float, num_rows: int, num_experts: int) -> int:
    return -(-int(factor * num_rows) // num_experts)


def _native_all_to_all(x_R: jax.Array) -> jax.Array:
    return jax.lax.all_to_all(x_R, "expert", split_axis=0, concat_axis=0)


def shifted_all_to_all(x_R: jax.Array, axis: str) -> jax.Array:
    """all_to_all over the leading dimension as R-1 permutes, each made to wait for the one before.

    Args:
      x_R: (R, ...), any float or int dtype; entry r goes to member r. Call inside an island.
      axis: name of the mesh axis.

    Returns:
      (R, ...); entry r came from member r. Gradient: the same exchange of the cotangents.
    """
    num_members = jax.lax.axis_size(axis)
    rank = jax.lax.axis_index(axis)
    out_R = jnp.zeros_like(x_R).at[rank].set(x_R[rank])
    for shift in range(1, num_members):
        sent = x_R[(rank + shift) % num_members]
        sent = sent + (out_R[0] * 0).astype(sent.dtype)  # XLA keeps the dependence: 0 * x is not 0 for every float
        arrived = jax.lax.ppermute(sent, axis, [(r, (r + shift) % num_members) for r in range(num_members)])
        out_R = out_R.at[(rank - shift) % num_members].set(arrived)
    return out_R
