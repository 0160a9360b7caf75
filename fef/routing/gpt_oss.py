"""gpt-oss gate: a linear gate with a bias, and a softmax over the K kept logits.

    experts = the K best of x W_gate + b_gate,  weights = softmax over these K logits

The bias is a parameter that learns by the gradient. The source says nothing of balance: the load-balance loss is that
of `top_k`.

Source: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025, section 2.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fef.config import ConfigError, knob
from fef.routing import ROUTERS, Assignment, RouterContext
from fef.routing.gate import LinearGate, count_by_expert, gate_entropy, gate_logits, token_choice
from fef.routing.losses import aux_loss_share


@ROUTERS.register("gpt_oss")
@dataclasses.dataclass(frozen=True)
class GptOss(LinearGate):
    """Dropless top-k token choice by logits with a bias.

    Raises:
      ConfigError: K outside [2, E] (a single weight is always 1, and the gate would not learn), or an option out of
        range.
    """

    @dataclasses.dataclass(unsafe_hash=True)  # so that a router can be a static argument
    class Options:
        balance_coef: float = knob(0.01, "model", "factor of the load-balance loss", ge=0)

    causal = True
    equivariant = True

    options: Options = dataclasses.field(default_factory=Options)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_choices == 1:
            raise ConfigError(
                "moe.num_choices", 1, "gpt_oss has weight 1 for a single choice, so its gate would not learn; use top_k"
            )

    def init(self, key: jax.Array, d_model: int) -> dict[str, jax.Array]:
        return super().init(key, d_model) | {"bias_E": jnp.zeros(self.num_experts, jnp.float32)}

    def __call__(self, params: dict[str, jax.Array], x_BSD: jax.Array, ctx: RouterContext) -> tuple[Assignment, Any]:
        logits_BSE = gate_logits(params["gate_DE"], x_BSD) + params["bias_E"][None, None]
        best_BSK, expert_BSK = jax.lax.top_k(logits_BSE, self.num_choices)

        kept_BSK = jnp.broadcast_to(ctx.mask_BS[..., None], expert_BSK.shape)
        load_E = count_by_expert(expert_BSK, kept_BSK, self.num_experts)
        assignment = token_choice(
            expert_BSK,
            jax.nn.softmax(best_BSK),
            kept_BSK,
            ctx.mask_BS,
            num_experts=self.num_experts,
            entropy_BS=gate_entropy(logits_BSE),
            aux_loss=aux_loss_share(logits_BSE, load_E, ctx, balance_coef=self.options.balance_coef, z_coef=0.0),
        )
        return assignment, {}
