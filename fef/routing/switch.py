"""Switch routing: each token visits the one expert to which the gate gives the highest probability.

    p = softmax(x W_gate),  expert = argmax p,  weight = p[expert], not renormalised: it carries the gate's gradient

An expert takes at most C = capacity_factor * S / E tokens of a sequence, in the order of their positions; the others
are dropped and pass by on the residual stream, or what else `overflow` says. In training the input of the gate may be
jittered: multiplied by draws between 1 - jitter and 1 + jitter.

Source: Fedus, Zoph, Shazeer, "Switch Transformers", 2021, sections 2.1, 2.2 and 2.4. The paper counts capacity over a
device's whole batch; here it is per sequence, so that drops do not depend on the number of devices. An absolute
`capacity` that holds in evaluation too is what Hugging Face's Switch Transformers count.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fef.config import knob
from fef.routing import ROUTERS, Assignment, RouterContext
from fef.routing.capacity import expert_capacity, overflow_knob, within_capacity
from fef.routing.gate import LinearGate, check_just, count_by_expert, gate_entropy, gate_logits, token_choice
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
        capacity: int = knob(0, "model", "tokens an expert takes of a sequence; 0: by capacity_factor", ge=0)
        capacity_at_eval: bool = knob(False, "model", "an expert takes no more than that in evaluation either")
        overflow: str = overflow_knob()
        jitter: float = knob(
            0.0, "model", "in training the gate's input varies by this share; the paper has 0.01", ge=0, lt=1
        )
        balance_coef: float = knob(0.01, "model", "factor of the load-balance loss", ge=0)
        z_coef: float = knob(0.0, "model", "factor of the router z-loss; the paper has none", ge=0)

    options: Options = dataclasses.field(default_factory=Options)

    def __post_init__(self) -> None:
        check_just(self.num_choices, 1, "switch sends each token to one expert", instead="top_k")
        super().__post_init__()

    @property
    def equivariant(self) -> bool:
        return not self._is_limited and not self.options.jitter  # drawn for places, whatever token is there

    @property
    def causal(self) -> bool:
        return not (self._is_limited and self.options.overflow == "batch_priority")

    @property
    def _is_limited(self) -> bool:
        return bool(self.options.capacity or self.options.capacity_factor)

    def __call__(self, params: dict[str, jax.Array], x_BSD: jax.Array, ctx: RouterContext) -> tuple[Assignment, Any]:
        options = self.options
        if ctx.train and options.jitter:
            low, high = 1 - options.jitter, 1 + options.jitter
            x_BSD = x_BSD.astype(jnp.float32) * jax.random.uniform(ctx.key, x_BSD.shape, jnp.float32, low, high)
        logits_BSE = gate_logits(params["gate_DE"], x_BSD)
        picks_BSK = jnp.argmax(logits_BSE, axis=-1, keepdims=True)  # K = 1
        claims_BSK = ctx.mask_BS[..., None]
        expert_BSK, kept_BSK = picks_BSK, claims_BSK
        if self._is_limited and (ctx.train or options.capacity_at_eval):
            by_factor = expert_capacity(options.capacity_factor, x_BSD.shape[1], 1, self.num_experts)
            capacity = options.capacity or by_factor
            expert_BSK, kept_BSK = within_capacity(picks_BSK, claims_BSK, logits_BSE, capacity, options.overflow)
        weight_BSK = jnp.take_along_axis(jax.nn.softmax(logits_BSE), expert_BSK, axis=-1)

        load_E = count_by_expert(picks_BSK, claims_BSK, self.num_experts)
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
