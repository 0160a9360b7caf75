"""Refuses second derivatives in one clear line.

JAX 0.10 mixes up the integer residuals of a `jax.custom_vjp` when it is differentiated twice inside `jax.lax.scan`
(tried: two residuals of different dtype raise a TypeError far from the cause; of equal dtype they would be silently
exchanged). So the ops of this package that keep integers for their backward pass refuse it everywhere.
"""

import functools
from typing import Any

import jax


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def first_order(op: str, operands: Any) -> Any:
    """Returns the float operands of a backward rule of `op` as they are; differentiating them is an error."""
    return operands


@first_order.defjvp
def _refuse(op: str, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(f"{op} has first derivatives only (reverse mode); it cannot be differentiated twice")
