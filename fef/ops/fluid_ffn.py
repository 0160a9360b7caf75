"""fluid_ffn: the whole expert layer where, expert by expert, weights come to the tokens or tokens go to the weights.

    y_t = sum over the assignments n of token t of weight_n FFN_expert(n)(x_t)

Worked example, 2 members with one expert each. Member 0 has tokens 0, 1 and 2; 0 and 2 are assigned to expert 1, with
weights 0.5 and 1. If it says that expert 1 is visited, it leaves rows 0 and 2 of x and says so; member 1 reads
them, multiplies them with its expert, and leaves the weighted results, which member 0 reads back: they are y_0 and y_2.
Otherwise member 0 reads expert 1 and computes them itself. In the backward pass the rows of dy go the same way, and
what comes back are rows of dx and the gradients of the two weights; or member 0 sends the gradient of expert 1.

Only float32 blocks on a CPU.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fef.ffn import Ffn
from fef.ops.device import REAL, Device
from fef.ops.first_order import first_order
from fef.ops.pooled_ffn import HIDDEN
from fef.ops.publish import TOKEN
from fef.sharding import member_index


class Settings(NamedTuple):
    """What is fixed when a program is compiled.

    Attributes:
      kind: of the experts; the native library must have it.
      d_expert: F.
      room: rows of other members, one for each assignment, that can visit this one; 0: nobody visits anybody, and the
        members do not wait for each other's rows.
      is_deduplicated: whether a token's row goes to a host once, however many of its experts live there.
      device: whose time this takes; see `fef.ops.device`.
    """

    kind: Ffn
    d_expert: int
    room: int
    is_deduplicated: bool = True
    device: Device = REAL

    @property
    def attributes(self) -> dict:
        """Of the custom calls."""
        return {
            **self.device.rates, "has_values": self.device.has_values, "ffn": self.kind.name,
            "is_deduplicated": self.is_deduplicated,
        }  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(8,))
def fluid_ffn(
    version_4: jax.Array,
    chain: jax.Array,
    layer: jax.Array,
    x_TD: jax.Array,
    token_N: jax.Array,
    weight_N: jax.Array,
    rows_E: jax.Array,
    is_visited_E: jax.Array,
    settings: Settings,
) -> jax.Array:
    """Applies each assignment's expert and adds the weighted results up. Call inside an island, on all members alike.

    Args:
      version_4: (4,) int32 and
      chain: () float32, from `publish`.
      layer: () int32, layer of the table.
      x_TD: (T, D) float32.
      token_N: (N,) int32 and
      weight_N: (N,) float32, of the assignments, sorted by expert; those beyond the sum of rows_E are unused.
      rows_E: (E,) int32, assignments of each expert.
      is_visited_E: (E,) int32, 1 where the rows go to the expert, 0 where it is read; 0 for the member's own.
      settings: see there.

    Returns:
      y_TD (T, D) float32; tokens without an assignment get 0.

    Sharding: per member. All members of the group take part in each call, with the same settings.
    Gradient: with respect to x_TD, weight_N and, through `chain`, to the arrays of the publish behind it. Reverse mode,
      first order. vmap and jvp are refused by JAX, second order by `first_order`.
    Raises (when it runs): as `get`; PoolError when more rows come to visit than there is room for.
    """
    return _forward(version_4, chain, layer, x_TD, token_N, weight_N, rows_E, is_visited_E, settings)[0]


def _forward(version_4, chain, layer, x_TD, token_N, weight_N, rows_E, is_visited_E, settings):
    def floats(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    rows, width = token_N.shape[0] + settings.room, x_TD.shape[1]
    hidden = [floats(rows if name in settings.kind.inner else 0, settings.d_expert) for name in HIDDEN]
    kept = (floats(rows, width), floats(rows, width), *hidden)
    call = jax.ffi.ffi_call("fef_fluid_ffn", (floats(*x_TD.shape), *kept))
    operands = (version_4, member_index(), layer, chain, x_TD, token_N, weight_N, rows_E, is_visited_E)
    return call(*operands, **settings.attributes)


def _fluid_ffn_fwd(version_4, chain, layer, x_TD, token_N, weight_N, rows_E, is_visited_E, settings):
    x_TD, weight_N = first_order("fluid_ffn", (x_TD, weight_N))
    operands = (version_4, chain, layer, x_TD, token_N, weight_N, rows_E, is_visited_E)
    y_TD, *kept = _forward(*operands, settings)
    return y_TD, (version_4, chain, layer, kept, token_N, weight_N, rows_E, is_visited_E)


def _fluid_ffn_bwd(settings, residuals, dy_TD):
    version_4, chain, layer, kept, token_N, weight_N, rows_E, is_visited_E = residuals
    dy_TD, kept, weight_N = first_order("fluid_ffn", (dy_TD, kept, weight_N))
    results = tuple(jax.ShapeDtypeStruct(array.shape, jnp.float32) for array in (dy_TD, weight_N))
    call = jax.ffi.ffi_call("fef_fluid_ffn_backward", (*results, TOKEN), has_side_effect=True)
    operands = (version_4, member_index(), layer, chain, dy_TD, *kept, token_N, weight_N, rows_E, is_visited_E)
    dx_TD, dweight_N, d_chain = call(*operands, **settings.attributes)
    return None, d_chain, None, dx_TD, None, dweight_N, None, None


fluid_ffn.defvjp(_fluid_ffn_fwd, _fluid_ffn_bwd)
