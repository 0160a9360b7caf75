import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from fef.config import ConfigError
from fef.routing.sigmoid_bias import SigmoidBias

TINY = json.loads((pathlib.Path(__file__).parents[1] / "cases/router/tiny_sigmoid.json").read_text())


def logit(p):
    return np.log(np.asarray(p) / (1 - np.asarray(p)))


def bias(*values):
    return {"bias_E": jnp.array(values, jnp.float32)}


def test_bias_selects_and_enters_no_weight(route):
    # scores 0.8, 0.6, 0.2 plus the bias 0, -0.5, 0: 0.8, 0.1, 0.2 choose 0 and 2; weights 0.8 and 0.2, sum 1
    router = SigmoidBias(3, 2)
    logits = [[logit([0.8, 0.6, 0.2])]]
    assignment = route(router, logits, state=bias(0, -0.5, 0))
    np.testing.assert_array_equal(assignment.expert_N, [0, 2])
    np.testing.assert_allclose(assignment.weight_N, [0.8, 0.2], rtol=1e-6)
    # without a bias 0 and 1: 0.8 / 1.4 and 0.6 / 1.4
    np.testing.assert_allclose(route(router, logits).weight_N, [4 / 7, 3 / 7], rtol=1e-6)


def test_plain_and_scaled_weights_by_hand(route):
    router = SigmoidBias(3, 2, SigmoidBias.Options(normalise=False, routed_scaling=2.5))
    assignment = route(router, [[logit([0.8, 0.6, 0.2])]])
    np.testing.assert_allclose(assignment.weight_N, [2.0, 1.5], rtol=1e-6)


def test_tiny_scores_keep_their_weights(route):
    case = TINY["select"]
    assignment = route(SigmoidBias(case["E"], case["K"]), [[case["logits"]]], state=bias(*case["bias"]))
    weights = dict(zip(map(str, assignment.expert_N), assignment.weight_N, strict=True))
    assert weights == pytest.approx(case["expected_weights"], abs=1e-6)

    case = TINY["normalised_rows"]
    weights = route(SigmoidBias(4, 4), [[case["logits"]]]).weight_N
    np.testing.assert_allclose(weights, case["expected"], atol=1e-6)
    assert float(weights.sum()) == pytest.approx(1, abs=1e-6)


def test_groups_by_hand(route):
    # groups {0,1}, {2,3}, {4,5}: sums of the two best 0.9 + 0.1 = 1.0, 0.6 + 0.5 = 1.1, 0.7 + 0.2 = 0.9.
    # One group stays: experts 2 and 3. Two groups: the three best of 0.9, 0.1, 0.6, 0.5 are experts 0, 2, 3.
    logits = [[logit([0.9, 0.1, 0.6, 0.5, 0.7, 0.2])]]
    one = route(SigmoidBias(6, 2, SigmoidBias.Options(n_groups=3, topk_groups=1)), logits)
    np.testing.assert_array_equal(one.expert_N, [2, 3])
    two = route(SigmoidBias(6, 3, SigmoidBias.Options(n_groups=3, topk_groups=2)), logits)
    np.testing.assert_array_equal(two.expert_N, [0, 2, 3])
    # a bias of 0.3 on expert 5 lifts the last group to 0.7 + 0.5 = 1.2
    lifted = route(
        SigmoidBias(6, 2, SigmoidBias.Options(n_groups=3, topk_groups=1)), logits, state=bias(0, 0, 0, 0, 0, 0.3)
    )
    np.testing.assert_array_equal(lifted.expert_N, [4, 5])


def test_bias_moves_against_the_load(route):
    # loads 3, 1, 2 of mean 2: the bias goes down, up, and stays
    router = SigmoidBias(3, 1, SigmoidBias.Options(update_rate=0.25))
    logits = logit([[[0.9, 0.1, 0.1]] * 3 + [[0.1, 0.9, 0.1]] + [[0.1, 0.1, 0.9]] * 2 + [[0.1, 0.9, 0.1]]])
    _, seen = route(router, logits, [[True] * 6 + [False]], with_seen=True)
    np.testing.assert_array_equal(seen["load_E"], [3, 1, 2])
    state = router.next_state(bias(1, 1, 1), seen)
    np.testing.assert_array_equal(state["bias_E"], [0.75, 1.25, 1.0])
    frozen = SigmoidBias(3, 1, SigmoidBias.Options(update_rate=0.0))
    np.testing.assert_array_equal(frozen.next_state(bias(1, 2, 3), seen)["bias_E"], [1, 2, 3])


def test_sequence_loss_by_hand(route):
    # E=2, K=1. Scores (0.6, 0.2) and (0.2, 0.2), so s' = (0.75, 0.25) and (0.5, 0.5): P = 0.625, 0.375.
    # Both tokens rate expert 0 highest (a tie goes to the first): f = E/(K*S) * (2, 0) = 2, 0; loss = 2 * 0.625
    # whatever the bias, which sends both tokens to expert 1.
    router = SigmoidBias(2, 1, SigmoidBias.Options(sequence_coef=1.0))
    assignment = route(router, logit([[[0.6, 0.2], [0.2, 0.2]]]), state=bias(0, 1))
    np.testing.assert_array_equal(assignment.expert_N, [1, 1])
    assert float(assignment.aux_loss) == pytest.approx(1.25, rel=1e-6)


def test_sequence_loss_of_a_balanced_sequence_is_one(route):
    logits = logit([[[0.9, 0.9, 0.1, 0.1], [0.1, 0.1, 0.9, 0.9]]])
    router = SigmoidBias(4, 2, SigmoidBias.Options(sequence_coef=1.0))
    assert float(route(router, logits).aux_loss) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(n_groups=3), r"sigmoid_bias.n_groups=3: must divide moe.num_experts=4"),
        (dict(n_groups=2, topk_groups=3), r"sigmoid_bias.topk_groups=3: must be <= n_groups=2"),
        (dict(n_groups=4, topk_groups=1), r"sigmoid_bias.topk_groups=1: so few groups hold fewer experts"),
        (dict(update_rate=-1.0), r"update_rate=-1.0: must be >= 0"),
    ],
)
def test_bad_settings_are_refused_in_one_line(options, message):
    with pytest.raises(ConfigError, match=message):
        SigmoidBias(4, 2, SigmoidBias.Options(**options))
