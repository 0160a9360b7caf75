"""step_memory: what of a step's blocks lies in the cache of a host, by hand; segments are found, and only those."""

import os
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import step_memory
from fef.config import PoolConfig

# Three members, of which the first two are on this host. [member, from whom], bytes.
RECEIVED = {
    "weights": np.array([[0, 0, 100], [0, 0, 20], [300, 0, 0]]),
    "relayed": np.array([[0, 0, 3], [0, 0, 0], [0, 0, 0]]),
    "gradients": np.full((3, 3), 1000),
}


@pytest.mark.parametrize(
    ("transport", "cache_bytes", "wanted"), [("tcp", 1000, 123), ("tcp", 50, 50), ("rma", 1000, 123), ("mmap", 1000, 0)]
)
def test_the_cache_has_what_this_host_has_fetched(transport, cache_bytes, wanted):
    pool = SimpleNamespace(
        transport=transport, host_GR=np.array([[0, 0, 1]]), config=PoolConfig(cache_bytes=cache_bytes)
    )  # fmt: skip
    assert step_memory.of_cache(pool, RECEIVED) == wanted


def test_segments_are_counted_as_far_as_they_are_taken():
    before = step_memory.open_segments()
    files = {name: os.memfd_create(name) for name in ("fef-experts-g0-r0", "fef-experts-g0-stages", "another")}
    try:
        for file in files.values():
            os.ftruncate(file, 1 << 20)
        os.posix_fallocate(files["fef-experts-g0-r0"], 0, 8192)
        os.posix_fallocate(files["fef-experts-g0-stages"], 0, 4096)
        found = step_memory.open_segments() - before
        assert len(found) == 2 and step_memory.of_segments(found) == {"slots": 8192, "stages": 4096}
    finally:
        for file in files.values():
            os.close(file)
