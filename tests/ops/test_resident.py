"""Contents that stay in the pool: steps of momentum SGD on them equal those on arrays, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pool_programs as programs
import pytest

from fef.native import build
from fef.ops import resident
from fef.ops.publish import opaque_handle
from fef.ops.release import release
from fef.pool import errors
from fef.pool.pool import Pool
from fef.pool.table import ExpertTable
from fef.sharding import REPLICATED, TOKENS, island, make_mesh

L, E, R, D = 3, 6, 4, 8
TABLE = ExpertTable(E, R)
RNG = np.random.default_rng(0)
W_LPD = programs.random_blocks(RNG, L, TABLE, (D,))
X_MD = RNG.normal(size=(R, D)).astype(np.float32)
IDS_LMN = RNG.integers(-1, E, size=(L, R, 3)).astype(np.int32)
RATE, DECAY = 0.1, 0.9


@pytest.fixture(scope="module")
def mesh():
    build.build()
    return make_mesh(R)


@pytest.fixture
def handle(mesh):
    """Of a table with a momentum beside each block, which begins as W_LPD and zeros."""
    with Pool(mesh) as pool:
        handle_2 = pool.table("test", L, TABLE, ((D,),), jnp.float32, own_elems=D)

        def body(w_LPD):
            version_4 = jnp.concatenate([opaque_handle(handle_2), jnp.zeros(2, jnp.int32)])
            token = resident.fill(version_4, jnp.float32(0), w_LPD, first_layer=0, offset=0, is_own=False)
            token = resident.fill(version_4, token, 0 * w_LPD, first_layer=0, offset=0, is_own=True)
            return token[None]

        jax.block_until_ready(jax.jit(island(mesh, body, (programs.LAYERS_FIRST,), TOKENS))(W_LPD))
        yield handle_2


def renewed(mesh, handle_2, contents):
    def body(handle_2, contents):
        version_4, chain = resident.renew(handle_2, contents)
        return version_4[None], chain[None]

    return island(mesh, body, (REPLICATED, REPLICATED), (TOKENS, TOKENS))(jnp.asarray(handle_2), jnp.int32(contents))


def loss_of(mesh, published, x_MD):
    for layer, ids_Mn in enumerate(IDS_LMN):
        x_MD = programs.get_layer(mesh, published, layer, x_MD, ids_Mn)
    return (x_MD**2).sum()


def train_step(mesh, handle_2, contents, x_MD, is_kept):
    version_M4, chain_M = renewed(mesh, handle_2, contents)
    loss, d_chain_M = jax.value_and_grad(lambda chain_M: loss_of(mesh, (version_M4, chain_M), x_MD))(chain_M)

    def body(version_M4, chain_M, d_chain_M, is_kept):
        version_4 = version_M4[0]
        token = resident.await_closed(version_4, chain_M[0], d_chain_M[0])
        next_4, token = resident.begin_update(version_4, token)

        def update(token, at):
            layer, local = at
            gradient = resident.gradient_of(version_4, layer, local, token, D)
            block, momentum = resident.contents_of(version_4, layer, local, token, D, jnp.float32, D)
            momentum = DECAY * momentum + gradient
            return resident.write_next(next_4, layer, local, token, block - RATE * momentum, momentum), None

        layers, locals_ = jnp.meshgrid(jnp.arange(L), jnp.arange(TABLE.per_member), indexing="ij")
        token, _ = jax.lax.scan(update, token, (layers.ravel(), locals_.ravel()))
        return resident.commit(next_4, is_kept, token)[None]

    specs = (TOKENS, TOKENS, TOKENS, REPLICATED)
    token_M = island(mesh, body, specs, TOKENS)(version_M4, chain_M, d_chain_M, is_kept)
    return loss, token_M


def look(mesh, handle_2, contents, x_MD):
    version_M4, chain_M = renewed(mesh, handle_2, contents)
    loss = loss_of(mesh, (version_M4, chain_M), x_MD)

    def body(version_M4, after):
        return release(version_M4[0], after)[None]

    return loss, island(mesh, body, (TOKENS, REPLICATED), TOKENS)(version_M4, loss)


reference = jax.jit(jax.value_and_grad(functools.partial(programs.reference_get_loss, TABLE, ids_LMn=IDS_LMN)))


def test_training_steps_equal_those_on_arrays(mesh, handle):
    step, looked = (jax.jit(functools.partial(program, mesh)) for program in (train_step, look))
    w_LPD, momentum_LPD = W_LPD, 0 * W_LPD
    for contents in range(5):
        wanted, gradient_LPD = reference(w_LPD, X_MD)
        if contents != 1:  # a step after a step, and a look before one
            programs.assert_close(jax.block_until_ready(looked(handle, contents, X_MD))[0], wanted)
        is_kept = contents == 2
        got, _ = jax.block_until_ready(step(handle, contents, X_MD, jnp.asarray(is_kept)))
        programs.assert_close(got, wanted)
        if not is_kept:
            momentum_LPD = DECAY * momentum_LPD + gradient_LPD
            w_LPD = w_LPD - RATE * momentum_LPD
    assert abs(float(wanted) - float(reference(W_LPD, X_MD)[0])) > 0.1  # the steps moved something


def test_a_state_that_is_not_the_newest_is_refused(mesh, handle):
    step = jax.jit(functools.partial(train_step, mesh))
    jax.block_until_ready(step(handle, 0, X_MD, jnp.asarray(False)))
    with pytest.raises(Exception) as caught:
        jax.block_until_ready(step(handle, 0, X_MD, jnp.asarray(False)))
    error = errors.as_pool_error(caught.value)
    assert isinstance(error, errors.StaleVersionError)
    assert "the state is that after 0 updates, the pool holds what came after 1" in str(error)
