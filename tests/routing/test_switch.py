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


def test_more_than_one_choice_is_refused():
    with pytest.raises(ConfigError, match=r"config.moe.num_choices=2: switch sends each token to one expert; set"):
        Switch(4, 2)
