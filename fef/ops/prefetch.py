"""prefetch: a hint that blocks will be read soon. Dropping, repeating or merging hints changes time, never values.

Worked example, 2 members: member 0 expects to need expert 1 of layer 3 and passes its activations through
prefetch(version, 3, [1, -1], x); x comes back as the same buffer, and the memory of the block is asked for.
"""

import jax
import jax.numpy as jnp

from fef.sharding import member_index


@jax.custom_vjp
def prefetch(version_4: jax.Array, layer: jax.Array, ids_n: jax.Array, x: jax.Array) -> jax.Array:
    """Hints that these blocks will be read, and returns x. Call inside an island.

    Args:
      version_4: (4,) int32, from `publish`.
      layer: () int32, layer of the table.
      ids_n: (n,) int32, experts; -1 marks an unused place, others out of range are ignored.
      x: any array; aliased through, so that XLA cannot drop the hint or move it behind the use of x.

    Returns:
      x.

    Sharding: per member. Gradient: the identity in x; hints are not repeated in the backward pass. vmap and jvp are
      refused by JAX.
    Raises (when it runs): PoolClosedError.
    """
    call = jax.ffi.ffi_call("fef_prefetch", jax.ShapeDtypeStruct(x.shape, x.dtype), input_output_aliases={4: 0})
    return call(version_4, member_index(), jnp.asarray(layer, jnp.int32), ids_n, x)


prefetch.defvjp(
    lambda version_4, layer, ids_n, x: (prefetch(version_4, layer, ids_n, x), None),
    lambda _, dx: (None, None, None, dx),
)
