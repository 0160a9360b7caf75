"""GShard routing: each token's best expert, and by chance its second one, with a capacity per sequence.

    p = softmax(x W_gate),  g1, g2 = the two highest p, divided by their sum: the weights
    in training the second expert is taken with probability min(1, 2 * g2)

An expert takes at most C = capacity_factor * 2*S / E tokens of a sequence. All first choices take their places before
any second one, so whether a token keeps its second expert depends on later tokens' first choices: with a capacity the
scheme is not causal. An undrawn second choice takes no place and counts as dropped. In evaluation both experts are
taken and none is full.

The auxiliary loss is the paper's mean over experts of (c_e / S) * m_e, with c_e the tokens whose first choice is e and
m_e the mean p of e; E * sum_e f_e * P_e of the other schemes is E^2 times that, so a balanced load costs 1 / E^2.
Here tokens and probabilities are counted over the global batch.

Source: Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding", 2020,
section 2.2 and algorithm 1. The paper's groups of tokens are sequences here, so that drops do not depend on the number
of devices.
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


@ROUTERS.register("gshard")
@dataclasses.dataclass(frozen=True)
class GShard(LinearGate):
    """Top-2 token choice with a capacity per sequence and a second expert by chance.

    Raises:
      ConfigError: num_choices other than 2, or an option out of range.
    """

    @dataclasses.dataclass(unsafe_hash=True)  # so that a router can be a static argument
    class Options:
        capacity_factor: float = knob(
            1.0, "model", "in training an expert takes this times 2*S/E tokens of a sequence; 0 drops none", ge=0
        )
        overflow: str = overflow_knob()
        second_policy: str = knob(
            "random",
            "model",
            "in training the second expert is taken by chance, likelier with a higher weight, or always (all)",
            choices=("random", "all"),
        )
        balance_coef: float = knob(
            1.0, "model", "factor of the load-balance loss, which is 1/E^2 of that of top_k", ge=0
        )

    options: Options = dataclasses.field(default_factory=Options)

    def __post_init__(self) -> None:
        check_just(self.num_choices, 2, "gshard gives a token two experts", instead="top_k")
        super().__post_init__()

    @property
    def causal(self) -> bool:
        return not self.options.capacity_factor

    @property
    def equivariant(self) -> bool:
        return not self.options.capacity_factor and self.options.second_policy == "all"

    def __call__(self, params: dict[str, jax.Array], x_BSD: jax.Array, ctx: RouterContext) -> tuple[Assignment, Any]:
        options = self.options
        logits_BSE = gate_logits(params["gate_DE"], x_BSD)
        probs_BSE = jax.nn.softmax(logits_BSE)
        _, expert_BSK = jax.lax.top_k(logits_BSE, 2)
        first_load_E = count_by_expert(expert_BSK[..., 0], ctx.mask_BS, self.num_experts)

        kept_BSK = jnp.broadcast_to(ctx.mask_BS[..., None], expert_BSK.shape)
        if ctx.train and options.second_policy == "random":
            second_BS = 2 * _weights(probs_BSE, expert_BSK)[..., 1]
            is_drawn_BS = second_BS > jax.random.uniform(ctx.key, second_BS.shape)
            kept_BSK = kept_BSK.at[..., 1].min(is_drawn_BS)
        if ctx.train and options.capacity_factor:
            capacity = expert_capacity(options.capacity_factor, x_BSD.shape[1], 2, self.num_experts)
            expert_BSK, kept_BSK = within_capacity(
                expert_BSK, kept_BSK, logits_BSE, capacity, options.overflow, first_choices_first=True
            )

        coef = options.balance_coef / self.num_experts**2
        assignment = token_choice(
            expert_BSK,
            _weights(probs_BSE, expert_BSK),
            kept_BSK,
            ctx.mask_BS,
            num_experts=self.num_experts,
            entropy_BS=gate_entropy(logits_BSE),
            aux_loss=aux_loss_share(logits_BSE, first_load_E, ctx, balance_coef=coef, z_coef=0.0),
        )
        return assignment, {}


def _weights(probs_BSE: jax.Array, expert_BSK: jax.Array) -> jax.Array:
    probs_BSK = jnp.take_along_axis(probs_BSE, expert_BSK, axis=-1)
    return probs_BSK / probs_BSK.sum(-1, keepdims=True)
