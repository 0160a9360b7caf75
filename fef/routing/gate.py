"""What schemes share: fields, a linear gate's parameters, logits, entropy and weights, counts, the Assignment."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from fef.config import ConfigError, check_fields
from fef.routing import Assignment


@dataclasses.dataclass(frozen=True)
class Gateless:
    """Fields and checks of a scheme without parameters and without a state; it overrides what it has otherwise.

    A scheme gives `options` its type and a default, and is a frozen dataclass itself.

    Raises:
      ConfigError: see `check_choices`.
    """

    num_experts: int
    num_choices: int
    options: Any

    def __post_init__(self) -> None:
        check_choices(self.num_experts, self.num_choices, self.options)

    def init(self, key: jax.Array, d_model: int) -> dict[str, jax.Array]:
        return {}

    def init_state(self) -> Any:
        return {}


@dataclasses.dataclass(frozen=True)
class LinearGate(Gateless):
    """The same with a gate (D, E)."""

    def init(self, key: jax.Array, d_model: int) -> dict[str, jax.Array]:
        return {"gate_DE": init_gate(key, d_model, self.num_experts)}


def init_gate(key: jax.Array, d_model: int, num_experts: int) -> jax.Array:
    """Initial gate (D, E) float32: normal with standard deviation sqrt(0.1 / D), cut at two deviations.

    Ten times less variance than a usual layer, so that routing starts near uniform.
    Source: Fedus, Zoph, Shazeer, "Switch Transformers", 2021, section 2.4.
    """
    draws_DE = jax.random.truncated_normal(key, -2.0, 2.0, (d_model, num_experts), jnp.float32)
    return math.sqrt(0.1 / d_model) * draws_DE


def gate_logits(gate_DE: jax.Array, x_BSD: jax.Array) -> jax.Array:
    """Logits (B, S, E), in float32 whatever the type of x: bfloat16 rounding would change which experts win."""
    x_BSD, gate_DE = x_BSD.astype(jnp.float32), gate_DE.astype(jnp.float32)
    return jnp.einsum("bsd,de->bse", x_BSD, gate_DE, precision=jax.lax.Precision.HIGHEST)


def gate_entropy(logits_BSE: jax.Array) -> jax.Array:
    """Entropy (B, S) float32 of each token's softmax over the experts, nats."""
    log_probs_BSE = jax.nn.log_softmax(logits_BSE)
    return -jnp.sum(jnp.exp(log_probs_BSE) * log_probs_BSE, axis=-1)


def count_by_expert(expert: jax.Array, counted: jax.Array, num_experts: int) -> jax.Array:
    """Counts (E,) int32 of the entries of `expert` where `counted` (same shape, bool)."""
    one_hot = jax.nn.one_hot(expert, num_experts, dtype=jnp.int32) * counted[..., None]
    return one_hot.reshape(-1, num_experts).sum(0)


def count_by_sequence(expert_BSK: jax.Array, mask_BS: jax.Array, num_experts: int) -> jax.Array:
    """Counts (B, E) int32 of each sequence's picks, padding not counted."""
    counted_BSK = jnp.broadcast_to(mask_BS[..., None], expert_BSK.shape)
    return jax.vmap(functools.partial(count_by_expert, num_experts=num_experts))(expert_BSK, counted_BSK)


def token_choice(
    expert_BSK: jax.Array,
    weight_BSK: jax.Array,
    kept_BSK: jax.Array,
    mask_BS: jax.Array,
    *,
    num_experts: int,
    entropy_BS: jax.Array,
    aux_loss: jax.Array,
    picked_BSK: jax.Array | None = None,
) -> Assignment:
    """The Assignment of a scheme in which every token picks K experts; place t*K + k is choice k of token t.

    Args:
      expert_BSK: (B, S, K) int32, the picks, best first.
      weight_BSK: (B, S, K) float32, their weights; set to 0 where a pick is not kept.
      kept_BSK: (B, S, K) bool, picks that are carried out; must be False on padding.
      mask_BS: (B, S) bool, False on padding.
      num_experts: E.
      entropy_BS: (B, S) float32, entropy of the gate, nats.
      aux_loss: () float32, this member's additive share.
      picked_BSK: (B, S, K) bool, for a scheme whose tokens pick at most K experts: the places that are picks, False on
        padding. The number of choices is then not the same for all tokens.
    """
    batch, seq_len, num_choices = expert_BSK.shape
    counted_BSK = jnp.broadcast_to(mask_BS[..., None], expert_BSK.shape) if picked_BSK is None else picked_BSK
    metrics = {
        "load_E": count_by_expert(expert_BSK, counted_BSK, num_experts),
        "kept_E": count_by_expert(expert_BSK, kept_BSK, num_experts),
        "tokens": jnp.sum(mask_BS, dtype=jnp.int32),
        "entropy_sum": jnp.sum(jnp.where(mask_BS, entropy_BS, 0.0)),
    }
    return Assignment(
        token_N=jnp.repeat(jnp.arange(batch * seq_len, dtype=jnp.int32), num_choices),
        expert_N=expert_BSK.reshape(-1).astype(jnp.int32),
        weight_N=jnp.where(kept_BSK, weight_BSK, 0.0).reshape(-1),
        valid_N=kept_BSK.reshape(-1),
        aux_loss=aux_loss,
        metrics=metrics,
        num_choices=num_choices if picked_BSK is None else None,
    )


def equal_choice(expert_BSK: jax.Array, mask_BS: jax.Array, num_experts: int) -> Assignment:
    """The Assignment of a scheme without a gate: K experts (B, S, K) int32 of weight 1 / K each, nothing dropped."""
    return token_choice(
        expert_BSK,
        jnp.full(expert_BSK.shape, 1 / expert_BSK.shape[-1], jnp.float32),
        jnp.broadcast_to(mask_BS[..., None], expert_BSK.shape),
        mask_BS,
        num_experts=num_experts,
        entropy_BS=jnp.zeros(mask_BS.shape),
        aux_loss=jnp.float32(0),
    )


def sigmoid_weights(log_scores_BSE: jax.Array, expert_BSK: jax.Array, *, normalise: bool) -> jax.Array:
    """Scores (B, S, K) of the chosen experts from their logarithms; divided by their sum if asked and K > 1."""
    log_scores_BSK = jnp.take_along_axis(log_scores_BSE, expert_BSK, axis=-1)
    if normalise and expert_BSK.shape[-1] > 1:
        return jax.nn.softmax(log_scores_BSK)
    return jnp.exp(log_scores_BSK)


def check_choices(num_experts: int, num_choices: int, options: Any) -> None:
    """Refuses E < 1, K outside [1, E] and options outside the range of their knob.

    Raises:
      ConfigError: naming the key, the value and the remedy.
    """
    if num_experts < 1:
        raise ConfigError("moe.num_experts", num_experts, "must be >= 1")
    if not 1 <= num_choices <= num_experts:
        raise ConfigError("moe.num_choices", num_choices, f"must be between 1 and moe.num_experts={num_experts}")
    check_fields(options)


def check_just(num_choices: int, wanted: int, why: str, instead: str) -> None:
    """Refuses another K than a scheme is made for.

    Args:
      why: what the scheme does with a token. instead: a scheme for other K.

    Raises:
      ConfigError: naming the key, the value and the remedy.
    """
    if num_choices != wanted:
        remedy = f"set config.moe.num_choices={wanted} or config.moe.router={instead}"
        raise ConfigError("moe.num_choices", num_choices, f"{why}; {remedy}")
