"""Modelled device time: expert matmuls take as long as on an accelerator, and leave the CPU to the network.

    x, clock = start(x, ...)      the device begins when x is there
    y = ... x ...                 computed here, or a cheap stand-in for it
    y = finish(y, clock, ...)     y is there when the device would have it

Worked example, 100 FLOP/s, half_rows 5, two experts with 20 and 0 rows of 10 FLOPs each: (20 + 5) * 10 / 100 = 2.5 s
forward, twice that backward. An expert without rows costs nothing. The CPU sleeps for what computing has left of it.

CPU only: a stand-in for accelerators in comparisons of what moves, on a machine that has none.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from fef.experts import Experts
from fef.ops.grouped_matmul import Segments
from fef.ops.publish import TOKEN
from fef.pool import native


@dataclasses.dataclass(frozen=True)
class Device:
    """What expert matmuls cost.

    Attributes:
      flops: rate of a large GEMM, FLOP/s; 0 models nothing.
      half_rows: rows at which a GEMM has half of that rate; each GEMM costs as if it had so many rows more.
      has_values: whether the matmuls are computed; else y = x * w, w_D the sum of the expert's matrices' means
        over F, which takes hardly any time and still shows whether each row has met its expert.
    """

    flops: float = 0.0
    half_rows: float = 0.0
    has_values: bool = True

    @property
    def is_modelled(self) -> bool:
        return self.flops > 0

    @property
    def rates(self) -> dict[str, np.float64]:
        """Attributes of the custom calls."""
        return {"flops": np.float64(self.flops), "half_rows": np.float64(self.half_rows)}

    def seconds(self, rows_E: np.ndarray, flops_per_row: float) -> float:
        """Time of one GEMM for each expert that has rows."""
        rows_E = np.asarray(rows_E, float)
        return float(((rows_E + self.half_rows) * (rows_E > 0)).sum() * flops_per_row / self.flops)


REAL = Device()


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def start(x_ND: jax.Array, segments: Segments, flops_per_row: float, device: Device) -> tuple[jax.Array, jax.Array]:
    """The device begins with the rows of `segments`.

    Args:
      x_ND: (N, D), any dtype; aliased through.
      segments: rows of each expert.
      flops_per_row: of the forward pass; the backward pass has twice as many.
      device: modelled.

    Returns:
      x_ND and clock () float32 for `finish`; its cotangent is the clock of the backward pass.

    Sharding: arrays of one member. Gradient: the identity in x_ND, after the time of the backward pass.
    """
    native.library()
    results = (jax.ShapeDtypeStruct(x_ND.shape, x_ND.dtype), TOKEN)
    x_ND, clock = jax.ffi.ffi_call("fef_device_start", results, input_output_aliases={0: 0})(x_ND)
    return x_ND, clock


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def finish(y_ND: jax.Array, clock: jax.Array, segments: Segments, flops_per_row: float, device: Device) -> jax.Array:
    """Returns y_ND, (N, D) of any dtype, when the device is through with what began at `clock`; see `start`.

    Sharding: arrays of one member. Gradient: the identity in y_ND; the backward pass begins with it.
    """
    result = jax.ShapeDtypeStruct(y_ND.shape, y_ND.dtype)
    call = jax.ffi.ffi_call("fef_device_finish", result, input_output_aliases={0: 0})
    flops = np.float64(flops_per_row)
    return call(y_ND, clock, segments.rows_G, segments.expert_G, flops_per_row=flops, **device.rates)


def _start_fwd(x_ND, segments, flops_per_row, device):
    return start(x_ND, segments, flops_per_row, device), segments


def _start_bwd(flops_per_row, device, segments, cotangents):
    dx_ND, d_clock = cotangents
    return finish(dx_ND, d_clock, segments, 2 * flops_per_row, device), None


def _finish_fwd(y_ND, clock, segments, flops_per_row, device):
    return finish(y_ND, clock, segments, flops_per_row, device), segments


def _finish_bwd(flops_per_row, device, segments, dy_ND):
    dy_ND, d_clock = start(dy_ND, segments, flops_per_row, device)
    return dy_ND, d_clock, None


start.defvjp(_start_fwd, _start_bwd)
finish.defvjp(_finish_fwd, _finish_bwd)


def stand_in(rows_ND: jax.Array, experts: Experts, segments: Segments) -> jax.Array:
    """y_ND = x_ND * w_D of each row's expert, see `Device`; rows in no segment are zero. `segments` ascend."""
    inner_PD = [experts[f"w_{name}"].mean(2) for name in experts.kind.inner]
    w_PD = functools.reduce(jnp.add, inner_PD) + experts["w_down"].mean(1)
    row_N = jnp.arange(rows_ND.shape[0], dtype=jnp.int32)
    segment_N = jnp.searchsorted(segments.first_G, row_N, side="right", method="compare_all") - 1
    is_used_N = row_N - segments.first_G[segment_N] < segments.rows_G[segment_N]
    return jnp.where(is_used_N[:, None], rows_ND * w_PD[segments.expert_G[segment_N]], 0)
