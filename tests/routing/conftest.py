"""`route`: runs a router whose gate is the identity, so that the inputs are the logits."""

import functools

import jax
import jax.numpy as jnp
import pytest

from fef.routing import RouterContext


def _context(mask_BS, train=True, psum=lambda statistics: statistics):
    mask_BS = jnp.asarray(mask_BS, bool)
    return RouterContext(
        mask_BS=mask_BS,
        token_ids_BS=jnp.zeros(mask_BS.shape, jnp.int32),
        layer=jnp.int32(0),
        step=jnp.int32(0),
        key=jax.random.key(0),
        train=train,
        state={},
        psum=psum,
    )


@functools.partial(jax.jit, static_argnums=(0, 3))
def _route(router, logits_BSE, mask_BS, train):
    params = {"gate_DE": jnp.eye(logits_BSE.shape[-1])}
    return router(params, logits_BSE, _context(mask_BS, train))[0]


@pytest.fixture
def make_context():
    return _context


@pytest.fixture
def route():
    def run(router, logits_BSE, mask_BS=None, train=True):
        logits_BSE = jnp.asarray(logits_BSE, jnp.float32)
        mask_BS = jnp.ones(logits_BSE.shape[:2], bool) if mask_BS is None else jnp.asarray(mask_BS, bool)
        return _route(router, logits_BSE, mask_BS, train)

    return run
