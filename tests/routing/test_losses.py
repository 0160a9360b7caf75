import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fef.routing.gate import count_by_expert
from fef.routing.losses import load_balance_share, z_share
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
    load = count_by_expert(jnp.argmax(logits, -1), mask, 4)
    tokens = jnp.int32(mask.sum())

    def whole(logits):
        f = load / 6
        p = jax.nn.softmax(logits)[mask].mean(0)
        return 4 * jnp.sum(f * p), jnp.mean(jax.nn.logsumexp(logits[mask], -1) ** 2)

    for which, share in enumerate(
        (lambda x, m: load_balance_share(x, m, load, tokens), lambda x, m: z_share(x, m, tokens))
    ):
        value, gradient = jax.value_and_grad(lambda x, i=which: whole(x)[i])(logits)
        shares, gradients = zip(
            *(jax.value_and_grad(share)(logits[r : r + 1], mask[r : r + 1]) for r in range(3)), strict=True
        )
        np.testing.assert_allclose(sum(shares), value, rtol=1e-6)
        np.testing.assert_allclose(np.concatenate(gradients), gradient, rtol=1e-5, atol=1e-7)


def test_gradient_at_perfect_balance_is_finite(route):
    """All-zero gate weights, the case at which a standard deviation would have the gradient 0/0; also one expert."""
    case = json.loads((CASES / "balanced_cv.json").read_text())
    x = jnp.asarray(case["x"])[None]
    for num_experts in (4, 1):
        router = TopK(num_experts, 1, TopK.Options(balance_coef=1.0, z_coef=1.0))

        def loss(gate_DE, router=router):
            share = load_balance_share(
                x @ gate_DE, jnp.ones((1, 4), bool), jnp.full(router.num_experts, 4), jnp.int32(4)
            )
            return share + z_share(x @ gate_DE, jnp.ones((1, 4), bool), jnp.int32(4))

        for run in (jax.grad(loss), jax.jit(jax.grad(loss))):
            gradient = run(jnp.zeros((3, num_experts)))
            assert np.isfinite(gradient).all()


def test_loss_without_coefficients_needs_no_collective(make_context):
    def psum(statistics):
        raise AssertionError("psum was called")

    router = TopK(4, 2, TopK.Options(balance_coef=0.0, z_coef=0.0))
    assignment, _ = router({"gate_DE": jnp.eye(4)}, jnp.ones((1, 3, 4)), make_context(np.ones((1, 3)), psum=psum))
    assert assignment.aux_loss == 0
