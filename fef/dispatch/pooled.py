"""pooled: tokens stay, and each member reads the experts it uses from the pool, one-sided.

Payload per member and layer, forward and backward: (fetched + refetched) P_E b_w + sent gradients P_E b_g bytes, as the
ledger counts them; experts without tokens on this member cost nothing. Within one process the members' segments are
mapped memory, so that the backward pass reads the weights in place a second time (refetch).

float32 on a CPU multiplies against the pool's memory itself (`pooled_ffn`); otherwise blocks are read into arrays.

Source: J. Liu et al., "Janus: A Unified Distributed Training Framework for Sparse Mixture-of-Experts Models", 2023,
section 3 (data-centric paradigm: experts move, tokens stay).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from fef import sharding
from fef.config import UserError
from fef.dispatch import DISPATCHERS
from fef.dispatch.base import Dispatcher, UnitSizes
from fef.experts import Experts
from fef.ffn import Ffn
from fef.ops.expert_ffn import expert_ffn
from fef.ops.get import get
from fef.ops.grouped_matmul import resolve, segments_of_counts
from fef.ops.permute import combine_rows, gather_rows, sort_by_expert
from fef.ops.pooled_ffn import pooled_ffn
from fef.ops.publish import opaque_handle, publish
from fef.ops.read_ledger import read_ledger
from fef.ops.release import release
from fef.pool import pool as pools
from fef.pool.ledger import PURPOSES
from fef.routing import Assignment
from fef.sharding import island


@dataclasses.dataclass(frozen=True)
class Published:
    """What a layer needs to read from the pool; entry m belongs to member m of the whole mesh.

    Attributes:
      version_M4: (M, 4) int32, table, incarnation, counter, microbatch; the same for every member.
      chain_M: (M,) float32; without a value, its cotangent orders the gradients before they are collected.
      kind: of the experts, and
      widths: (D, F); both static.
      load_MLE: (M, L, E) int32, what `Dispatcher.prepare` was told of the last step.
    """

    version_M4: jax.Array
    chain_M: jax.Array
    kind: Ffn
    widths: tuple[int, int]
    load_MLE: jax.Array


jax.tree_util.register_dataclass(Published, ["version_M4", "chain_M", "load_MLE"], ["kind", "widths"])


@DISPATCHERS.register("pooled")
class Pooled(Dispatcher):
    """Reads the experts it uses from the pool; tokens stay."""

    uses_pool = True

    @classmethod
    def check_platform(cls, platform: str) -> None:
        if platform != "cpu":
            raise UserError(
                f"the pooled dispatcher has no handlers for {platform} yet; "
                "use all_to_all, ragged_all_to_all, all_gather or reference there"
            )

    @property
    def experts_spec(self) -> PartitionSpec:
        return sharding.TOKENS

    @property
    def block_dtype(self) -> str:
        """How blocks are stored."""
        return self.dtype

    @property
    def units(self) -> UnitSizes:
        return UnitSizes(weight_bytes=jnp.dtype(self.block_dtype).itemsize, gradient_bytes=4)

    def prepare(self, runs: list[Experts], load_LE: jax.Array | None = None) -> Published:
        runs = [run if run["w_up"].ndim == 4 else jax.tree.map(lambda w: w[None], run) for run in runs]
        kind, widths = runs[0].kind, runs[0].widths
        num_layers = sum(run["w_up"].shape[0] for run in runs)
        shapes = tuple(kind.shapes(*widths).values())
        handle_2 = pools.current().table("experts", num_layers, self.table, shapes, self.block_dtype)
        arrays = tuple(jax.tree.leaves(runs))

        def body(*arrays: jax.Array) -> tuple:
            version_4, chain = publish(opaque_handle(handle_2), arrays, len(shapes), self.block_dtype)
            return version_4[None], chain[None]

        specs = (sharding.LAYERED_EXPERTS,) * len(arrays)
        run = island(self.mesh, body, specs, (sharding.TOKENS, sharding.TOKENS))
        version_M4, chain_M = run(*arrays)
        load_LE = jnp.zeros((num_layers, self.table.num_experts), jnp.int32) if load_LE is None else load_LE
        load_MLE = jnp.broadcast_to(load_LE, (self.mesh.size, *load_LE.shape))
        return Published(version_M4, chain_M, kind, widths, load_MLE)

    def at_microbatch(self, prepared: Published, index: jax.Array) -> Published:
        return dataclasses.replace(prepared, version_M4=prepared.version_M4.at[:, 3].set(index))

    def __call__(self, x_TD: jax.Array, assignment: Assignment, experts: Published, layer: jax.Array) -> tuple:
        order = sort_by_expert(assignment, self.table.num_experts)
        rows_ND = gather_rows(x_TD, assignment, order)
        version_4, chain = experts.version_M4[0], experts.chain_M[0]
        if x_TD.dtype == jnp.float32 and resolve(self.matmul) == "native":
            like_0F = jnp.zeros((0, experts.widths[1]), jnp.float32)
            rows_ND = pooled_ffn(version_4, chain, layer, rows_ND, order.counts_E, like_0F, self.device, experts.kind)
        else:
            read = self._read(experts, layer, order.counts_E)
            rows_ND = expert_ffn(rows_ND, read, segments_of_counts(order.counts_E), self.matmul, self.device)
        y_TD = combine_rows(rows_ND, assignment, order, x_TD.shape[0])
        return y_TD.astype(x_TD.dtype), self.moved()

    def _read(self, experts: Published, layer: jax.Array, counts_E: jax.Array) -> Experts:
        """The experts with tokens as arrays, zeros for the others."""
        version_4, chain, kind = experts.version_M4[0], experts.chain_M[0], experts.kind
        ids_E = jnp.where(counts_E > 0, jnp.arange(self.table.num_experts, dtype=jnp.int32), -1)
        blocks = get(version_4, chain, layer, ids_E, kind.num_elems(*experts.widths), self.dtype)
        shapes = kind.shapes(*experts.widths)
        ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
        arrays = jnp.split(blocks, ends[:-1].tolist(), axis=1)
        return Experts(
            kind, {part: w.reshape(-1, *shape) for (part, shape), w in zip(shapes.items(), arrays, strict=True)}
        )

    def finish(self, prepared: Published, moved_MLQP: jax.Array, after: jax.Array, collected: bool) -> tuple:
        num_layers = moved_MLQP.shape[1]

        def body(version_M4: jax.Array, after: jax.Array) -> Any:
            if not collected:
                after = release(version_M4[0], after)
            counts_LQE, waits_us_LW = read_ledger(version_M4[0], after, num_layers, self.table.num_experts)
            shape = (num_layers, len(PURPOSES), self.table.num_positions)
            counts_LQP = jnp.zeros(shape, jnp.int32).at[..., np.asarray(self.table.position_E)].set(counts_LQE)
            return counts_LQP[None], waits_us_LW[None]

        specs = (sharding.TOKENS, sharding.REPLICATED)
        return island(self.mesh, body, specs, (sharding.TOKENS, sharding.TOKENS))(prepared.version_M4, after)
