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


def aux_loss_share(
    logits_BSE: jax.Array, load_E: jax.Array, ctx: RouterContext, *, balance_coef: float, z_coef: float
) -> jax.Array:
    """balance_coef * load-balance loss + z_coef * z-loss of one layer, this member's share, () float32.

    Args:
      logits_BSE: (B, S, E) float32 gate logits.
      load_E: (E,) int32, this member's choices before drops, padding not counted.
      ctx: gives the mask and `psum`, which is called once, and not at all when both coefficients are 0.
      balance_coef: factor >= 0.
      z_coef: factor >= 0.
    """
    if not (balance_coef or z_coef):
        return jnp.zeros((), jnp.float32)
    total = ctx.psum({"load_E": load_E, "tokens": jnp.sum(ctx.mask_BS, dtype=jnp.int32)})
    balance = load_balance_share(logits_BSE, ctx.mask_BS, total["load_E"], total["tokens"])
    return balance_coef * balance + z_coef * z_share(logits_BSE, ctx.mask_BS, total["tokens"])


def load_balance_share(logits_BSE: jax.Array, mask_BS: jax.Array, load_E: jax.Array, tokens: jax.Array) -> jax.Array:
    """Share of E * sum_e f_e * P_e, () float32; the whole is K when the load is balanced and E when one expert has all.

    f_e = choices of expert e / tokens (sums to K), P_e = mean softmax probability of e; both over the unmasked tokens
    of the global batch. The share replaces P_e by (this member's sum of probabilities) / tokens.

    Args:
      logits_BSE: (B, S, E) float32, this member's.
      mask_BS: (B, S) bool, this member's.
      load_E: (E,) int32, choices before drops, summed over all members.
      tokens: () int32, unmasked tokens of all members.

    Gradient: through P only; the counts have none.
    Source: Fedus, Zoph, Shazeer, "Switch Transformers", 2021, section 2.2, equations 4-6.
    """
    num_tokens = jnp.maximum(tokens, 1).astype(jnp.float32)
    probs_BSE = jnp.where(mask_BS[..., None], jax.nn.softmax(logits_BSE), 0.0)
    fraction_E = load_E.astype(jnp.float32) / num_tokens
    return logits_BSE.shape[-1] * jnp.sum(fraction_E * probs_BSE.sum((0, 1)) / num_tokens)


def z_share(logits_BSE: jax.Array, mask_BS: jax.Array, tokens: jax.Array) -> jax.Array:
    """Share of the mean over unmasked tokens of logsumexp(logits)^2, () float32; keeps the logits small.

    Args:
      logits_BSE: (B, S, E) float32, this member's.
      mask_BS: (B, S) bool, this member's.
      tokens: () int32, unmasked tokens of all members.

    Source: Zoph et al., "ST-MoE", 2022, section 3.1, equation 5.
    """
    squares_BS = jnp.square(jax.nn.logsumexp(logits_BSE, axis=-1))
    return jnp.sum(jnp.where(mask_BS, squares_BS, 0.0)) / jnp.maximum(tokens, 1).astype(jnp.float32)
