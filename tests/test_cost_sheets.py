"""cost_sheets: rows made by hand give the lines worked out by hand."""

import pytest
from result_rows import grid_row

from experiments import cost_sheets

MEMORY = {
    "arguments": 8_500_000, "outputs": 4_200_000, "aliased": 4_000_000, "temporaries": 100_000_000, "slots": 3_000_000,
    "stages": 2_000_000, "cache": 12_600_000, "rss_before": 300_000_000, "peak_rss": 1_500_000_000,
}  # fmt: skip


def texts(sheet):
    return [[cell.text for cell in line.cells] for line in sheet.lines]


def row(dispatcher, step_ms, tokens=512, **changes):
    made = grid_row(dispatcher, step_ms, tokens, **changes)
    return made | {"flags": made["flags"] | {"d_expert": 341}}


def pair(tokens, weights_ms, tokens_ms):
    return [row("pooled", weights_ms, tokens), row("fluid:mode=tokens", tokens_ms, tokens)]


def test_the_break_even_lies_between_its_neighbours():
    # log 2 above at 256 and log 2 below at 1,024, a factor of 4 apart: in the middle.
    rows = [*pair(1024, 300.0, 600.0), *pair(256, 200.0, 100.0)]
    sheet = cost_sheets.break_even(rows)
    assert [head.text for head in sheet.heads][4:] == [
        "measured T", "rows", "T by bytes", "rows (T*)", "T by time", "rows by time"
    ]  # fmt: skip
    (line,) = texts(sheet)
    assert line[:8] == ["leaves=1", "auto", "100", "balanced", "512", "128", "2,046", "512"]  # 511.5 is 3 * 341 / 2
    assert sheet.lines[0].cells[4].value == pytest.approx(512) and len(sheet.lines[0].rows) == 4


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (pair(256, 100.0, 200.0) + pair(512, 100.0, 400.0), "below 256"),
        (pair(256, 200.0, 100.0) + pair(512, 400.0, 100.0), "above 512"),
        ([row("fluid", 100.0)], "\N{EN DASH}"),
    ],
)
def test_a_break_even_beyond_what_was_measured(rows, said):
    ((*_, measured, of_expert, _, _, _, _),) = texts(cost_sheets.break_even(rows))
    assert (measured, of_expert) == (said, "\N{EN DASH}")


def test_the_rows_that_other_clusters_need():
    # 1,024 rows of 6 * 3 * 256 * 341 FLOP in 45 ms, 12.5 MB a second: 2,861 FLOP a byte; times 0.75 * 4 / 3.
    sheet = cost_sheets.realism([row("fluid", 100.0)])
    assert texts(sheet) == [
        ["this lab", "2,861", "2,861", "128"],
        ["400 TFLOP/s, 400 Gbit/s, bfloat16", "8,000", "4,000", "\N{EN DASH}"],
        ["the same, 8 devices share what they read", "8,000", "500", "\N{EN DASH}"],
    ]


def test_stalls_are_summed_over_their_kinds():
    waits = {"waits_ms": {"published": [10.0, 1.0], "tokens": [5.0, 0.0]}}
    sheet = cost_sheets.stalls([row("all_gather", 100.0, **waits), row("pooled", 180.0, **waits)])
    assert [head.text for head in sheet.heads][5:] == [
        "dispatcher",
        "layer 0",
        "layer 1",
        "all",
        "step ms",
        "utilisation",
    ]
    assert [line[5:] for line in texts(sheet)] == [["pooled", "15", "1", "16", "180", "50.0%"]]


def test_memory_has_what_is_aliased_once_and_the_process_of_who_was_alone():
    shared = grid_row("pooled", 200.0, memory=MEMORY)
    alone = shared | {"cell": shared["cell"] | {"dispatcher": "pooled"}}
    head, _, first, second = cost_sheets.memory([alone, shared]).markdown().splitlines()[:4]
    assert head == (
        "| routing | T | dispatcher | arguments | outputs | temporaries | aliased | slots | stages | cache "
        "| XLA and pool | RSS before | peak RSS |"
    )
    # 8.5 + 4.2 + 100 + 3 + 2 + 12.6 - 4
    sizes = "| balanced | 512 | `pooled` | 8.5 | 4.2 | 100.0 | 4.0 | 3.0 | 2.0 | 12.6 | 126.3 |"
    assert first == f"{sizes} 300.0 | 1,500.0 |" and second == f"{sizes} – | – |"


def test_cpu_time_is_shared_out_over_the_tokens_of_the_host():
    in_one = grid_row("pooled", 60.0, cpu_ms=81.92, hosts=1)  # 81,920 us for 4 * 512 tokens, in 2 layers
    head, _, first, second = cost_sheets.dispatch_cost([in_one, in_one | {"hosts": 4}]).markdown().splitlines()[:4]
    assert head == "| routing | T | dispatcher | CPU us / token | CPU us / token and layer | CPU ms | step ms |"
    assert first == "| balanced | 512 | `pooled` | 40.0 | 20.0 | 82 | 60 |"
    assert second == "| balanced | 512 | `pooled` | 160.0 | 80.0 | 82 | 60 |"
