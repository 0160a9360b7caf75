"""The cost model's choices against a search by hand, over random shapes and counts, and on worked numbers."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fef.config import UserError
from fef.fabric import calibration, cost
from fef.pool.ledger import Units
from fef.pool.table import ExpertTable

# A row costs 4 * 10 bytes, an expert 100 + 100: 5 rows break even. A GEMM of n rows takes n + 2 s, a byte of a block
# 0.1 s, one of a row 0.125 s.
UNITS = Units(block_bytes=100, gradient_bytes=100, row_bytes=10)
RATES = calibration.Calibration(bytes_per_s=10.0, row_bytes_per_s=8.0, latency_s=0.5, flops=1.0, half_rows=2.0)

counts = st.lists(st.integers(0, 12), min_size=1, max_size=7)


def make(rows, members):
    return np.array(rows, np.int32), cost.Layer(ExpertTable(len(rows), members), UNITS, flops_per_row=1.0)


def seconds(rows, load, order, k, rank, layer):
    """Of a layer in which the first k experts of an order are read, as the head of fef/fabric/cost.py has it."""
    home, members, read = layer.table.home_E, layer.table.num_members, set(order[:k])
    of_all = [max(last, n) for last, n in zip(load, rows, strict=True)] if any(load) else [members * n for n in rows]
    of_other = [(a - n) / max(members - 1, 1) for a, n in zip(of_all, rows, strict=True)]
    candidates = [e for e in order if k and of_other[e] > 0 and of_other[e] >= rows[order[k - 1]]]
    rest = [e for e in order if of_other[e] > 0 and e not in candidates]
    read_compute = 0.0
    served, blocks_sent, visiting = np.zeros(members), np.zeros(members), np.zeros(members)
    blocks_read = rows_sent = 0
    for e, n in enumerate(rows):
        others = [m for m in range(members) if m not in (rank, home[e])]
        is_mine = home[e] == rank
        if e in read:
            read_compute += (n + RATES.half_rows) * (n > 0)
        else:
            served[home[e]] += (of_all[e] + RATES.half_rows) * (of_all[e] > 0)
        if e in read and not is_mine and n > 0:
            blocks_read += 1
            blocks_sent[home[e]] += 1
        elif not is_mine:
            rows_sent += n
            visiting[home[e]] += n
        chance = min(1, k / len(candidates)) if e in candidates else 0
        if e in rest:
            chance = min(1, max(0, k - len(candidates)) / len(rest))
        blocks_sent[home[e]] += chance * len(others)
        visiting[home[e]] += (1 - chance) * of_other[e] * len(others)
    blocks_s = max(blocks_read, blocks_sent.max()) * 100 / RATES.bytes_per_s  # and as long for gradients
    row_s = 10 / RATES.row_bytes_per_s
    crossing = max(rows_sent, visiting.max()) * row_s + RATES.latency_s * (visiting.max() > 0)
    total = 0.0
    for share in (1 / 3, 2 / 3):
        busy = (read_compute + served.max()) * share
        wire = blocks_s + (rows_sent + visiting.max()) * row_s
        total += max(busy, wire, 2 * crossing + served.max() * share)
    return total


@settings(deadline=None, max_examples=60)
@given(counts, st.integers(1, 4), st.integers(0, 3), st.data())
def test_the_choice_by_time_is_the_best_prefix(rows, members, rank, data):
    load = np.array(data.draw(st.lists(st.integers(0, 40), min_size=len(rows), max_size=len(rows))), np.int32)
    rows, layer = make(rows, members)
    rank %= members
    is_visited = np.asarray(cost.visit_by_time(rows, load, rank, layer, RATES))
    home = layer.table.home_E
    order = sorted(range(len(rows)), key=lambda expert: (-rows[expert], (home[expert] - rank) % members, expert))
    prefixes = [set(order[:k]) for k in range(len(rows) + 1)]
    of_prefix = [seconds(rows.tolist(), load.tolist(), order, k, rank, layer) for k in range(len(rows) + 1)]
    remote = {expert for expert in range(len(rows)) if layer.table.home_E[expert] != rank and rows[expert] > 0}
    chosen = set(np.flatnonzero(is_visited).tolist())
    assert chosen <= remote
    # Own experts, and such without rows, are in any prefix or in none, at no cost to the wire.
    matching = [s for read, s in zip(prefixes, of_prefix, strict=True) if remote - read == chosen]
    assert min(matching) <= min(of_prefix) * (1 + 1e-5)


@settings(deadline=None, max_examples=60)
@given(counts, st.integers(1, 4), st.integers(0, 3))
def test_by_bytes_each_expert_has_the_fewer(rows, members, rank):
    rows, layer = make(rows, members)
    is_visited = np.asarray(cost.visit_by_bytes(rows, rank % members, layer))
    for expert, n in enumerate(rows):
        is_remote = layer.table.home_E[expert] != rank % members
        assert is_visited[expert] == (is_remote and 0 < 40 * n < 200)


@settings(deadline=None, max_examples=60)
@given(counts, st.integers(2, 4), st.integers(0, 20), st.data())
def test_a_home_gets_no_more_than_its_quota_and_the_hottest_stay(rows, members, quota, data):
    rows, layer = make(rows, members)
    wanted = np.array(data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))))
    kept = np.asarray(cost.within_quota(wanted, rows, layer, quota))
    assert not (kept & ~wanted).any()
    for home in range(members):
        of_home = [expert for expert in np.flatnonzero(wanted) if layer.table.home_E[expert] == home]
        of_home.sort(key=lambda expert: (-rows[expert], expert))
        fitting = next(k for k in itertools.count() if sum(rows[e] for e in of_home[k:]) <= quota)
        assert [expert for expert in of_home if kept[expert]] == of_home[fitting:]


def test_a_calibration_comes_back_as_it_was_saved(tmp_path):
    RATES.save(tmp_path / "rates.json")
    assert calibration.load(tmp_path / "rates.json") == RATES


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file or directory; python -m experiments.calibrate writes one"),
        ("{", "python -m experiments.calibrate writes a new one"),
        ('{"flops": 1}', "missing 4 required positional arguments"),
        (json.dumps(dataclasses.asdict(RATES) | {"bytes_per_s": 0}), "bytes_per_s=0: must be a number from"),
        (json.dumps(dataclasses.asdict(RATES) | {"half_rows": "a"}), "half_rows='a': must be a number"),
    ],
)
def test_what_is_no_calibration_is_refused_with_its_name(text, said, tmp_path):
    path = tmp_path / "rates.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=f"calibration {path}: .*") as error:
        calibration.load(path)
    assert said in str(error.value)


def test_faster_links_move_more_weights():
    rows, layer = make([4, 3, 1, 1], 2)
    no_load = np.zeros(4, np.int32)
    slow, fast = (dataclasses.replace(RATES, bytes_per_s=r, row_bytes_per_s=r, half_rows=0.0) for r in (1.0, 1e6))
    assert np.asarray(cost.visit_by_time(rows, no_load, 0, layer, slow)).tolist() == [False, False, True, True]
    assert not np.asarray(cost.visit_by_time(rows, no_load, 0, layer, fast)).any()


def test_an_expert_that_others_use_much_is_read():
    """One's own 4 rows are fewer bytes than the weights, but its home would compute all members' rows alone."""
    rows, layer = make([0, 0, 4, 1], 2)
    rates = dataclasses.replace(RATES, bytes_per_s=4.0, row_bytes_per_s=4.0, latency_s=0.0)
    few, many = (np.array(load, np.int32) for load in ([0, 0, 4, 1], [0, 0, 80, 1]))
    assert np.asarray(cost.visit_by_time(rows, few, 0, layer, rates)).tolist() == [False, False, True, True]
    assert np.asarray(cost.visit_by_time(rows, many, 0, layer, rates)).tolist() == [False, False, False, True]


def test_members_with_equal_rows_read_from_different_homes():
    """Else all would draw on one home, whose link is then the slowest."""
    rows, layer = make([4, 4, 4, 4, 4, 4], 3)
    orders = [np.asarray(cost.by_rows(rows, rank, layer)).tolist() for rank in range(3)]
    assert orders == [[0, 1, 2, 3, 4, 5], [2, 3, 4, 5, 0, 1], [4, 5, 0, 1, 2, 3]]


def test_who_reads_all_takes_others_to_do_so_too():
    """Others have fewer rows of some experts by chance. It does not follow that they send them."""
    rows, layer = make([11, 12, 11, 12], members=4)
    order = cost.by_rows(rows, 0, layer)
    uneven, even = (
        cost.layer_seconds(rows, np.array(of_all, np.int32), order, 0, layer, RATES)
        for of_all in ([41, 47, 40, 48], [44, 48, 44, 48])
    )
    assert uneven[-1] == even[-1]
