"""MoeLayer in a model that is not ours: plain nnx, plain jax.jit, dense layers left to XLA."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from small import assert_close, fast_compilation  # noqa: F401

import fef
from fef.config import ConfigError, PoolConfig
from fef.routing.switch import Switch
from fef.sharding import TOKENS, named

SIZES = {"d_model": 16, "d_expert": 24, "num_experts": 5, "num_choices": 2}


class Net(nnx.Module):
    """More MoE layers, each publishing by itself, than versions are kept between programs; dense ones between them."""

    def __init__(self, mesh, dispatcher):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.moes = nnx.List([fef.MoeLayer(**SIZES, mesh=mesh, rngs=rngs, dispatcher=dispatcher) for _ in range(5)])
        self.between = nnx.Linear(16, 16, rngs=rngs)
        self.last = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x_BSI):
        x_BSD, aux_loss = self.first(x_BSI), 0.0
        for moe in self.moes:
            y_BSD, metrics = moe(x_BSD)
            x_BSD = x_BSD + jnp.tanh(self.between(y_BSD))
            aux_loss += metrics["aux_loss"]
        return self.last(x_BSD), aux_loss


def programs(mesh, dispatcher):
    """Parameters, a training step and the loss alone."""
    graph, params = nnx.split(Net(mesh, dispatcher))

    def loss(params, x_BSI, target_BSO):
        y_BSO, aux_loss = nnx.merge(graph, params)(x_BSI)
        return jnp.mean((y_BSO - target_BSO) ** 2) + aux_loss

    def step(params, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value, grads

    return params, jax.jit(step), jax.jit(loss)


def test_a_plain_model_trains_over_the_pool_as_over_the_reference(monkeypatch):
    """Each layer publishes by itself; XLA's own sums over the dense gradients meet the pool's waits in any order,
    which FEF_CHAOS shuffles: 30 steps must neither hang nor differ."""
    mesh = fef.make_mesh(4)
    batch = [
        jax.device_put(jax.random.normal(jax.random.key(i), (8, 3, width)), named(mesh, TOKENS))
        for i, width in enumerate((8, 4))
    ]
    expected, step, _ = programs(mesh, "reference")
    losses, first_grads = [], step(expected, *batch)[2]
    for _ in range(30):
        expected, value, _ = step(expected, *batch)
        losses.append(float(value))
    assert losses[-1] < losses[0] / 2

    monkeypatch.setenv("FEF_CHAOS", "1")
    with fef.Pool(mesh, PoolConfig(deadline_s=30)):
        params, step, loss = programs(mesh, "pooled")
        for number in range(30):
            params, value, grads = step(params, *batch)
            assert float(value) == pytest.approx(losses[number], rel=1e-5)
            if number == 0:
                assert_close(grads, first_grads)
        assert_close(params, expected)
        # More evaluations than there are slots, in which nothing is collected.
        values = [float(loss(params, *batch)) for _ in range(20)]
        assert values == values[:1] * 20 and values[0] < losses[0] / 2


def layer(mesh, **changes):
    return fef.MoeLayer(**SIZES | {"mesh": mesh, "rngs": nnx.Rngs(0)} | changes)


def test_a_users_router_object_and_a_mask():
    mesh = fef.make_mesh(2)
    router = Switch(5, 1, Switch.Options(capacity_factor=1.0))
    graph, state = nnx.split(layer(mesh, num_choices=1, router=router, dispatcher="reference"))
    x_BSD = jax.random.normal(jax.random.key(0), (2, 10, 16))
    mask_BS = jnp.arange(10)[None, :] < jnp.array([[10], [6]])
    run = jax.jit(lambda *args: nnx.merge(graph, state)(args[0], mask_BS=args[1]))
    y_BSD, metrics = run(x_BSD, mask_BS)
    assert y_BSD.shape == x_BSD.shape and not y_BSD[1, 6:].any()
    assert metrics["tokens"].tolist() == [10, 6]  # per member
    assert metrics["load_E"].shape == (2, 5) and metrics["load_E"].sum() == 16
    assert metrics["kept_E"].max() <= 2  # 1.0 * 10 / 5
    assert metrics["trace"]["expert_N"].shape == (20,) and metrics["aux_loss"].shape == ()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"router": "top_kk"}, ValueError, "unknown router 'top_kk'; nearest: top_k"),
        ({"dispatcher": "poled"}, ValueError, "unknown dispatcher 'poled'; nearest: pooled"),
        ({"num_choices": 6}, ConfigError, "config.moe.num_choices=6: must be between 1 and moe.num_experts=5"),
    ],
)
def test_what_cannot_work_is_refused_when_the_layer_is_made(changes, error, words):
    with pytest.raises(error, match=words):
        layer(fef.make_mesh(2), **changes)


def test_a_batch_that_cannot_be_split_is_refused():
    with pytest.raises(ValueError, match="a batch of 3 cannot be split over 2 devices; use a multiple"):
        layer(fef.make_mesh(2), dispatcher="reference")(jnp.zeros((3, 4, 16)))


def test_pooled_needs_an_open_pool():
    mesh = fef.make_mesh(2)
    pooled, x_BSD = layer(mesh), jnp.zeros((2, 4, 16))
    with pytest.raises(fef.PoolClosedError, match="inside `with fef.Pool"):
        jax.jit(lambda x: pooled(x)[0])(x_BSD)
