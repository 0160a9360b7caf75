"""How many tokens an expert takes from one sequence, and what becomes of the choices beyond that.

Places are given within a sequence, so they depend neither on the number of members nor on the dispatcher. Earlier
positions go first, and within a position better choices, so that what a token gets never depends on later tokens. What
a scheme does with a choice that finds its expert full is its option `overflow`:

  drop            the choice is lost, and the token passes by on the residual stream;
  next_best       the choice goes to the best expert with room that the token does not have yet, and is lost only where
                  none has. Claims are settled one after the other, each once: S*K steps, and still no look ahead;
  batch_priority  a choice is lost, but tokens go first whose best weight is higher. Not causal: a later token of a
                  higher weight takes an earlier one's place. Source: Riquelme et al., "Scaling Vision with Sparse
                  Mixture of Experts", 2021, section 4.1. The paper ranks a device's batch, here it is a sequence, so
                  that sequences have no part in each other.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from fef.config import knob


def overflow_knob() -> Any:
    """The option `overflow` of a scheme with a capacity."""
    return knob(
        "drop",
        "model",
        "a choice of a full expert is dropped or goes to the next best one with room; or, dropping, tokens of higher "
        "weight go first (batch_priority: looks at later tokens)",
        choices=("drop", "next_best", "batch_priority"),
    )


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


def within_capacity(
    expert_BSK: jax.Array,
    claims_BSK: jax.Array,
    logits_BSE: jax.Array,
    capacity: int,
    overflow: str = "drop",
    *,
    first_choices_first: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Which expert each choice ends at, (B, S, K) int32, and whether it found a place there, (B, S, K) bool.

    Args:
      expert_BSK: (B, S, K) int32, the picks, best first.
      claims_BSK: (B, S, K) bool, False where no place is wanted, as on padding.
      logits_BSE: (B, S, E) float32, what the gate thinks of the experts; no gradient passes through it.
      capacity: C, places of an expert for one sequence.
      overflow: see the top of this file.
      first_choices_first: all tokens' first choices take their places before any second one; not causal either.
    """
    logits_BSE = jax.lax.stop_gradient(logits_BSE)
    if overflow == "batch_priority":  # in the order of priority, and back
        best_BS = jnp.where(claims_BSK.any(-1), jax.nn.softmax(logits_BSE).max(-1), 0.0)
        order_BS = jnp.argsort(-best_BS, axis=1)
        sorted_expert_BSK, sorted_claims_BSK = (
            jnp.take_along_axis(array, order_BS[..., None], axis=1) for array in (expert_BSK, claims_BSK)
        )
        kept_BSK = _below(sorted_expert_BSK, sorted_claims_BSK, logits_BSE.shape[-1], capacity, first_choices_first)
        return expert_BSK, jnp.take_along_axis(kept_BSK, jnp.argsort(order_BS, axis=1)[..., None], axis=1)
    if overflow == "next_best":
        return _next_best(expert_BSK, claims_BSK, logits_BSE, capacity, first_choices_first)
    return expert_BSK, _below(expert_BSK, claims_BSK, logits_BSE.shape[-1], capacity, first_choices_first)


def _below(
    expert_BSK: jax.Array, claims_BSK: jax.Array, num_experts: int, capacity: int, first_choices_first: bool
) -> jax.Array:
    """The claims (B, S, K) bool whose place in their expert's queue is below the capacity."""
    if not first_choices_first:
        return claims_BSK & (queue_places(expert_BSK, claims_BSK, num_experts) < capacity)
    batch, seq_len, num_choices = expert_BSK.shape
    expert_BN1, claims_BN1 = (array.transpose(0, 2, 1).reshape(batch, -1, 1) for array in (expert_BSK, claims_BSK))
    places_BN1 = queue_places(expert_BN1, claims_BN1, num_experts)
    return claims_BSK & (places_BN1.reshape(batch, num_choices, seq_len).transpose(0, 2, 1) < capacity)


def _next_best(
    expert_BSK: jax.Array, claims_BSK: jax.Array, logits_BSE: jax.Array, capacity: int, first_choices_first: bool
) -> tuple[jax.Array, jax.Array]:
    """As `within_capacity`; the claims are settled one after the other, as each may take what the next one wants."""
    batch, seq_len, num_choices = expert_BSK.shape
    place_SK = jnp.arange(seq_len * num_choices).reshape(seq_len, num_choices)
    order_N = (place_SK.T if first_choices_first else place_SK).reshape(-1)

    def settle(expert_N: jax.Array, claims_N: jax.Array, logits_SE: jax.Array) -> tuple[jax.Array, jax.Array]:
        def step(carry: tuple[jax.Array, jax.Array], place: jax.Array) -> tuple[Any, Any]:
            count_E, has_SE = carry
            token, wanted = place // num_choices, expert_N[place]
            free_E = (count_E < capacity) & ~has_SE[token]
            spilled = jnp.argmax(jnp.where(free_E, logits_SE[token], -jnp.inf))
            expert = jnp.where(free_E[wanted], wanted, spilled)
            kept = claims_N[place] & free_E[expert]
            carry = count_E.at[expert].add(kept), has_SE.at[token, expert].max(kept)
            return carry, (jnp.where(kept, expert, wanted).astype(jnp.int32), kept)

        start = jnp.zeros(logits_SE.shape[1], jnp.int32), jnp.zeros(logits_SE.shape, bool)
        _, (expert_N, kept_N) = jax.lax.scan(step, start, order_N)
        back_N = jnp.argsort(order_N)
        return expert_N[back_N], kept_N[back_N]

    settled = jax.vmap(settle)(expert_BSK.reshape(batch, -1), claims_BSK.reshape(batch, -1), logits_BSE)
    expert_BSK, kept_BSK = (array.reshape(batch, seq_len, num_choices) for array in settled)
    return expert_BSK, kept_BSK
