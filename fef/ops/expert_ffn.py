"""The expert FFN on arrays: grouped matmuls, and the activation of the experts' kind (`fef.ffn`)."""

import jax
import jax.numpy as jnp

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
        flops_per_row = experts.kind.flops_per_row(*experts.widths)
        rows_ND, clock = devices.start(rows_ND, segments, flops_per_row, device)
        y_ND = _values(rows_ND, experts, segments, implementation, device.has_values)
        return devices.finish(y_ND, clock, segments, flops_per_row, device)
    return _values(rows_ND, experts, segments, implementation, has_values=True)


def _values(
    rows_ND: jax.Array, experts: Experts, segments: Segments, implementation: str, has_values: bool
) -> jax.Array:
    if not has_values:
        return devices.stand_in(rows_ND, experts, segments)

    def linear(name: str, x_NI: jax.Array) -> jax.Array:
        y_NO = grouped_matmul(x_NI, experts[f"w_{name}"], segments, implementation=implementation)
        if not experts.kind.has_biases:
            return y_NO
        # The bias of each row's expert, as a matmul too: no bias for rows in no segment, and its gradient is a sum over
        # the rows of each expert.
        ones_N1, b_P1O = jnp.ones_like(x_NI[:, :1]), experts[f"b_{name}"][:, None]
        return y_NO + grouped_matmul(ones_N1, b_P1O, segments, implementation=implementation)

    return experts.kind(rows_ND, linear)
