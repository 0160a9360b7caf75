"""What the compiled step of a dispatcher takes of its host's memory: XLA's buffers, the pool's, and the whole process.

XLA's and the segments' are exact. The cache is a closed form: a block of another host is kept until all members of this
host have closed its version, and only then is the next version published, so at most one version's blocks are there.
Buffers of native code that last for a part of a step only (sums of gradients, token rows on their way, hidden rows of
an expert FFN) are in none of these, nor are blocks by which rates were measured; they show in the peak of the process.
"""

import os
import resource
from typing import Any

import jax
import numpy as np

from fef.pool.pool import Pool

_FILES = "/proc/self/fd"
_SEGMENT, _STAGES = "/memfd:fef-", "-stages"  # what fef/native/domain.cc calls them
_BLOCK = 512  # bytes, the unit of st_blocks whatever the file system
_FROM_OTHERS = ("weights", "missed", "relayed")  # purposes for which blocks come into the cache


def of_program(compiled: jax.stages.Compiled) -> dict[str, int]:
    """XLA's own figures, bytes of all devices of this host: arguments, outputs, the part of both that is the same
    memory (aliased), and temporaries, all of them at their peak.
    """
    analysis: Any = compiled.memory_analysis()  # of one device; XLA:CPU always has it
    devices = jax.local_device_count()
    return {
        "arguments": analysis.argument_size_in_bytes * devices,
        "outputs": analysis.output_size_in_bytes * devices,
        "aliased": analysis.alias_size_in_bytes * devices,
        "temporaries": analysis.temp_size_in_bytes * devices,
    }


def open_segments() -> set[str]:
    """The pools' segments of memory that this process has open, as files of /proc; over mmap those of others too."""
    return {path for path in (f"{_FILES}/{number}" for number in os.listdir(_FILES)) if _SEGMENT in _name(path)}


def of_segments(paths: set[str]) -> dict[str, int]:
    """Bytes that segments have taken so far: slots for published blocks, stages for gradients on their way."""
    taken = {"slots": 0, "stages": 0}
    for path in paths:
        kind = "stages" if _STAGES in _name(path) else "slots"
        taken[kind] += os.stat(path).st_blocks * _BLOCK
    return taken


def of_cache(pool: Pool, received: dict[str, np.ndarray]) -> int:
    """Bytes of other hosts' blocks that this host keeps in a step; 0 where they are read in place.

    Args:
      pool: of the step.
      received: of `fef.pool.ledger.bytes_received`, of the step.
    """
    if pool.transport not in ("tcp", "rma"):
        return 0
    is_here_M = pool.host_GR.reshape(-1) == jax.process_index()
    blocks = sum(int(received[purpose][is_here_M].sum()) for purpose in _FROM_OTHERS if purpose in received)
    return min(blocks, pool.config.cache_bytes)


def peak_rss() -> int:
    """The most memory that this process has had so far, bytes, shared pages that it touches included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _name(path: str) -> str:
    """Of an open file; empty if it was closed meanwhile."""
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""
