"""Sinkhorn routing: in training, tokens choose from logits whose columns are scaled until all experts are as popular.

    Pi = exp(x W_gate) scaled to row sums 1 and column sums S/E,  experts = the K best of Pi,
    weights = softmax (or sigmoid) of the logits themselves, at the chosen experts

In evaluation experts are the K best logits. The scaling looks at the whole sequence, later tokens included, so the
scheme is not causal in training; it has no auxiliary loss, and its gradient passes through the weights alone.

Source: Clark et al., "Unified Scaling Laws for Routed Language Models", 2022, section 3.3 (S-BASE: K = 1, in place of
the exact assignment of BASE). The paper iterates to a tolerance over a device's tokens; here a fixed number of
iterations runs within each sequence, so that the choice does not depend on the number of devices, and K may exceed 1.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fef.config import knob
from fef.routing import ROUTERS, Assignment, RouterContext
from fef.routing.gate import LinearGate, gate_entropy, gate_logits, token_choice


@ROUTERS.register("sinkhorn")
@dataclasses.dataclass(frozen=True)
class Sinkhorn(LinearGate):
    """Dropless token choice, balanced within each sequence in training.

    Raises:
      ConfigError: K outside [1, E] or an option out of range.
    """

    @dataclasses.dataclass(unsafe_hash=True)  # so that a router can be a static argument
    class Options:
        iterations: int = knob(8, "model", "how often the columns are scaled in training", ge=1)
        gate: str = knob("softmax", "model", "what makes a weight of a logit", choices=("softmax", "sigmoid"))

    causal = False
    equivariant = True

    options: Options = dataclasses.field(default_factory=Options)

    def __call__(self, params: dict[str, jax.Array], x_BSD: jax.Array, ctx: RouterContext) -> tuple[Assignment, Any]:
        logits_BSE = gate_logits(params["gate_DE"], x_BSD)
        ranking_BSE = jax.lax.stop_gradient(logits_BSE)
        if ctx.train:
            ranking_BSE += column_scales(ranking_BSE, ctx.mask_BS, self.options.iterations)[:, None]
        _, expert_BSK = jax.lax.top_k(ranking_BSE, self.num_choices)
        weights = jax.nn.softmax if self.options.gate == "softmax" else jax.nn.sigmoid
        assignment = token_choice(
            expert_BSK,
            jnp.take_along_axis(weights(logits_BSE), expert_BSK, axis=-1),
            jnp.broadcast_to(ctx.mask_BS[..., None], expert_BSK.shape),
            ctx.mask_BS,
            num_experts=self.num_experts,
            entropy_BS=gate_entropy(logits_BSE),
            aux_loss=jnp.zeros((), jnp.float32),
        )
        return assignment, {}


def column_scales(logits_BSE: jax.Array, mask_BS: jax.Array, iterations: int) -> jax.Array:
    """Logarithms (B, E) float32 of the factors of the columns; rows' factors change no row's order and are left out.

    Args:
      logits_BSE: (B, S, E) float32.
      mask_BS: (B, S) bool; padding has no part. A sequence of padding alone gets zeros.
      iterations: each scales the rows, then the columns.
    """
    num_experts = logits_BSE.shape[-1]
    real_B1 = mask_BS.sum(1, keepdims=True)
    log_share_B1 = jnp.log(jnp.maximum(real_B1, 1) / num_experts)

    def iterate(_: int, scale_BE: jax.Array) -> jax.Array:
        log_rows_BSE = jax.nn.log_softmax(logits_BSE + scale_BE[:, None])
        log_columns_BE = jax.nn.logsumexp(log_rows_BSE, axis=1, where=mask_BS[..., None])
        return jnp.where(real_B1 > 0, scale_BE + log_share_B1 - log_columns_BE, 0.0)

    return jax.lax.fori_loop(0, iterations, iterate, jnp.zeros((logits_BSE.shape[0], num_experts), jnp.float32))
