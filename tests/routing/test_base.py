import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from fef.config import ConfigError
from fef.routing.base import Base, balanced_assignment

assign = jax.jit(balanced_assignment)

# All four tokens like expert 0 better, by 3, 1, 2 and 4: two places each, so those that lose least go to expert 1.
SCORES_BSE = np.array([[[3.0, 0.0], [1.0, 0.0], [2.0, 0.0], [4.0, 0.0]]])


def test_one_sequence_by_hand(route):
    assignment = route(Base(2, 1), SCORES_BSE)
    np.testing.assert_array_equal(assignment.expert_N, [0, 1, 1, 0])
    sigmoid = 1 / (1 + np.exp(-np.array([3.0, 0.0, 0.0, 4.0])))
    np.testing.assert_allclose(assignment.weight_N, sigmoid, rtol=1e-6)
    assert assignment.valid_N.all() and assignment.aux_loss == 0
    np.testing.assert_array_equal(assignment.metrics["load_E"], [2, 2])


def test_tokens_move_on_to_make_room(route):
    # Three experts of one place. Token 0 takes 0, token 1 takes 1. Token 2 wants 0 by 9: token 0 then moves to 1, which
    # costs it 1, and token 1 to 2, which costs it 2: 5 + 4 + 9 - 3 in all; token 2 elsewhere would lose 9.
    scores = [[[5.0, 4.0, 0.0], [0.0, 4.0, 2.0], [9.0, 0.0, 0.0]]]
    np.testing.assert_array_equal(route(Base(3, 1), scores).expert_N, [1, 2, 0])


def test_evaluation_takes_the_best_score(route):
    np.testing.assert_array_equal(route(Base(2, 1), SCORES_BSE, train=False).expert_N, [0, 0, 0, 0])


def test_padding_takes_no_place(route):
    # Two real tokens, one place each, whatever the padding wants.
    scores = np.concatenate([[[[-9.0, 9.0]] * 3], SCORES_BSE[:, :2]], axis=1)
    assignment = route(Base(2, 1), scores, [[False, False, False, True, True]])
    np.testing.assert_array_equal(assignment.expert_N[3:], [0, 1])
    np.testing.assert_array_equal(assignment.valid_N, [0, 0, 0, 1, 1])


def test_gradient_by_hand(route):
    # through the weight alone: sigmoid'(3) = 0.952574 * 0.047426
    gradient = jax.grad(lambda logits: route(Base(2, 1), logits).weight_N[0])(jnp.asarray(SCORES_BSE))
    np.testing.assert_allclose(gradient[0], [[0.952574 * 0.047426, 0], [0, 0], [0, 0], [0, 0]], atol=1e-6)


def check(scores_SE, mask_S):
    """Against SciPy, an expert being as many columns as it has places."""
    num_experts = scores_SE.shape[1]
    expert_S = np.asarray(assign(jnp.asarray(scores_SE, jnp.float32), jnp.asarray(mask_S)))
    real = scores_SE[mask_S]
    capacity = -(-len(real) // num_experts)
    assert np.bincount(expert_S[mask_S], minlength=num_experts).max(initial=0) <= capacity
    rows, columns = linear_sum_assignment(np.repeat(real, capacity, axis=1), maximize=True)
    best = real[rows, columns // capacity].sum() if capacity else 0.0
    ours = real[np.arange(len(real)), expert_S[mask_S]].sum()
    # each token's score is rounded to 2^-28 E of the largest difference, at most 20 here, and float32 has 24 digits
    assert ours == pytest.approx(best, rel=1e-6, abs=1e-5)


@pytest.mark.parametrize(("seq_len", "num_experts"), [(24, 4), (23, 4), (5, 8), (40, 16), (30, 1)])
def test_the_sum_of_scores_is_the_highest(seq_len, num_experts):
    random = np.random.default_rng(seq_len)
    for case in range(6):
        scores = random.normal(size=(seq_len, num_experts)) + random.normal(size=num_experts) * case
        check(scores.astype(np.float32), random.random(seq_len) < [1, 1, 0.8, 0.5, 0.1, 0][case])


def test_ties_and_equal_tokens():
    """Where an auction would raise prices by next to nothing for ever."""
    random = np.random.default_rng(0)
    full = np.ones(24, bool)
    for scores in (np.zeros((24, 4)), np.tile(random.normal(size=(1, 4)), (24, 1)), random.integers(0, 3, (24, 4))):
        check(scores.astype(np.float32), full)


def test_other_numbers_of_choices_are_refused():
    with pytest.raises(ConfigError, match=r"config.moe.num_choices=2: base assigns each token to one expert; set"):
        Base(4, 2)
