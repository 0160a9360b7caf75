"""Top-k token choice: each token visits the K experts to which a softmax gate gives the highest probability.

    p = softmax(x W_gate) over all E experts,  weights = p of the K best, divided by their sum if `renormalise`

Sources: Shazeer et al., "Outrageously Large Neural Networks", 2017 (top-k gating); Jiang et al., "Mixtral of Experts",
2024, section 2.1 (renormalised; softmax over the K best logits is the same thing); Muennighoff et al., "OLMoE", 2024
(not renormalised); Qiu et al., "Demons in the Detail", 2025, section 3 (balance over all microbatches of a step: there
the counts of the step itself; as this needs a second pass over the batch, those of the step before stand in here).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fef.config import knob
from fef.routing import ROUTERS, Assignment, RouterContext
from fef.routing.capacity import expert_capacity, overflow_knob, within_capacity
from fef.routing.gate import (
    LinearGate,
    count_by_expert,
    count_by_sequence,
    gate_entropy,
    gate_logits,
    token_choice,
)
from fef.routing.losses import aux_loss_share


@ROUTERS.register("top_k")
@dataclasses.dataclass(frozen=True)
class TopK(LinearGate):
    """Top-k token choice with a softmax gate; dropless unless `capacity_factor` is set.

    Raises:
      ConfigError: K outside [1, E] or an option out of range.
    """

    @dataclasses.dataclass(unsafe_hash=True)  # so that a router can be a static argument
    class Options:
        renormalise: bool = knob(
            True, "model", "divide a token's K weights by their sum; no effect at K = 1, where the gate would not learn"
        )
        balance_coef: float = knob(0.01, "model", "factor of the load-balance loss", ge=0)
        balance_scope: str = knob(
            "microbatch",
            "model",
            "where the load is balanced: in a microbatch, in each sequence, or in all microbatches of a step (global: "
            "by the counts of the last step)",
            choices=("microbatch", "sequence", "global"),
        )
        z_coef: float = knob(0.001, "model", "factor of the router z-loss", ge=0)
        capacity_factor: float = knob(
            0.0, "model", "in training an expert takes this times K*S/E tokens of a sequence; 0 drops none", ge=0
        )
        overflow: str = overflow_knob()

    options: Options = dataclasses.field(default_factory=Options)

    @property
    def causal(self) -> bool:
        return not (self.options.capacity_factor and self.options.overflow == "batch_priority")

    @property
    def equivariant(self) -> bool:
        return not self.options.capacity_factor

    def init_state(self) -> Any:
        if self.options.balance_scope != "global":
            return {}
        return {"load_E": jnp.zeros(self.num_experts, jnp.int32), "tokens": jnp.int32(0)}

    def next_state(self, state: Any, seen: Any) -> Any:
        return seen

    def __call__(self, params: dict[str, jax.Array], x_BSD: jax.Array, ctx: RouterContext) -> tuple[Assignment, Any]:
        options, num_choices = self.options, self.num_choices
        logits_BSE = gate_logits(params["gate_DE"], x_BSD)
        _, picks_BSK = jax.lax.top_k(logits_BSE, num_choices)
        claims_BSK = jnp.broadcast_to(ctx.mask_BS[..., None], picks_BSK.shape)
        expert_BSK, kept_BSK = picks_BSK, claims_BSK
        if ctx.train and options.capacity_factor:
            capacity = expert_capacity(options.capacity_factor, x_BSD.shape[1], num_choices, self.num_experts)
            expert_BSK, kept_BSK = within_capacity(picks_BSK, claims_BSK, logits_BSE, capacity, options.overflow)
        weight_BSK = jnp.take_along_axis(jax.nn.softmax(logits_BSE), expert_BSK, axis=-1)
        if options.renormalise and num_choices > 1:
            weight_BSK /= weight_BSK.sum(-1, keepdims=True)

        load_E = count_by_expert(picks_BSK, claims_BSK, self.num_experts)
        in_sequences, in_step = options.balance_scope == "sequence", options.balance_scope == "global"
        aux_loss = aux_loss_share(
            logits_BSE,
            load_E,
            ctx,
            balance_coef=options.balance_coef,
            z_coef=options.z_coef,
            load_BE=count_by_sequence(picks_BSK, ctx.mask_BS, self.num_experts) if in_sequences else None,
            last_step=ctx.state if in_step else None,
        )
        assignment = token_choice(
            expert_BSK,
            weight_BSK,
            kept_BSK,
            ctx.mask_BS,
            num_experts=self.num_experts,
            entropy_BS=gate_entropy(logits_BSE),
            aux_loss=aux_loss,
        )
        seen = {"load_E": load_E, "tokens": assignment.metrics["tokens"]} if in_step else {}
        return assignment, seen
