import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fef.routing.losses import aux_loss_share, load_balance_share, squared_variation_share, z_share
from fef.routing.top_k import TopK

CASES = pathlib.Path(__file__).parents[1] / "cases/router"
FORMULA = json.loads((CASES / "aux_formula.json").read_text())
MASKED = json.loads((CASES / "aux_mask.json").read_text())


def balance_only(num_experts, num_choices):
    return TopK(num_experts, num_choices, TopK.Options(balance_coef=1.0, z_coef=0.0))


@pytest.mark.parametrize("name, rows, num_choices", [("collapsed_E8_K1", 4, 1), ("skewed_E4_K2", 8, 2)])
def test_balance_loss_takes_one_softmax(route, name, rows, num_choices):
    case = FORMULA[name]
    row = case[f"logits_each_of_{rows}_rows"]
    assignment = route(balance_only(len(row), num_choices), np.broadcast_to(row, (1, rows, len(row))))
    assert float(assignment.aux_loss) == pytest.approx(case["expected"], abs=2e-6)


def test_balance_loss_is_per_layer(route):
    """Two layers collapsed on different experts cost 2 each; pooled over the layers they would look balanced (1)."""
    case = FORMULA["two_layers_K1_E2"]
    losses = [float(route(balance_only(2, 1), [case[layer]]).aux_loss) for layer in ("layer0", "layer1")]
    assert np.mean(losses) == pytest.approx(case["per_layer_mean"], abs=1e-6)


def test_balance_loss_of_a_balanced_batch_is_k(route):
    logits = np.full((1, 4, 4), -20.0)
    logits[0, range(4), range(4)] = logits[0, range(4), [1, 2, 3, 0]] = 0.0
    assert float(route(balance_only(4, 2), logits).aux_loss) == pytest.approx(2.0, abs=1e-5)


def test_padding_has_no_part_in_the_balance_loss(route):
    shape = (MASKED["batch"], MASKED["seq"], MASKED["E"])
    logits = jnp.asarray(MASKED["router_logits"], jnp.float32).reshape(shape)
    mask = np.array(MASKED["mask"], bool)
    router = balance_only(MASKED["E"], MASKED["K"])

    def loss(logits, mask):
        return route(router, logits, mask).aux_loss

    value, gradient = jax.value_and_grad(loss)(logits, mask)
    assert float(value) == pytest.approx(MASKED["expected_aux_E_sum_fP"], abs=2e-6)
    assert not gradient[~mask].any() and gradient[mask].any()
    other_value, other_gradient = jax.value_and_grad(loss)(jnp.where(mask[..., None], logits, 7.0 - logits), mask)
    assert other_value == value
    np.testing.assert_array_equal(other_gradient, gradient)


@pytest.mark.parametrize("options", [dict(balance_coef=1.0, z_coef=0.0), dict(balance_coef=0.0, z_coef=1.0)])
def test_a_batch_of_padding_costs_nothing(route, options):
    router = TopK(4, 2, TopK.Options(**options))
    loss = lambda logits: route(router, logits, np.zeros((1, 3), bool)).aux_loss  # noqa: E731
    value, gradient = jax.value_and_grad(loss)(jnp.ones((1, 3, 4)))
    assert value == 0 and not gradient.any()


def test_z_loss_by_hand(route):
    # logsumexp of four zeros is ln 4, of (ln 1, ln 2, ln 3, ln 4) ln 10; the third token is padding
    logits = np.log([[[1.0, 1, 1, 1], [1, 2, 3, 4], [100, 1, 1, 1]]])
    router = TopK(4, 1, TopK.Options(balance_coef=0.0, z_coef=0.5))
    loss = route(router, logits, [[True, True, False]]).aux_loss
    assert float(loss) == pytest.approx(0.5 * (np.log(4) ** 2 + np.log(10) ** 2) / 2, rel=1e-6)


def test_shares_add_up_to_the_loss_of_the_whole_batch():
    """Values and gradients, for members with 5, 1 and 0 real tokens."""
    random = np.random.default_rng(0)
    logits = jnp.asarray(random.normal(size=(3, 5, 4)), jnp.float32)
    mask = np.array([[1, 1, 1, 1, 1], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]], bool)
    load = np.bincount(np.argmax(logits, -1)[mask], minlength=4)
    tokens = jnp.int32(mask.sum())

    def whole(logits):  # in plain words, over the real rows only
        balance = 4 * jnp.sum(load / 6 * jax.nn.softmax(logits)[mask].mean(0))
        return balance, jnp.mean(jax.nn.logsumexp(logits[mask], -1) ** 2)

    def shares(logits, mask):
        return load_balance_share(logits, mask, load, tokens), z_share(logits, mask, tokens)

    def value_and_gradients(losses, *args):
        return losses(*args), jax.jacrev(losses)(*args)

    values, gradients = jax.jit(lambda x: value_and_gradients(whole, x))(logits)
    member = jax.jit(lambda x, m: value_and_gradients(shares, x, m))
    members = [member(logits[r : r + 1], mask[r : r + 1]) for r in range(3)]
    for which in range(2):
        np.testing.assert_allclose(sum(m[0][which] for m in members), values[which], rtol=1e-6)
        parts = np.concatenate([m[1][which] for m in members])
        np.testing.assert_allclose(parts, gradients[which], rtol=1e-5, atol=1e-7)


def test_gradient_at_perfect_balance_is_finite():
    """All-zero gate weights, the case at which a standard deviation would have the gradient 0/0; also one expert."""
    x = jnp.asarray(json.loads((CASES / "balanced_cv.json").read_text())["x"])[None]
    mask = np.ones((1, 4), bool)

    def losses(gate_DE):
        logits, load = x @ gate_DE, np.full(gate_DE.shape[1], 4 / gate_DE.shape[1])
        return load_balance_share(logits, mask, load, jnp.int32(4)), z_share(logits, mask, jnp.int32(4))

    for run in (jax.jacrev(losses), jax.jit(jax.jacrev(losses))):
        balance, z = run(jnp.zeros((3, 4)))
        np.testing.assert_allclose(balance, 0, atol=1e-7)  # the loss rests at balance
        assert np.isfinite(z).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.jit(jax.jacrev(losses))(jnp.zeros((3, 1))))


def test_loss_without_coefficients_needs_no_collective(make_context):
    def psum(statistics):
        raise AssertionError("psum was called")

    ctx = make_context(np.ones((1, 3)), psum=psum)
    assert aux_loss_share(jnp.ones((1, 3, 4)), jnp.ones(4), ctx, balance_coef=0.0, z_coef=0.0) == 0


# Two sequences of E=2, K=1; rows are logits ln p. Sequence 0: p0 = 0.9, 0.7; both tokens pick expert 0.
# Sequence 1: p0 = 0.2, the second token is padding; it picks expert 1.
SCOPED = np.log([[[0.9, 0.1], [0.7, 0.3]], [[0.2, 0.8], [0.9, 0.1]]])
SCOPED_MASK = [[True, True], [True, False]]


def scoped(scope, coef=1.0):
    return TopK(2, 1, TopK.Options(balance_coef=coef, z_coef=0.0, balance_scope=scope))


def test_balance_within_sequences_by_hand(route):
    # sequence 0: f = 1, 0 and P0 = 0.8: 2 * 0.8 = 1.6; sequence 1: f = 0, 1 and P1 = 0.8: 1.6.
    # Over 2 and 1 real tokens the mean is 1.6; the microbatch as a whole: f = 2/3, 1/3, P = 0.6, 0.4:
    # 2 * (2/3 * 0.6 + 1/3 * 0.4) = 16/15
    assert float(route(scoped("sequence"), SCOPED, SCOPED_MASK).aux_loss) == pytest.approx(1.6, rel=1e-6)
    assert float(route(scoped("microbatch"), SCOPED, SCOPED_MASK).aux_loss) == pytest.approx(16 / 15, rel=1e-6)


def test_sequences_count_by_their_real_tokens(route):
    # as above with p0 = 0.4 in sequence 1: 2 * 0.6 = 1.2, and (2 * 1.6 + 1 * 1.2) / 3 = 22/15
    logits = np.array(SCOPED)
    logits[1, 0] = np.log([0.4, 0.6])
    assert float(route(scoped("sequence"), logits, SCOPED_MASK).aux_loss) == pytest.approx(22 / 15, rel=1e-6)


def test_balance_over_a_step_takes_the_counts_of_the_last_one(route):
    router = scoped("global")
    first, seen = route(router, SCOPED, SCOPED_MASK, with_seen=True)
    assert float(first.aux_loss) == pytest.approx(16 / 15, rel=1e-6)  # nothing was counted yet: the microbatch's own
    np.testing.assert_array_equal(seen["load_E"], [2, 1])
    assert seen["tokens"] == 3
    # two microbatches with 6 choices of expert 0 and 2 of expert 1: f = 3/4, 1/4; P = 0.6, 0.4 as before:
    # 2 * (0.75 * 0.6 + 0.25 * 0.4) = 1.1
    state = router.next_state(router.init_state(), {"load_E": jnp.array([6, 2]), "tokens": jnp.int32(8)})
    assert float(route(router, SCOPED, SCOPED_MASK, state=state).aux_loss) == pytest.approx(1.1, rel=1e-6)


def test_microbatches_without_balance_coefficient_still_count(route):
    _, seen = route(scoped("global", coef=0.0), SCOPED, SCOPED_MASK, with_seen=True)
    assert seen["tokens"] == 3


def test_squared_variation_rests_at_perfect_balance():
    case = json.loads((CASES / "balanced_cv.json").read_text())

    def loss(weight):
        importance = jax.nn.softmax(jnp.array(case["x"]) @ weight).sum(0)
        return squared_variation_share(importance, importance, jnp.float32(1))

    for run in (lambda f: f, jax.jit):
        value, gradient = run(jax.value_and_grad(loss))(jnp.zeros((3, 4)))
        assert value == case["expected_loss"]
        np.testing.assert_array_equal(gradient, np.zeros((3, 4)))


def test_squared_variation_by_hand():
    # (3, 1) is 2 +- 1: 1 / 4. d/dV = 2 / (E m) * (V/m - 1) - 2 / (E^2 m) * sum (V/m)(V/m - 1) = (0.25, -0.25) - 0.125
    def share(sums, part=1.0):
        return squared_variation_share(sums, jnp.array([3.0, 1.0]), jnp.float32(part))

    value, gradient = jax.value_and_grad(share)(jnp.array([3.0, 1.0]))
    assert float(value) == 0.25
    np.testing.assert_allclose(gradient, [0.125, -0.375])
    assert float(share(jnp.array([1.0, 1.0]), 0.5)) == 0.125  # a member with half of the tokens
    for total in ([0.0, 0.0], [4.0]):  # only padding; one expert
        value, gradient = jax.value_and_grad(lambda v: squared_variation_share(v, v, jnp.float32(1)))(jnp.array(total))
        assert value == 0 and not gradient.any()
