"""What must be set in a process before JAX starts its backend. The only such place.

- `PJRT_NPROC`: with more virtual devices than cores, XLA:CPU's pool needs a thread for each handler that waits.
- glibc malloc: XLA's buffers otherwise go back to the operating system after every step and are page-faulted in
  again, about a fifth of the CPU time of a small training step. Memory is then never returned to the system,
  which is why there is an opt-out (`config.run.malloc=False`).
- XLA aborts the process when a collective has waited for 40 s. A member that waits in the pool keeps the others waiting
  in the next collective, and the pool's own error, which says what is missing, must come first.
- The hosts of a job find each other: by a `Job` given, by the environment that `experiments.launch` sets, or by that of
  a cluster (SLURM, Open MPI, TPUs on GKE). Where there is none of these, nothing is connected to anything.
"""

from __future__ import annotations

import ctypes
import math
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fef.rendezvous import Job

MIN_POOL_THREADS = 16
JOIN_TIMEOUT_S = 60.0
_COLLECTIVE_TIMEOUT = "--xla_cpu_collective_call_terminate_timeout_seconds"  # between the devices of a process
_GLOO_TIMEOUT = "--xla_cpu_collective_timeout_seconds"  # between processes
_COLLECTIVE_MARGIN_S = 60
_HEARTBEAT_TIMEOUT_S = 10
_SHUTDOWN_TIMEOUT_S = 60
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8  # glibc's malloc.h


def prepare(
    num_devices: int | None = None,
    malloc: bool = True,
    deadline_s: float | None = None,
    job: Job | None = None,
    join_timeout_s: float = JOIN_TIMEOUT_S,
) -> None:
    """Prepares this process and connects it to its job; call before the first JAX computation.

    Args:
      num_devices: number of virtual CPU devices over all hosts, or None to leave JAX's default.
      malloc: whether glibc may keep freed memory instead of returning it to the system.
      deadline_s: the pool's (`config.pool.deadline_s`), seconds; None means its default.
      job: which of which hosts this process is; None takes it from the environment.
      join_timeout_s: longest wait for the other hosts.

    Raises:
      UserError: a host did not come (named, with the coordinator's address), or the devices cannot be divided.
      RuntimeError: when the backend already runs with another number of devices.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    if malloc:
        _keep_freed_memory()

    # Imports of JAX, which reads the variables above. It reads the others when a backend starts.
    import jax

    from fef.config import ConfigError, PoolConfig

    job = job or _job_from_environment(join_timeout_s)
    hosts = job.num_hosts if job else 1
    if num_devices is not None and num_devices % hosts:
        raise ConfigError("mesh.devices", num_devices, f"must be a multiple of the number of hosts, {hosts}")
    local_devices = None if num_devices is None else num_devices // hosts
    os.environ.setdefault("PJRT_NPROC", str(max(MIN_POOL_THREADS, 4 * (local_devices or 1))))
    deadline_s = PoolConfig().deadline_s if deadline_s is None else deadline_s
    for name in (_COLLECTIVE_TIMEOUT, _GLOO_TIMEOUT)[: min(hosts, 2)]:
        flags = os.environ.get("XLA_FLAGS", "")
        if name not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} {name}={math.ceil(deadline_s) + _COLLECTIVE_MARGIN_S}".strip()
    if local_devices is not None:
        jax.config.update("jax_num_cpu_devices", local_devices)
    if job and hosts > 1:
        _connect(job, join_timeout_s)


def _job_from_environment(timeout_s: float) -> Job | None:
    from fef import compat
    from fef.rendezvous import Job

    found = Job.from_environment()
    cluster = None if found else compat.detected_cluster(timeout_s)
    if cluster:
        coordinator, hosts, host, device_ids = cluster
        found = Job(coordinator, hosts, host, local_device_ids=device_ids)
    return found


def _connect(job: Job, timeout_s: float) -> None:
    import jax

    from fef import compat, hosts
    from fef.rendezvous import meet

    hosts.own_address = meet(job, timeout_s)
    compat.let_gloo_listen_at(hosts.own_address)
    # Ours are connections between hosts of one network, never through a proxy for the web.
    skipped = [os.environ.get("no_grpc_proxy", ""), job.address[0]]
    os.environ["no_grpc_proxy"] = ",".join(filter(None, skipped))
    jax.config.update("jax_check_proxy_envs", False)  # it would warn of this very variable
    # JAX's notice of a pre-emption would swallow SIGTERM, and nobody here asks for it.
    jax.config.update("jax_enable_preemption_service", False)
    bind_address, port = job.bind_address
    jax.distributed.initialize(
        job.coordinator, job.num_hosts, job.host,
        local_device_ids=job.local_device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=math.ceil(timeout_s),
        heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT_S,
        shutdown_timeout_seconds=_SHUTDOWN_TIMEOUT_S,
        coordinator_bind_address=f"[{bind_address}]:{port}" if ":" in bind_address else f"{bind_address}:{port}",
    )  # fmt: skip


def _keep_freed_memory() -> None:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return  # not glibc: nothing to tune
    mallopt(_M_ARENA_MAX, 1)
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, -1)
    mallopt(_M_TOP_PAD, 256 << 20)
