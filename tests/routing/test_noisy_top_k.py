import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fef.config import ConfigError
from fef.routing.noisy_top_k import NoisyTopK
from fef.testing import check_router

LN2 = math.log(2)  # softplus(0), the spread where x W_noise is 0


def phi(z):
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))


def router(num_experts=3, num_choices=2, importance_coef=0.0, load_coef=0.0):
    return NoisyTopK(num_experts, num_choices, NoisyTopK.Options(importance_coef, load_coef))


@pytest.fixture
def route(make_context):
    """Routes logits by the identity as gate; `noise` is the other matrix."""

    def run(router, logits, mask=None, train=False, noise=0.0, key=0):
        logits = jnp.asarray(logits, jnp.float32)
        mask = np.ones(logits.shape[:2], bool) if mask is None else np.asarray(mask)
        ctx = dataclasses.replace(make_context(mask, train), key=jax.random.key(key))
        size = logits.shape[-1]
        params = {"gate_DE": jnp.eye(size), "noise_DE": jnp.full((size, size), noise)}
        return jax.jit(lambda logits: router(params, logits, ctx)[0])(logits)

    return run


LOGITS = [[[2.0, 1.0, 0.0]]]


def test_evaluation_by_hand(route):
    # softmax of (2, 1) is 1 / (1 + 1/e) = 0.731059 and 0.268941
    assignment = route(router(), LOGITS)
    np.testing.assert_array_equal(assignment.expert_N, [0, 1])
    np.testing.assert_allclose(assignment.weight_N, [0.731059, 0.268941], rtol=1e-5)
    assert assignment.aux_loss == 0


def test_importance_loss_by_hand(route):
    # importance (0.731059, 0.268941, 0), mean 1/3: CV^2 = (1.193177^2 + 0.193177^2 + 1) / 3 = 0.820329
    scheme = router(importance_coef=0.5)
    assert float(route(scheme, LOGITS).aux_loss) == pytest.approx(0.5 * 0.820329, rel=1e-5)
    # = 3 * (sum of squares) - 1, and d0.731059/dlogit 0 = 0.731059 * 0.268941 = 0.196612:
    # 3 * 2 * 0.196612 * (0.731059 - 0.268941) = 0.545149
    gradient = jax.grad(lambda logits: route(scheme, logits).aux_loss)(jnp.array(LOGITS))
    np.testing.assert_allclose(gradient[0, 0], [0.5 * 0.545149, -0.5 * 0.545149, 0], rtol=1e-4, atol=1e-6)


def test_load_loss_by_hand(route):
    # Thresholds: the third best, 0, for the two chosen; the second best, 1, for the other. Spread ln 2.
    chance = np.array([phi(2 / LN2), phi(1 / LN2), phi(-1 / LN2)])  # 0.998045, 0.925451, 0.074549
    expected = np.mean((chance / chance.mean() - 1) ** 2)
    assert expected == pytest.approx(0.395, abs=0.01)
    scheme = router(load_coef=0.5)
    assert float(route(scheme, LOGITS).aux_loss) == pytest.approx(0.5 * expected, rel=1e-4)
    # Two tokens add up: (2, 1, 0) and (0, 1, 2), and one of padding does not count.
    both = chance + chance[::-1]
    expected = np.mean((both / both.mean() - 1) ** 2)
    loss = route(scheme, [[[2, 1, 0], [0, 1, 2], [5, 0, 0]]], [[True, True, False]]).aux_loss
    assert float(loss) == pytest.approx(0.5 * expected, rel=1e-4)


def test_gradient_of_the_load_loss_by_differences(route):
    logits = np.array([[[0.9, 0.2, -0.3, 0.1], [0.0, 0.4, -0.6, 0.8]]])
    scheme = router(num_experts=4, load_coef=1.0)
    gradient = jax.grad(lambda logits: route(scheme, logits).aux_loss)(jnp.asarray(logits, jnp.float32))
    for place in np.ndindex(logits.shape):
        step = np.zeros(logits.shape)
        step[place] = 0.02
        up, down = (float(route(scheme, logits + sign * step).aux_loss) for sign in (1, -1))
        assert float(gradient[place]) == pytest.approx((up - down) / 0.04, abs=2e-3)
    assert np.abs(gradient).max() > 0.05


def test_a_balanced_batch_costs_nothing_and_rests(route):
    logits = jnp.array([[[2.0, 1.0, 0.0], [0.0, 2.0, 1.0], [1.0, 0.0, 2.0]]])
    scheme = router(importance_coef=1.0, load_coef=1.0)
    value, gradient = jax.value_and_grad(lambda logits: route(scheme, logits).aux_loss)(logits)
    assert float(value) == pytest.approx(0, abs=1e-10)
    np.testing.assert_allclose(gradient, 0, atol=1e-6)


def test_all_experts_chosen_have_no_load_loss(route):
    assert route(router(num_choices=3, load_coef=1.0), LOGITS).aux_loss == 0


def test_noise_is_as_likely_as_the_load_says(route):
    """How often each expert is chosen among noisy copies of one token, against the mean of P(x, e)."""
    logits = np.broadcast_to([0.5, 0.0, -0.5, -1.0], (4, 2500, 4))
    scheme = router(num_experts=4)
    load = np.asarray(route(scheme, logits, train=True).metrics["load_E"]) / 10_000
    noisy = np.array([0.5, 0, -0.5, -1]) + LN2 * np.random.default_rng(0).normal(size=(100_000, 4))
    expected = np.bincount(np.argsort(-noisy)[:, :2].reshape(-1), minlength=4) / 100_000
    np.testing.assert_allclose(load, expected, atol=0.02)  # deviation 0.005
    quiet = route(scheme, logits, train=True, noise=-100.0)  # softplus of -100 times the sum of the logits, 1.0
    assert (np.asarray(quiet.metrics["load_E"])[2:] > 0).any()  # the sum is -1.0: noise of size 100
    np.testing.assert_array_equal(
        route(scheme, logits, train=True, noise=100.0).metrics["load_E"], [10_000] * 2 + [0] * 2
    )


@pytest.mark.parametrize("train", [False, True])
def test_two_members_give_the_value_and_gradient_of_one(make_context, train):
    """With 5 and 3 real tokens, and noise that is the same for both members' first sequences."""
    random = np.random.default_rng(0)
    params = {name: jnp.asarray(random.normal(size=(6, 4)), jnp.float32) for name in ("gate_DE", "noise_DE")}
    x_RBSD = jnp.asarray(random.normal(size=(2, 1, 5, 6)), jnp.float32)
    mask_RBS = jnp.asarray([[[1, 1, 1, 1, 1]], [[1, 0, 1, 0, 1]]], bool)
    scheme = router(4, 2, importance_coef=0.3, load_coef=0.7)

    def loss(params, x_BSD, mask_BS, key, psum):
        ctx = dataclasses.replace(make_context(mask_BS, train, psum), key=key)
        return scheme(params, x_BSD, ctx)[0].aux_loss

    def members(params):
        psum = lambda tree: jax.lax.psum(tree, "members")  # noqa: E731
        each = jax.value_and_grad(lambda p, x, m: loss(p, x, m, jax.random.key(1), psum))
        return jax.vmap(each, (None, 0, 0), axis_name="members")(params, x_RBSD, mask_RBS)

    def one(params):
        """Plain: the sums of both, and the squared coefficients of variation of these, differentiated as they are."""
        sums = {"importance": 0.0, "load": 0.0}
        for x_BSD, mask_BS in zip(x_RBSD, mask_RBS, strict=True):
            logits, spread = x_BSD @ params["gate_DE"], jax.nn.softplus(x_BSD @ params["noise_DE"])
            noisy = logits + train * spread * jax.random.normal(jax.random.key(1), logits.shape)
            ordered = jnp.sort(noisy)[..., ::-1]
            is_in = noisy >= ordered[..., 1:2]
            weights = jax.nn.softmax(jnp.where(is_in, noisy, -jnp.inf))
            chance = jax.scipy.stats.norm.cdf(
                (logits - jnp.where(is_in, ordered[..., 2:3], ordered[..., 1:2])) / spread
            )
            sums["importance"] += (weights * mask_BS[..., None]).sum((0, 1))
            sums["load"] += (chance * mask_BS[..., None]).sum((0, 1))
        squared = {name: total.var() / total.mean() ** 2 for name, total in sums.items()}
        return 0.3 * squared["importance"] + 0.7 * squared["load"]

    values, gradients = jax.jit(members)(params)
    value, gradient = jax.jit(jax.value_and_grad(one))(params)
    assert value > 0.01 and float(values.sum()) == pytest.approx(float(value), rel=1e-5)
    for name in params:
        assert np.abs(gradient[name]).max() > 1e-3
        np.testing.assert_allclose(gradients[name].sum(0), gradient[name], rtol=1e-4, atol=1e-6)


class Trained(NoisyTopK):
    """With a gate that says something, which zeros do not."""

    def init(self, key, d_model):
        keys = jax.random.split(key)
        shape = (d_model, self.num_experts)
        return {name: jax.random.normal(key, shape) for name, key in zip(("gate_DE", "noise_DE"), keys, strict=True)}


def test_invariants_with_a_gate_that_is_not_zero():
    check_router(Trained(4, 2))


def test_it_begins_with_zeros():
    params = NoisyTopK(4, 2).init(jax.random.key(0), 8)
    assert {name: leaf.shape for name, leaf in params.items()} == {"gate_DE": (8, 4), "noise_DE": (8, 4)}
    assert not any(np.any(leaf) for leaf in params.values())


def test_one_choice_is_refused():
    with pytest.raises(ConfigError, match=r"config.moe.num_choices=1: the softmax over one expert is 1"):
        NoisyTopK(4, 1)
