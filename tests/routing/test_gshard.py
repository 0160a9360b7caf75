import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fef.config import ConfigError
from fef.routing.gshard import GShard

# Weights: 0.6 and 0.3 over 0.9 are 2/3 and 1/3; 0.5 and 0.4 over 0.9 are 5/9 and 4/9; 0.7 and 0.2 are 7/9 and 2/9.
PROBS_BSE = np.array([[[0.6, 0.3, 0.1], [0.5, 0.4, 0.1], [0.2, 0.7, 0.1]]])
CERTAIN = dict(second_policy="all")


def router(**options):
    return GShard(3, 2, GShard.Options(**options))


def test_one_sequence_by_hand(route):
    # S=3, E=3, factor 1: C = 2. First choices 0, 0, 1 take their places first: expert 0 is full, expert 1 has one left.
    # Second choices 1, 1, 0: token 0 gets expert 1, token 1 finds it full, token 2 finds expert 0 full.
    assignment = route(router(**CERTAIN), np.log(PROBS_BSE))
    np.testing.assert_array_equal(assignment.expert_N, [0, 1, 0, 1, 1, 0])
    np.testing.assert_array_equal(assignment.valid_N, [1, 1, 1, 0, 1, 0])
    np.testing.assert_allclose(assignment.weight_N, [2 / 3, 1 / 3, 5 / 9, 0, 7 / 9, 0], rtol=1e-6)
    # m = (1.3, 1.4, 0.3) / 3, c / S = 2/3, 1/3, 0: mean over experts of (2.6 + 1.4) / 9 = 4 / 27
    assert float(assignment.aux_loss) == pytest.approx(4 / 27, rel=1e-6)


def test_the_loss_is_that_of_top_k_over_e_squared(route):
    # a balanced load: E * sum f P = 1, so the paper's is 1 / 9
    probs = np.array([[[0.6, 0.3, 0.1], [0.1, 0.6, 0.3], [0.3, 0.1, 0.6]]])
    assert float(route(router(), np.log(probs)).aux_loss) == pytest.approx(1 / 9, rel=1e-6)
    # d/dlogit of token 0: f_e / (E S) * P'; with f = 1/3 for all, the sum of P is 1 and nothing moves
    gradient = jax.grad(lambda logits: route(router(), logits).aux_loss)(np.log(probs))
    np.testing.assert_allclose(gradient, 0, atol=1e-7)
    # f = (2/3, 1/3, 0) of the hand-worked sequence: sum_e f_e dP_e / 9, and for logit 0 of token 0
    # dP = 0.6 * (0.4, -0.3, -0.1): (2/3 * 0.24 - 1/3 * 0.18) / 9 = 0.1 / 9
    gradient = jax.grad(lambda logits: route(router(), logits).aux_loss)(np.log(PROBS_BSE))
    assert float(gradient[0, 0, 0]) == pytest.approx(0.1 / 9, rel=1e-5)


def test_a_first_choice_goes_before_an_earlier_second_one(route):
    """So the scheme looks ahead, and says so."""
    assert not router().causal and router(capacity_factor=0.0).causal
    wants_2 = PROBS_BSE.copy()
    wants_2[0, 2] = [0.2, 0.1, 0.7]  # expert 1 now has room for token 1's second choice
    before, after = (route(router(**CERTAIN), np.log(probs)).valid_N[3] for probs in (PROBS_BSE, wants_2))
    assert not before and after


def test_the_second_expert_is_drawn_with_twice_its_weight(route):
    # g2 = 1/5: drawn with probability 2/5; over 4000 tokens that is 1600, standard deviation 31
    logits = np.broadcast_to(np.log([0.8, 0.2, 1e-9]), (4, 1000, 3))
    valid_N = np.asarray(route(router(capacity_factor=0.0), logits).valid_N).reshape(-1, 2)
    assert valid_N[:, 0].all() and abs(valid_N[:, 1].sum() - 1600) < 160
    # equal weights: 2 * 1/2 is a certainty
    assert route(router(capacity_factor=0.0), np.zeros((2, 50, 3))).valid_N.all()


def test_an_undrawn_second_choice_takes_no_place(route):
    # 30 tokens of weights 1 and about 0 on experts 0 and 1, then one on 1 and 2: nothing is before it at expert 1
    logits = np.broadcast_to(np.array([40.0, 0.0, -40.0]), (1, 31, 3)).copy()
    logits[0, -1] = [-40.0, 40.0, 0.0]
    valid_NK = np.asarray(route(router(capacity_factor=1.0), logits).valid_N).reshape(-1, 2)
    np.testing.assert_array_equal(valid_NK[:, 0], [1] * 21 + [0] * 9 + [1])  # C = ceil(2 * 31 / 3) = 21
    assert not valid_NK[:, 1].any()


def test_evaluation_takes_both_experts(route):
    assignment = route(router(), np.log(PROBS_BSE), train=False)
    assert assignment.valid_N.all()


def test_gradient_of_a_weight_by_hand(route):
    # g1 = sigmoid(logit 0 - logit 1) = 2/3: derivative 2/9 and -2/9
    gradient = jax.grad(lambda logits: route(router(**CERTAIN), logits).weight_N[0])(jnp.log(PROBS_BSE))
    np.testing.assert_allclose(gradient[0, 0], [2 / 9, -2 / 9, 0], atol=1e-6)


def test_other_numbers_of_choices_are_refused():
    with pytest.raises(ConfigError, match=r"config.moe.num_choices=4: gshard gives a token two experts; set"):
        GShard(8, 4)
