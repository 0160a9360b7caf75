"""Routing schemes: which experts see which tokens. One scheme a file, found by scanning this folder.

A router moves no token and no weight; it returns an `Assignment`, which every dispatcher can carry out.

Shape letters: B batch, S sequence, T = B*S tokens, D model width, E experts, K choices per token, C capacity,
N assignments. B, S, T, N and C are those of one member.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax

from fef.registry import Registry


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Which token goes to which expert, and with which weight.

    No token names the same expert in two valid places: dispatchers size their buffers by that.

    Attributes:
      token_N: (N,) int32, position of the token in the member's T tokens.
      expert_N: (N,) int32 in [0, E).
      weight_N: (N,) float32, the factor of the expert's output in the sum; carries the gradient to the gate.
      valid_N: (N,) bool; False marks an unused place (dropped, padding), which reaches no expert.
      aux_loss: () float32, this member's additive share of the scheme's auxiliary losses, coefficients included:
        the sum over members is the exact value over the global (micro)batch.
      metrics: additive counts of this member, summed over members by the caller: `load_E` (E,) int32 choices before
        drops, `kept_E` (E,) int32 choices carried out, `tokens` () int32 unmasked tokens, `entropy_sum` () float32
        sum over tokens of the entropy of the gate, nats.
      num_choices: K when token_N is exactly [0]*K + [1]*K + ... (token choice), which lets dispatchers gather
        instead of scatter; None otherwise (expert choice).
    """

    token_N: jax.Array
    expert_N: jax.Array
    weight_N: jax.Array
    valid_N: jax.Array
    aux_loss: jax.Array
    metrics: dict[str, jax.Array]
    num_choices: int | None = None


jax.tree_util.register_dataclass(
    Assignment,
    data_fields=["token_N", "expert_N", "weight_N", "valid_N", "aux_loss", "metrics"],
    meta_fields=["num_choices"],
)


@dataclasses.dataclass(frozen=True)
class RouterContext:
    """What a router may look at beside its input.

    Attributes:
      mask_BS: (B, S) bool, False on padding, which takes no expert, no capacity and no part in a loss.
      token_ids_BS: (B, S) int32, for schemes that route by token id.
      layer: () int32, index of the MoE layer.
      step: () int32, optimizer step.
      key: PRNG key, different per layer, step, microbatch and member.
      train: whether this is a training step (static).
      state: the scheme's own state of this layer (a pytree; {} for schemes without one); the same for all microbatches
        of a step.
      psum: sums a pytree of O(E) statistics over all members. Not differentiated by the schemes here: they sum
        counts and return additive shares, so the backward pass needs no collective.
    """

    mask_BS: jax.Array
    token_ids_BS: jax.Array
    layer: jax.Array
    step: jax.Array
    key: jax.Array
    train: bool
    state: Any
    psum: Callable[[Any], Any]


class Router(Protocol):
    """A routing scheme. A dataclass with these three fields first; `Options` is its own options dataclass.

    Class attributes: `Options` (frozen-able dataclass with a default for every field, made of `fef.config.knob`),
    `causal` (False when a token's assignment depends on later tokens; a decoder then needs
    `config.routing.allow_noncausal=True`; a property where it depends on the options). Optional: `equivariant` (True
    when reordering the tokens of a sequence only reorders their assignments; absent means not claimed).

    A scheme whose `init_state` is not {} also has `next_state(state, seen)`, see the function of that name.
    """

    num_experts: int
    num_choices: int
    options: Any
    Options: type
    causal: bool

    def init(self, key: jax.Array, d_model: int) -> dict[str, jax.Array]:
        """Parameters of one layer, float32."""
        ...

    def init_state(self) -> Any:
        """State of one layer that is no parameter (a bias updated outside autograd); {} when there is none."""
        ...

    def __call__(self, params: dict[str, jax.Array], x_BSD: jax.Array, ctx: RouterContext) -> tuple[Assignment, Any]:
        """Routes the member's tokens.

        Returns:
          the assignment, and what `next_state` is to know of the tokens: a pytree of sums over this member's unmasked
          tokens, {} for schemes without a state.
        """
        ...


def next_state(router: Router, state: Any, seen: Any) -> Any:
    """A router's state after an optimizer step; the old one if it has none.

    Args:
      router: calls its `next_state(state, seen)`, which is not differentiated.
      state: of the step, of one layer.
      seen: what the router's calls have returned, summed over the members and microbatches of the step.
    """
    return router.next_state(state, seen) if jax.tree.leaves(state) else state  # type: ignore[attr-defined]


ROUTERS: Registry = Registry("router")
