"""bench_stack on two virtual devices: its rows by hand, and what it refuses."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from experiments import bench_stack

ROOT = pathlib.Path(__file__).parent.parent
SHAPE = ["--members=2", "--experts=4", "--d_model=16", "--d_expert=8", "--steps=1", "--workloads=balanced"]
BLOCK_BYTES, ROW_BYTES = 3 * 16 * 8 * 4, 16 * 4


def bench(*words):
    return subprocess.run(
        [sys.executable, "-m", "experiments.bench_stack", *SHAPE, *words],
        cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_rows_and_their_table(tmp_path):
    path = tmp_path / "rows.json"
    done = bench("--cells=32:0.05", "--nic=1", f"--json={path}")
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())
    assert done.stdout.rstrip().endswith(bench_stack.table(rows))
    assert [row["dispatcher"] for row in rows] == [
        "all_to_all", "all_to_all:form=shifted", "all_gather", "pooled"
    ]  # fmt: skip
    blocks = 2 * 2 * BLOCK_BYTES  # layers, remote experts
    # 16 of a member's 64 rows go to each expert, without padding: 32 cross 4 times a layer. Half of the crossings come
    # to the member, and as many of the other member's.
    tokens = 2 * 4 * 32 * ROW_BYTES
    metadata = 2 * 2 * 4
    wanted = {"all_to_all": tokens + metadata, "all_gather": 2 * blocks, "pooled": 3 * blocks}  # mapped: read twice
    for row in rows:
        assert row["bytes"] == wanted[row["dispatcher"].partition(":")[0]], row["dispatcher"]
        assert row["max_loss_difference"] <= 1e-6 and row["compute_ms"] == 100
        assert row["wire_ms"] == pytest.approx(row["bytes"] * 8 / 1e3)
        assert row["floor_ms"] == max(100, row["wire_ms"])
        assert sum(row["bytes_by_purpose"].values()) == 2 * row["bytes"]  # the members are alike
        assert row["least_bytes"] == 2 * 2 * blocks  # 16 rows of an expert are more than it and its gradient
        assert row["compute"] == "modelled" and 0 < row["cpu_ms"]
    memory = {row["dispatcher"]: row["memory"] for row in rows}
    for of_row in memory.values():
        assert of_row["aliased"] == 2 * 4 * BLOCK_BYTES  # the experts of both layers, updated in place
        assert of_row["aliased"] < of_row["outputs"] < of_row["arguments"] and of_row["temporaries"] > 0
        assert 0 < of_row["rss_before"] <= of_row["peak_rss"] and of_row["cache"] == 0  # read in place
    assert memory["all_to_all"]["slots"] == memory["all_gather"]["stages"] == 0
    # Each member's slots hold its two experts of both layers at least, a stage the gradients of all four of each.
    assert memory["pooled"]["slots"] >= 2 * 2 * 2 * BLOCK_BYTES and memory["pooled"]["slots"] % 4096 == 0
    assert memory["pooled"]["stages"] >= 2 * 4 * BLOCK_BYTES


def test_a_layer_of_the_cpu_has_the_time_of_its_rows_at_the_measured_rate(tmp_path):
    path = tmp_path / "rows.json"
    names = "pooled,pooled:pool.fetch_ahead=False"
    done = bench("--cells=32:real", "--nic=1", f"--dispatchers={names}", f"--json={path}")
    assert done.returncode == 0, done.stderr
    assert "pool over local, computed by the CPU; median" in done.stdout
    ahead, not_ahead = json.loads(path.read_text())
    assert ahead["compute"] == "real" and ahead["layer_s"] == not_ahead["layer_s"] > 0
    assert ahead["compute_ms"] == pytest.approx(2 * ahead["layer_s"] * 1e3)
    # 64 rows, each with 3 * 2 FLOP for the 3 * 16 * 8 elements: the rate is one that a CPU can have.
    assert 1e6 < 64 * 6 * 384 / ahead["layer_s"] < 1e13
    assert ahead["loss"] == not_ahead["loss"] and not_ahead["max_loss_difference"] == 0
    assert ahead["utilisation"] == pytest.approx(ahead["compute_ms"] / ahead["step_ms"])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--cells=32", "--cells: '32': write T:SECONDS"),
        ("--workloads=balance", "--workloads: 'balance': there are balanced, hot_experts"),
        ("--cells=32:nan", "--cells: '32:nan': write T:SECONDS"),
        ("--cells=32:", "--cells: '32:': write T:SECONDS, such as 4096:1.9, or T:real"),
        ("--dispatchers=pooled:pool.slot=3", "config.pool.slot"),
        ("--dispatchers=reference", "the reference dispatcher models no device time"),
        ("--dispatchers=all_to_al", "config.moe.dispatcher='all_to_al'"),
        ("--dispatchers=all_to_all:form=round", "must be one of native, shifted"),
    ],
)
def test_what_cannot_be_is_one_line(word, message):
    done = bench(word)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and message in line
