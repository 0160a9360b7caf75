"""Learning rate, clipping, decay and the two update rules."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fef.config import Config, freeze
from fef.optim import learning_rate, make_optimizer
from fef.validation import validate


def config(steps=100, **optim):
    config = Config()
    config.train.steps = steps
    for name, value in optim.items():
        setattr(config.optim, name, value)
    validate(config)
    freeze(config)
    return config


def rates(config, *steps):
    return [float(learning_rate(config)(jnp.int32(step))) for step in steps]


def test_warm_up_and_cosine_at_their_ends():
    made = config(learning_rate=1.0, warmup_steps=10, final_fraction=0.1)
    first, last_of_warm_up, peak, middle, end, beyond = rates(made, 0, 9, 10, 55, 100, 10_000)
    assert first == pytest.approx(0.1)  # not 0, which would waste the first step
    assert last_of_warm_up == peak == pytest.approx(1.0)
    assert middle == pytest.approx(0.55)
    assert end == beyond == pytest.approx(0.1)


def test_without_warm_up_and_with_a_fixed_decay():
    assert rates(config(learning_rate=1.0, warmup_steps=0), 0) == [1.0]
    assert rates(config(10, learning_rate=1.0, warmup_steps=0, decay_steps=50, final_fraction=0.0), 25, 50) == (
        pytest.approx([0.5, 0.0])
    )


@pytest.mark.parametrize("warmup", [8, 20])
def test_a_run_shorter_than_its_warm_up_only_warms_up(warmup):
    values = rates(config(8, learning_rate=1.0, warmup_steps=warmup), *range(8))
    np.testing.assert_allclose(values, (np.arange(8) + 1) / warmup, rtol=1e-6)


def one_update(config, grads, params):
    optimizer = make_optimizer(config)
    return optimizer.update(grads, optimizer.init(params), params)[0]


def test_the_global_norm_is_clipped():
    """D-04: experts 1, 2, 3, 4 and six dense ones of 1 have the norm 6."""
    grads = {"experts": jnp.array([1.0, 2, 3, 4]), "dense": {"a": jnp.ones(2), "b": jnp.ones((2, 2))}}
    params = jax.tree.map(jnp.zeros_like, grads)
    made = config(name="sgd", learning_rate=1.0, warmup_steps=0, clip_norm=1.0)
    updates = one_update(made, grads, params)
    jax.tree.map(lambda update, grad: np.testing.assert_allclose(update, -grad / 6, rtol=1e-6), updates, grads)
    made = config(name="sgd", learning_rate=1.0, warmup_steps=0, clip_norm=None)
    jax.tree.map(np.testing.assert_array_equal, one_update(made, grads, params), jax.tree.map(jnp.negative, grads))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_matrices_decay_and_norms_and_biases_do_not(name):
    kept = {
        "attention_norm": jnp.ones(4),
        "final_norm": jnp.ones(4),
        "b_up_PF": jnp.ones((2, 4)),
        "b_down": jnp.ones(4),
    }
    params = kept | {"w": jnp.ones((4, 4)), "w_up_PDF": jnp.ones(4), "embedding_VD": jnp.ones((4, 4))}
    made = config(name=name, learning_rate=0.5, warmup_steps=0, weight_decay=0.1)
    updates = one_update(made, jax.tree.map(jnp.zeros_like, params), params)
    for key, update in updates.items():
        np.testing.assert_allclose(update, 0 if key in kept else -0.05, rtol=1e-6, err_msg=key)


def test_adamw_is_that_of_the_paper():
    """Two steps by hand, with bias correction."""
    made = config(learning_rate=0.1, warmup_steps=0, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.01, clip_norm=None)
    optimizer, w, m, v = make_optimizer(made), 2.0, 0.0, 0.0
    params = {"w": jnp.float32(w)}
    state = optimizer.init(params)
    for step, grad in enumerate([0.5, -1.5]):
        updates, state = optimizer.update({"w": jnp.float32(grad)}, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        m, v = 0.9 * m + 0.1 * grad, 0.95 * v + 0.05 * grad**2
        unbiased = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.95 ** (step + 1))
        w -= rates(made, step)[0] * (unbiased[0] / (unbiased[1] ** 0.5 + 1e-8) + 0.01 * w)
    assert float(params["w"]) == pytest.approx(w, rel=1e-6)


def test_sgd_has_momentum():
    made = config(name="sgd", learning_rate=1.0, warmup_steps=0, momentum=0.5, weight_decay=0.0, decay_steps=10**6)
    optimizer, params = make_optimizer(made), {"w": jnp.zeros(())}
    state = optimizer.init(params)
    first, state = optimizer.update({"w": jnp.ones(())}, state, params)
    second, state = optimizer.update({"w": jnp.ones(())}, state, params)
    assert [float(first["w"]), float(second["w"])] == pytest.approx([-1.0, -1.5], rel=1e-5)


def test_the_config_is_locked():
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().optim.learning_rate = 1.0
