import jax
import numpy as np
import pytest

from fef.config import ConfigError
from fef.routing.expert_choice import ExpertChoice

# p of 2 experts for the 4 tokens of a sequence
PROBS_BSE = np.array([[[0.9, 0.1], [0.6, 0.4], [0.7, 0.3], [0.2, 0.8]]])


def table(assignment, num_tokens, num_experts):
    weight_TE = np.zeros((num_tokens, num_experts))
    valid_N = np.asarray(assignment.valid_N)
    weight_TE[assignment.token_N[valid_N], assignment.expert_N[valid_N]] = assignment.weight_N[valid_N]
    return weight_TE


def test_one_sequence_by_hand(route):
    # K=1, factor 1: C = 1 * 4 / 2 = 2. Expert 0 takes tokens 0 and 2, expert 1 takes tokens 3 and 1.
    assignment = route(ExpertChoice(2, 1), np.log(PROBS_BSE))
    np.testing.assert_array_equal(assignment.token_N, [0, 2, 3, 1])
    np.testing.assert_array_equal(assignment.expert_N, [0, 0, 1, 1])
    np.testing.assert_allclose(assignment.weight_N, [0.9, 0.7, 0.8, 0.4], rtol=1e-6)
    assert assignment.valid_N.all() and assignment.num_choices is None and assignment.aux_loss == 0
    np.testing.assert_array_equal(assignment.metrics["load_E"], [2, 2])


def test_a_token_may_have_every_expert_or_none(route):
    # factor 0.5: C = 1; token 0 is the favourite of expert 0, token 3 that of expert 1, tokens 1 and 2 get none
    assignment = route(ExpertChoice(2, 1, ExpertChoice.Options(capacity_factor=0.5)), np.log(PROBS_BSE))
    np.testing.assert_array_equal(assignment.token_N, [0, 3])
    # K=2: C = 4 = S, every expert takes every token
    assignment = route(ExpertChoice(2, 2), np.log(PROBS_BSE))
    np.testing.assert_allclose(table(assignment, 4, 2), PROBS_BSE[0], rtol=1e-6)


def test_sequences_choose_for_themselves(route):
    both = np.log(np.concatenate([PROBS_BSE, PROBS_BSE[:, ::-1]]))
    assignment = route(ExpertChoice(2, 1), both)
    np.testing.assert_array_equal(assignment.token_N, [0, 2, 3, 1, 4 + 3, 4 + 1, 4 + 0, 4 + 2])
    np.testing.assert_array_equal(assignment.metrics["load_E"], [4, 4])


@pytest.mark.parametrize("num_real", [0, 1, 3, 5])
def test_padding_is_never_chosen_and_takes_no_place(route, num_real):
    """A padded sequence gets exactly what the sequence alone gets."""
    logits = np.random.default_rng(0).normal(size=(1, 8, 4))
    logits[0, num_real:] = 50.0  # padding that every expert would like
    mask = np.arange(8)[None] < num_real
    padded = route(ExpertChoice(4, 2), logits, mask)
    assert not padded.valid_N[np.asarray(padded.token_N) >= num_real].any()
    if num_real:
        alone = table(route(ExpertChoice(4, 2), logits[:, :num_real]), num_real, 4)
        np.testing.assert_allclose(table(padded, 8, 4)[:num_real], alone, rtol=1e-6)
    assert int(padded.metrics["tokens"]) == num_real


def test_gradient_reaches_the_gate_through_the_weights(route):
    # d p0 / d logit0 = p0 (1 - p0): token 0 of expert 0 has 0.9 * 0.1
    gradient = jax.grad(lambda logits: route(ExpertChoice(2, 1), logits).weight_N[0])(np.log(PROBS_BSE))
    np.testing.assert_allclose(gradient[0], [[0.09, -0.09], [0, 0], [0, 0], [0, 0]], atol=1e-6)


def test_it_does_look_ahead(route):
    """`causal = False` is true: another last token takes expert 1 away from token 1."""
    assert not ExpertChoice.causal
    changed = PROBS_BSE.copy()
    changed[0, 2] = [0.3, 0.7]
    before, after = (table(route(ExpertChoice(2, 1), np.log(p)), 4, 2)[:2] for p in (PROBS_BSE, changed))
    assert before[1, 1] > 0 and after[1, 1] == 0


def test_capacity_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="capacity_factor=0.0: must be > 0"):
        ExpertChoice(4, 2, ExpertChoice.Options(capacity_factor=0.0))
