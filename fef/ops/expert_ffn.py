"""The expert FFN on arrays: three grouped matmuls and a SwiGLU.

    y[rows of e] = (silu(x W_gate_e) * x W_up_e) W_down_e

Source: N. Shazeer, "GLU Variants Improve Transformer", 2020, section 2.
"""

import jax

from fef.experts import Experts
from fef.ops import device as devices
from fef.ops.device import REAL, Device
from fef.ops.grouped_matmul import Segments, grouped_matmul


def expert_ffn(
    rows_ND: jax.Array, experts: Experts, segments: Segments, implementation: str = "auto", device: Device = REAL
) -> jax.Array:
    """Applies each segment's expert to its rows.

    Args:
      rows_ND: (N, D), compute dtype.
      experts: positions that the segments name; cast to the dtype of the rows.
      segments: runs of rows per position.
      implementation: of `grouped_matmul`.
      device: whose time this takes; see `fef.ops.device`.

    Returns:
      (N, D), dtype of the rows; rows in no segment are zero.

    Sharding: arrays of one member. Gradient: reverse mode, in rows and experts. Raises: as `grouped_matmul`.
    """
    experts = experts.astype(rows_ND.dtype)
    if device.is_modelled:
        flops_per_row = 6.0 * experts.w_gate_PDF.shape[1] * experts.w_gate_PDF.shape[2]
        rows_ND, clock = devices.start(rows_ND, segments, flops_per_row, device)
        y_ND = _values(rows_ND, experts, segments, implementation, device.has_values)
        return devices.finish(y_ND, clock, segments, flops_per_row, device)
    return _values(rows_ND, experts, segments, implementation, has_values=True)


def _values(
    rows_ND: jax.Array, experts: Experts, segments: Segments, implementation: str, has_values: bool
) -> jax.Array:
    if not has_values:
        return devices.stand_in(rows_ND, experts, segments)

    def matmul(x_ND: jax.Array, w_PDF: jax.Array) -> jax.Array:
        return grouped_matmul(x_ND, w_PDF, segments, implementation=implementation)

    hidden_NF = jax.nn.silu(matmul(rows_ND, experts.w_gate_PDF)) * matmul(rows_ND, experts.w_up_PDF)
    return matmul(hidden_NF, experts.w_down_PFD)
