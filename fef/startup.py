"""What must be set in a process before JAX starts its backend. The only such place.

- `PJRT_NPROC`: with more virtual devices than cores, XLA:CPU's pool needs a thread for each handler that waits.
- glibc malloc: XLA's buffers otherwise go back to the operating system after every step and are page-faulted in
  again, about a fifth of the CPU time of a small training step. Memory is then never returned to the system,
  which is why there is an opt-out (`config.run.malloc=False`).
- XLA aborts the process when a collective has waited for 40 s. A member that waits in the pool keeps the others waiting
  in the next collective, and the pool's own error, which says what is missing, must come first.
"""

import ctypes
import math
import os

MIN_POOL_THREADS = 16
_COLLECTIVE_TIMEOUT = "--xla_cpu_collective_call_terminate_timeout_seconds"
_COLLECTIVE_MARGIN_S = 60
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8  # glibc's malloc.h


def prepare(num_devices: int | None = None, malloc: bool = True, deadline_s: float | None = None) -> None:
    """Prepares this process; call before the first JAX computation.

    Args:
      num_devices: number of virtual CPU devices, or None to leave JAX's default.
      malloc: whether glibc may keep freed memory instead of returning it to the system.
      deadline_s: the pool's (`config.pool.deadline_s`), seconds; None means its default.

    Raises:
      RuntimeError: when the backend already runs with another number of devices.
    """
    threads = max(MIN_POOL_THREADS, 4 * (num_devices or 1))
    os.environ.setdefault("PJRT_NPROC", str(threads))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    if malloc:
        _keep_freed_memory()

    # Not before the lines above: this imports JAX.
    import jax

    from fef.config import PoolConfig

    deadline_s = PoolConfig().deadline_s if deadline_s is None else deadline_s
    flags = os.environ.get("XLA_FLAGS", "")
    if _COLLECTIVE_TIMEOUT not in flags:
        timeout_s = math.ceil(deadline_s) + _COLLECTIVE_MARGIN_S
        os.environ["XLA_FLAGS"] = f"{flags} {_COLLECTIVE_TIMEOUT}={timeout_s}".strip()
    if num_devices is not None:
        jax.config.update("jax_num_cpu_devices", num_devices)


def _keep_freed_memory() -> None:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return  # not glibc: nothing to tune
    mallopt(_M_ARENA_MAX, 1)
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, -1)
    mallopt(_M_TOP_PAD, 256 << 20)
