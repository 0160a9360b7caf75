"""Imbalance workloads as a router: tokens meet experts as popular as a workload of fef.testing.workloads makes them.

    experts = the K best of log popularity_E + Gumbel noise   (draws without replacement in proportion to popularity)
    weights = 1 / K

For measurements of a real training run under a known load. Where all experts are equally popular they take turns, so
that the loads of a member differ by at most one, apart from padding. The popularity follows the training step in
`rotating_hotspot` and `burst`, and is the same in all layers.

Departures from `fef.testing.workloads.workload`: the draws are JAX's, so the assignments are not the same ones;
padding takes no expert; an evaluation, which draws no noise, gives every sequence the same fixed draw. Workloads that
are uneven between members are refused, because routing must not depend on how many members there are.

Source of W0, W1, W6 and W7: the imbalance suite proposed in NVIDIA/Megatron-LM pull request 7488.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fef.config import ConfigError, knob
from fef.registry import nearest
from fef.routing import ROUTERS, Assignment, RouterContext
from fef.routing.gate import Gateless, equal_choice
from fef.testing.workloads import OF_EXPERTS, is_of_experts, is_workload, popularity_by_step


@ROUTERS.register("workload")
@dataclasses.dataclass(frozen=True)
class Workload(Gateless):
    """The expert loads of an imbalance workload, whatever the tokens are; no gate, nothing is learnt.

    Raises:
      ConfigError: K outside [1, E], an unknown workload, or one that is uneven between members.
    """

    @dataclasses.dataclass(unsafe_hash=True)  # so that a router can be a static argument
    class Options:
        name: str = knob("balanced", "model", "workload: " + ", ".join([*OF_EXPERTS, "zipf:S"]))
        seed: int = knob(0, "model", "seed of the hot experts, and of the draws in an evaluation", ge=0, lt=2**32)

    causal = True

    options: Options = dataclasses.field(default_factory=Options)

    def __post_init__(self) -> None:
        super().__post_init__()
        name, key = self.options.name, "routing.workload.name"
        if not is_workload(name):
            raise ConfigError(key, name, f"unknown workload{nearest(name, list(OF_EXPERTS))}")
        if not is_of_experts(name):
            known = ", ".join(OF_EXPERTS)
            raise ConfigError(key, name, f"is uneven between members, on which no routing may depend; use {known}")

    def __call__(self, params: dict[str, jax.Array], x_BSD: jax.Array, ctx: RouterContext) -> tuple[Assignment, Any]:
        (batch, seq_len), num_choices = ctx.mask_BS.shape, self.num_choices
        popularity_PE = popularity_by_step(self.options.name, self.num_experts, num_choices, self.options.seed)
        phase = ctx.step % len(popularity_PE)
        draw_key, turn_key = jax.random.split(ctx.key if ctx.train else jax.random.key(self.options.seed))
        drawn = batch if ctx.train else 1
        log_popularity_E = jnp.log(jnp.asarray(popularity_PE, jnp.float32))[phase]
        drawn_BSK = _draw(draw_key, log_popularity_E, drawn, seq_len, num_choices)
        turns_BSK = _take_turns(turn_key, self.num_experts, drawn, seq_len, num_choices)
        is_even = jnp.asarray((popularity_PE == 1).all(1))[phase]
        expert_BSK = jnp.broadcast_to(jnp.where(is_even, turns_BSK, drawn_BSK), (batch, seq_len, num_choices))
        return equal_choice(expert_BSK, ctx.mask_BS, self.num_experts), {}


def _draw(key: jax.Array, log_popularity_E: jax.Array, batch: int, seq_len: int, num_choices: int) -> jax.Array:
    """(B, S, K) int32, in proportion to the popularity, without replacement."""
    noise_BSE = jax.random.gumbel(key, (batch, seq_len, len(log_popularity_E)), jnp.float32)
    return jax.lax.top_k(log_popularity_E[None, None] + noise_BSE, num_choices)[1]


def _take_turns(key: jax.Array, num_experts: int, batch: int, seq_len: int, num_choices: int) -> jax.Array:
    """(B, S, K) int32: all experts in turn, tokens in random order."""
    order_key, first_key = jax.random.split(key)
    first = jax.random.randint(first_key, (), 0, num_experts)  # else the left-over turns are always expert 0's
    place_BS1 = jax.random.permutation(order_key, batch * seq_len).reshape(batch, seq_len, 1)
    return (first + place_BS1 * num_choices + jnp.arange(num_choices)[None, None]) % num_experts
