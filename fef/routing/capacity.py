"""How many tokens an expert takes from one sequence, and which choices are dropped beyond that.

Drops are decided within a sequence, so they depend neither on the number of members nor on the dispatcher. Earlier
positions go first, and within a position better choices, so a token's drops never depend on later tokens.
"""

import math

import jax
import jax.numpy as jnp


def expert_capacity(factor: float, seq_len: int, num_choices: int, num_experts: int) -> int:
    """C, the places of one expert for one sequence: factor * K*S/E rounded up, at least 1 and at most S."""
    exact = factor * num_choices * seq_len / num_experts
    return min(seq_len, max(1, math.ceil(exact - 1e-6)))  # a rounding error must not add a place


def queue_places(expert_BSK: jax.Array, claims_BSK: jax.Array, num_experts: int) -> jax.Array:
    """The place (B, S, K) int32 of each choice in its expert's queue: how many earlier claims the expert has.

    All choices of all earlier tokens and the better choices of the same token count, so no two claims on an expert
    share a place. Example, one sequence, E=2, K=2: tokens choosing (0,1), (1,0) and (0,1) get the places
    (0,0), (1,1) and (2,2).

    Args:
      expert_BSK: (B, S, K) int32.
      claims_BSK: (B, S, K) bool, False on padding, which takes no place (its result means nothing).
      num_experts: E.
    """
    batch, seq_len, num_choices = expert_BSK.shape
    expert_BN = expert_BSK.reshape(batch, seq_len * num_choices)
    claims_BN = claims_BSK.reshape(batch, seq_len * num_choices)
    one_hot_BNE = jax.nn.one_hot(expert_BN, num_experts, dtype=jnp.int32) * claims_BN[..., None]
    earlier_BNE = jnp.cumsum(one_hot_BNE, axis=1) - one_hot_BNE
    places_BN = jnp.take_along_axis(earlier_BNE, expert_BN[..., None], axis=2)
    return places_BN.reshape(batch, seq_len, num_choices)


def within_capacity(expert_BSK: jax.Array, claims_BSK: jax.Array, num_experts: int, factor: float) -> jax.Array:
    """The claims (B, S, K) bool that find a place: those below `expert_capacity` in their expert's queue."""
    _, seq_len, num_choices = expert_BSK.shape
    capacity = expert_capacity(factor, seq_len, num_choices, num_experts)
    return claims_BSK & (queue_places(expert_BSK, claims_BSK, num_experts) < capacity)
