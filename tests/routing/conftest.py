"""`route`: runs a router whose gate is the identity, so that the inputs are the logits."""

import functools

import jax
import jax.numpy as jnp
import pytest

from fef.routing import RouterContext


@pytest.fixture
def make_context():
    def make(mask_BS, train=True, psum=lambda statistics: statistics):
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

    return make


@pytest.fixture
def route(make_context):
    @functools.partial(jax.jit, static_argnums=(0, 4))
    def compiled(router, params, logits_BSE, mask_BS, train):
        return router(params, logits_BSE, make_context(mask_BS, train))[0]

    def run(router, logits_BSE, mask_BS=None, train=True):
        logits_BSE = jnp.asarray(logits_BSE, jnp.float32)
        mask_BS = jnp.ones(logits_BSE.shape[:2], bool) if mask_BS is None else mask_BS
        params = {"gate_DE": jnp.eye(logits_BSE.shape[-1])}
        return compiled(router, params, logits_BSE, jnp.asarray(mask_BS, bool), train)

    return run
