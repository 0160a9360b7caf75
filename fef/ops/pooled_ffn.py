"""pooled_ffn: the whole expert FFN against weights that stay where they are, in the pool.

    y[rows of e] = FFN_e(x), of a kind in `fef.ffn`

Worked example, 2 members with one expert each: member 0 has 3 rows of expert 0 and 2 of expert 1, rows_E = [3, 2]. It
multiplies rows 0-2 with its own memory and rows 3-4 with that of member 1, without a copy. Backward, it multiplies
with the same memory again, and writes the gradients of both experts into their homes' staging.

Only float32 blocks on a CPU; otherwise `get` and `expert_ffn`, which is also this operation's pure-JAX reference.
"""

import functools

import jax
import jax.numpy as jnp

from fef.ffn import SWIGLU, Ffn
from fef.ops.device import REAL, Device
from fef.ops.first_order import first_order
from fef.ops.publish import TOKEN
from fef.sharding import member_index

HIDDEN = ("gate", "up")  # what the native library keeps for the backward pass, as far as the kind has it


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def pooled_ffn(
    version_4: jax.Array,
    chain: jax.Array,
    layer: jax.Array,
    x_ND: jax.Array,
    rows_E: jax.Array,
    like_0F: jax.Array,
    device: Device = REAL,
    kind: Ffn = SWIGLU,
) -> jax.Array:
    """Applies each row's expert. Call inside an island.

    Args:
      version_4: (4,) int32 and
      chain: () float32, from `publish`.
      layer: () int32, layer of the table.
      x_ND: (N, D) float32, rows sorted by expert; rows beyond the sum of rows_E are unused.
      rows_E: (E,) int32, rows of each expert.
      like_0F: (0, F) float32, gives the hidden width.
      device: whose time this takes; see `fef.ops.device`.
      kind: of the experts; the native library must have it.

    Returns:
      y_ND (N, D) float32; unused rows are zero.

    Sharding: per member.
    Gradient: with respect to x_ND and, through `chain`, to the arrays of the publish behind it. Reverse mode, first
      order. vmap and jvp are refused by JAX, second order by `first_order`.
    Raises (when it runs): as `get`.
    """
    return _forward(version_4, chain, layer, x_ND, rows_E, like_0F, device, kind)[0]


def _forward(version_4, chain, layer, x_ND, rows_E, like_0F, device, kind):
    num_rows, d_expert = x_ND.shape[0], like_0F.shape[1]
    hidden = [jax.ShapeDtypeStruct((num_rows if name in kind.inner else 0, d_expert), jnp.float32) for name in HIDDEN]
    call = jax.ffi.ffi_call("fef_pooled_ffn", (jax.ShapeDtypeStruct(x_ND.shape, jnp.float32), *hidden))
    return call(version_4, member_index(), layer, chain, x_ND, rows_E, **_attributes(device, kind))


def _attributes(device, kind):
    return {**device.rates, "has_values": device.has_values, "ffn": kind.name}


def _pooled_ffn_fwd(version_4, chain, layer, x_ND, rows_E, like_0F, device, kind):
    x_ND = first_order("pooled_ffn", x_ND)
    y_ND, g_NF, u_NF = _forward(version_4, chain, layer, x_ND, rows_E, like_0F, device, kind)
    return y_ND, (version_4, chain, layer, x_ND, rows_E, g_NF, u_NF)


def _pooled_ffn_bwd(device, kind, residuals, dy_ND):
    version_4, chain, layer, x_ND, rows_E, g_NF, u_NF = residuals
    dy_ND, x_ND, g_NF, u_NF = first_order("pooled_ffn", (dy_ND, x_ND, g_NF, u_NF))
    results = (jax.ShapeDtypeStruct(x_ND.shape, jnp.float32), TOKEN)
    call = jax.ffi.ffi_call("fef_pooled_ffn_backward", results, has_side_effect=True)
    operands = (version_4, member_index(), layer, chain, dy_ND, x_ND, g_NF, u_NF, rows_E)
    dx_ND, d_chain = call(*operands, **_attributes(device, kind))
    return None, d_chain, None, dx_ND, None, jnp.zeros((0, g_NF.shape[1]), jnp.float32)


pooled_ffn.defvjp(_pooled_ffn_fwd, _pooled_ffn_bwd)
