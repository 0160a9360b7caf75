"""Every test sees 8 virtual CPU devices, and silent rank promotion is an error.

Programs in this process are compiled without XLA's fusion emitters, which halves the time of the suite; processes that
tests start have XLA's defaults, as users have.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from fef import startup

startup.prepare(num_devices=8)

import jax

flags = os.environ["XLA_FLAGS"]
os.environ["XLA_FLAGS"] = flags + " --xla_cpu_use_fusion_emitters=false"
jax.devices()  # starts the backend, which reads the flags
os.environ["XLA_FLAGS"] = flags

jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items):
    """Skips what needs UCX where there is none."""
    import pytest

    from fef.native import build

    if build.UCX in build.parts():
        return
    for item in items:
        if item.get_closest_marker("ucx"):
            item.add_marker(pytest.mark.skip(reason="needs UCX with its headers: pip install libucx-cu12"))
