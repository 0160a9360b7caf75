"""Expert choice: each expert visits the tokens that the gate rates highest for it, so the load is balanced by design.

    p = softmax(x W_gate) over the experts,  expert e takes the C tokens of the sequence with the highest p[:, e],
    C = capacity_factor * K*S/E,  weight = p[token, e]

A token may be taken by many experts or by none. Whether a token is taken depends on later tokens of its sequence, so
the scheme is not causal: a decoder trained with it has no counterpart in generation.

Source: Zhou et al., "Mixture-of-Experts with Expert Choice Routing", 2022, section 3.2. The paper's capacity factor c,
the mean number of experts per token, is capacity_factor * K here, so that equal K means equal work as in token choice;
and tokens compete within a sequence, not within a device's batch, so that the choice does not depend on the number of
devices.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fef.config import knob
from fef.routing import ROUTERS, Assignment, RouterContext
from fef.routing.capacity import expert_capacity
from fef.routing.gate import LinearGate, count_by_expert, gate_entropy, gate_logits


@ROUTERS.register("expert_choice")
@dataclasses.dataclass(frozen=True)
class ExpertChoice(LinearGate):
    """Expert choice within each sequence; N = B*E*C, place (b*E + e)*C + c is the c-th best token of expert e.

    A padded sequence gives each expert only its share of the real tokens (their number in place of S), so padding
    changes nothing for them.

    Raises:
      ConfigError: K outside [1, E] or an option out of range.
    """

    @dataclasses.dataclass(unsafe_hash=True)  # so that a router can be a static argument
    class Options:
        capacity_factor: float = knob(1.0, "model", "an expert takes this times K*S/E tokens of a sequence", gt=0)

    causal = False
    equivariant = True

    options: Options = dataclasses.field(default_factory=Options)

    def __call__(self, params: dict[str, jax.Array], x_BSD: jax.Array, ctx: RouterContext) -> tuple[Assignment, Any]:
        seq_len, num_experts = x_BSD.shape[1], self.num_experts
        factor = self.options.capacity_factor
        capacity = expert_capacity(factor, seq_len, self.num_choices, num_experts)

        logits_BSE = gate_logits(params["gate_DE"], x_BSD)
        probs_BES = jax.nn.softmax(logits_BSE).transpose(0, 2, 1)
        _, position_BEC = jax.lax.top_k(jnp.where(ctx.mask_BS[:, None, :], probs_BES, -1.0), capacity)
        weight_BEC = jnp.take_along_axis(probs_BES, position_BEC, axis=-1)

        real_B = ctx.mask_BS.sum(1, dtype=jnp.int32)
        shares = [expert_capacity(factor, num_real, self.num_choices, num_experts) for num_real in range(seq_len + 1)]
        share_B = jnp.asarray(shares, jnp.int32)[real_B]
        rank_BEC = jax.lax.broadcasted_iota(jnp.int32, position_BEC.shape, 2)
        taken_BEC = rank_BEC < share_B[:, None, None]

        sequence_BEC = jax.lax.broadcasted_iota(jnp.int32, position_BEC.shape, 0)
        expert_BEC = jax.lax.broadcasted_iota(jnp.int32, position_BEC.shape, 1)
        load_E = count_by_expert(expert_BEC, taken_BEC, num_experts)
        entropy_BS = gate_entropy(logits_BSE)
        assignment = Assignment(
            token_N=(sequence_BEC * seq_len + position_BEC).reshape(-1).astype(jnp.int32),
            expert_N=expert_BEC.reshape(-1),
            weight_N=jnp.where(taken_BEC, weight_BEC, 0.0).reshape(-1),
            valid_N=taken_BEC.reshape(-1),
            aux_loss=jnp.zeros((), jnp.float32),
            metrics={
                "load_E": load_E,
                "kept_E": load_E,
                "tokens": real_B.sum(dtype=jnp.int32),
                "entropy_sum": jnp.sum(jnp.where(ctx.mask_BS, entropy_BS, 0.0)),
            },
        )
        return assignment, {}
