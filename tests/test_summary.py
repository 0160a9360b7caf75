import math

import pytest

from fef.config import Config
from fef.summary import bytes_text, count_text, format_summary, ms_text, number_text, percent_text, start_line

SUMMARY = {
    "heldout_loss": 2.0123,
    "train_loss": 1.9,
    "tokens_per_s": 11321.4,
    "step_ms": 200.0,
    "wait_ms": 15.0,
    "bytes_per_step": 48_100_000,
    "bytes_by_purpose": {"weights": 31e6, "gradients": 17.1e6},
    "dropped_fraction": 0.025,
    "max_vio": [0.25, 0.5],
    "steps": 300,
}


def lines_of(summary, workdir=None):
    table = format_summary(summary, workdir)
    width = table.index("2.0123") if "2.0123" in table else 0
    return {line[:width].strip(): line[width:].strip() for line in table.splitlines()}


def test_the_summary_table_holds_every_figure_with_its_unit(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "report.html").touch()
    assert lines_of(SUMMARY, tmp_path) == {
        "held-out loss": "2.0123 nats/byte (perplexity 7.48)",
        "train loss": "1.9000 nats/byte (perplexity 6.69)",
        "tokens/s": "11,321",
        "step": "200 ms",
        "waiting for experts": "15.0 ms (7.50 % of the step)",
        "bytes moved per step": "48.1 MB",
        "weights": "31.0 MB",
        "gradients": "17.1 MB",
        "dropped fraction": "2.50 %",
        "MaxVio of expert load": "0.500 (worst of 2 layers)",
        "steps": "300",
        "metrics": str(tmp_path / "metrics.jsonl"),
        "report": str(tmp_path / "report.html"),
    }


def test_skipped_updates_are_said():
    assert "3 (not finite)" in format_summary(SUMMARY | {"skipped_updates": 3})
    assert "skipped" not in format_summary(SUMMARY | {"skipped_updates": 0})


@pytest.mark.parametrize("nothing", [{}, dict.fromkeys(SUMMARY), {**dict.fromkeys(SUMMARY, math.nan), "max_vio": []}])
def test_a_missing_figure_is_a_dash(nothing):
    if "bytes_by_purpose" in nothing:
        nothing["bytes_by_purpose"] = None
    table = format_summary(nothing)
    assert len(table.splitlines()) == 9
    assert all(line.endswith("\N{EN DASH}") for line in table.splitlines())


def test_a_share_needs_both_numbers():
    assert lines_of(SUMMARY | {"wait_ms": None})["waiting for experts"] == "\N{EN DASH}"
    assert lines_of(SUMMARY | {"step_ms": None})["waiting for experts"] == "15.0 ms"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (bytes_text(0), "0 B"),
        (bytes_text(999), "999 B"),
        (bytes_text(999.7), "1.00 kB"),
        (bytes_text(12_345), "12.3 kB"),
        (bytes_text(999_999), "1.00 MB"),
        (bytes_text(3.2e15), "3.20 PB"),
        (bytes_text(7e18), "7,000 PB"),
        (count_text(999_499), "999,499"),
        (count_text(999_500), "1.00 M"),
        (count_text(3.456e9), "3.46 B"),
        (number_text(0), "0"),
        (number_text(0.00042), "0.000420"),
        (number_text(9.999), "10.0"),
        (number_text(-3.2), "-3.20"),
        (number_text(12_345.6), "12,346"),
        (number_text(1e-12), "1.00e-12"),
        (ms_text(6383.4), "6,383 ms"),
        (percent_text(0.0), "0 %"),
        (percent_text(1.0), "100 %"),
    ],
)
def test_human_units(text, expected):
    assert text == expected


def test_start_line_says_what_runs_where():
    config = Config()
    sizes = {"corpus_bytes": 27_123_456, "params_total": 3_456_789, "params_active": 1_234_567}
    line = start_line(config, platform="cpu", hosts=1, **sizes)
    assert line == (
        "4 cpu devices (data 1 x expert 4); corpus 27.1 MB; parameters 3.46 M total, 1.23 M active; "
        "32 experts, 4 a token; router top_k; dispatcher pooled"
    )
    config.mesh.devices, config.mesh.data, config.moe.every = 8, 2, 0
    line = start_line(config, platform="gpu", hosts=2, **sizes)
    assert line.startswith("8 gpu devices (data 2 x expert 4) on 2 hosts; ")
    assert line.endswith("; dense, no experts") and "router" not in line
