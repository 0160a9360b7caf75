"""Switch routing: each token visits the one expert to which the gate gives the highest probability.

    p = softmax(x W_gate),  expert = argmax p,  weight = p[expert], not renormalised: it carries the gate's gradient

An expert takes at most C = capacity_factor * S / E tokens of a sequence, in the order of their positions; the others
are dropped and pass by on the residual stream.

Source: Fedus, Zoph, Shazeer, "Switch Transformers", 2021, sections 2.1 and 2.2. The paper counts capacity over a
device's whole batch; here it is per sequence, so that drops do not depend on the number of devices.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fef.config import ConfigError, knob
from fef.routing import ROUTERS, Assignment, RouterContext
from fef.routing.capacity import within_capacity
from fef.routing.gate import LinearGate, count_by_expert, gate_entropy, gate_logits, token_choice
from fef.routing.losses import aux_loss_share


@ROUTERS.register("switch")
@dataclasses.dataclass(frozen=True)
class Switch(LinearGate):
    """Top-1 token choice with a capacity per sequence.

    Raises:
      ConfigError: num_choices other than 1, or an option out of range.
    """

    @dataclasses.dataclass(unsafe_hash=True)  # so that a router can be a static argument
    class Options:
        capacity_factor: float = knob(
            1.25, "model", "in training an expert takes this times S/E tokens of a sequence; 0 drops none", ge=0
        )
        balance_coef: float = knob(0.01, "model", "factor of the load-balance loss", ge=0)
        z_coef: float = knob(0.0, "model", "factor of the router z-loss; the paper has none", ge=0)

    causal = True

    options: Options = dataclasses.field(default_factory=Options)

    def __post_init__(self) -> None:
        if self.num_choices != 1:
            raise ConfigError(
                "moe.num_choices",
                self.num_choices,
                "switch sends each token to one expert; set config.moe.num_choices=1 or config.moe.router=top_k",
            )
        super().__post_init__()

    @property
    def equivariant(self) -> bool:
        return not self.options.capacity_factor

    def __call__(self, params: dict[str, jax.Array], x_BSD: jax.Array, ctx: RouterContext) -> tuple[Assignment, Any]:
        options = self.options
        logits_BSE = gate_logits(params["gate_DE"], x_BSD)
        expert_BSK = jnp.argmax(logits_BSE, axis=-1, keepdims=True)  # K = 1
        weight_BSK = jnp.take_along_axis(jax.nn.softmax(logits_BSE), expert_BSK, axis=-1)

        claims_BSK = ctx.mask_BS[..., None]
        kept_BSK = claims_BSK
        if ctx.train and options.capacity_factor:
            kept_BSK = within_capacity(expert_BSK, claims_BSK, self.num_experts, options.capacity_factor)

        load_E = count_by_expert(expert_BSK, claims_BSK, self.num_experts)
        aux_loss = aux_loss_share(logits_BSE, load_E, ctx, balance_coef=options.balance_coef, z_coef=options.z_coef)
        assignment = token_choice(
            expert_BSK,
            weight_BSK,
            kept_BSK,
            ctx.mask_BS,
            num_experts=self.num_experts,
            entropy_BS=gate_entropy(logits_BSE),
            aux_loss=aux_loss,
        )
        return assignment, {}
