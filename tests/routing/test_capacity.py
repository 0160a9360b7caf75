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
    kept = np.asarray(within_capacity(expert, claims, case["E"], 1.0))
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
