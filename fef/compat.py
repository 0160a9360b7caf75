"""The private parts of JAX that fef uses, each with the reason. No other file imports jax._src."""

import functools
import os
from typing import Any

from jax._src import clusters, distributed
from jax._src.lib import _jax

# Not GCE and not plain Kubernetes: to find these, JAX asks the network.
_CLUSTERS = ("slurm", "ompi", "gketpu")


def detected_cluster(timeout_s: float) -> tuple[str, int, int, tuple[int, ...] | None] | None:
    """Coordinator, number of hosts, this host's number and its devices, as the cluster's environment says; or None.

    `jax.distributed.initialize` does the same, but only together with the connection.
    """
    for cluster in clusters.ClusterEnv._cluster_types:
        if cluster.name in _CLUSTERS and cluster.is_env_present():
            hosts, local = cluster.get_process_count(), cluster.get_local_process_id()
            if hosts == 1:
                return None
            port = os.environ.get("JAX_COORDINATOR_PORT")
            coordinator = cluster.get_coordinator_address(timeout_secs=int(timeout_s), override_coordinator_port=port)
            return coordinator, hosts, cluster.get_process_id(), None if local is None else (local,)
    return None


def let_gloo_listen_at(address: str) -> None:
    """XLA:CPU's collectives listen at this address of ours.

    Gloo would take whatever the machine's own name stands for, often loopback or nothing at all; jaxlib can be told
    better, but JAX has no option for it.
    """
    _jax.make_gloo_tcp_collectives = functools.partial(_jax.make_gloo_tcp_collectives, hostname=address)


def coordination_client() -> Any:
    """The client of JAX's coordination service: barriers and keys with deadlines, where the public functions have none.

    Only after `jax.distributed.initialize`.
    """
    return distributed.global_state.client
