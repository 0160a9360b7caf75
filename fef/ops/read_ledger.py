"""read_ledger: what this member moved and how long it waited under one version.

Worked example, 2 members with one expert each, one layer, one step: each reads the other's block in the forward pass
(weights 1) and again in the backward pass (refetch 1), and sends one block of gradients (gradients 1); its own expert
counts nowhere.
"""

import jax
import jax.numpy as jnp

from fef.pool.ledger import PURPOSES, WAITS
from fef.sharding import member_index


def read_ledger(
    version_4: jax.Array, after: jax.Array, num_layers: int, num_experts: int
) -> tuple[jax.Array, jax.Array]:
    """Reads this member's part of the ledger. Call inside an island.

    Args:
      version_4: (4,) int32, from `publish`.
      after: () float32 that depends on everything that is to be counted.
      num_layers: L of the table.
      num_experts: E of the table.

    Returns:
      counts_LQE (L, purposes, E) int32, units moved to (weights, refetch) or from (gradients) this member, and
      waits_us_LW (L, kinds) float32, microseconds.

    Sharding: per member. Gradient: none. vmap and jvp are refused by JAX.
    Raises (when it runs): StaleVersionError when the version is too old to be remembered.
    """
    results = (
        jax.ShapeDtypeStruct((num_layers, len(PURPOSES), num_experts), jnp.int32),
        jax.ShapeDtypeStruct((num_layers, len(WAITS)), jnp.float32),
    )
    call = jax.ffi.ffi_call("fef_ledger", results, has_side_effect=True)
    counts_LQE, waits_us_LW = call(version_4, member_index(), jax.lax.stop_gradient(after).astype(jnp.float32))
    return counts_LQE, waits_us_LW
