"""The kinds of feed-forward network, of dense layers, shared experts and experts alike: `config.model.ffn`.

    y = hidden(x W_gate + b_gate, x W_up + b_up) W_down + b_down

A kind without a gate has hidden(x W_up + b_up), and one without biases leaves them out. A kind is all in this file, but
for what `fef/native/activation.cc` computes of it.

Letters: D model width, F hidden width.

Sources: N. Shazeer, "GLU Variants Improve Transformer", 2020, section 2 (swiglu); D. Hendrycks, K. Gimpel, "Gaussian
Error Linear Units (GELUs)", 2016, section 2 (gelu, in the approximation by tanh); W. Fedus, B. Zoph, N. Shazeer,
"Switch Transformers", 2021 (relu); OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025, section 2 (clamped_swiglu).
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fef.registry import Registry


@dataclasses.dataclass(frozen=True)
class Ffn:
    """A kind of FFN.

    Attributes:
      name: as in the configuration.
      hidden: the activation, of one array (..., F) for each of `inner`, element by element.
      inner: names of the linear maps from D to F, up and, before it, gate where there is one; that from F to D is down.
      has_biases: whether each linear map adds a bias.
    """

    name: str
    hidden: Callable[..., jax.Array]
    inner: tuple[str, ...]
    has_biases: bool = False

    def __call__(self, x: jax.Array, linear: Callable[[str, jax.Array], jax.Array]) -> jax.Array:
        """x -> y, given linear(name, x), the linear map of that name with its bias."""
        return linear("down", self.hidden(*(linear(name, x) for name in self.inner)))

    @property
    def maps(self) -> tuple[str, ...]:
        """Names of the linear maps."""
        return (*self.inner, "down")

    @property
    def parts(self) -> dict[str, str]:
        """Names and shape letters of the parameters, in the order in which they stand in a block of the pool."""
        parts = {f"w_{name}": "DF" for name in self.inner} | {"w_down": "FD"}
        biases = {f"b_{name}": "F" for name in self.inner} | {"b_down": "D"}
        return parts | biases if self.has_biases else parts

    def expert_name(self, part: str) -> str:
        """What a part is called where it has a leading axis of positions: w_gate_PDF."""
        return f"{part}_P{self.parts[part]}"

    def shapes(self, d_model: int, d_hidden: int) -> dict[str, tuple[int, ...]]:
        """Of the parts, in their order."""
        width = {"D": d_model, "F": d_hidden}
        return {part: tuple(width[letter] for letter in letters) for part, letters in self.parts.items()}

    def num_elems(self, d_model: int, d_hidden: int) -> int:
        """Of all parts together."""
        return sum(math.prod(shape) for shape in self.shapes(d_model, d_hidden).values())

    def num_matmul_elems(self, d_model: int, d_hidden: int) -> int:
        """Of the matrices, each of which a row is multiplied with once."""
        return len(self.maps) * d_model * d_hidden

    def flops_per_row(self, d_model: int, d_hidden: int) -> float:
        """Of the matmuls of a forward pass; the backward pass has twice as many."""
        return 2.0 * self.num_matmul_elems(d_model, d_hidden)


FFNS: Registry[Ffn] = Registry("FFN")
_LIMIT, _SLOPE = 7.0, 1.702  # of clamped_swiglu


def _swiglu(g: jax.Array, u: jax.Array) -> jax.Array:
    return jax.nn.silu(g) * u


def _gelu(u: jax.Array) -> jax.Array:
    """u/2 (1 + tanh(sqrt(2/pi) (u + 0.044715 u^3)))."""
    return jax.nn.gelu(u, approximate=True)


def _relu(u: jax.Array) -> jax.Array:
    """Its gradient is 0 where u is 0."""
    return jax.nn.relu(u)


def _clamped_swiglu(g: jax.Array, u: jax.Array) -> jax.Array:
    """(u + 1) g sigmoid(1.702 g), g clipped at 7 from above and u at both ends; no gradient from the limit on."""
    g = jnp.where(g >= _LIMIT, _LIMIT, g)
    u = jnp.where(u >= _LIMIT, _LIMIT, jnp.where(u <= -_LIMIT, -_LIMIT, u))
    return (u + 1) * g * jax.nn.sigmoid(_SLOPE * g)


def _registered(kind: Ffn) -> Ffn:
    return FFNS.register(kind.name)(kind)


SWIGLU = _registered(Ffn("swiglu", _swiglu, ("gate", "up")))
GELU = _registered(Ffn("gelu", _gelu, ("up",)))
RELU = _registered(Ffn("relu", _relu, ("up",)))
CLAMPED_SWIGLU = _registered(Ffn("clamped_swiglu", _clamped_swiglu, ("gate", "up"), has_biases=True))
