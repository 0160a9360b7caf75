"""reference: a dense loop over all experts, the oracle that every dispatcher must equal.

Every member computes every expert on all of its tokens and keeps what the assignment asks for: E/K times the work. It
has no exchange of its own; with more than one member XLA hands every member all weights, which is not counted.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from fef import sharding
from fef.dispatch import DISPATCHERS
from fef.dispatch.base import Dispatcher
from fef.experts import Experts
from fef.routing import Assignment


@DISPATCHERS.register("reference")
class Reference(Dispatcher):
    """A dense loop over all experts (the oracle)."""

    models_device = False

    @property
    def experts_spec(self) -> PartitionSpec:
        return sharding.REPLICATED

    def __call__(self, x_TD: jax.Array, assignment: Assignment, experts: Experts, layer: jax.Array) -> tuple:
        num_experts = self.table.num_experts
        weight_N = jnp.where(assignment.valid_N, assignment.weight_N, 0)
        weight_ET = jnp.zeros((num_experts, x_TD.shape[0])).at[assignment.expert_N, assignment.token_N].add(weight_N)
        logical = jax.tree.map(lambda w: w[self.table.position_E].astype(x_TD.dtype), experts)

        def add_expert(y_TD: jax.Array, expert: tuple) -> tuple:
            own, weight_T = expert
            out_TD = own.kind(x_TD, own.linear)
            return y_TD + weight_T[:, None] * out_TD.astype(jnp.float32), None

        y_TD, _ = jax.lax.scan(add_expert, jnp.zeros(x_TD.shape, jnp.float32), (logical, weight_ET))
        return y_TD.astype(x_TD.dtype), self.moved()
