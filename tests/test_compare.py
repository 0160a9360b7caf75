"""compare: a grid is run in a lab and goes on where it ended; what does not belong together is refused; the table."""

import json
import subprocess
import sys

import pytest
from needs import needs_lab
from small import ROOT, quick_environment

from experiments import compare, rows_file
from fef.config import UserError

GRID = {
    "networks": ("leaves=1",), "nics": (500,), "workloads": ("balanced",), "tokens": (32, 64), "us_per_token": 100.0,
    "hosts": 2, "experts": 4, "steps": 1,
    "dispatchers": ("fluid:mode=tokens", "fluid", "fluid:cost=bytes:deduplicate=False:room=8"),
}  # fmt: skip


@pytest.fixture
def grid_file(tmp_path):
    def write(**changes):
        path = tmp_path / "grid.py"
        path.write_text(f"def get_grid():\n    return {GRID | changes!r}\n")
        return str(path)

    return write


@needs_lab
def test_a_grid_goes_on_where_it_ended(grid_file, tmp_path, tmp_path_factory):
    results = tmp_path / "rows.jsonl"

    def run(**changes):
        return subprocess.run(
            [sys.executable, "-m", "experiments.compare", f"--config={grid_file(**changes)}", f"--results={results}"],
            cwd=ROOT, env=quick_environment(tmp_path_factory), capture_output=True, text=True, timeout=500,
        )  # fmt: skip

    done = run(tokens=(32,))
    assert done.returncode == 0, done.stderr
    first = results.read_text()
    rows = [json.loads(line) for line in first.splitlines()]
    assert [row["dispatcher"] for row in rows] == list(GRID["dispatchers"])
    assert {row["cell"]["tokens"] for row in rows} == {32} and {row["code"] for row in rows} == {
        rows_file.digest(compare.SOURCES)
    }
    assert "bench_stack" in rows[0]["command"] and rows[0]["versions"]["jax"] and compare._is_least(rows[2])
    assert done.stdout == compare.table(rows) + "\n"

    results.write_text(first + first[:40])  # interrupted while it wrote the next cell
    done = run()
    assert done.returncode == 0, done.stderr
    both = results.read_text()
    assert both.startswith(first) and len(both.splitlines()) == 6

    assert run().returncode == 0 and results.read_text() == both  # nothing is left to do

    done = run(tokens=(32, 64, 128), dispatchers=("all_to_al",))
    assert done.returncode == 2 and "config.moe.dispatcher='all_to_al'" in (tmp_path / "rows.log").read_text()
    assert done.stderr.splitlines()[-1].startswith("error: the cell {'network': 'leaves=1'")
    assert results.read_text() == both


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no function get_grid()"),
        ("def get_grid():\n    return {'token': 1}", "unexpected keyword argument 'token'"),
        ("def get_grid():\n    return {'tokens': (1,)}", "missing 5 required positional arguments"),
    ],
)
def test_what_is_no_grid_is_refused(text, said, tmp_path):
    path = tmp_path / "grid.py"
    path.write_text(text)
    with pytest.raises(UserError, match=said.replace("(", r"\(").replace(")", r"\)")):
        compare.load_grid(str(path))
    with pytest.raises(UserError, match="no such file"):
        compare.load_grid(str(tmp_path / "none.py"))


def row(dispatcher, step_ms, **more):
    cell = {"network": "leaves=1", "relay": "auto", "nic": 100, "tokens": 512, "us_per_token": 2.0, "steps": 2}
    return {
        "dispatcher": dispatcher, "step_ms": step_ms, "steps_ms": [900.0, step_ms, step_ms * 1.5], "floor_ms": 90.0,
        "cell": cell, "hosts": 4, "commit": "c0ffee", "versions": {"jax": "1"},
        "flags": {"workload": "balanced", "layers": 2, "experts": 8, "choices": 2},
    } | more  # fmt: skip


def test_the_table_says_where_fluid_loses():
    moved = {"weights": 100, "gradients": 100, "tokens": 50, "metadata": 7, "missed": 100}
    by_bytes = row(compare.BY_BYTES, 500.0, bytes_by_purpose=moved, least_bytes=250)
    other = {"cell": row("", 0)["cell"] | {"tokens": 1024}}
    rows = [row("pooled", 200.0), row("fluid", 210.0), by_bytes]
    rows += [row("pooled", 400.0, **other), row("fluid", 300.0, **other), by_bytes | other | {"least_bytes": 251}]
    lines = compare.table(rows).splitlines()
    assert lines[4] == "| leaves=1 | auto | 100 | balanced | 512 | 90 | **200** | 210 | 500 | 1.05 | 1.50 | yes |"
    assert lines[5] == "| leaves=1 | auto | 100 | balanced | 1,024 | 90 | 400 | **300** | 500 | 0.75 | 1.50 | **no** |"
    assert "median 0.90, worst 1.05, at most 1.05 in 2 of 2 cells" in lines[7]
