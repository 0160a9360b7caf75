"""Top-p routing: each token visits as few experts as it takes for their probabilities to add up to p.

    P = softmax(x W_gate),  experts = the shortest row of the best ones whose P add up to `p`, at most K
    weights = P of these, divided by their sum if `renormalise`
    loss = balance_coef * load-balance loss + entropy_coef * mean entropy of P

A token of which the gate is sure takes one expert, a hard one more. Without the entropy loss the gate would spread P
to take more and more. The paper has no bound K: there K = E. The load balance's f_e counts the experts that are taken.

Source: Huang et al., "Harder Tasks Need More Experts: Dynamic Routing in MoE Models", 2024, section 2; p and
the factors are those of its experiments.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fef.config import knob
from fef.routing import ROUTERS, Assignment, RouterContext
from fef.routing.gate import LinearGate, count_by_expert, gate_entropy, gate_logits, token_choice
from fef.routing.losses import aux_loss_share


@ROUTERS.register("top_p")
@dataclasses.dataclass(frozen=True)
class TopP(LinearGate):
    """Dropless token choice of one to K experts.

    Raises:
      ConfigError: K outside [1, E] or an option out of range.
    """

    @dataclasses.dataclass(unsafe_hash=True)  # so that a router can be a static argument
    class Options:
        p: float = knob(0.4, "model", "probability that a token's experts are to have together", gt=0, le=1)
        renormalise: bool = knob(
            False, "model", "divide a token's weights by their sum; the gate learns nothing from tokens of one expert"
        )
        balance_coef: float = knob(0.01, "model", "factor of the load-balance loss", ge=0)
        entropy_coef: float = knob(1e-4, "model", "factor of the mean entropy of the gate", ge=0)

    causal = True
    equivariant = True

    options: Options = dataclasses.field(default_factory=Options)

    def __call__(self, params: dict[str, jax.Array], x_BSD: jax.Array, ctx: RouterContext) -> tuple[Assignment, Any]:
        options = self.options
        logits_BSE = gate_logits(params["gate_DE"], x_BSD)
        _, expert_BSK = jax.lax.top_k(logits_BSE, self.num_choices)
        weight_BSK = jnp.take_along_axis(jax.nn.softmax(logits_BSE), expert_BSK, axis=-1)
        is_taken_BSK = jnp.cumsum(weight_BSK, axis=-1) - weight_BSK < options.p  # the better ones do not suffice
        if options.renormalise:
            weight_BSK /= jnp.sum(jnp.where(is_taken_BSK, weight_BSK, 0.0), axis=-1, keepdims=True)

        kept_BSK = is_taken_BSK & ctx.mask_BS[..., None]
        aux_loss = aux_loss_share(
            logits_BSE,
            count_by_expert(expert_BSK, kept_BSK, self.num_experts),
            ctx,
            balance_coef=options.balance_coef,
            z_coef=0.0,
            entropy_coef=options.entropy_coef,
        )
        assignment = token_choice(
            expert_BSK,
            weight_BSK,
            kept_BSK,
            ctx.mask_BS,
            num_experts=self.num_experts,
            entropy_BS=gate_entropy(logits_BSE),
            aux_loss=aux_loss,
            picked_BSK=kept_BSK,
        )
        return assignment, {}
