"""Every test sees 8 virtual CPU devices, and silent rank promotion is an error."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from fef import startup

startup.prepare(num_devices=8)

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
