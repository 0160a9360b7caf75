"""Random routing: every token visits K experts drawn at random. What a scheme must beat.

    experts = K different ones, all equally likely,  weights = 1 / K

In training each step draws anew. In evaluation the draw is the same for every sequence and every time: it depends on
the place in the sequence, the layer and `eval_seed`.

Source: Zuo et al., "Taming Sparsely Activated Transformer with Stochastic Experts", 2021, whose experts are drawn at
random too; without the paper's consistency loss, which compares two draws.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fef.config import knob
from fef.routing import ROUTERS, Assignment, RouterContext
from fef.routing.gate import Gateless, equal_choice


@ROUTERS.register("random")
@dataclasses.dataclass(frozen=True)
class Random(Gateless):
    """Dropless routing by chance; no gate, nothing is learned.

    Raises:
      ConfigError: K outside [1, E] or an option out of range.
    """

    @dataclasses.dataclass(unsafe_hash=True)  # so that a router can be a static argument
    class Options:
        eval_seed: int = knob(0, "model", "seed of the draws in an evaluation", ge=0, lt=2**32)

    causal = True

    options: Options = dataclasses.field(default_factory=Options)

    def __call__(self, params: dict[str, jax.Array], x_BSD: jax.Array, ctx: RouterContext) -> tuple[Assignment, Any]:
        (batch, seq_len), num_choices = ctx.mask_BS.shape, self.num_choices
        key, drawn = ctx.key, batch
        if not ctx.train:
            key, drawn = jax.random.fold_in(jax.random.key(self.options.eval_seed), ctx.layer), 1
        lots = jax.random.uniform(key, (drawn, seq_len, self.num_experts))
        expert_BSK = jnp.broadcast_to(jax.lax.top_k(lots, num_choices)[1], (batch, seq_len, num_choices))
        return equal_choice(expert_BSK, ctx.mask_BS, self.num_experts), {}
