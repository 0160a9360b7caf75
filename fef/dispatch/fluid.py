"""fluid: expert by expert and step by step, weights come to the tokens or tokens go to the weights, the cheaper way.

A member chooses by itself, from its own counts and all members' of the last step (`fef.fabric.cost`). Some experts it
reads, as with `pooled`. Rows for the others it leaves where it is; their homes read them, compute, and leave the
results, which it reads back: exact rows, no padding, and one row per token and host however many of its experts live
there. A member has room for a bounded number of visiting rows; what would exceed it is read as weights, so nothing is
dropped.

Payload per member and layer, forward and backward: reads as in `pooled`, and 4 (rows sent) D b.

Blocks and rows are float32 on the way, also for models of other types.

Source of the two ways: J. Liu et al., "Janus: A Unified Distributed Training Framework for Sparse Mixture-of-Experts
Models", 2023, section 3, which chooses one of them for a whole layer, before the run.
"""

import dataclasses

import jax
import jax.numpy as jnp

from fef.config import Section, UserError, knob
from fef.dispatch import DISPATCHERS
from fef.dispatch.pooled import Pooled, Published
from fef.fabric import calibration, cost
from fef.ffn import Ffn
from fef.ops.fluid_ffn import Settings, fluid_ffn
from fef.ops.grouped_matmul import resolve
from fef.ops.permute import sort_by_expert
from fef.routing import Assignment


@DISPATCHERS.register("fluid")
class Fluid(Pooled):
    """Moves weights or tokens, expert by expert, whichever is cheaper."""

    @dataclasses.dataclass(unsafe_hash=True)
    class Options(Section):
        mode: str = knob("auto", "run", "what flows; auto chooses", choices=("auto", "weights", "tokens"))
        cost: str = knob("time", "run", "what auto makes least: time exposed, or bytes", choices=("time", "bytes"))
        calibration: str = knob("", "run", "rates by experiments.calibrate; empty: the run's own")
        room: float = knob(2.0, "run", "rows that can visit a member, as a multiple of its own; the rest is read", ge=0)
        deduplicate: bool = knob(
            True, "run", "a token's row goes to a host once, however many of its experts live there"
        )

    @classmethod
    def needs_rates(cls, options: "Fluid.Options") -> bool:
        return (options.mode, options.cost, options.calibration) == ("auto", "time", "")

    @property
    def block_dtype(self) -> str:
        return "float32"

    def __call__(self, x_TD: jax.Array, assignment: Assignment, experts: Published, layer: jax.Array) -> tuple:
        if resolve(self.matmul) != "native":
            raise UserError(f"config.dispatch.matmul={self.matmul}: fluid computes in the native library; use auto")
        order = sort_by_expert(assignment, self.table.num_experts)
        quota = self.quota(order.order_N.shape[0])
        load_E = experts.load_MLE[0, layer]
        is_visited_E = self.choose(
            order.counts_E, load_E, jax.lax.axis_index("expert"), experts.kind, experts.widths, quota
        )
        weight_N = jnp.where(assignment.valid_N, assignment.weight_N, 0.0)[order.order_N]
        room = quota * (self.table.num_members - 1)
        settings = Settings(experts.kind, experts.widths[1], room, self.options.deduplicate, self.device)
        y_TD = fluid_ffn(
            experts.version_M4[0], experts.chain_M[0], layer, x_TD.astype(jnp.float32),
            assignment.token_N[order.order_N], weight_N, order.counts_E, is_visited_E.astype(jnp.int32), settings,
        )  # fmt: skip
        return y_TD.astype(x_TD.dtype), self._planned(order.counts_E, is_visited_E)

    def _planned(self, rows_E: jax.Array, is_visited_E: jax.Array) -> jax.Array:
        """Units by purpose and position, (purposes, P): as if no two choices of a token went to the same host."""
        is_read_E = ~is_visited_E & (rows_E > 0)
        units_EQ = jnp.stack([is_read_E.astype(jnp.int32), cost.CROSSINGS * rows_E * is_visited_E], axis=1)
        units_PQ = jnp.zeros((self.table.num_positions, 2), jnp.int32).at[self.table.position_E].set(units_EQ)
        return self.moved(weights=units_PQ[:, 0], gradients=units_PQ[:, 0], tokens=units_PQ[:, 1])

    @property
    def rates(self) -> calibration.Calibration:
        path = self.options.calibration
        return calibration.load(path) if path else calibration.current()

    def quota(self, num_assignments: int) -> int:
        """Rows that a member with N assignments may leave for each home."""
        if self.options.mode == "weights" or self.table.num_members == 1:
            return 0
        return int(self.options.room * num_assignments / (self.table.num_members - 1))

    def choose(
        self, rows_E: jax.Array, load_E: jax.Array, rank: jax.Array, kind: Ffn, widths: tuple[int, int], quota: int
    ) -> jax.Array:
        """(E,) bool: the experts to which this member's rows go, from its rows, all members' last ones and its rank."""
        layer = cost.Layer(self.table, self.units.for_shapes(kind, *widths), 3 * kind.flops_per_row(*widths))
        if quota == 0:
            return jnp.zeros(rows_E.shape, bool)
        if self.options.mode == "tokens":
            is_visited_E = (jnp.asarray(self.table.home_E) != rank) & (rows_E > 0)
        elif self.options.cost == "bytes":
            is_visited_E = cost.visit_by_bytes(rows_E, rank, layer)
        else:
            is_visited_E = cost.visit_by_time(rows_E, load_E, rank, layer, self.rates)
        return cost.within_quota(is_visited_E, rows_E, layer, quota)
