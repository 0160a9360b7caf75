"""The device mesh and what lives where on it. The only file that makes a mesh.

Axes ('data', 'expert'): tokens are sharded over both, experts over 'expert' (R members, replicated over 'data'),
everything else is replicated.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fef.config import UserError

AXES = ("data", "expert")
TOKENS = PartitionSpec(AXES)  # the leading dimension (batch, or one entry per member) over all devices
EXPERTS = PartitionSpec("expert")  # the leading dimension (expert positions) over the members
LAYERED_EXPERTS = PartitionSpec(None, "expert")  # the same behind a leading axis of layers
REPLICATED = PartitionSpec()


def make_mesh(devices: int, data: int = 1) -> Mesh:
    """A (data, devices / data) mesh of the first `devices` devices, as many of each host, in the order of the hosts.

    Raises:
      UserError: fewer devices exist, or data does not divide devices, or the hosts do not.
    """
    if devices % data:
        raise UserError(f"config.mesh.data={data} must divide config.mesh.devices={devices}")
    if devices > jax.device_count():
        raise UserError(
            f"config.mesh.devices={devices}, but JAX has {jax.device_count()}; lower it or start JAX with more"
        )
    per_host, rest = divmod(devices, jax.process_count())
    if rest:
        raise UserError(
            f"config.mesh.devices={devices} must be a multiple of the number of hosts {jax.process_count()}"
        )
    chosen = [device for host in range(jax.process_count()) for device in jax.local_devices(host)[:per_host]]
    return jax.make_mesh((data, devices // data), AXES, axis_types=(AxisType.Auto,) * 2, devices=chosen)


def num_members(mesh: Mesh) -> int:
    """R, the size of the expert axis."""
    return mesh.shape["expert"]


def named(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """The placement `spec` on `mesh`."""
    return NamedSharding(mesh, spec)


def place(tree: Any, shardings: Any) -> Any:
    """Puts arrays that every host has, equal and whole, where `shardings` (of each leaf, or one for all) says.

    `jax.device_put` does this too, but with several hosts it compares each leaf over the network first.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def put(place: NamedSharding, part: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jax.make_array_from_callback(np.shape(leaf), place, np.asarray(leaf).__getitem__), part
        )

    return jax.tree.map(put, shardings, tree)


def island(mesh: Mesh, body: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """`body` as seen by one member, over both mesh axes."""
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def member_index() -> jax.Array:
    """Inside an island: (2,) int32, the member's data-parallel group and its rank."""
    return jnp.stack([jax.lax.axis_index("data"), jax.lax.axis_index("expert")]).astype(jnp.int32)
