import json
import pathlib

import numpy as np
import pytest

from fef.routing.capacity import expert_capacity, queue_places, within_capacity

CASES = pathlib.Path(__file__).parents[1] / "cases"


@pytest.mark.parametrize(
    "factor, seq_len, num_choices, num_experts, expected",
    [
        (1.0, 8, 1, 4, 2),
        (1.25, 8, 1, 4, 3),  # 2.5
        (1.0, 4, 3, 4, 3),
        (1.1, 100, 1, 10, 11),  # 11.000000000000002 in floating point
        (1.0, 4, 1, 64, 1),  # at least 1
        (100.0, 8, 2, 4, 8),  # at most S
        (1.0, 6, 2, 3, 4),  # 2/3 * 6
    ],
)
def test_capacity(factor, seq_len, num_choices, num_experts, expected):
    assert expert_capacity(factor, seq_len, num_choices, num_experts) == expected


def test_docstring_example():
    places = queue_places(np.array([[[0, 1], [1, 0], [0, 1]]]), np.ones((1, 3, 2), bool), 2)
    np.testing.assert_array_equal(places, [[[0, 0], [1, 1], [2, 2]]])


def test_three_choices_never_share_a_slot():
    case = json.loads((CASES / "dispatch/topk3_slots.json").read_text())
    expert = np.array([case["choices"]])
    claims = np.ones(expert.shape, bool)
    places = np.asarray(queue_places(expert, claims, case["E"]))
    logits = np.zeros((*expert.shape[:2], case["E"]))
    _, kept = map(np.asarray, within_capacity(expert, claims, logits, case["C"]))
    slots = set(zip(expert[kept].tolist(), places[kept].tolist(), strict=True))
    assert kept.sum() == case["expected"]["kept"]
    assert len(slots) == case["expected"]["distinct_(expert,slot)_pairs_among_kept"]
    assert all(slot < case["C"] for _, slot in slots)


@pytest.mark.parametrize("num_choices", [1, 2, 3, 4])
def test_places_equal_a_plain_loop(num_choices):
    random = np.random.default_rng(num_choices)
    batch, seq_len, num_experts = 3, 9, 5
    scores = random.random((batch, seq_len, num_experts))
    expert = np.argsort(scores, axis=-1)[..., :num_choices]
    claims = np.broadcast_to(random.random((batch, seq_len, 1)) < 0.7, expert.shape)
    places = queue_places(expert, claims, num_experts)
    for b in range(batch):
        length = np.zeros(num_experts, int)
        for s in range(seq_len):
            for k in range(num_choices):
                if claims[b, s, k]:
                    assert places[b, s, k] == length[expert[b, s, k]]
                    length[expert[b, s, k]] += 1


def settle(wanted, logits, capacity, overflow, claims=None, **how):
    """Of one sequence: experts and whether kept, (S, K) each."""
    wanted, logits = np.array([wanted]), np.array([logits], np.float32)
    claims = np.ones(wanted.shape, bool) if claims is None else np.array([claims], bool)
    expert, kept = within_capacity(wanted, claims, logits, capacity, overflow, **how)
    return np.asarray(expert)[0], np.asarray(kept)[0]


# Four tokens, three experts, two places each. All like 0 best, then 1, but the last one, who likes 2.
LIKED = [[3.0, 2.0, 1.0]] * 3 + [[0.0, 1.0, 2.0]]


def test_next_best_by_hand():
    # Tokens 0 and 1 fill expert 0; token 2 goes to its next best, 1; token 3 has its own.
    expert, kept = settle([[0], [0], [0], [2]], LIKED, 2, "next_best")
    np.testing.assert_array_equal(expert[:, 0], [0, 0, 1, 2])
    assert kept.all()
    # One place each: the last token finds 2, which token 2 took, full, and nothing is left.
    expert, kept = settle([[0], [0], [0], [2]], LIKED, 1, "next_best")
    np.testing.assert_array_equal(expert[:3, 0], [0, 1, 2])
    np.testing.assert_array_equal(kept[:, 0], [1, 1, 1, 0])


def test_next_best_gives_no_token_the_same_expert_twice():
    # C = 1: token 0 has 0 and 1. Token 1 wants the same: its first choice goes to 2, its second one nowhere.
    expert, kept = settle([[0, 1], [0, 1]], LIKED[:2], 1, "next_best")
    np.testing.assert_array_equal(expert[kept], [0, 1, 2])
    np.testing.assert_array_equal(kept, [[1, 1], [1, 0]])
    # C = 2, wants (0, 1), (0, 1), (0, 1): the third token's choices go to 2, and then nowhere.
    expert, kept = settle([[0, 1]] * 3, LIKED[:3], 2, "next_best")
    np.testing.assert_array_equal(kept, [[1, 1], [1, 1], [1, 0]])
    assert expert[2, 0] == 2
    # First choices first, C = 1: token 0 takes 0, token 1 goes to 1; then token 0's second choice finds 1 full: 2.
    expert, kept = settle([[0, 1], [0, 1]], LIKED[:2], 1, "next_best", first_choices_first=True)
    np.testing.assert_array_equal(expert[kept], [0, 2, 1])
    np.testing.assert_array_equal(kept, [[1, 1], [1, 0]])


def test_next_best_loses_nothing_while_there_is_room():
    """And drops, keeps and spills as a plain loop does."""
    random = np.random.default_rng(0)
    for num_choices in (1, 2, 3):
        logits = random.normal(size=(12, 5)) + [2, 1, 0, 0, 0]
        wanted = np.argsort(-logits, axis=-1)[:, :num_choices]
        claims = np.broadcast_to(random.random((12, 1)) < 0.8, wanted.shape)
        capacity = 8  # 5 * 8 places for at most 36 choices, and each token finds K experts with room
        expert, kept = settle(wanted, logits, capacity, "next_best", claims)
        count, plain = np.zeros(5, int), np.full(wanted.shape, -1)
        for s in range(12):
            for k in range(num_choices):
                rest = [e for e in np.argsort(-logits[s]) if count[e] < capacity and e not in plain[s]]
                if claims[s, k]:
                    plain[s, k] = wanted[s, k] if wanted[s, k] in rest else rest[0]
                    count[plain[s, k]] += 1
        np.testing.assert_array_equal(kept, claims)
        np.testing.assert_array_equal(expert[kept], plain[kept])
    assert count.max() == capacity


def test_batch_priority_by_hand():
    # Expert 0 has two places; the weights on it rise with the position, so the first token loses, not the last.
    logits = np.log([[0.6, 0.4], [0.7, 0.3], [0.9, 0.1]])
    _, kept = settle([[0]] * 3, logits, 2, "batch_priority")
    np.testing.assert_array_equal(kept[:, 0], [0, 1, 1])
    _, kept = settle([[0]] * 3, logits, 2, "drop")
    np.testing.assert_array_equal(kept[:, 0], [1, 1, 0])
    # Padding has no priority, and equal weights go by position.
    _, kept = settle([[0]] * 3, logits, 1, "batch_priority", [[1], [1], [0]])
    np.testing.assert_array_equal(kept[:, 0], [0, 1, 0])
    _, kept = settle([[0]] * 3, np.zeros((3, 2)), 2, "batch_priority")
    np.testing.assert_array_equal(kept[:, 0], [1, 1, 0])


def test_batch_priority_of_two_choices():
    # Token 1 goes first and takes 1 and 0; token 0 finds both of C = 1 full. First choices first: it gets its 0.
    logits = np.log([[0.6, 0.4], [0.3, 0.7]])
    _, kept = settle([[0, 1], [1, 0]], logits, 1, "batch_priority")
    np.testing.assert_array_equal(kept, [[0, 0], [1, 1]])
    _, kept = settle([[0, 1], [1, 0]], logits, 1, "batch_priority", first_choices_first=True)
    np.testing.assert_array_equal(kept, [[1, 0], [1, 0]])
