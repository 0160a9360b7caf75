"""What a dispatcher is.

Letters: T tokens, N assignments, D model width, E experts, P positions, R members, L layers, Q ledger purposes.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from fef import sharding
from fef.config import Section
from fef.experts import Experts
from fef.fabric.calibration import Calibration
from fef.ffn import Ffn
from fef.ops.device import REAL, Device
from fef.ops.permute import Order
from fef.pool import ledger
from fef.pool.table import ExpertTable
from fef.routing import Assignment


@dataclasses.dataclass(frozen=True)
class Dispatcher:
    """Base of the dispatchers that take the experts as arrays; `pooled` overrides what differs.

    A subclass implements `__call__` and `moved_QP`, and registers itself under its name.

    Attributes:
      mesh: the device mesh.
      table: homes and positions of the experts.
      matmul: implementation of the grouped matmul, auto, native or jax.
      dtype: compute type of the model.
      rerun: whether the layer is recomputed in the backward pass (remat), which moves some things again.
      device: whose time the expert FFN takes.
      options: the subclass's own `Options`; None means their defaults.
    """

    @dataclasses.dataclass(unsafe_hash=True)
    class Options(Section):
        pass

    models_device: ClassVar[bool] = True  # whether the expert FFN can take a modelled device's time
    uses_pool: ClassVar[bool] = False  # whether it needs an open `fef.Pool`

    mesh: Mesh
    table: ExpertTable
    matmul: str = "auto"
    dtype: str = "float32"
    rerun: bool = False
    device: Device = REAL
    options: Any = None

    def __post_init__(self) -> None:
        if self.options is None:
            object.__setattr__(self, "options", type(self).Options())

    @classmethod
    def check_platform(cls, platform: str) -> None:
        """Raises ValueError, naming what to use instead, when this dispatcher does not run on the platform."""

    @classmethod
    def needs_rates(cls, options: Any) -> bool:
        """Whether, with these options, it chooses by the rates of links and devices, and names no file of them."""
        return False

    @property
    def rates(self) -> Calibration | None:
        """What it chooses by. A dispatcher that chooses what moves returns from `__call__` what it means to move."""
        return None

    @property
    def experts_spec(self) -> PartitionSpec:
        """How the members see what `prepare` returns for a layer."""
        return sharding.EXPERTS

    def prepare(self, runs: list[Experts], load_LE: jax.Array | None = None) -> Any:
        """Makes the experts of all layers ready for a step. Outside of the islands, once per optimizer step.

        Args:
          runs: global arrays; a run is one layer, or consecutive layers stacked on a leading axis.
          load_LE: (L, E) int32, assignments of all members to each expert in the last step, of one microbatch; None or
            zeros before the first. Only who chooses what moves asks for it.

        Returns:
          what the layers take: here the runs themselves, for `pooled` one `Published` for all layers.
        """
        return runs

    def at_microbatch(self, prepared: Any, index: jax.Array) -> Any:
        """What `prepare` returned, for the layers of microbatch `index`."""
        return prepared

    def __call__(self, x_TD: jax.Array, assignment: Assignment, experts: Any, layer: jax.Array) -> tuple:
        """Carries out the assignment. Inside the layer's island.

        Args:
          x_TD: (T, D), this member's tokens.
          assignment: from the router.
          experts: this member's view (`experts_spec`) of the layer's part of what `prepare` returned.
          layer: () int32, number of the MoE layer.

        Returns:
          y_TD (T, D) and moved_QP (purposes, P) int32, the ledger's units moved to or from this member in a forward
          and a backward pass.

        Sharding: arrays of one member. Gradient: in x_TD, assignment.weight_N and experts, equal to `reference`.
        """
        raise NotImplementedError

    def finish(self, prepared: Any, moved_MLQP: jax.Array, after: jax.Array, collected: bool) -> tuple:
        """Ends the use of what `prepare` returned. Outside of the islands.

        Args:
          prepared: from `prepare`.
          moved_MLQP: what the layers returned, one entry per member on the leading axis.
          after: () float32 that depends on everything done with `prepared`.
          collected: whether it was differentiated.

        Returns:
          moved_MLQP and waits_us_MLW (members, layers, kinds) float32.
        """
        members, layers = moved_MLQP.shape[:2]
        return moved_MLQP, jnp.zeros((members, layers, len(ledger.WAITS)), jnp.float32)

    @property
    def units(self) -> "UnitSizes":
        """Bytes per element of what this dispatcher moves."""
        return UnitSizes(jnp.dtype(self.dtype).itemsize)

    def counts_P(self, order: Order) -> jax.Array:
        """Rows per position, from rows per expert."""
        return jnp.zeros(self.table.num_positions, jnp.int32).at[self.table.position_E].set(order.counts_E)

    def moved(self, **units_by_purpose: Any) -> jax.Array:
        """moved_QP with the given units at every position that is not this member's own, 0 elsewhere."""
        rank = jax.lax.axis_index("expert")
        remote_P = jnp.asarray(np.arange(self.table.num_positions) // self.table.per_member) != rank
        rows = [jnp.asarray(units_by_purpose.get(purpose, 0), jnp.int32) * remote_P for purpose in ledger.PURPOSES]
        return jnp.stack(rows).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class UnitSizes:
    """Bytes per element of what a dispatcher moves; `for_shapes` gives the ledger's units."""

    weight_bytes: int
    gradient_bytes: int | None = None  # None: as the weights

    def for_shapes(self, kind: Ffn, d_model: int, d_expert: int) -> ledger.Units:
        """The ledger's units for experts of this kind and these widths."""
        elems = kind.num_elems(d_model, d_expert)
        gradient_bytes = self.weight_bytes if self.gradient_bytes is None else self.gradient_bytes
        return ledger.Units(elems * self.weight_bytes, elems * gradient_bytes, d_model * self.weight_bytes)
