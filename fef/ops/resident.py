"""Contents that stay in the pool: renew makes them readable, an update changes them block by block.

    renew:         handle, contents        ->  version, chain, as from publish
    await_closed:  chain and its cotangent ->  token; all gradients are at home
    begin_update:  version, token          ->  the next version, token
    gradient_of, contents_of:  version, layer, local, token  ->  its gradient; the block and its home's own floats
    write_next:    next version, layer, local, token, block, own  ->  token
    commit:        next version, is_kept, token  ->  token; what was written is the contents

Worked example, 2 members, one layer, each the home of one block. Both renew the contents after 0 updates and agree on
version 7, read both blocks and send gradients of both. Each waits until all gradients are there, reads its own block
with its gradient, writes the block minus a tenth of it under version 8, and commits. The next program renews the
contents after 1 update: version 8, as they stand.

`contents`, the number of updates, is all that the program's state holds of a table. The pool refuses any other number
than its own, so that a state which is not the newest is never mistaken for it.

Sharding of all: per member, inside an island; `local` counts the member's blocks. Not differentiable: the gradients of
the contents are what `gradient_of` returns. vmap and jvp are refused by JAX (custom calls without a rule).
"""

from typing import Any

import jax
import jax.numpy as jnp

from fef.ops.publish import TOKEN, agree_on_version
from fef.sharding import member_index


def fill(version_4: jax.Array, token: jax.Array, array: jax.Array, first_layer: int, offset: int, is_own: bool):
    """Puts a part of the contents where it belongs, before anybody reads them; returns a () float32 token.

    Args:
      version_4: (4,) int32; table, incarnation, and two numbers without a meaning here.
      token: () float32.
      array: (layers, P/R, ...), the member's part of each block of layers from `first_layer` on; as blocks are stored,
        or float32 if `is_own`.
      offset: of the part in a block, bytes.
      is_own: whether it is a part of the floats that the home keeps beside the block.

    Raises (when it runs): PoolError (it does not fit), PoolClosedError.
    """
    call = jax.ffi.ffi_call("fef_fill", TOKEN, has_side_effect=True)
    return call(version_4, member_index(), token, array, first_layer=first_layer, offset=offset, is_own=is_own)


def renew(handle_2: jax.Array, contents: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Makes the contents readable, in place of `publish`; once in a program.

    Args:
      handle_2: (2,) int32, from `Pool.table` with `own_elems`; a constant by `opaque_handle`.
      contents: () int32, updates that the contents have had.

    Returns:
      version (4,) int32 and chain () float32.

    Raises (when it runs): StaleVersionError (not the newest contents), PoolError (the program before has not ended),
      PoolClosedError.
    """
    version_4 = agree_on_version(handle_2, "fef_renewal")
    return version_4, jax.ffi.ffi_call("fef_renew", TOKEN, has_side_effect=True)(version_4, member_index(), contents)


def await_closed(version_4: jax.Array, chain: jax.Array, d_chain: jax.Array) -> jax.Array:
    """Waits until no member reads or sends any more under the version; `d_chain` is the cotangent of its chain.

    Raises (when it runs): PoolTimeoutError, names who has not closed it.
    """
    return jax.ffi.ffi_call("fef_await_closed", TOKEN, has_side_effect=True)(version_4, member_index(), chain, d_chain)


def begin_update(version_4: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The version that the next contents will have, and a token once they may be written.

    Raises (when it runs): PoolTimeoutError (somebody still reads the contents before).
    """
    next_4 = agree_on_version(version_4[:2])
    return next_4, jax.ffi.ffi_call("fef_begin_update", TOKEN, has_side_effect=True)(next_4, member_index(), token)


def gradient_of(version_4: jax.Array, layer: jax.Array, local: jax.Array, token: jax.Array, block_elems: int):
    """(block_elems,) float32: the sum over all members, in the order of ranks; zeros where nobody sent any."""
    call = jax.ffi.ffi_call("fef_gradient_of", jax.ShapeDtypeStruct((block_elems,), jnp.float32))
    return call(version_4, member_index(), layer, local, token)


def contents_of(
    version_4: jax.Array,
    layer: jax.Array,
    local: jax.Array,
    token: jax.Array,
    block_elems: int,
    dtype: Any,
    own_elems: int,
) -> tuple[jax.Array, jax.Array]:
    """Block (block_elems,), dtype, and its home's own floats (own_elems,) float32."""
    results = (jax.ShapeDtypeStruct((block_elems,), dtype), jax.ShapeDtypeStruct((own_elems,), jnp.float32))
    block, own = jax.ffi.ffi_call("fef_contents_of", results)(version_4, member_index(), layer, local, token)
    return block, own


def write_next(
    next_4: jax.Array, layer: jax.Array, local: jax.Array, token: jax.Array, block: jax.Array, own: jax.Array
) -> jax.Array:
    """Writes a block of the next contents, shaped as `contents_of` returns it."""
    call = jax.ffi.ffi_call("fef_write_next", TOKEN, has_side_effect=True)
    return call(next_4, member_index(), layer, local, token, block, own)


def commit(next_4: jax.Array, is_kept: jax.Array, token: jax.Array) -> jax.Array:
    """Once every block is written: they are the contents. is_kept () bool: not they, but the bytes that were before."""
    call = jax.ffi.ffi_call("fef_commit", TOKEN, has_side_effect=True)
    return call(next_4, member_index(), is_kept.astype(jnp.int32), token)
