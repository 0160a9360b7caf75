"""Quantile balancing: an expert's bias is minus the score that a K/E share of the last step's tokens exceeded.

    s = sigmoid(x W_gate),  experts = the K best of s + bias,  weights = s / (sum of the K chosen s)
    after each optimizer step:  bias_e = -(the (1 - K/E) quantile of s[:, e])

s + bias is positive for a K/E share of the tokens, the same for all experts, so each is equally often above its
threshold. Unlike a bias moved by a fixed rate (`sigmoid_bias`) it is right after one step, whatever the scores' scale.

The source's rule is the quantile. Choices made here: sigmoid scores; the quantile is read from a histogram, whose
counts add up over members and microbatches, linear within a bin; exactly K experts a token, where the source's
threshold gives K only on average; `smoothing`; no auxiliary loss. Being above the threshold equally often is not the
same as an equal load when the K best are taken: the load is balanced only approximately.

Source: J. Su, "MoE Travelogue: 7. A Minimalist Solution for Dynamic Activation", 2026 (the quantile as the optimal dual
of a balanced assignment; known as quantile balancing).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fef.config import knob
from fef.routing import ROUTERS, Assignment, RouterContext
from fef.routing.gate import LinearGate, gate_entropy, gate_logits, sigmoid_weights, token_choice


@ROUTERS.register("quantile_bias")
@dataclasses.dataclass(frozen=True)
class QuantileBias(LinearGate):
    """Dropless token choice by sigmoid scores plus a bias (E,) float32 from quantiles, the router's state.

    Raises:
      ConfigError: K outside [1, E] or an option out of range.
    """

    @dataclasses.dataclass(unsafe_hash=True)  # so that a router can be a static argument
    class Options:
        bins: int = knob(1024, "model", "bins of the histogram of scores between 0 and 1", ge=1)
        smoothing: float = knob(1.0, "model", "share of the new quantile in the bias; 0 freezes it", ge=0, le=1)

    causal = True
    equivariant = True

    options: Options = dataclasses.field(default_factory=Options)

    def init_state(self) -> Any:
        return {"bias_E": jnp.zeros(self.num_experts, jnp.float32)}

    def next_state(self, state: Any, seen: Any) -> Any:
        histogram_EH = seen["histogram_EH"]  # H bins
        quantile_E = upper_quantile(histogram_EH, self.num_choices / self.num_experts)
        moved_E = state["bias_E"] + self.options.smoothing * (-quantile_E - state["bias_E"])
        return {"bias_E": jnp.where(histogram_EH.sum(1) > 0, moved_E, state["bias_E"])}

    def __call__(self, params: dict[str, jax.Array], x_BSD: jax.Array, ctx: RouterContext) -> tuple[Assignment, Any]:
        logits_BSE = gate_logits(params["gate_DE"], x_BSD)
        scores_BSE = jax.nn.sigmoid(logits_BSE)
        log_scores_BSE = jax.nn.log_sigmoid(logits_BSE)
        _, expert_BSK = jax.lax.top_k(scores_BSE + ctx.state["bias_E"][None, None], self.num_choices)
        assignment = token_choice(
            expert_BSK,
            sigmoid_weights(log_scores_BSE, expert_BSK, normalise=True),
            jnp.broadcast_to(ctx.mask_BS[..., None], expert_BSK.shape),
            ctx.mask_BS,
            num_experts=self.num_experts,
            entropy_BS=gate_entropy(log_scores_BSE),
            aux_loss=jnp.zeros((), jnp.float32),
        )
        return assignment, {"histogram_EH": score_histogram(scores_BSE, ctx.mask_BS, self.options.bins)}


def score_histogram(scores_BSE: jax.Array, mask_BS: jax.Array, bins: int) -> jax.Array:
    """Counts (E, bins) int32 of each expert's scores over equal bins of [0, 1], padding not counted."""
    num_experts = scores_BSE.shape[-1]
    bin_BSE = jnp.clip((scores_BSE * bins).astype(jnp.int32), 0, bins - 1)
    expert_BSE = jax.lax.broadcasted_iota(jnp.int32, bin_BSE.shape, 2)
    counted_BSE = jnp.broadcast_to(mask_BS[..., None], bin_BSE.shape).astype(jnp.int32)
    return jnp.zeros((num_experts, bins), jnp.int32).at[expert_BSE, bin_BSE].add(counted_BSE)


def upper_quantile(histogram_EH: jax.Array, share: float) -> jax.Array:
    """The score (E,) float32 that a `share` of the counts exceeds, linear within a bin; undefined without counts."""
    bins = histogram_EH.shape[1]
    up_to_EH = jnp.cumsum(histogram_EH, axis=1).astype(jnp.float32)
    below_E = (1 - share) * up_to_EH[:, -1]
    bin_E = jnp.argmax(up_to_EH >= below_E[:, None], axis=1)[:, None]
    end_E1 = jnp.take_along_axis(up_to_EH, bin_E, axis=1)
    count_E1 = jnp.take_along_axis(histogram_EH, bin_E, axis=1).astype(jnp.float32)
    part_E1 = (below_E[:, None] - (end_E1 - count_E1)) / jnp.maximum(count_E1, 1)
    return ((bin_E + part_E1) / bins)[:, 0]
