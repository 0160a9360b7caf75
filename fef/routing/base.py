"""BASE routing: in training, tokens are assigned to experts so that all have as many and the scores sum up highest.

    s = x W_gate,  in training: maximise sum of s[token, expert] over the tokens of a sequence, an expert taking at most
    ceil(tokens / E);  in evaluation: expert = argmax s;  weight = sigmoid(s[expert])

The assignment looks at the whole sequence, later tokens included, so the scheme is not causal in training; it has no
auxiliary loss, and its gradient passes through the weights alone.

Source: Lewis et al., "BASE Layers: Simplifying Training of Large, Sparse Models", 2021, sections 3.1 and 3.2. The paper
assigns the tokens of a device's batch after shuffling them among the devices; here it is a sequence's tokens, so that
the choice does not depend on the number of devices. The paper's auction (Bertsekas) runs until it happens to end; here
shortest augmenting paths find the same optimum in a bounded number of steps (see `balanced_assignment`).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fef.routing import ROUTERS, Assignment, RouterContext
from fef.routing.gate import LinearGate, check_just, gate_entropy, gate_logits, token_choice

_FAR = 2**29  # beyond all path lengths, and twice of it still an int32


@ROUTERS.register("base")
@dataclasses.dataclass(frozen=True)
class Base(LinearGate):
    """One expert per token, dropless, balanced within each sequence in training.

    Raises:
      ConfigError: num_choices other than 1.
    """

    @dataclasses.dataclass(unsafe_hash=True)  # so that a router can be a static argument
    class Options:
        pass

    causal = False

    options: Options = dataclasses.field(default_factory=Options)

    def __post_init__(self) -> None:
        check_just(self.num_choices, 1, "base assigns each token to one expert", instead="sinkhorn")
        super().__post_init__()

    def __call__(self, params: dict[str, jax.Array], x_BSD: jax.Array, ctx: RouterContext) -> tuple[Assignment, Any]:
        scores_BSE = gate_logits(params["gate_DE"], x_BSD)
        if ctx.train:
            expert_BS = jax.vmap(balanced_assignment)(jax.lax.stop_gradient(scores_BSE), ctx.mask_BS)
        else:
            expert_BS = jnp.argmax(scores_BSE, axis=-1)
        expert_BSK = expert_BS[..., None]  # K = 1
        assignment = token_choice(
            expert_BSK,
            jax.nn.sigmoid(jnp.take_along_axis(scores_BSE, expert_BSK, axis=-1)),
            ctx.mask_BS[..., None],
            ctx.mask_BS,
            num_experts=self.num_experts,
            entropy_BS=gate_entropy(scores_BSE),
            aux_loss=jnp.zeros((), jnp.float32),
        )
        return assignment, {}


def balanced_assignment(scores_SE: jax.Array, mask_S: jax.Array) -> jax.Array:
    """Experts (S,) int32 of one sequence's tokens: the highest sum of scores of at most ceil(tokens / E) each.

    Tokens are added one by one, and the assignment of those added is optimal each time. A new token enters at the end
    of a shortest path: it takes an expert, whose token of least loss moves on to another expert, and so on to an expert
    with room. Scores are rounded to integers (2^28 / E steps over the largest difference between a token's scores), so
    that path lengths are exact and no rounding makes a detour look shorter. It takes S paths of at most E rounds each,
    however close the scores are.

    Args:
      scores_SE: (S, E) float32.
      mask_S: (S,) bool; padding takes no place and gets expert 0.

    Source: the method of successive shortest paths, Edmonds, Karp, "Theoretical Improvements in Algorithmic Efficiency
    for Network Flow Problems", 1972.
    """
    seq_len, num_experts = scores_SE.shape
    loss_SE = _integer_losses(scores_SE, mask_S)
    capacity = -(-jnp.sum(mask_S, dtype=jnp.int32) // num_experts)

    def add(token: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        expert_S, count_E = carry  # expert E: not assigned
        gain_S = jnp.take_along_axis(loss_SE, expert_S[:, None], axis=1, mode="clip")
        move_SE = loss_SE - gain_S  # what it costs to move a token to another expert
        length_EE = jax.ops.segment_min(move_SE, expert_S, num_experts + 1)
        is_least_SE = move_SE == length_EE[expert_S]
        mover_SE = jnp.where(is_least_SE, jnp.arange(seq_len, dtype=jnp.int32)[:, None], seq_len)
        mover_EE = jax.ops.segment_min(mover_SE, expert_S, num_experts + 1)
        length_EE = jnp.minimum(length_EE[:num_experts], _FAR)  # from an expert without tokens nothing moves

        distance_E, before_E = _shortest_paths(loss_SE[token], length_EE)
        last = jnp.argmin(jnp.where(count_E < capacity, distance_E, _FAR)).astype(jnp.int32)

        def pass_on(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            expert_S, expert = carry
            return expert_S.at[mover_EE[before_E[expert], expert]].set(expert), before_E[expert]

        moved_S, first = jax.lax.while_loop(lambda carry: before_E[carry[1]] >= 0, pass_on, (expert_S, last))
        is_real = mask_S[token]
        expert_S = jnp.where(is_real, moved_S.at[token].set(first), expert_S)
        return expert_S, count_E.at[last].add(is_real.astype(jnp.int32))

    start = jnp.full(seq_len, num_experts, jnp.int32), jnp.zeros(num_experts, jnp.int32)
    expert_S, _ = jax.lax.fori_loop(0, seq_len, add, start)
    return jnp.where(mask_S, expert_S, 0)


def _integer_losses(scores_SE: jax.Array, mask_S: jax.Array) -> jax.Array:
    """(S, E) int32 from 0 to 2^28 / E, what a token loses at each expert against its best one."""
    losses_SE = jnp.where(mask_S[:, None], scores_SE.max(1, keepdims=True) - scores_SE, 0.0)
    largest = losses_SE.max()
    steps = 2**28 // scores_SE.shape[1]
    return jnp.round(losses_SE / jnp.where(largest > 0, largest, 1.0) * steps).astype(jnp.int32)


def _shortest_paths(start_E: jax.Array, length_EE: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Distances (E,) int32 from outside, and the expert before each on its path, -1 where it comes from outside.

    Bellman and Ford's rounds until nothing changes. An optimal assignment has no negative cycle, so E rounds suffice
    and paths have no loop.

    Args:
      start_E: (E,) int32, length of the way from outside to each expert.
      length_EE: (E, E) int32, from expert to expert; may be negative.
    """
    num_experts = start_E.size

    def is_open(carry: tuple) -> jax.Array:
        _, _, has_changed, rounds = carry
        return has_changed & (rounds < num_experts)

    def relax(carry: tuple) -> tuple:
        distance_E, before_E, _, rounds = carry
        through_EE = distance_E[:, None] + length_EE
        shorter_E = through_EE.min(0) < distance_E
        before_E = jnp.where(shorter_E, jnp.argmin(through_EE, axis=0).astype(jnp.int32), before_E)
        return jnp.minimum(distance_E, through_EE.min(0)), before_E, shorter_E.any(), rounds + 1

    start = start_E, jnp.full(num_experts, -1, jnp.int32), jnp.bool_(True), jnp.int32(0)
    distance_E, before_E, _, _ = jax.lax.while_loop(is_open, relax, start)
    return distance_E, before_E
