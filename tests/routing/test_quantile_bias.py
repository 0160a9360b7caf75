import jax.numpy as jnp
import numpy as np
import pytest

from fef.config import ConfigError
from fef.routing.quantile_bias import QuantileBias, upper_quantile


def logit(p):
    return np.log(np.asarray(p) / (1 - np.asarray(p)))


def test_bias_selects_and_enters_no_weight(route):
    # 0.8, 0.6, 0.2 with the bias 0, -0.5, 0: 0.8, 0.1, 0.2 choose 0 and 2; weights 0.8 and 0.2, sum 1
    state = {"bias_E": jnp.array([0, -0.5, 0])}
    assignment = route(QuantileBias(3, 2), [[logit([0.8, 0.6, 0.2])]], state=state)
    np.testing.assert_array_equal(assignment.expert_N, [0, 2])
    np.testing.assert_allclose(assignment.weight_N, [0.8, 0.2], rtol=1e-6)


def test_one_step_by_hand(route):
    # E=2, K=1, four bins of 0.25; four tokens and one of padding. Expert 0: 0.6, 0.6, 0.9, 0.9; expert 1: 0.1, 0.1,
    # 0.1, 0.4. Half of the tokens are to be above: for expert 0 the two of bin 2 are below, its end is 0.75; for
    # expert 1 two of the three of bin 0, 2/3 of its width: 1/6.
    router = QuantileBias(2, 1, QuantileBias.Options(bins=4))
    logits = logit([[[0.6, 0.1], [0.6, 0.1], [0.9, 0.1], [0.9, 0.4], [0.01, 0.99]]])
    mask = [[True] * 4 + [False]]
    assignment, seen = route(router, logits, mask, with_seen=True)
    np.testing.assert_array_equal(seen["histogram_EH"], [[0, 0, 2, 2], [3, 1, 0, 0]])
    np.testing.assert_array_equal(assignment.metrics["load_E"], [4, 0])
    state = router.next_state(router.init_state(), seen)
    np.testing.assert_allclose(state["bias_E"], [-0.75, -1 / 6], rtol=1e-6)
    # 0.6 - 0.75 < 0.1 - 1/6 for tokens 0 and 1; 0.9 - 0.75 > 0.1 - 1/6 for 2; 0.15 < 0.4 - 1/6 = 0.233 for 3
    moved = route(router, logits, mask, state=state)
    np.testing.assert_array_equal(moved.expert_N[:4], [1, 1, 0, 1])


def test_smoothing_and_a_step_without_tokens():
    histogram = jnp.array([[0, 0, 2, 2], [0, 0, 0, 0]])
    state = {"bias_E": jnp.array([-0.25, -0.5])}
    router = QuantileBias(2, 1, QuantileBias.Options(bins=4, smoothing=0.5))
    bias_E = router.next_state(state, {"histogram_EH": histogram})["bias_E"]
    np.testing.assert_allclose(bias_E, [-0.5, -0.5])  # half of the way from -0.25 to -0.75; nothing seen: unmoved


def test_all_experts_chosen_needs_no_threshold():
    np.testing.assert_array_equal(upper_quantile(jnp.array([[0, 3], [2, 1]]), 1.0), [0, 0])


def test_skewed_scores_become_balanced(route):
    """Means that differ by more than the spread: without a bias two of eight experts have everything."""
    random = np.random.default_rng(0)
    logits = random.normal(size=(4, 256, 8)) * 0.3 + np.linspace(-2, 2, 8)
    router = QuantileBias(8, 2)
    before, seen = route(router, logits, with_seen=True)
    after = route(router, logits, state=router.next_state(router.init_state(), seen))
    mean = 4 * 256 * 2 / 8
    assert before.metrics["load_E"].max() > 3 * mean
    assert after.metrics["load_E"].max() < 1.5 * mean and after.metrics["load_E"].min() > 0.5 * mean


def test_bad_settings_are_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"smoothing=1.5: must be >= 0 and <= 1"):
        QuantileBias(4, 2, QuantileBias.Options(smoothing=1.5))
