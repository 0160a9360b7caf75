"""Noisy top-k gating: in training, noise of a learned size on the logits spreads the load.

    H = x W_gate + normal * softplus(x W_noise),  experts = the K best of H,  weights = softmax over these K of H
    loss = importance_coef * CV(importance)^2 + load_coef * CV(load)^2

CV is the coefficient of variation over the experts. An expert's importance is the sum of its weights, its load a smooth
count of its tokens: the sum of P(x, e), the probability that e would be chosen if its noise alone were drawn again,

    P(x, e) = Phi((x W_gate - threshold) / softplus(x W_noise)),  threshold = the K-th best H without e's own.

Sums are over the global batch (see `squared_variation_share`). In evaluation there is no noise: H = x W_gate.

Both matrices begin with zeros, as in the paper: routing starts as noise alone and balanced. softplus is kept above
1e-6, where the paper has no bound, so that very negative x W_noise divides nothing by 0.

Source: Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer", 2017, section
2.1, equations 3-5, section 4, equations 6-7, and appendix A, equations 8-11.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fef.config import ConfigError, knob
from fef.routing import ROUTERS, Assignment, RouterContext
from fef.routing.gate import LinearGate, gate_entropy, gate_logits, token_choice
from fef.routing.losses import squared_variation_share

_LEAST_SPREAD = 1e-6


@ROUTERS.register("noisy_top_k")
@dataclasses.dataclass(frozen=True)
class NoisyTopK(LinearGate):
    """Dropless top-k token choice by noisy logits.

    Raises:
      ConfigError: K < 2 or above E, or an option out of range.
    """

    @dataclasses.dataclass(unsafe_hash=True)  # so that a router can be a static argument
    class Options:
        importance_coef: float = knob(0.1, "model", "factor of the importance loss", ge=0)
        load_coef: float = knob(0.1, "model", "factor of the load loss", ge=0)

    causal = True

    options: Options = dataclasses.field(default_factory=Options)

    def __post_init__(self) -> None:
        if self.num_choices < 2:
            raise ConfigError(
                "moe.num_choices",
                self.num_choices,
                "the softmax over one expert is 1, and noisy_top_k's gate would not learn; "
                "set config.moe.num_choices=2 or config.moe.router=switch",
            )
        super().__post_init__()

    def init(self, key: jax.Array, d_model: int) -> dict[str, jax.Array]:
        return {name: jnp.zeros((d_model, self.num_experts), jnp.float32) for name in ("gate_DE", "noise_DE")}

    def __call__(self, params: dict[str, jax.Array], x_BSD: jax.Array, ctx: RouterContext) -> tuple[Assignment, Any]:
        num_choices, mask_BS = self.num_choices, ctx.mask_BS
        logits_BSE = gate_logits(params["gate_DE"], x_BSD)
        spread_BSE = jnp.maximum(jax.nn.softplus(gate_logits(params["noise_DE"], x_BSD)), _LEAST_SPREAD)
        noisy_BSE = logits_BSE
        if ctx.train:
            noisy_BSE += jax.random.normal(ctx.key, logits_BSE.shape, jnp.float32) * spread_BSE
        best_BSK, expert_BSK = jax.lax.top_k(noisy_BSE, num_choices)
        weight_BSK = jax.nn.softmax(best_BSK)

        chosen_BSKE = jax.nn.one_hot(expert_BSK, self.num_experts)
        share_BSE = jnp.sum(weight_BSK[..., None] * chosen_BSKE, axis=2)
        chance_BSE = chosen_BSKE.sum(2)  # of an expert that cannot lose its place
        if num_choices < self.num_experts:
            chance_BSE = _chance(logits_BSE, spread_BSE, noisy_BSE, chance_BSE > 0, num_choices)
        assignment = token_choice(
            expert_BSK,
            weight_BSK,
            jnp.broadcast_to(mask_BS[..., None], expert_BSK.shape),
            mask_BS,
            num_experts=self.num_experts,
            entropy_BS=gate_entropy(logits_BSE),
            aux_loss=self._loss_share(share_BSE, chance_BSE, ctx),
        )
        return assignment, {}

    def _loss_share(self, share_BSE: jax.Array, chance_BSE: jax.Array, ctx: RouterContext) -> jax.Array:
        own = {
            name: jnp.sum(jnp.where(ctx.mask_BS[..., None], array_BSE, 0.0), axis=(0, 1))
            for name, array_BSE in (("importance_E", share_BSE), ("load_E", chance_BSE))
        }
        tokens = jnp.sum(ctx.mask_BS, dtype=jnp.int32)
        total, all_tokens = ctx.psum(jax.lax.stop_gradient((own, tokens)))
        part = tokens / jnp.maximum(all_tokens, 1)
        importance = squared_variation_share(own["importance_E"], total["importance_E"], part)
        load = squared_variation_share(own["load_E"], total["load_E"], part)
        return self.options.importance_coef * importance + self.options.load_coef * load


def _chance(
    logits_BSE: jax.Array, spread_BSE: jax.Array, noisy_BSE: jax.Array, is_chosen_BSE: jax.Array, num_choices: int
) -> jax.Array:
    """P(x, e), (B, S, E) float32, with K < E."""
    best, _ = jax.lax.top_k(noisy_BSE, num_choices + 1)
    threshold_BSE = jnp.where(is_chosen_BSE, best[..., num_choices, None], best[..., num_choices - 1, None])
    return jax.scipy.special.ndtr((logits_BSE - threshold_BSE) / spread_BSE)
