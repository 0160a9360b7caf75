"""`route`: runs a router whose gate is the identity, so that the inputs are the logits."""

import functools

import jax
import jax.numpy as jnp
import pytest

from fef.routing import RouterContext


def _context(mask_BS, train=True, psum=lambda statistics: statistics, state=None):
    mask_BS = jnp.asarray(mask_BS, bool)
    return RouterContext(
        mask_BS=mask_BS,
        token_ids_BS=jnp.zeros(mask_BS.shape, jnp.int32),
        layer=jnp.int32(0),
        step=jnp.int32(0),
        key=jax.random.key(0),
        train=train,
        state={} if state is None else state,
        psum=psum,
    )


@functools.partial(jax.jit, static_argnums=(0, 3))
def _route(router, logits_BSE, mask_BS, train, state):
    params = {"gate_DE": jnp.eye(logits_BSE.shape[-1])}
    return router(params, logits_BSE, _context(mask_BS, train, state=state))


@pytest.fixture
def make_context():
    return _context


@pytest.fixture
def route():
    def run(router, logits_BSE, mask_BS=None, train=True, state=None, with_seen=False):
        logits_BSE = jnp.asarray(logits_BSE, jnp.float32)
        mask_BS = jnp.ones(logits_BSE.shape[:2], bool) if mask_BS is None else jnp.asarray(mask_BS, bool)
        state = router.init_state() if state is None else state
        assignment, seen = _route(router, logits_BSE, mask_BS, train, state)
        return (assignment, seen) if with_seen else assignment

    return run
