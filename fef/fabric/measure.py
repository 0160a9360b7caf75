"""Measures a Calibration: what reads, token rows and expert matmuls take, all members at the same time.

Letters: R members, T tokens, D, F widths, E experts.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fef import hosts
from fef.experts import Experts
from fef.fabric.calibration import Calibration
from fef.fabric.cost import CROSSINGS
from fef.ffn import SWIGLU, Ffn
from fef.ops.device import Device
from fef.ops.expert_ffn import expert_ffn
from fef.ops.fluid_ffn import Settings, fluid_ffn
from fef.ops.get import get
from fef.ops.grouped_matmul import segments_of_counts
from fef.ops.publish import publish
from fef.ops.release import release
from fef.pool import pool as pools
from fef.pool.table import ExpertTable
from fef.sharding import LAYERED_EXPERTS, REPLICATED, TOKENS, island, named

REPEATS = 5
LEAST_S = 10e-6  # differences of two measured times are not to be trusted below
BLOCK_ELEMS = 1 << 18  # 1 MiB
FEW_ELEMS = 16
FORWARD_CROSSINGS = CROSSINGS // 2  # of a row
ROWS = (32, 128, 512)


def measure(mesh: Mesh, kind: Ffn, d_model: int, d_expert: int, device: Device, matmul: str = "auto") -> Calibration:
    """Measures with the open pool; the same result on every host. Takes some reads of 1 MiB from each member.

    Args:
      mesh: the pool's.
      kind, d_model, d_expert: of the experts.
      device: taken at its word if it is modelled.
      matmul: of the expert FFN.

    Returns:
      the slowest host's rates. With one member nothing moves, and the rates mean nothing.
    """
    blocks_s = _read_seconds(mesh, BLOCK_ELEMS)
    many_rows = max(BLOCK_ELEMS // d_model, 2)
    few_s, many_s = (_row_seconds(mesh, d_model, rows) for rows in (1, many_rows))
    flops, half_rows = device.flops, device.half_rows
    if not device.is_modelled:
        flops, half_rows = gemm_rate(mesh, kind, d_model, d_expert, matmul)
    bytes_per_s = max(_num_read(mesh), 1) * 4 * BLOCK_ELEMS / blocks_s
    row_bytes = FORWARD_CROSSINGS * max(mesh.shape["expert"] - 1, 1) * (many_rows - 1) * 4 * d_model
    row_bytes_per_s = row_bytes / max(many_s - few_s, LEAST_S)
    found = hosts.gather("its calibration", [bytes_per_s, row_bytes_per_s, few_s / FORWARD_CROSSINGS, flops, half_rows])
    rates, row_rates, latencies, flops_of_all, half_rows_of_all = zip(*found, strict=True)
    where = f"{mesh.shape['expert']} members on {jax.process_count()} hosts over {pools.current().transport}"
    return Calibration(min(rates), min(row_rates), max(latencies), min(flops_of_all), max(half_rows_of_all), where)


def _num_read(mesh: Mesh) -> int:
    """Members of other hosts, or, on one host, the other members."""
    here = jax.process_index()
    hosts_R = [device.process_index for device in mesh.devices[0]]
    return sum(host != here for host in hosts_R) or len(hosts_R) - 1


def _read_seconds(mesh: Mesh, elems: int) -> float:
    """From one member's publishing to its having the blocks of all others, beyond the time of the program itself."""
    members = mesh.shape["expert"]
    table = ExpertTable(members, members)
    handle_2 = pools.current().table("calibration", 1, table, ((elems,),), jnp.float32)
    blocks = jax.jit(lambda: jnp.zeros((1, members, elems)), out_shardings=named(mesh, LAYERED_EXPERTS))()

    def program(is_reading: bool) -> Callable:
        def member(handle_2: jax.Array, blocks: jax.Array) -> jax.Array:
            version_4, chain = publish(handle_2, (blocks,), 1, jnp.float32)
            ids = jnp.arange(members, dtype=jnp.int32)
            ids = jnp.where((ids != jax.lax.axis_index("expert")) & is_reading, ids, -1)
            read = get(version_4, chain, jnp.int32(0), ids, elems, jnp.float32)
            return release(version_4, read.sum())[None]

        return jax.jit(island(mesh, member, (REPLICATED, LAYERED_EXPERTS), TOKENS))

    return _seconds_beyond(program(True), program(False), jnp.asarray(handle_2), blocks)


def _row_seconds(mesh: Mesh, d_model: int, rows: int) -> float:
    """A forward pass in which each member sends each other one so many rows, beyond the time without them."""
    members = mesh.shape["expert"]
    table, others = ExpertTable(members, members), max(members - 1, 1)
    shapes = tuple(SWIGLU.shapes(d_model, 1).values())
    handle_2 = pools.current().table("calibration of rows", 1, table, shapes, jnp.float32)
    place = named(mesh, LAYERED_EXPERTS)
    blocks = jax.jit(lambda: tuple(jnp.zeros((1, members, *shape)) for shape in shapes), out_shardings=place)()

    def program(is_sending: bool) -> Callable:
        def member(handle_2: jax.Array, blocks: tuple) -> jax.Array:
            version_4, chain = publish(handle_2, blocks, len(shapes), jnp.float32)
            is_sent_E = (jnp.arange(members) != jax.lax.axis_index("expert")) & is_sending
            tokens_T = jnp.arange(rows * others, dtype=jnp.int32)
            settings = Settings(SWIGLU, 1, rows * others if is_sending else 0, is_deduplicated=False)
            y_TD = fluid_ffn(
                version_4, chain, jnp.int32(0), jnp.zeros((rows * others, d_model)), tokens_T,
                jnp.ones(rows * others), rows * is_sent_E.astype(jnp.int32), is_sent_E.astype(jnp.int32), settings,
            )  # fmt: skip
            return release(version_4, y_TD.sum())[None]

        return jax.jit(island(mesh, member, (REPLICATED, LAYERED_EXPERTS), TOKENS))

    return _seconds_beyond(program(True), program(False), jnp.asarray(handle_2), blocks)


def gemm_rate(
    mesh: Mesh, kind: Ffn, d_model: int, d_expert: int, matmul: str = "auto", rows: Sequence[int] = ROWS
) -> tuple[float, float]:
    """Of expert matmuls, forward and backward, on one of this host's devices while all others compute too.

    Args:
      mesh: of all hosts, which call this together.
      kind, d_model, d_expert: of the experts.
      matmul: of the expert FFN.
      rows: of the GEMMs that are timed, two numbers or more, the largest last.

    Returns:
      FLOP/s of large GEMMs, and rows at which a GEMM has half of it, from a line through times over rows.

    Raises:
      UserError: a host did not come.
    """
    members = mesh.size

    def seconds(num_rows: int) -> float:
        def member(x_ND: jax.Array, experts: Experts) -> tuple:
            segments = segments_of_counts(jnp.full(1, num_rows, jnp.int32))

            def total(x_ND: jax.Array, experts: Experts) -> jax.Array:
                return expert_ffn(x_ND, experts, segments, matmul).sum()

            # With the value, or XLA leaves out the last matmul of the forward pass, which is counted below.
            value, gradients = jax.value_and_grad(total, argnums=(0, 1))(x_ND, experts)
            return value[None], gradients

        shapes = kind.shapes(d_model, d_expert)
        experts = Experts(kind, {part: jnp.ones((members, *shape)) * 1e-3 for part, shape in shapes.items()})
        run = jax.jit(island(mesh, member, (TOKENS, TOKENS), TOKENS))
        return _median_seconds(run, jnp.ones((members * num_rows, d_model)), experts)

    times = [seconds(num_rows) for num_rows in rows]
    per_row, fixed = np.polyfit(rows, times, 1)
    # Of GEMMs too small to be told from noise the line may fall: the largest has half of the rate at least.
    per_row = max(per_row, times[-1] / (2 * rows[-1]))
    return 3 * kind.flops_per_row(d_model, d_expert) / per_row, float(np.clip(fixed / per_row, 0.0, rows[-1]))


def _seconds_beyond(run: Callable, without: Callable, *args: Any) -> float:
    """What one program takes more than another, at least LEAST_S."""
    return max(_median_seconds(run, *args) - _median_seconds(without, *args), LEAST_S)


def _median_seconds(run: Callable, *args: Any) -> float:
    jax.block_until_ready(run(*args))
    times = []
    for _ in range(REPEATS):
        hosts.barrier("are about to measure")
        begin = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
