import jax
import numpy as np
import pytest

from fef.routing.top_p import TopP

# 0.7 reaches 0.6 alone; 0.5 does not, 0.5 + 0.3 does; 0.4 + 0.3 does; 0.3 + 0.28 does not, with 0.22 it does.
PROBS_BSE = np.array([
    [[0.1, 0.7, 0.1, 0.1], [0.5, 0.3, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4], [0.22, 0.2, 0.3, 0.28]]
])  # fmt: skip


def router(num_choices=4, **options):
    return TopP(4, num_choices, TopP.Options(**(dict(p=0.6, balance_coef=0.0, entropy_coef=0.0) | options)))


def test_as_few_experts_as_reach_p(route):
    assignment = route(router(), np.log(PROBS_BSE))
    valid_SK, expert_SK = (np.asarray(a).reshape(4, 4) for a in (assignment.valid_N, assignment.expert_N))
    np.testing.assert_array_equal(valid_SK.sum(1), [1, 2, 2, 3])
    assert [set(e[v]) for e, v in zip(expert_SK, valid_SK, strict=True)] == [{1}, {0, 1}, {3, 2}, {2, 3, 0}]
    weights = np.asarray(assignment.weight_N).reshape(4, 4)
    np.testing.assert_allclose(
        weights[:, :3], [[0.7, 0, 0], [0.5, 0.3, 0], [0.4, 0.3, 0], [0.3, 0.28, 0.22]], rtol=1e-5
    )
    np.testing.assert_array_equal(assignment.metrics["load_E"], [2, 2, 2, 2])
    np.testing.assert_array_equal(assignment.metrics["kept_E"], [2, 2, 2, 2])


def test_no_more_than_k_experts(route):
    assignment = route(router(num_choices=2), np.log(PROBS_BSE))
    np.testing.assert_array_equal(assignment.valid_N, [1, 0, 1, 1, 1, 1, 1, 1])
    assert route(router(num_choices=4, p=1.0), np.log(PROBS_BSE)).valid_N.all()


def test_renormalised_weights_by_hand(route):
    weights = np.asarray(route(router(renormalise=True), np.log(PROBS_BSE)).weight_N).reshape(4, 4)
    np.testing.assert_allclose(weights[:3, :2], [[1, 0], [5 / 8, 3 / 8], [4 / 7, 3 / 7]], rtol=1e-5)


def test_balance_loss_by_hand(route):
    # Two sequences of two tokens over 2 experts, p = 0.6: the sets are {0}, {0, 1}, {0}; one token is padding.
    # f = (3, 1) / 3, P = (0.9 + 0.55 + 0.8, 0.1 + 0.45 + 0.2) / 3 = (0.75, 0.25): 2 * (1 * 0.75 + 0.25 / 3) = 5/3
    probs = np.array([[[0.9, 0.1], [0.55, 0.45]], [[0.8, 0.2], [0.1, 0.9]]])
    scheme = TopP(2, 2, TopP.Options(p=0.6, balance_coef=0.5, entropy_coef=0.0))
    loss = route(scheme, np.log(probs), [[True, True], [True, False]]).aux_loss
    assert float(loss) == pytest.approx(0.5 * 5 / 3, rel=1e-6)


def test_entropy_loss_by_hand(route):
    # H(0.7, 0.1, 0.1, 0.1) = 0.940448 and H(0.5, 0.3, 0.1, 0.1) = 1.168283, mean 1.054365
    loss = lambda logits: route(router(entropy_coef=0.1), logits).aux_loss  # noqa: E731
    logits = np.log(PROBS_BSE[:, :2])
    assert float(loss(logits)) == pytest.approx(0.1054365, rel=1e-5)
    # dH/dlogit_j = -p_j (ln p_j + H); for the first token's 0.7: -0.7 * (-0.356675 + 0.940448) = -0.408641, over 2
    assert float(jax.grad(loss)(logits)[0, 0, 1]) == pytest.approx(-0.1 * 0.408641 / 2, rel=1e-4)
    # an even gate rests, but is not pushed back: the entropy is stationary there
    np.testing.assert_allclose(jax.grad(loss)(np.zeros((1, 2, 4))), 0, atol=1e-8)
