"""The benchmark of reads runs, writes its rows and shows them; torn reads are counted, and there are none."""

import importlib.util
import json
import subprocess
import sys
import xml.etree.ElementTree

import pytest
from needs import needs_lab

from experiments import bench_pool as bench
from fef.native import build

HAS_UCX = build.UCX in build.parts()
UCX_WAYS = ["ucx", "rma"] if HAS_UCX else []


def run(tmp_path, *args: str) -> tuple[list[dict], str]:
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", "experiments.bench_pool", "--repeats=1", f"--json={file}", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text()), done.stdout


def test_two_processes(tmp_path):
    build.build()
    rows, shown = run(tmp_path, "--parts=jit,torn,get", "--largest=4096", f"--plot={tmp_path}/plot.svg")
    of_get = [row for row in rows if row["part"] == "get"]
    wanted = [(size, way) for size in (8, 4096) for way in ["memcpy", "mmap", "sockets", "tcp", *UCX_WAYS]]
    assert [(row["block_bytes"], row["way"]) for row in of_get] == wanted
    assert all(row["seconds"] >= row["least_seconds"] > 0 for row in of_get)
    for row in rows:
        if row["part"] == "torn":
            assert row["whole"] >= 10_000 and row["publishes"] >= 10_000 and row["torn"] == 0, row
    assert [row["part"] for row in rows][-5:] == ["torn"] * 2 + ["jit"] * 3
    assert all(row["call_seconds"] > 0 for row in rows if row["part"] == "jit")
    assert shown.count("\n| torn blocks, ") == 2
    xml.etree.ElementTree.parse(tmp_path / "plot.svg")


@needs_lab
def test_the_exchange_brings_the_right_bytes(tmp_path):
    rows, _ = run(tmp_path, "--parts=exchange")
    assert [row["carrier"] for row in rows] == ["fef's sockets", *["UCX active messages"] * len(UCX_WAYS)]
    assert all(0 < row["least"] <= row["share"] <= row["most"] < 0.97 for row in rows), rows


def test_targets_are_shown_beside_what_was_measured():
    def row(part, way, size, **more):
        return {"part": part, "way": way, "block_bytes": size, "seconds": 1e-3, "least_seconds": 1e-3} | more

    setting = {
        "cores": 2,
        "load": 0.5,
        "window_bytes": 65536,
        "ucx": None,
        "repeats": 3,
        "versions": {"jax": "1"},
        "commit": "c",
    }
    rows = [
        row("get", "memcpy", 1 << 20), row("get", "mmap", 1 << 20, ratio=1.25), row("get", "tcp", 8, ratio=1.5),
        row("shaped", "tcp", 1 << 20, share_of_ceiling=0.98, ratio=1.0),
    ]  # fmt: skip
    shown = bench.table([one | setting for one in rows])
    assert "blocks >= 256 KiB (1 MiB) | >= 0.95 | 0.80 |" in shown
    assert "| tcp / sockets, time of 8 B, one host | <= 1.3 | 1.50 |" in shown
    assert "1 MiB: share of the payload ceiling | >= 0.97 | 0.98 |" in shown
    assert "no UCX" in shown


def test_wrong_part_is_one_line():
    command = [sys.executable, "-m", "experiments.bench_pool", "--parts=gets"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (2, "error: --parts=gets: choose of get, torn, jit, shaped, exchange\n")


@pytest.mark.skipif(importlib.util.find_spec("libucx") is None, reason="needs the Python package libucx-cu12")
def test_the_version_of_ucx_is_that_of_its_package():
    import libucx

    assert libucx.__version__.startswith(bench.ucx_files.find().version)
