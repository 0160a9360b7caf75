"""get: a one-sided read of named blocks. Its transpose is accumulate: gradient blocks are sent home.

    get:         (version, chain, layer, ids)  ->  blocks
    accumulate:  (version, chain, layer, ids, d_blocks)  ->  cotangent of the chain, which orders it before collect

Worked example, 2 members, experts 0 and 1: member 0 calls get with ids [1, -1] and receives the block of expert 1
(home: member 1) and zeros. In the backward pass the gradient of that block is staged at member 1, the zeros' dropped.

A read has no side effect and may be repeated (remat), merged or dropped by XLA; the version operand makes that safe.
"""

import jax
import jax.numpy as jnp

from fef.ops.first_order import first_order
from fef.ops.publish import TOKEN
from fef.sharding import member_index


def get(
    version_4: jax.Array,
    chain: jax.Array,
    layer: jax.Array,
    ids_n: jax.Array,
    block_elems: int,
    dtype,
) -> jax.Array:
    """Reads blocks from the pool. Call inside an island.

    Args:
      version_4: (4,) int32 and
      chain: () float32, from `publish`.
      layer: () int32, layer of the table.
      ids_n: (n,) int32, experts; -1 gives zeros. An expert may be named twice.
      block_elems: elements of a block.
      dtype: how blocks are stored, as given to `publish`.

    Returns:
      blocks (n, block_elems), dtype.

    Sharding: per member; members read independently of each other, the homes' programs take no part.
    Gradient: with respect to `arrays` of the publish behind `chain`; float32 on the way. Reverse mode, first order.
      vmap and jvp are refused by JAX, second order by `first_order`.
    Raises (when it runs): StaleVersionError, PoolTimeoutError (a home has not published, or another member has not
      sent its gradients), PoolClosedError, PoolError (layer, expert or block size out of the table's).
    """
    return _get(version_4, chain, jnp.asarray(layer, jnp.int32), ids_n, _Like(block_elems, jnp.dtype(dtype).name))


@jax.tree_util.register_static
class _Like(tuple):
    """(block_elems, dtype name)."""

    def __new__(cls, block_elems: int, dtype: str):
        return super().__new__(cls, (block_elems, dtype))


@jax.custom_vjp
def _get(version_4, chain, layer, ids_n, like):
    block_elems, dtype = like
    blocks = jax.ShapeDtypeStruct((ids_n.shape[0], block_elems), jnp.dtype(dtype))
    return jax.ffi.ffi_call("fef_get", blocks)(version_4, member_index(), layer, chain, ids_n)


def _get_fwd(version_4, chain, layer, ids_n, like):
    return _get(version_4, chain, layer, ids_n, like), (version_4, chain, layer, ids_n)


def _get_bwd(residuals, d_blocks):
    version_4, chain, layer, ids_n = residuals
    return None, accumulate(version_4, chain, layer, ids_n, d_blocks), None, None, None


_get.defvjp(_get_fwd, _get_bwd)


def accumulate(
    version_4: jax.Array, chain: jax.Array, layer: jax.Array, ids_n: jax.Array, d_blocks: jax.Array
) -> jax.Array:
    """Sends gradient blocks home and closes the (layer, microbatch) for this member; returns a () float32 token.

    The chain keeps it behind publish also when XLA has dropped the read, as it does when only the gradient is used.
    """
    d_blocks = first_order("get", d_blocks.astype(jnp.float32))
    call = jax.ffi.ffi_call("fef_accumulate", TOKEN, has_side_effect=True)
    return call(version_4, member_index(), layer, chain, ids_n, d_blocks)
