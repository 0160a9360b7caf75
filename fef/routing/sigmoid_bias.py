"""Sigmoid gate with a balancing bias: a bias per expert, moved by the load and not by a gradient, steers the choice.

    s = sigmoid(x W_gate),  experts = the K best of s + bias,  weights = scaling * s / (sum of the K chosen s)
    after each optimizer step:  bias += update_rate * sign(mean load - load)

With groups, a token keeps the `topk_groups` groups whose two best biased scores have the highest sum, and takes its K
experts from them. Weights are a softmax of log s: s / sum(s) stays exact where all scores are tiny, without an epsilon.
The sequence balance loss is the paper's; its f_e counts the K best s without the bias, and sequences with padding count
by their real tokens.

Sources: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024, section 3;
DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2, equations 12-20. The paper's groups are nodes, so
that a token is sent to few of them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fef.config import ConfigError, knob
from fef.routing import ROUTERS, Assignment, RouterContext
from fef.routing.gate import (
    LinearGate,
    count_by_expert,
    count_by_sequence,
    gate_entropy,
    gate_logits,
    sigmoid_weights,
    token_choice,
)
from fef.routing.losses import aux_loss_share


@ROUTERS.register("sigmoid_bias")
@dataclasses.dataclass(frozen=True)
class SigmoidBias(LinearGate):
    """Dropless token choice by sigmoid scores plus a bias (E,) float32, the router's state.

    Raises:
      ConfigError: K outside [1, E], groups that do not divide E or hold too few experts, an option out of range.
    """

    @dataclasses.dataclass(unsafe_hash=True)  # so that a router can be a static argument
    class Options:
        normalise: bool = knob(
            True, "model", "divide a token's K weights by their sum; no effect at K = 1, where the gate would not learn"
        )
        routed_scaling: float = knob(1.0, "model", "factor of the weights", gt=0)
        update_rate: float = knob(0.001, "model", "how far the bias moves in a step; 0 freezes it", ge=0)
        sequence_coef: float = knob(1e-4, "model", "factor of the load-balance loss within sequences", ge=0)
        n_groups: int = knob(1, "model", "groups of consecutive experts; divides E", ge=1)
        topk_groups: int = knob(1, "model", "groups from which a token takes its experts, at most n_groups", ge=1)

    causal = True
    equivariant = True

    options: Options = dataclasses.field(default_factory=Options)

    def __post_init__(self) -> None:
        super().__post_init__()
        n_groups, topk_groups = self.options.n_groups, self.options.topk_groups
        if self.num_experts % n_groups:
            raise ConfigError(
                "routing.sigmoid_bias.n_groups", n_groups, f"must divide moe.num_experts={self.num_experts}"
            )
        if topk_groups > n_groups:
            raise ConfigError("routing.sigmoid_bias.topk_groups", topk_groups, f"must be <= n_groups={n_groups}")
        if topk_groups * (self.num_experts // n_groups) < self.num_choices:
            raise ConfigError(
                "routing.sigmoid_bias.topk_groups",
                topk_groups,
                f"so few groups hold fewer experts than moe.num_choices={self.num_choices}; take more",
            )

    def init_state(self) -> Any:
        return {"bias_E": jnp.zeros(self.num_experts, jnp.float32)}

    def next_state(self, state: Any, seen: Any) -> Any:
        load_E = seen["load_E"].astype(jnp.float32)
        return {"bias_E": state["bias_E"] + self.options.update_rate * jnp.sign(load_E.mean() - load_E)}

    def __call__(self, params: dict[str, jax.Array], x_BSD: jax.Array, ctx: RouterContext) -> tuple[Assignment, Any]:
        options, num_choices = self.options, self.num_choices
        logits_BSE = gate_logits(params["gate_DE"], x_BSD)
        log_scores_BSE = jax.nn.log_sigmoid(logits_BSE)
        biased_BSE = jax.nn.sigmoid(logits_BSE) + ctx.state["bias_E"][None, None]
        _, expert_BSK = jax.lax.top_k(self._in_best_groups(biased_BSE), num_choices)
        weight_BSK = sigmoid_weights(log_scores_BSE, expert_BSK, normalise=options.normalise)

        kept_BSK = jnp.broadcast_to(ctx.mask_BS[..., None], expert_BSK.shape)
        load_E = count_by_expert(expert_BSK, kept_BSK, self.num_experts)
        _, unbiased_BSK = jax.lax.top_k(logits_BSE, num_choices)
        aux_loss = aux_loss_share(
            log_scores_BSE,  # their softmax is s divided by its sum over all experts
            load_E,
            ctx,
            balance_coef=options.sequence_coef / num_choices,
            z_coef=0.0,
            load_BE=count_by_sequence(unbiased_BSK, ctx.mask_BS, self.num_experts),
        )
        assignment = token_choice(
            expert_BSK,
            options.routed_scaling * weight_BSK,
            kept_BSK,
            ctx.mask_BS,
            num_experts=self.num_experts,
            entropy_BS=gate_entropy(log_scores_BSE),
            aux_loss=aux_loss,
        )
        return assignment, {"load_E": load_E}

    def _in_best_groups(self, biased_BSE: jax.Array) -> jax.Array:
        """The biased scores, -inf outside of the token's best groups (G groups, I experts in each)."""
        n_groups, topk_groups = self.options.n_groups, self.options.topk_groups
        if topk_groups == n_groups:
            return biased_BSE
        biased_BSGI = biased_BSE.reshape(*biased_BSE.shape[:2], n_groups, -1)
        two_best, _ = jax.lax.top_k(biased_BSGI, min(2, biased_BSGI.shape[-1]))
        _, group_BSJ = jax.lax.top_k(two_best.sum(-1), topk_groups)
        kept_BSG = jax.nn.one_hot(group_BSJ, n_groups, dtype=bool).any(-2)
        return jnp.where(kept_BSG[..., None], biased_BSGI, -jnp.inf).reshape(biased_BSE.shape)
