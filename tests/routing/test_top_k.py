import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fef.config import ConfigError
from fef.routing.top_k import TopK

CASES = pathlib.Path(__file__).parents[1] / "cases"
PLAIN = dict(balance_coef=0.0, z_coef=0.0)

# Two tokens whose logits are the logarithms of their probabilities, so softmax gives these back.
PROBS_BSE = np.array([[[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]]])


def test_renormalised_weights_by_hand(route):
    # token 0: 0.5 and 0.3 over 0.8 are 0.625 and 0.375; token 1: 0.7 and 0.2 over 0.9 are 7/9 and 2/9
    assignment = route(TopK(3, 2, TopK.Options(**PLAIN)), np.log(PROBS_BSE))
    np.testing.assert_array_equal(assignment.token_N, [0, 0, 1, 1])
    np.testing.assert_array_equal(assignment.expert_N, [0, 1, 2, 1])
    np.testing.assert_allclose(assignment.weight_N, [0.625, 0.375, 7 / 9, 2 / 9], rtol=1e-6)
    assert assignment.valid_N.all() and assignment.num_choices == 2 and assignment.aux_loss == 0
    np.testing.assert_array_equal(assignment.metrics["load_E"], [1, 2, 1])
    # -(0.5 ln 0.5 + 0.3 ln 0.3 + 0.2 ln 0.2) = 1.029653, -(0.1 ln 0.1 + 0.2 ln 0.2 + 0.7 ln 0.7) = 0.801819
    assert float(assignment.metrics["entropy_sum"]) == pytest.approx(1.029653 + 0.801819, rel=1e-5)


def test_plain_weights_are_the_probabilities(route):
    assignment = route(TopK(3, 2, TopK.Options(renormalise=False, **PLAIN)), np.log(PROBS_BSE))
    np.testing.assert_allclose(assignment.weight_N, [0.5, 0.3, 0.7, 0.2], rtol=1e-6)


def test_one_choice_keeps_its_probability_so_that_the_gate_learns(route):
    router = TopK(3, 1, TopK.Options(renormalise=True, **PLAIN))
    np.testing.assert_allclose(route(router, np.log(PROBS_BSE)).weight_N, [0.5, 0.7], rtol=1e-6)
    # d p0 / d logits = p0 * (1 - p0), -p0 p1, -p0 p2 = 0.25, -0.15, -0.10
    gradient = jax.grad(lambda logits: route(router, logits).weight_N[0])(np.log(PROBS_BSE))
    np.testing.assert_allclose(gradient[0, 0], [0.25, -0.15, -0.10], rtol=1e-5)


def test_choice_follows_logits_where_probabilities_underflow(route):
    logits = [[[0.0, -200.0, -150.0, -300.0]]]  # in float32 the last three probabilities are all 0
    assignment = route(TopK(4, 3, TopK.Options(**PLAIN)), logits)
    np.testing.assert_array_equal(assignment.expert_N, [0, 2, 1])
    np.testing.assert_array_equal(assignment.weight_N, [1, 0, 0])


def test_bfloat16_input_is_routed_in_float32(make_context):
    # 1.001 is 1.0 in bfloat16, so routing in bfloat16 would be a tie that the first expert wins.
    params = {"gate_DE": jnp.array([[1.0, 1.001]])}
    x_BSD = jnp.ones((1, 2, 1), jnp.bfloat16)
    assignment, _ = jax.jit(lambda params, x: TopK(2, 1)(params, x, make_context(np.ones((1, 2)))))(params, x_BSD)
    np.testing.assert_array_equal(assignment.expert_N, [1, 1])
    assert assignment.weight_N.dtype == jnp.float32


def test_capacity_drops_the_latest_tokens_of_each_sequence_in_training_only(route):
    # S=4, E=2, K=1, factor 1: C = 2. Everybody wants expert 0; in sequence 1 the first token is padding.
    router = TopK(2, 1, TopK.Options(capacity_factor=1.0))
    logits = np.broadcast_to([1.0, 0.0], (2, 4, 2))
    mask = np.array([[1, 1, 1, 1], [0, 1, 1, 1]], bool)
    assignment = route(router, logits, mask)
    np.testing.assert_array_equal(assignment.valid_N, [1, 1, 0, 0, 0, 1, 1, 0])
    np.testing.assert_array_equal(assignment.weight_N > 0, assignment.valid_N)
    np.testing.assert_array_equal(assignment.metrics["load_E"], [7, 0])
    np.testing.assert_array_equal(assignment.metrics["kept_E"], [4, 0])
    np.testing.assert_array_equal(route(router, logits, mask, train=False).valid_N, mask.reshape(-1))


def test_three_choices_fill_the_slots_without_losing_one(route):
    case = json.loads((CASES / "dispatch/topk3_slots.json").read_text())
    expected = case["expected"]
    logits = np.zeros((1, case["T"], case["E"]))
    for token, choices in enumerate(case["choices"]):
        logits[0, token, choices] = [3.0, 2.0, 1.0]
    # C = 1 * K*T/E = 3
    assignment = route(TopK(case["E"], case["K"], TopK.Options(capacity_factor=1.0)), logits)
    assert assignment.valid_N.size == expected["assignments"]
    np.testing.assert_array_equal(assignment.metrics["load_E"], expected["count_per_expert"])
    np.testing.assert_array_equal(assignment.metrics["kept_E"], expected["kept_per_expert"])
    kept, load = (int(assignment.metrics[name].sum()) for name in ("kept_E", "load_E"))
    assert kept == expected["kept"] and 1 - kept / load == expected["drop_rate"]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: TopK(4, 5), r"moe.num_choices=5: must be between 1 and moe.num_experts=4"),
        (lambda: TopK(4, 0), r"moe.num_choices=0: must be between 1"),
        (lambda: TopK(0, 1), r"moe.num_experts=0: must be >= 1"),
        (lambda: TopK(4, 2, TopK.Options(capacity_factor=-1.0)), r"capacity_factor=-1.0: must be >= 0"),
        (lambda: TopK(4, 2, TopK.Options(z_coef=float("nan"))), r"z_coef=nan"),
    ],
)
def test_bad_settings_are_refused_in_one_line(make, message):
    with pytest.raises(ConfigError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_routers_are_values():
    assert TopK(4, 2) == TopK(4, 2) and hash(TopK(4, 2)) == hash(TopK(4, 2))
    assert TopK(4, 2) != TopK(4, 2, TopK.Options(renormalise=False))
