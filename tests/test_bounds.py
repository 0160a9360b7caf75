"""bounds: numbers by hand."""

import json

import pytest
from small import ROOT

from experiments import bounds


def row(**changes):
    """Two members with 8 tokens of 2 choices, 4 experts: 16 rows a member, of which 8 cross under balanced routing."""
    fields = {"tokens": 8, "layer_s": 0.05, "step_ms": 400.0, "bytes": 2500}
    setting = {
        "members": 2, "layers": 2, "experts": 4, "choices": 2, "d_model": 16, "d_expert": 8, "nic": 0.1,
        "workload": "balanced",
    }  # fmt: skip
    return fields | {"flags": setting | {key: changes.pop(key) for key in list(changes) if key in setting}} | changes


def test_utilisation_is_compute_by_step():
    assert bounds.compute_ms(row()) == pytest.approx(2 * 50)
    assert bounds.utilisation(row()) == pytest.approx(0.25)


def test_without_a_link_nothing_waits_for_it():
    assert bounds.wire_ms(row(nic=0)) == 0
    assert bounds.floor_ms([row(nic=0)]) == bounds.overlapped_ms(row(nic=0)) == pytest.approx(100)


def test_only_real_rows_count():
    # Half of the experts gets no token and every second member has none: 16 of 32 places are real.
    assert bounds.compute_ms(row(workload="zero_load")) == pytest.approx(50)
    assert bounds.utilisation(row(workload="zero_load")) == pytest.approx(0.125)


def test_the_floor_is_the_larger_of_compute_and_the_fewest_bytes():
    assert bounds.wire_ms(row()) == pytest.approx(2500 * 8 / 100)  # 0.1 Mbit/s are 100 bits a millisecond
    assert bounds.floor_ms([row(bytes=5000), row()]) == pytest.approx(200)
    assert bounds.floor_ms([row(bytes=5000), row(bytes=10)]) == pytest.approx(100)


@pytest.mark.parametrize(
    ("workload", "tokens_travel", "weights_travel"),
    [
        ("balanced", 1, 1),
        ("zero_load", 2, 2),  # all 16 rows come from member 0 and meet experts 0 and 1, at home there
        ("ragged_sources", 1, 2),  # all come from member 0 and meet every expert
    ],
)
def test_the_straggler_is_the_busiest_home_or_the_busiest_source(workload, tokens_travel, weights_travel):
    def straggler(name):
        return bounds.straggler(row(workload=workload, dispatcher=name))

    assert straggler("all_to_all:form=shifted") == straggler("fluid:mode=tokens") == tokens_travel
    assert straggler("pooled") == straggler("all_gather") == weights_travel
    assert straggler("fluid") is None  # some rows meet their expert here, some there


def test_what_a_capacity_would_drop():
    # Each place for 16 rows of 4 experts is 1.25 * 4 = 5; experts 0 and 1 have 8 rows each.
    assert bounds.dropped(row(workload="zero_load")) == pytest.approx(2 * 3 / 16)
    assert bounds.dropped(row()) == 0


def test_an_overlapped_all_to_all_is_held_by_its_rows_on_the_link():
    # Each way 8 rows come to a member and 8 results come back, forward and backward, of 64 bytes, in 2 layers.
    assert bounds.overlapped_ms(row()) == pytest.approx((8 + 8) * 2 * 64 * 2 * 8 / 100)


def test_an_overlapped_all_to_all_is_held_by_its_busiest_member():
    # All 16 real rows come from member 0 and meet experts 0 and 1, at home there: nothing crosses, one member computes.
    assert bounds.overlapped_ms(row(workload="zero_load")) == pytest.approx(100)


def test_the_bound_is_what_an_unpadded_exchange_has_moved():
    """Under balanced routing all_to_all pads nothing; of its bytes only the counts are left out."""
    rows = [json.loads(line) for line in (ROOT / "results/baselines.jsonl").read_text().splitlines()]
    measured = next(r for r in rows if r["dispatcher"] == "all_to_all" and r["flags"]["workload"] == "balanced")
    exchange = dict(measured, layer_s=0.0)
    assert bounds.overlapped_ms(exchange) == pytest.approx(bounds.wire_ms(measured), rel=1e-4)


def test_the_break_even_in_bytes_and_in_time():
    # A block of 3 * 16 * 8 = 384 elements against 2 * 16 of a row, there and back.
    assert bounds.break_even_rows(row()) == 12
    # Half of 4 experts is remote, 2 * 384 * 4 bytes each: 6,144 bytes, 491.52 ms at 100 bits a ms. A token takes the
    # device 50 / 8 = 6.25 ms and the link 2 * 0.5 rows * 4 * 64 bytes, 20.48 ms.
    assert bounds.break_even_tokens(row()) == pytest.approx(491.52 / (6.25 + 20.48))


def test_rows_that_hide_weights():
    # 16 rows of 6 * 384 FLOP in 50 ms are 737,280 FLOP/s; 0.1 Mbit/s are 12,500 bytes a second.
    assert bounds.flop_per_byte(row()) == pytest.approx(737_280 / 12_500)
    assert bounds.hiding_rows(4, 4, 1114) == pytest.approx(1114)
    assert bounds.hiding_rows(4, 2, 8000) == pytest.approx(4000)
    # There, blocks and gradients take as long as the rows do: 6 P rows E / flops = 2 (R - 1) / R E P b / rate.
    rows, flops, rate = bounds.hiding_rows(4, 4, 10.0), 1e9, 1e8
    assert 6 * rows / flops == pytest.approx(2 * 0.75 * 4 / rate)
