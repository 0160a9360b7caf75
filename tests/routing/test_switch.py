import dataclasses

import numpy as np
import pytest

from fef.config import ConfigError
from fef.routing.switch import Switch


def test_one_sequence_by_hand(route):
    # E=2, S=4, factor 1: C = 2. Tokens want experts 0, 1, 0, 0 with probabilities 0.9, 0.8, 0.7, 0.6.
    # Expert 0 takes tokens 0 and 2; token 3 is dropped. Load 3 and 1 of 4: f = 0.75, 0.25.
    # P0 = (0.9 + 0.2 + 0.7 + 0.6) / 4 = 0.6, P1 = 0.4; balance loss = 2 * (0.75 * 0.6 + 0.25 * 0.4) = 1.1
    probs = np.array([[[0.9, 0.1], [0.2, 0.8], [0.7, 0.3], [0.6, 0.4]]])
    assignment = route(Switch(2, 1, Switch.Options(capacity_factor=1.0, balance_coef=0.5)), np.log(probs))
    np.testing.assert_array_equal(assignment.expert_N, [0, 1, 0, 0])
    np.testing.assert_array_equal(assignment.valid_N, [1, 1, 1, 0])
    np.testing.assert_allclose(assignment.weight_N, [0.9, 0.8, 0.7, 0.0], rtol=1e-6)
    np.testing.assert_array_equal(assignment.metrics["load_E"], [3, 1])
    np.testing.assert_array_equal(assignment.metrics["kept_E"], [2, 1])
    assert float(assignment.aux_loss) == pytest.approx(0.5 * 1.1, rel=1e-6)


def test_z_loss_is_added_when_asked(route):
    # equal logits c: logsumexp = c + ln 2, here (1 + ln 2)^2; the balance loss of ties on expert 0 is 2 * 1 * 0.5 = 1
    options = Switch.Options(balance_coef=1.0, z_coef=0.1)
    assignment = route(Switch(2, 1, options), np.ones((1, 3, 2)))
    assert float(assignment.aux_loss) == pytest.approx(1 + 0.1 * (1 + np.log(2)) ** 2, rel=1e-6)


def test_capacity_is_per_sequence_and_without_padding(route):
    # S=4, E=4, factor 1.25: C = ceil(1.25) = 2 per expert and sequence; all tokens want expert 2
    logits = np.broadcast_to([0.0, 0.0, 1.0, 0.0], (2, 4, 4))
    mask = np.array([[1, 1, 1, 1], [0, 0, 1, 1]], bool)
    assignment = route(Switch(4, 1), logits, mask)
    np.testing.assert_array_equal(assignment.valid_N, [1, 1, 0, 0, 0, 0, 1, 1])
    dropless = route(Switch(4, 1, Switch.Options(capacity_factor=0.0)), logits, mask)
    np.testing.assert_array_equal(dropless.valid_N, mask.reshape(-1))


def test_an_absolute_capacity_holds_in_evaluation_if_asked(route):
    logits = np.broadcast_to([0.0, 0.0, 1.0, 0.0], (2, 4, 4))
    for at_eval in (False, True):
        router = Switch(4, 1, Switch.Options(capacity=1, capacity_at_eval=at_eval))
        np.testing.assert_array_equal(route(router, logits).valid_N, [1, 0, 0, 0] * 2)
        np.testing.assert_array_equal(
            route(router, logits, train=False).valid_N, [1, not at_eval] + [not at_eval] * 2 + [1] + [not at_eval] * 3
        )
    by_factor = Switch(4, 1, Switch.Options(capacity_at_eval=True))  # C = 2, as above
    np.testing.assert_array_equal(route(by_factor, logits, train=False).valid_N, [1, 1, 0, 0] * 2)


def test_a_spilled_token_has_the_weight_of_its_expert_and_the_loss_counts_its_wish(route):
    # As in the first test, but token 3 (probabilities 0.6, 0.4) goes to expert 1, which has one place left.
    probs = np.array([[[0.9, 0.1], [0.2, 0.8], [0.7, 0.3], [0.6, 0.4]]])
    options = Switch.Options(capacity_factor=1.0, balance_coef=0.5, overflow="next_best")
    assignment = route(Switch(2, 1, options), np.log(probs))
    np.testing.assert_array_equal(assignment.expert_N, [0, 1, 0, 1])
    np.testing.assert_allclose(assignment.weight_N, [0.9, 0.8, 0.7, 0.4], rtol=1e-6)
    np.testing.assert_array_equal(assignment.metrics["kept_E"], [2, 2])
    assert float(assignment.aux_loss) == pytest.approx(0.5 * 1.1, rel=1e-6)


def test_batch_priority_looks_ahead_and_says_so(route):
    options = Switch.Options(capacity_factor=1.0, overflow="batch_priority")
    probs = np.array([[[0.6, 0.4], [0.2, 0.8], [0.7, 0.3], [0.9, 0.1]]])  # of expert 0's three, the least loses
    np.testing.assert_array_equal(route(Switch(2, 1, options), np.log(probs)).valid_N, [0, 1, 1, 1])
    assert not Switch(2, 1, options).causal and Switch(2, 1).causal
    assert Switch(2, 1, dataclasses.replace(options, capacity_factor=0.0)).causal


def test_jitter_varies_the_input_in_training(route):
    router = Switch(2, 1, Switch.Options(jitter=0.1))
    logits = np.broadcast_to([1.0, 0.0], (4, 500, 2))  # 1 * uniform(0.9, 1.1): the weight is its sigmoid
    weights = np.asarray(route(router, logits, train=False).weight_N)
    np.testing.assert_allclose(weights, 1 / (1 + np.exp(-1)), rtol=1e-6)
    weights = np.asarray(route(Switch(2, 1, Switch.Options(jitter=0.1, capacity_factor=0.0)), logits).weight_N)
    factors = np.log(weights / (1 - weights))
    assert factors.min() == pytest.approx(0.9, abs=0.002) and factors.max() == pytest.approx(1.1, abs=0.002)
    assert factors.mean() == pytest.approx(1, abs=0.006)  # deviation 0.0577 / sqrt(2000) = 0.0013


def test_more_than_one_choice_is_refused():
    with pytest.raises(ConfigError, match=r"config.moe.num_choices=2: switch sends each token to one expert; set"):
        Switch(4, 2)
