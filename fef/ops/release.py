"""release: the end of a version that nobody differentiates, so that its slots may be refilled.

Worked example, 2 members: an evaluation publishes version 8, both members read and compute their loss, both release
version 8 with that loss as `after`; once both have, the next publish may use the same slots. (A training step needs no
release: collect does it.)
"""

import jax
import jax.numpy as jnp

from fef.ops.publish import TOKEN
from fef.sharding import member_index


def release(version_4: jax.Array, after: jax.Array) -> jax.Array:
    """Says that this member reads no more under the version. Call inside an island.

    Args:
      version_4: (4,) int32, from `publish`.
      after: () float32 that depends on every read of this member.

    Returns:
      token () float32 without a value.

    Sharding: per member. Gradient: none (its input is not differentiated). vmap and jvp are refused by JAX.
    Raises (when it runs): PoolClosedError.
    """
    call = jax.ffi.ffi_call("fef_release", TOKEN, has_side_effect=True)
    return call(version_4, member_index(), jax.lax.stop_gradient(after).astype(jnp.float32))
