"""The parameters of a layer's experts, as every dispatcher takes them.

P positions (a multiple of R members, see `fef.pool.table.ExpertTable`), D model width, F expert hidden width.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fef.ffn import SWIGLU, Ffn
from fef.pool.table import ExpertTable


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class Experts:
    """Experts of one kind; a pytree whose leaves are the parts, in the kind's order.

    Attributes:
      kind: what they compute.
      parts: by the kind's names, each (P, ...) with P sharded over the expert axis: w_up (P, D, F), b_up (P, F). A
        leading layers axis may stand before P. `experts["w_up"]` is one of them.
    """

    kind: Ffn
    parts: Mapping[str, jax.Array]

    def __getitem__(self, part: str) -> jax.Array:
        return self.parts[part]

    @property
    def widths(self) -> tuple[int, int]:
        """(D, F)."""
        d_model, d_expert = self.parts["w_up"].shape[-2:]
        return d_model, d_expert

    def astype(self, dtype: Any) -> "Experts":
        """All parts in another dtype; differentiable."""
        return jax.tree.map(lambda part: part.astype(dtype), self)

    def linear(self, name: str, x: jax.Array) -> jax.Array:
        """A linear map of `kind`, of one expert (rows, in) -> (rows, out), or of each expert its own rows (P, ...)."""
        y = x @ self.parts[f"w_{name}"]
        return y + self.parts[f"b_{name}"][..., None, :] if self.kind.has_biases else y

    def tree_flatten_with_keys(self) -> tuple:
        names = self.kind.parts
        return [(jax.tree_util.DictKey(name), self.parts[name]) for name in names], self.kind

    @classmethod
    def tree_unflatten(cls, kind: Ffn, parts: tuple) -> "Experts":
        return cls(kind, dict(zip(kind.parts, parts, strict=True)))


def init_experts(
    key: jax.Array, table: ExpertTable, d_model: int, d_expert: int, scale: float, kind: Ffn = SWIGLU
) -> Experts:
    """Draws every expert's matrices, float32, truncated normal of deviation scale / sqrt(fan_in); biases are zero.

    Expert e is the same for every number of members: it is drawn by its logical number, then put at its position.
    """

    def draw(key: jax.Array, fan_in: int, fan_out: int) -> jax.Array:
        w_EIO = jax.random.truncated_normal(key, -2, 2, (table.num_experts, fan_in, fan_out), jnp.float32)
        w_PIO = jnp.zeros((table.num_positions, fan_in, fan_out), jnp.float32)
        return w_PIO.at[np.asarray(table.position_E)].set(w_EIO * (scale * fan_in**-0.5))

    shapes = kind.shapes(d_model, d_expert)
    parts = {part: jnp.zeros((table.num_positions, *shape), jnp.float32) for part, shape in shapes.items()}
    for name, own_key in zip(kind.maps, jax.random.split(key, len(kind.maps)), strict=True):
        parts[f"w_{name}"] = draw(own_key, *shapes[f"w_{name}"])
    return Experts(kind, parts)
