"""all_gather: every member gathers all weights, in the style of FSDP; the gradients are reduce-scattered.

Payload per member and layer, forward and backward: 2 (R-1)/R P P_E b bytes for blocks of P_E elements, and one half of
it more when the layer is recomputed. Independent of how many tokens use an expert.

Source: Y. Zhao et al., "PyTorch FSDP", 2023, section 3; S. Rajbhandari et al., "ZeRO", 2020, section 5.3.
"""

import jax

from fef.dispatch import DISPATCHERS
from fef.dispatch.base import Dispatcher
from fef.experts import Experts
from fef.ops.expert_ffn import expert_ffn
from fef.ops.grouped_matmul import segments_of_counts
from fef.ops.permute import combine_rows, gather_rows, sort_by_expert
from fef.routing import Assignment


@DISPATCHERS.register("all_gather")
class AllGather(Dispatcher):
    """All weights to every member, gradients reduce-scattered (FSDP style)."""

    def __call__(self, x_TD: jax.Array, assignment: Assignment, experts: Experts, layer: jax.Array) -> tuple:
        order = sort_by_expert(assignment, self.table.num_experts)
        gathered = jax.tree.map(
            lambda w: jax.lax.all_gather(w.astype(x_TD.dtype), "expert", axis=0, tiled=True), experts
        )
        rows_ND = gather_rows(x_TD, assignment, order)
        rows_ND = expert_ffn(rows_ND, gathered, segments_of_counts(self.counts_P(order)), self.matmul, self.device)
        y_TD = combine_rows(rows_ND, assignment, order, x_TD.shape[0])
        return y_TD.astype(x_TD.dtype), self.moved(weights=1, refetch=int(self.rerun), gradients=1)
