"""Auxiliary losses of the gate, as additive shares of the members.

Each function returns this member's share: the sum of the shares over all members is exactly the loss over the
global (micro)batch of one layer, and each member's gradient of its own share is that member's part of the exact
gradient, so the backward pass needs no collective. All take logits, never probabilities: a softmax taken twice
would silently weaken the loss. A batch that is all padding gives 0.

Shape letters: B batch, S sequence, E experts, K choices per token; B is that of one member.
"""

import jax
import jax.numpy as jnp

from fef.routing import RouterContext
from fef.routing.gate import gate_entropy


def aux_loss_share(
    logits_BSE: jax.Array,
    load_E: jax.Array,
    ctx: RouterContext,
    *,
    balance_coef: float,
    z_coef: float,
    entropy_coef: float = 0.0,
    load_BE: jax.Array | None = None,
    last_step: dict[str, jax.Array] | None = None,
) -> jax.Array:
    """Load-balance loss, z-loss and entropy loss of one layer, each times its factor, this member's share, () float32.

    Args:
      logits_BSE: (B, S, E) float32 gate logits.
      load_E: (E,) int32, this member's choices before drops, padding not counted.
      ctx: gives the mask and `psum`, which is called once, and not at all when all coefficients are 0.
      balance_coef: factor >= 0.
      z_coef: factor >= 0.
      entropy_coef: factor >= 0.
      load_BE: (B, E) int32, the choices of each sequence: the load is then balanced within sequences.
      last_step: `load_E` and `tokens` of all microbatches of the last optimizer step: f_e is then taken from them,
        and from this microbatch only if they counted no token (the first step).
    """
    if not (balance_coef or z_coef or entropy_coef):
        return jnp.zeros((), jnp.float32)
    total = ctx.psum({"load_E": load_E, "tokens": jnp.sum(ctx.mask_BS, dtype=jnp.int32)})
    tokens = total["tokens"]
    if load_BE is not None:
        balance = sequence_balance_share(logits_BSE, ctx.mask_BS, load_BE, tokens)
    else:
        counted = total
        if last_step is not None:
            counted = jax.tree.map(lambda last, now: jnp.where(last_step["tokens"] > 0, last, now), last_step, total)
        balance = load_balance_share(logits_BSE, ctx.mask_BS, counted["load_E"], tokens, counted["tokens"])
    loss = balance_coef * balance + z_coef * z_share(logits_BSE, ctx.mask_BS, tokens)
    return loss + entropy_coef * entropy_share(logits_BSE, ctx.mask_BS, tokens) if entropy_coef else loss


def load_balance_share(
    logits_BSE: jax.Array,
    mask_BS: jax.Array,
    load_E: jax.Array,
    tokens: jax.Array,
    load_tokens: jax.Array | None = None,
) -> jax.Array:
    """Share of E * sum_e f_e * P_e, () float32; the whole is K when the load is balanced and E when one expert has all.

    f_e = choices of expert e / tokens (sums to K), P_e = mean softmax probability of e; both over the unmasked tokens
    of the global batch. The share replaces P_e by (this member's sum of probabilities) / tokens.

    Args:
      logits_BSE: (B, S, E) float32, this member's.
      mask_BS: (B, S) bool, this member's.
      load_E: (E,) int32, choices before drops, summed over all members.
      tokens: () int32, unmasked tokens of all members.
      load_tokens: () int32, the tokens that `load_E` counts, where these are not `tokens`.

    Gradient: through P only; the counts have none.
    Sources: Fedus, Zoph, Shazeer, "Switch Transformers", 2021, section 2.2, equations 4-6; Qiu et al., "Demons in the
    Detail: On Implementing Load Balancing Loss for Training Specialized Mixture-of-Expert Models", 2025, section 3
    (load_E of more than one microbatch).
    """
    num_tokens = _at_least_one(tokens)
    probs_BSE = jnp.where(mask_BS[..., None], jax.nn.softmax(logits_BSE), 0.0)
    fraction_E = load_E.astype(jnp.float32) / (num_tokens if load_tokens is None else _at_least_one(load_tokens))
    return logits_BSE.shape[-1] * jnp.sum(fraction_E * probs_BSE.sum((0, 1)) / num_tokens)


def sequence_balance_share(
    logits_BSE: jax.Array, mask_BS: jax.Array, load_BE: jax.Array, tokens: jax.Array
) -> jax.Array:
    """Share of the mean over sequences of E * sum_e f_e * P_e, both of one sequence's unmasked tokens, () float32.

    A sequence counts by its unmasked tokens, so that padding, or a sequence of padding, changes nothing.

    Args:
      logits_BSE: (B, S, E) float32, this member's; P is their softmax.
      mask_BS: (B, S) bool, this member's.
      load_BE: (B, E) int32, choices of each sequence before drops.
      tokens: () int32, unmasked tokens of all members.

    Gradient: through P only.
    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2, equations 17-20, there divided by K.
    """
    probs_BSE = jnp.where(mask_BS[..., None], jax.nn.softmax(logits_BSE), 0.0)
    # n_b/tokens * (load/n_b) * (sum of P/n_b): one of the three n_b remains
    products_B = jnp.sum(load_BE * probs_BSE.sum(1), axis=-1) / _at_least_one(mask_BS.sum(1))
    return logits_BSE.shape[-1] * jnp.sum(products_B) / _at_least_one(tokens)


def z_share(logits_BSE: jax.Array, mask_BS: jax.Array, tokens: jax.Array) -> jax.Array:
    """Share of the mean over unmasked tokens of logsumexp(logits)^2, () float32; keeps the logits small.

    Args:
      logits_BSE: (B, S, E) float32, this member's.
      mask_BS: (B, S) bool, this member's.
      tokens: () int32, unmasked tokens of all members.

    Source: Zoph et al., "ST-MoE", 2022, section 3.1, equation 5.
    """
    squares_BS = jnp.square(jax.nn.logsumexp(logits_BSE, axis=-1))
    return jnp.sum(jnp.where(mask_BS, squares_BS, 0.0)) / _at_least_one(tokens)


def entropy_share(logits_BSE: jax.Array, mask_BS: jax.Array, tokens: jax.Array) -> jax.Array:
    """Share of the mean over unmasked tokens of the softmax's entropy, () float32; makes the gate decided.

    Args: as of `z_share`.
    Source: Huang et al., "Harder Tasks Need More Experts", 2024, section 2 (dynamic loss).
    """
    return jnp.sum(jnp.where(mask_BS, gate_entropy(logits_BSE), 0.0)) / _at_least_one(tokens)


def squared_variation_share(sums_E: jax.Array, total_E: jax.Array, part: jax.Array) -> jax.Array:
    """Share of CV(total)^2 = variance / mean^2 over the experts, () float32; 0 when all have the same, at most E - 1.

    CV^2 of a sum is no sum of anything of the members. But its gradient is one number per expert, g = dCV^2/dtotal, the
    same for all members, and the total moves as the members' sums move; so the share

        part * CV(total)^2 + g . (sums - sums held constant),    total and g held constant

    has the exact value when the shares are added, as the parts add up to 1 and the rest is 0, and the exact gradient.
    As a mean of squares rather than the square of a root, it has gradient 0 where all experts are equal, and not 0 / 0.

    Args:
      sums_E: (E,) float32, this member's sums, which carry the gradient.
      total_E: (E,) float32, their sum over all members; all zeros cost nothing.
      part: () float32, this member's part of the value.

    Source: Shazeer et al., "Outrageously Large Neural Networks", 2017, section 4, equations 6 and 7.
    """

    def squared_variation(total_E: jax.Array) -> jax.Array:
        mean = total_E.mean()
        return jnp.mean(jnp.square(jnp.where(mean > 0, total_E / jnp.where(mean > 0, mean, 1.0) - 1, 0.0)))

    value, gradient_E = jax.value_and_grad(squared_variation)(jax.lax.stop_gradient(total_E))
    value, gradient_E, part = jax.lax.stop_gradient((value, gradient_E, part))
    return part * value + jnp.sum(gradient_E * (sums_E - jax.lax.stop_gradient(sums_E)))


def _at_least_one(count: jax.Array) -> jax.Array:
    return jnp.maximum(count, 1).astype(jnp.float32)
