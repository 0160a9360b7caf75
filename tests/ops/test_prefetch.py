"""prefetch changes nothing: x comes back, gradients pass, hints that make no sense are dropped."""

import jax
import jax.numpy as jnp
import numpy as np
import pool_programs as programs
import pytest

from fef.native import build
from fef.ops.prefetch import prefetch
from fef.pool import errors
from fef.pool.pool import Pool
from fef.pool.table import ExpertTable
from fef.sharding import REPLICATED, TOKENS, island, make_mesh

R = 2
X_MD = np.arange(6, dtype=np.float32).reshape(R, 3)


@pytest.fixture(scope="module")
def mesh():
    build.build()
    return make_mesh(R)


@pytest.fixture(scope="module")
def hint(mesh):
    def run(version_M4, layer, ids_n, x_MD):
        def body(version_M4, layer, ids_n, x_MD):
            return prefetch(version_M4[0], layer, ids_n, x_MD)

        return island(mesh, body, (TOKENS, REPLICATED, REPLICATED, TOKENS), TOKENS)(version_M4, layer, ids_n, x_MD)

    return jax.jit(run)


@pytest.mark.parametrize(("layer", "ids"), [(0, [1, -1]), (0, [7, 0]), (9, [0, 1]), (-1, [1, 1])])
def test_hints_are_dropped_or_taken(mesh, hint, layer, ids):
    with Pool(mesh) as pool:
        handle = pool.table("test", 1, ExpertTable(3, R), ((2000,),), jnp.float32)
        version_M4, _ = programs.publish_all(mesh, handle, (np.ones((1, 4, 2000), np.float32),))

        def total(x_MD):
            return (hint(version_M4, jnp.int32(layer), jnp.asarray(ids, jnp.int32), x_MD) * X_MD).sum()

        value, grad = jax.value_and_grad(total)(X_MD)
        assert value == (X_MD * X_MD).sum()
        np.testing.assert_array_equal(grad, X_MD)
        unpublished_M4 = version_M4.at[:, 2].add(1)
        np.testing.assert_array_equal(hint(unpublished_M4, jnp.int32(0), jnp.zeros(2, jnp.int32), X_MD), X_MD)


def test_a_hint_is_not_dropped_by_the_compiler(hint):
    args = np.zeros((R, 4), np.int32), jnp.int32(0), jnp.zeros(2, jnp.int32), X_MD
    assert hint.lower(*args).compile().as_text().count('custom_call_target="fef_prefetch"') == 1


def test_closed_pool(mesh, hint):
    with Pool(mesh) as pool:
        handle = pool.table("test", 1, ExpertTable(3, R), ((8,),), jnp.float32)
    version_M4 = np.tile([*handle, 1, 0], (R, 1)).astype(np.int32)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        hint(version_M4, jnp.int32(0), jnp.zeros(2, jnp.int32), X_MD).block_until_ready()
    assert type(errors.as_pool_error(caught.value)) is errors.PoolClosedError
    with pytest.raises(NotImplementedError, match="vmap is only supported"):
        jax.vmap(lambda x_MD: hint(version_M4, jnp.int32(0), jnp.zeros(2, jnp.int32), x_MD))(X_MD[None])
