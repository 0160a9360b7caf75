"""Rotary positions, plain and stretched.

Shape letters: B batch, S sequence, H heads, A width that is rotated.

Sources: J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, section 3.2; B. Peng et
al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023, sections 3.2 and 3.4.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from fef.config import YarnConfig


def rotate(x_BSHA: jax.Array, theta: float, yarn: YarnConfig) -> jax.Array:
    """Rotary positions 0..S-1: dimension i turns with dimension i + A/2 by position / theta^(2i/A); shape of x.

    With `yarn.factor` > 1 slow dimensions turn slower, and the result is `yarn.attention_factor` times as large.
    """
    seq_len, width = x_BSHA.shape[1], x_BSHA.shape[3]
    frequency = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    factor = 1.0
    if yarn.factor > 1:
        frequency *= _stretch(width, theta, yarn)
        factor = growth(yarn.factor) if yarn.attention_factor is None else yarn.attention_factor
    angle_SA = jnp.arange(seq_len, dtype=jnp.float32)[:, None] * frequency[None, :]
    cos, sin = (f(angle_SA)[None, :, None, :] for f in (jnp.cos, jnp.sin))
    if factor != 1:
        cos, sin = factor * cos, factor * sin
    first, second = jnp.split(x_BSHA.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BSHA.dtype)


def growth(factor: float, mscale: float = 1.0) -> float:
    """By how much positions stretched by `factor` let queries and keys grow: 0.1 mscale ln(factor) + 1."""
    return 0.1 * mscale * math.log(factor) + 1


def _stretch(width: int, theta: float, yarn: YarnConfig) -> np.ndarray:
    """Factor (A/2,) float32 of each frequency: 1 for fast dimensions, 1 / yarn.factor for slow ones, a ramp between."""

    def dimension(turns: float) -> float:
        """The dimension that makes so many turns over the trained length."""
        return width * math.log(yarn.original_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    slow = np.clip((np.arange(width // 2) - low) / max(high - low, 0.001), 0, 1)
    return (slow / yarn.factor + (1 - slow)).astype(np.float32)
