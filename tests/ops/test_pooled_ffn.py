"""pooled_ffn against a dense reference: values, gradients, transformations, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pool_programs as programs
import pytest

from fef.config import PoolConfig
from fef.ffn import CLAMPED_SWIGLU, RELU, SWIGLU
from fef.native import build
from fef.pool import errors
from fef.pool.pool import Pool
from fef.pool.table import ExpertTable
from fef.sharding import make_mesh

L, E, R, D, F, N = 2, 6, 4, 8, 10, 12
TABLE = ExpertTable(E, R)
SHAPES = ((D, F), (D, F), (F, D))
RNG = np.random.default_rng(0)
WEIGHTS, OTHER_WEIGHTS = (programs.random_weights(RNG, L, TABLE, D, F) for _ in range(2))
X_ND = RNG.normal(size=(R * N, D)).astype(np.float32)
# All rows used, some unused, all of one expert, none at all; expert 5 is used by one member only, expert 3 by none.
ROWS_ME = np.array([[2, 3, 1, 0, 6, 0], [1, 0, 0, 0, 3, 5], [0, 12, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]], np.int32)


reference_grad = jax.jit(
    jax.value_and_grad(lambda w, x: programs.reference_ffn_loss(TABLE, w, x, ROWS_ME), argnums=(0, 1))
)


@pytest.fixture(scope="module")
def mesh():
    build.build()
    return make_mesh(R)


@pytest.fixture(scope="module")
def pool(mesh):
    with Pool(mesh) as pool:
        yield pool


@pytest.fixture(scope="module")
def handle(pool):
    return pool.table("ffn", L, TABLE, SHAPES, jnp.float32)


@pytest.fixture(scope="module")
def value_and_grad(mesh):
    run = jax.value_and_grad(lambda w, x, h, rows: programs.ffn_loss(mesh, h, w, x, rows), argnums=(0, 1))
    return jax.jit(run)


@pytest.fixture(scope="module")
def forward(mesh):
    """One layer of the FFN, weights published with it."""

    def run(weights, x_ND, rows_ME, handle):
        published = programs.publish_all(mesh, handle, weights, num_parts=3)
        return programs.ffn_all(mesh, published, 0, x_ND, rows_ME, F)

    return jax.jit(run)


def test_value_and_gradient(value_and_grad, handle):
    for weights in (WEIGHTS, OTHER_WEIGHTS, WEIGHTS):
        got = value_and_grad(weights, X_ND, handle, ROWS_ME)
        programs.assert_close(got, reference_grad(weights, X_ND))
    for grad in got[1][0]:
        grad = np.asarray(grad)
        assert grad[:, TABLE.position_E[5]].any(), "an expert that one member uses"
        assert not grad[:, TABLE.position_E[3]].any(), "an expert that nobody uses gets exactly zero"
        assert not np.delete(grad, TABLE.position_E, axis=1).any(), "an empty position gets exactly zero"


def test_finite_differences(value_and_grad, handle):
    rng = np.random.default_rng(1)
    steps = (programs.random_weights(rng, L, TABLE, D, F), 0.3 * rng.normal(size=X_ND.shape).astype(np.float32))
    steps = jax.tree.map(lambda step: 1e-2 * step, steps)
    ends = [
        value_and_grad(*jax.tree.map(lambda a, step, s=sign: a + s * step, (WEIGHTS, X_ND), steps), handle, ROWS_ME)[0]
        for sign in (1, -1)
    ]
    grads = value_and_grad(WEIGHTS, X_ND, handle, ROWS_ME)[1]
    slope = 2 * sum((np.asarray(g) * step).sum() for g, step in zip(*map(jax.tree.leaves, (grads, steps)), strict=True))
    np.testing.assert_allclose(ends[0] - ends[1], slope, rtol=1e-2)


def test_worked_example():
    """Two members with one expert each, the first one has 3 and 2 rows; all weights are 1, so that sums are by hand."""
    mesh, table = make_mesh(2), ExpertTable(2, 2)
    weights = tuple(np.ones((1, 2, *shape), np.float32) for shape in ((1, 1), (1, 1), (1, 1)))
    x_ND = np.arange(10, dtype=np.float32)[:, None]
    rows_ME = np.array([[3, 2], [0, 5]])

    def total(weights, handle):
        published = programs.publish_all(mesh, handle, weights, num_parts=3)
        return programs.ffn_all(mesh, published, 0, x_ND, rows_ME, 1).sum()

    with Pool(mesh) as pool:
        handle = pool.table("example", 1, table, ((1, 1), (1, 1), (1, 1)), jnp.float32)
        value, (gate, up, down) = jax.jit(jax.value_and_grad(total))(weights, handle)
    x = np.arange(10)
    hidden = x / (1 + np.exp(-x)) * x  # silu(x) * x with all weights 1
    np.testing.assert_allclose(value, hidden.sum(), rtol=1e-6)
    np.testing.assert_allclose(down.ravel(), [hidden[:3].sum(), hidden[3:].sum()], rtol=1e-6)
    np.testing.assert_allclose(up.ravel(), down.ravel(), rtol=1e-6)
    d_gate = x * x * (1 + np.exp(-x) * (1 + x)) / (1 + np.exp(-x)) ** 2  # x times u = x times the slope of silu
    np.testing.assert_allclose(gate.ravel(), [d_gate[:3].sum(), d_gate[3:].sum()], rtol=1e-6)


def test_unused_rows_are_zero_whatever_they_hold(forward, mesh, handle):
    x_ND = X_ND.copy()
    unused = np.concatenate([np.arange(N) >= used for used in ROWS_ME.sum(1)])
    x_ND[unused] = np.nan
    value, vjp = jax.vjp(lambda w, x: forward(w, x, ROWS_ME, handle), WEIGHTS, x_ND)
    d_weights, dx_ND = vjp(np.where(unused[:, None], np.nan, np.ones_like(x_ND)).astype(np.float32))
    assert unused.sum() == 3 + 12 and not np.asarray(value)[unused].any() and not np.asarray(dx_ND)[unused].any()
    assert all(np.isfinite(array).all() for array in (value, dx_ND, *d_weights))


def test_remat_scan_over_layers_and_microbatches(mesh, handle):
    """All at once, as a training step does it: the layer's number and the microbatch's are traced."""

    @jax.jit
    def step(weights, x_BND, rows_BME, handle):
        publish = functools.partial(programs.publish_all, mesh, handle, num_parts=3)
        (version_M4, chain_M), collect = jax.vjp(lambda w: publish(w), weights)

        def microbatch(chain_M, index, x_ND, rows_ME):
            published = programs.at_microbatch((version_M4, chain_M), index)

            @jax.checkpoint
            def layer(x_ND, layer):
                return x_ND + programs.ffn_all(mesh, published, layer, x_ND, rows_ME, F), None

            return (jax.lax.scan(layer, x_ND, jnp.arange(L))[0] ** 2).sum()

        def add(sums, batch):
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(microbatch)(chain_M, *batch)), None

        zeros = (jnp.float32(0), jnp.zeros(R))
        (loss, d_chain_M), _ = jax.lax.scan(add, zeros, (jnp.arange(len(x_BND)), x_BND, rows_BME))
        return loss, collect((np.zeros(version_M4.shape, jax.dtypes.float0), d_chain_M))[0]

    x_BND, rows_BME = np.stack([X_ND, 0.5 * X_ND]), np.stack([ROWS_ME, ROWS_ME[::-1]])

    def wanted(weights):
        return sum(programs.reference_ffn_loss(TABLE, weights, *batch) for batch in zip(x_BND, rows_BME, strict=True))

    expected = jax.jit(jax.value_and_grad(wanted))(WEIGHTS)
    for _ in range(2):
        programs.assert_close(step(WEIGHTS, x_BND, rows_BME, handle), expected)


@pytest.mark.parametrize("data", [1, 2])
def test_8_devices_with_3_experts(data):
    """With two data-parallel groups, each reads and sums by itself, and the gradients of both are added."""
    mesh = make_mesh(8, data=data)
    table = ExpertTable(3, 8 // data)
    rng = np.random.default_rng(2)
    weights = programs.random_weights(rng, 1, table, D, F)
    x_ND, rows_ME = rng.normal(size=(8 * 4, D)).astype(np.float32), rng.integers(0, 2, (8, 3))
    with Pool(mesh) as pool:
        handle = pool.table("ffn", 1, table, SHAPES, jnp.float32)
        run = jax.jit(jax.value_and_grad(lambda w, x: programs.ffn_loss(mesh, handle, w, x, rows_ME), argnums=(0, 1)))
        got = run(weights, x_ND)
    wanted = jax.value_and_grad(lambda w, x: programs.reference_ffn_loss(table, w, x, rows_ME), argnums=(0, 1))
    programs.assert_close(got, jax.jit(wanted)(weights, x_ND))


def test_a_member_without_rows(mesh, handle):
    """N = 0: nothing is read, the member still closes its stages."""

    def total(weights):
        published = programs.publish_all(mesh, handle, weights, num_parts=3)
        return programs.ffn_all(mesh, published, 0, jnp.zeros((0, D)), np.zeros((R, E)), F).sum()

    value, grads = jax.jit(jax.value_and_grad(total))(WEIGHTS)
    assert value == 0 and not any(np.asarray(grad).any() for grad in grads)


@pytest.mark.parametrize(
    ("transform", "error", "text"),
    [
        (lambda f, x: jax.vmap(f)(x[None]), NotImplementedError, "vmap is only supported"),
        (lambda f, x: jax.jvp(f, (x,), (x,)), TypeError, "forward-mode autodiff"),
        (
            lambda f, x: jax.grad(lambda x: jax.grad(lambda x: f(x).sum())(x).sum())(x),
            NotImplementedError,
            "pooled_ffn has first derivatives only .reverse mode.; it cannot be differentiated twice",
        ),
    ],
    ids=["vmap", "jvp", "second order"],
)
def test_refused_transformations(forward, handle, transform, error, text):
    with pytest.raises(error, match=text):
        transform(jax.jit(lambda x: forward(WEIGHTS, x, ROWS_ME, handle)), X_ND)


@pytest.mark.parametrize(
    ("rows_ME", "d_expert", "dtype", "text"),
    [
        (np.full((R, E), 3), F, jnp.float32, "table ffn, expert 4: 3 rows from row 12 do not fit into 12"),
        (np.tile([1, -1, 1, 0, 0, 0], (R, 1)), F, jnp.float32, "table ffn, expert 1: -1 rows from row 1"),
        (ROWS_ME[:, :5], F, jnp.float32, "pooled_ffn: rows of 5 experts, table ffn has 6"),
        (ROWS_ME, F + 1, jnp.float32, "table ffn holds blocks of 240 x 4 bytes, not the 264 floats of this FFN"),
        (ROWS_ME, F, jnp.bfloat16, "table ffn holds blocks of 240 x 2 bytes, not the 240 floats of this FFN"),
    ],
)
def test_what_does_not_fit(mesh, rows_ME, d_expert, dtype, text):
    assert text in refusal(mesh, rows_ME, d_expert, dtype, SWIGLU)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (RELU, "table ffn holds blocks of 240 x 4 bytes, not the 160 floats of this FFN"),
        (CLAMPED_SWIGLU, "table ffn holds blocks of 240 x 4 bytes, not the 268 floats of this FFN"),
        (
            dataclasses.replace(SWIGLU, name="my_ffn"),
            "pooled_ffn: no native code for the FFN my_ffn; config.dispatch.matmul=jax does without",
        ),
    ],
)
def test_another_kind_of_ffn_does_not_fit(mesh, kind, text):
    assert text in refusal(mesh, ROWS_ME, F, jnp.float32, kind)


def refusal(mesh, rows_ME, d_expert, dtype, kind) -> str:
    """How a table of SwiGLU experts refuses an FFN."""
    with Pool(mesh, PoolConfig()) as pool:
        handle = pool.table("ffn", L, TABLE, SHAPES, dtype)

        @jax.jit
        def run():
            published = programs.publish_all(mesh, handle, WEIGHTS, num_parts=3, dtype=dtype)
            return programs.ffn_all(mesh, published, 0, X_ND, rows_ME, d_expert, kind)

        with pytest.raises((RuntimeError, ValueError)) as caught:
            run().block_until_ready()
    error = errors.as_pool_error(caught.value)
    assert type(error) is errors.PoolError
    return str(error)
