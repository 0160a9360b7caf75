"""Hash routing: a fixed table says to which experts a token id goes; nothing is learned.

    experts = table[layer, token id],  weights = 1 / K

The table is balanced over the ids: E consecutive ids, a block, share out the E experts among them, in an order that is
random for each block, layer and seed, and choice k of an id is the expert k places after its first one. So each expert
is choice k of exactly one id of each block, and an id's K experts differ. It needs no memory and no size of the
vocabulary, as the order is made when it is needed: the experts sorted by

    mix(mix(mix(mix(table_seed) ^ layer) ^ block) ^ expert),

mix(h) = the finaliser of MurmurHash3 on h + 0x9E3779B9 (without the addition mix(0) is 0), of 32 bits, so that ties are
possible but rare; the lower expert goes first.

Source: Roller, Sukhbaatar, Szlam, Weston, "Hash Layers For Large Sparse Models", 2021 (random hash; its balanced
assignment shares out the ids by how frequent they are, which needs counts of a text); K > 1 sums whole experts, where
the paper's MultiHash joins segments of several. MurmurHash3: Appleby, 2011, `fmix32`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fef.config import knob
from fef.routing import ROUTERS, Assignment, RouterContext
from fef.routing.gate import Gateless, equal_choice


@ROUTERS.register("hash")
@dataclasses.dataclass(frozen=True)
class Hash(Gateless):
    """Dropless routing by token id; no gate. A `MoeLayer` must be given the ids, or all tokens go the way of id 0.

    Raises:
      ConfigError: K outside [1, E] or an option out of range.
    """

    @dataclasses.dataclass(unsafe_hash=True)  # so that a router can be a static argument
    class Options:
        table_seed: int = knob(0, "model", "another seed, another table", ge=0, lt=2**32)

    causal = True
    equivariant = True

    options: Options = dataclasses.field(default_factory=Options)

    def __call__(self, params: dict[str, jax.Array], x_BSD: jax.Array, ctx: RouterContext) -> tuple[Assignment, Any]:
        num_experts, num_choices = self.num_experts, self.num_choices
        block_BS, place_BS = ctx.token_ids_BS // num_experts, ctx.token_ids_BS % num_experts
        table = mix(mix(jnp.uint32(self.options.table_seed)) ^ ctx.layer.astype(jnp.uint32))
        block_BS1 = mix(table ^ block_BS.astype(jnp.uint32))[..., None]
        order_BSE = jnp.argsort(mix(block_BS1 ^ jnp.arange(num_experts, dtype=jnp.uint32)[None, None]), axis=-1)
        places_BSK = (place_BS[..., None] + jnp.arange(num_choices)[None, None]) % num_experts
        expert_BSK = jnp.take_along_axis(order_BSE, places_BSK, axis=-1)
        return equal_choice(expert_BSK, ctx.mask_BS, num_experts), {}


def mix(word: jax.Array) -> jax.Array:
    """The hash of a uint32, uint32."""
    word += jnp.uint32(0x9E3779B9)
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)
