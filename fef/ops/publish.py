"""publish: the home puts its blocks into the pool. Its transpose is collect: the home gets their gradients' sum.

    publish:  member's arrays  ->  (version, chain)
    collect:  chain's cotangent ->  gradients of the member's arrays

Worked example, 2 members, one layer, experts 0 and 1 (member 0 is home of 0, member 1 of 1). Both call publish with
their own block; they agree on version 7. Member 0 reads expert 1 under version 7 and vice versa. In the backward pass
both send gradients of both experts; collect returns to member 0 the gradient of expert 0, that of member 0 plus that of
member 1 (always in this order), and to member 1 that of expert 1.

`version` and `chain` are what every read takes. The version says which contents are meant, so that XLA may repeat,
merge or drop reads, but never confuse two steps. The chain carries no value; its cotangent makes collect come after
every accumulate. The version is agreed by a sum over the members, which also keeps executions that publish in one
order on all devices.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fef.ops.first_order import first_order
from fef.sharding import AXES, member_index

TOKEN = jax.ShapeDtypeStruct((), jnp.float32)


def opaque_handle(handle_2: np.ndarray) -> jax.Array:
    """A handle from `Pool.table` for a program that is traced for this one pool: (2,) int32, per member.

    XLA does not see the numbers. It would fold a constant and its neighbours, another way for [0, 1], an iota, than for
    [0, 2]; programs that differ so far are rounded differently, and the same training would give other bits in a
    process's first pool than in its second.

    Not differentiable: integers.
    """
    call = jax.ffi.ffi_call("fef_handle", jax.ShapeDtypeStruct((2,), jnp.int32))
    table, incarnation = handle_2
    return call(table=np.int32(table), incarnation=np.int32(incarnation))


def agree_on_version(handle_2: jax.Array, ticket: str = "fef_ticket") -> jax.Array:
    """Version (4,) int32 of all members, with the number that the first one has drawn by the call `ticket`."""
    call = jax.ffi.ffi_call(ticket, jax.ShapeDtypeStruct((), jnp.int32), has_side_effect=True)
    counter = jax.lax.psum(call(handle_2, member_index()), AXES)
    return jnp.stack([handle_2[0], handle_2[1], counter, jnp.int32(0)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def publish(handle_2: jax.Array, arrays: tuple, num_parts: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Publishes this member's blocks of all layers of a table. Call inside an island, once per optimizer step.

    Args:
      handle_2: (2,) int32, from `Pool.table`; a constant by `opaque_handle`.
      arrays: for each run of consecutive layers, `num_parts` arrays (layers, P/R, ...); a block is the concatenation
        of its parts.
      num_parts: matrices in a block.
      dtype: how blocks are stored; arrays are cast to it.

    Returns:
      version (4,) int32 and chain () float32.

    Sharding: per member; the arrays are the member's part of the position axis.
    Gradient: with respect to `arrays`, the sum over all members of what reads under this version sent back; reverse
      mode, first order. vmap and jvp are refused by JAX (a custom call without a rule), second order by `first_order`.
    Raises: ValueError, arrays that are no whole runs. When it runs: PoolExhaustedError, PoolTimeoutError (a slot is
      being read for too long), PoolClosedError, PoolError (shapes do not fit the table).
    """
    if not arrays or len(arrays) % num_parts:
        raise ValueError(f"publish: {len(arrays)} arrays are no whole number of runs of {num_parts} parts")
    version_4 = agree_on_version(handle_2)
    stored = [array.astype(dtype) for array in arrays]
    call = jax.ffi.ffi_call("fef_publish", TOKEN, has_side_effect=True)
    return version_4, call(version_4, member_index(), *stored, num_parts=num_parts)


def _publish_fwd(handle_2: jax.Array, arrays: tuple, num_parts: int, dtype: Any) -> Any:
    version_4, chain = publish(handle_2, arrays, num_parts, dtype)
    like = tuple(jnp.zeros((0,), array.dtype) for array in arrays)  # carries the dtypes; residuals must be arrays
    shapes = tuple(array.shape for array in arrays)
    return (version_4, chain), (version_4, chain, _Static(shapes), like)


def _publish_bwd(num_parts: int, dtype: Any, residuals: Any, cotangents: Any) -> Any:
    version_4, chain, static, like = residuals
    d_chain = first_order("publish", cotangents[1])
    member_2 = member_index()
    token = jax.ffi.ffi_call("fef_await_closed", TOKEN, has_side_effect=True)(version_4, member_2, chain, d_chain)
    results = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in static.value)
    sums = jax.ffi.ffi_call("fef_collect", results, has_side_effect=True)(
        version_4, member_2, token, num_parts=num_parts
    )
    return None, tuple(total.astype(array.dtype) for total, array in zip(sums, like, strict=True))


publish.defvjp(_publish_fwd, _publish_bwd)


@jax.tree_util.register_static
class _Static:
    """A hashable value among residuals."""

    def __init__(self, value: tuple):
        self.value = value

    def __hash__(self) -> int:
        return hash(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.value == other.value
