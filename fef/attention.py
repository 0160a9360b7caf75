"""Self-attention: grouped queries with its variants, and multi-head latent attention, relative positions.

Shape letters: B batch, S sequence, D model width, H query heads, G key/value heads, Q heads per key/value head, A width
of queries and keys, V width of values.

Sources: A. Vaswani et al., "Attention Is All You Need", 2017, section 3.2; J. Ainslie et al., "GQA", 2023, section 2.2;
B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", 2019, section 4. Of the variants: M. Dehghani et al.,
"Scaling Vision Transformers to 22 Billion Parameters", 2023, section 2 (norms of queries and keys); I. Beltagy et al.,
"Longformer", 2020, section 3.1 (windows); OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025, section 2 (sinks).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fef.config import ModelConfig, head_dim
from fef.rope import rotate

_LATENT_EPS = 1e-6  # of the norms of the latents in the published models, whatever the other norms have


def rms_norm(x: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * scale over the last dimension; x (..., D), scale (D,) float32; computed in float32, dtype of x."""
    x32 = x.astype(jnp.float32)
    root = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * root * scale_D.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def causal_attention(
    q_BSHA: jax.Array,
    k_BSGA: jax.Array,
    v_BSGV: jax.Array,
    mask_BS: jax.Array,
    *,
    window: int = 0,
    sinks_H: jax.Array | None = None,
    score_factor: float = 1.0,
) -> jax.Array:
    """Grouped-query attention over earlier, unmasked positions; softmax in float32. Returns (B, S, H, V).

    Args:
      q_BSHA, k_BSGA, v_BSGV: queries, keys and values, of one dtype.
      mask_BS: (B, S) bool, False on padding.
      window: how many positions a query sees, its own included; 0 is all.
      sinks_H: (H,) float32, logits that take part in the softmax and have no value.
      score_factor: of the scores, beside A^-0.5.
    """
    seq_len, width = q_BSHA.shape[1], q_BSHA.shape[3]
    seen_SS = jnp.tril(jnp.ones((seq_len, seq_len), bool))
    if window:
        seen_SS &= ~jnp.tril(seen_SS, -window)
    seen_BSS = seen_SS[None] & mask_BS[:, None, :]
    return _attend(q_BSHA, k_BSGA, v_BSGV, seen_BSS, factor=score_factor * width**-0.5, sinks_H=sinks_H)


def _attend(
    q_BSHA: jax.Array,
    k_BTGA: jax.Array,
    v_BTGV: jax.Array,
    seen_BST: jax.Array,
    *,
    factor: float = 1.0,
    bias_HST: jax.Array | None = None,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """(B, S, H, V): the mean of the values that a query sees, by the softmax of factor * query . key + bias."""
    batch, seq_len, num_heads, width = q_BSHA.shape
    num_keys, num_groups = k_BTGA.shape[1:3]
    q_BSGQA = q_BSHA.reshape(batch, seq_len, num_groups, -1, width)
    scores = jnp.einsum("bsgqa,btga->bgqst", q_BSGQA, k_BTGA, preferred_element_type=jnp.float32)
    scores = scores * factor
    if bias_HST is not None:
        scores = scores + bias_HST.reshape(1, num_groups, -1, seq_len, num_keys)
    scores = jnp.where(seen_BST[:, None, None], scores, -1e30)
    if sinks_H is not None:
        sinks = jnp.broadcast_to(sinks_H.reshape(1, num_groups, -1, 1, 1), (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sinks], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :num_keys]
    out = jnp.einsum("bgqst,btgv->bsgqv", weights.astype(v_BTGV.dtype), v_BTGV)
    return out.reshape(batch, seq_len, num_heads, -1)


class Linear(nnx.Module):
    """y = x W, plus a bias if it has one; W (in, out) and bias (out,) float32, cast to the dtype of x."""

    def __init__(self, fan_in: int, fan_out: int, scale: float, rngs: nnx.Rngs, has_bias: bool = False):
        draw = jax.random.truncated_normal(rngs.params(), -2, 2, (fan_in, fan_out), jnp.float32)
        self.w = nnx.Param(draw * scale * fan_in**-0.5)
        if has_bias:
            self.bias = nnx.Param(jnp.zeros(fan_out))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x @ self.w[...].astype(x.dtype)
        if hasattr(self, "bias"):
            y = y + self.bias[...].astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
        return y


class Attention(nnx.Module):
    """Rotary grouped-query self-attention, with the variants of `config.model.attention`.

    Args:
      model: the model's configuration.
      window: how many positions a query sees, its own included; 0 is all.
      rngs: source of the initial parameters.
    """

    def __init__(self, model: ModelConfig, window: int, rngs: nnx.Rngs):
        variant, scale = model.attention, model.init_scale
        self.width, self.window, self.qk_norm, self.eps = head_dim(model), window, variant.qk_norm, model.norm_eps
        self.theta, self.yarn = model.rope_theta, model.yarn
        q_width, kv_width = model.num_heads * self.width, model.num_kv_heads * self.width
        self.query = Linear(model.d_model, q_width, scale, rngs, variant.bias)
        self.key = Linear(model.d_model, kv_width, scale, rngs, variant.bias)
        self.value = Linear(model.d_model, kv_width, scale, rngs, variant.bias)
        self.out = Linear(q_width, model.d_model, scale, rngs, variant.bias)
        if variant.qk_norm != "none":
            is_head = variant.qk_norm == "head"
            self.query_norm = nnx.Param(jnp.ones(self.width if is_head else q_width))
            self.key_norm = nnx.Param(jnp.ones(self.width if is_head else kv_width))
        if variant.sinks:
            self.sinks_H = nnx.Param(jnp.zeros(model.num_heads))

    def __call__(self, x_BSD: jax.Array, mask_BS: jax.Array) -> jax.Array:
        q = self._rotated(self.query(x_BSD), getattr(self, "query_norm", None))
        k = self._rotated(self.key(x_BSD), getattr(self, "key_norm", None))
        v = self._heads(self.value(x_BSD))
        sinks_H = self.sinks_H[...] if hasattr(self, "sinks_H") else None
        out_BSHA = causal_attention(
            q, k, v, mask_BS, window=self.window, sinks_H=sinks_H, score_factor=self.yarn.score_factor
        )
        return self.out(out_BSHA.reshape(*x_BSD.shape[:2], -1))

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, self.width)

    def _rotated(self, x: jax.Array, norm: Any) -> jax.Array:
        if self.qk_norm == "projection":
            x = rms_norm(x, norm[...], self.eps)
        heads = self._heads(x)
        if self.qk_norm == "head":
            heads = rms_norm(heads, norm[...], self.eps)
        return rotate(heads, self.theta, self.yarn)


class LatentAttention(nnx.Module):
    """Multi-head latent self-attention (MLA) in its training form: keys and values are expanded from the latent.

    A head's queries and keys are a part without positions and a rotary part; the rotary part of the keys is the same
    for all heads.

    Args:
      model: the model's configuration; widths in `model.mla`.
      rngs: source of the initial parameters.

    Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1; "DeepSeek-V3 Technical Report", 2024, section 2.1.1,
    equations 1-11.
    """

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs):
        mla, heads, scale = model.mla, model.num_heads, model.init_scale
        self.mla, self.num_heads, self.theta, self.yarn = mla, heads, model.rope_theta, model.yarn
        q_width = heads * (mla.nope_dim + mla.rope_dim)
        if mla.q_rank:
            self.query_down = Linear(model.d_model, mla.q_rank, scale, rngs)
            self.query_norm = nnx.Param(jnp.ones(mla.q_rank))
        self.query = Linear(mla.q_rank or model.d_model, q_width, scale, rngs)
        self.latent = Linear(model.d_model, mla.kv_rank + mla.rope_dim, scale, rngs)
        self.latent_norm = nnx.Param(jnp.ones(mla.kv_rank))
        self.key_value = Linear(mla.kv_rank, heads * (mla.nope_dim + mla.value_dim), scale, rngs)
        self.out = Linear(heads * mla.value_dim, model.d_model, scale, rngs)

    def __call__(self, x_BSD: jax.Array, mask_BS: jax.Array) -> jax.Array:
        mla = self.mla
        batch, seq_len, _ = x_BSD.shape
        query_in = x_BSD
        if mla.q_rank:
            query_in = rms_norm(self.query_down(x_BSD), self.query_norm[...], _LATENT_EPS)
        q = self.query(query_in).reshape(batch, seq_len, self.num_heads, -1)
        q_nope, q_rope = jnp.split(q, [mla.nope_dim], axis=-1)
        latent, k_rope = jnp.split(self.latent(x_BSD), [mla.kv_rank], axis=-1)
        kv = self.key_value(rms_norm(latent, self.latent_norm[...], _LATENT_EPS))
        k_nope, v = jnp.split(kv.reshape(batch, seq_len, self.num_heads, -1), [mla.nope_dim], axis=-1)

        q_rope = rotate(q_rope, self.theta, self.yarn)
        k_rope = rotate(k_rope[:, :, None], self.theta, self.yarn)
        q = jnp.concatenate([q_nope, q_rope], axis=-1)
        k = jnp.concatenate([k_nope, jnp.broadcast_to(k_rope, q_rope.shape)], axis=-1)
        out = causal_attention(q, k, v, mask_BS, score_factor=self.yarn.score_factor)
        return self.out(out.reshape(batch, seq_len, -1))


def make_attention(model: ModelConfig, window: int, rngs: nnx.Rngs) -> Attention | LatentAttention:
    """The self-attention of a layer in which a query sees `window` positions (0: all)."""
    return LatentAttention(model, rngs) if model.mla.kv_rank else Attention(model, window, rngs)


class RelativeAttention(nnx.Module):
    """Attention without positions in queries and keys: a bias by their distance, which all layers of a stack share.

    Scores are not divided by the root of the width; the queries' initial weights are that much smaller instead.

    Args:
      model: the model's configuration.
      is_causal: whether a query sees earlier positions only.
      rngs: source of the initial parameters.

    Source: C. Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2020,
    section 2.1.
    """

    def __init__(self, model: ModelConfig, is_causal: bool, rngs: nnx.Rngs):
        self.width, self.is_causal, scale = head_dim(model), is_causal, model.init_scale
        inner = model.num_heads * self.width
        self.query = Linear(model.d_model, inner, scale * self.width**-0.5, rngs)
        self.key = Linear(model.d_model, inner, scale, rngs)
        self.value = Linear(model.d_model, inner, scale, rngs)
        self.out = Linear(inner, model.d_model, scale, rngs)

    def __call__(self, x_BSD: jax.Array, mask_BS: jax.Array, bias_HSS: jax.Array) -> jax.Array:
        """To itself, with a bias (H, S, S) float32 of the scores."""
        return self.attend(x_BSD, x_BSD, mask_BS, bias_HSS)

    def attend(
        self, x_BSD: jax.Array, memory_BTD: jax.Array, mask_BT: jax.Array, bias_HST: jax.Array | None = None
    ) -> jax.Array:
        """To a memory (B, T, D), of which mask_BT (B, T) bool is False on padding. Returns (B, S, D)."""

        def heads(linear: Linear, x: jax.Array) -> jax.Array:
            return linear(x).reshape(*x.shape[:2], -1, self.width)

        q_BSHA, k_BTHA, v_BTHA = heads(self.query, x_BSD), heads(self.key, memory_BTD), heads(self.value, memory_BTD)
        seen_ST = jnp.ones((x_BSD.shape[1], memory_BTD.shape[1]), bool)
        if self.is_causal:
            seen_ST = jnp.tril(seen_ST)
        seen_BST = seen_ST[None] & mask_BT[:, None, :]
        out_BSHA = _attend(q_BSHA, k_BTHA, v_BTHA, seen_BST, bias_HST=bias_HST)
        return self.out(out_BSHA.reshape(*x_BSD.shape[:2], -1))


def distance_buckets(length: int, num_buckets: int, max_distance: int, is_causal: bool) -> np.ndarray:
    """The bucket (S, S) int32 of key t's distance from query s, by which `RelativeAttention` biases their score.

    Half of the buckets are single distances, the others grow by a constant factor up to max_distance, the last has all
    beyond. Without causality half of each are for keys behind the query.
    """
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]
    buckets = np.zeros(distance.shape, np.int32)
    if is_causal:
        distance = np.maximum(distance, 0)
    else:
        num_buckets //= 2
        buckets += np.where(distance < 0, num_buckets, 0).astype(np.int32)
        distance = np.abs(distance)
    exact = num_buckets // 2
    ratio = np.maximum(distance, 1).astype(np.float32) / exact
    grown = np.log(ratio) / np.float32(np.log(max_distance / exact)) * np.float32(num_buckets - exact)
    far = np.minimum(exact + grown.astype(np.int32), num_buckets - 1)
    return buckets + np.where(distance < exact, distance, far).astype(np.int32)
