"""The parameters of a layer's experts, as every dispatcher takes them.

P positions (a multiple of R members, see `fef.pool.table.ExpertTable`), D model width, F expert hidden width.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fef.pool.table import ExpertTable


@dataclasses.dataclass(frozen=True)
class Experts:
    """SwiGLU experts: y = (silu(x W_gate) * x W_up) W_down. A leading layers axis may stand before P.

    Attributes:
      w_gate_PDF, w_up_PDF: (P, D, F), P sharded over the expert axis.
      w_down_PFD: (P, F, D), likewise.
    """

    w_gate_PDF: jax.Array
    w_up_PDF: jax.Array
    w_down_PFD: jax.Array

    def astype(self, dtype: Any) -> "Experts":
        """All three matrices in another dtype; differentiable."""
        return jax.tree.map(lambda w: w.astype(dtype), self)


jax.tree_util.register_dataclass(Experts, ["w_gate_PDF", "w_up_PDF", "w_down_PFD"], [])


def init_experts(key: jax.Array, table: ExpertTable, d_model: int, d_expert: int, scale: float) -> Experts:
    """Draws every expert's matrices, float32, truncated normal of deviation scale / sqrt(fan_in).

    Expert e is the same for every number of members: it is drawn by its logical number, then put at its position.
    """

    def draw(key: jax.Array, fan_in: int, fan_out: int) -> jax.Array:
        w_EIO = jax.random.truncated_normal(key, -2, 2, (table.num_experts, fan_in, fan_out), jnp.float32)
        w_PIO = jnp.zeros((table.num_positions, fan_in, fan_out), jnp.float32)
        return w_PIO.at[np.asarray(table.position_E)].set(w_EIO * (scale * fan_in**-0.5))

    gate, up, down = jax.random.split(key, 3)
    return Experts(draw(gate, d_model, d_expert), draw(up, d_model, d_expert), draw(down, d_expert, d_model))
