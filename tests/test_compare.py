"""compare: a grid is run in a lab and goes on where it ended; what does not belong together is refused; the table."""

import json
import subprocess
import sys

import pytest
from needs import needs_lab
from small import ROOT, quick_environment

from experiments import compare, grid_sheets, grid_tables, rows_file
from experiments.flags import dispatcher_words, override
from experiments.lab import Lab
from fef.config import Config, UserError
from fef.testing import workloads
from fef.validation import validate

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
    assert "bench_stack" in rows[0]["command"] and rows[0]["versions"]["jax"] and grid_sheets.moved_least(rows[2])
    assert done.stdout == grid_tables.markdown(rows, ("summary",)) + "\n"

    results.write_text(first + first[:40])  # interrupted while it wrote the next cell
    done = run()
    assert done.returncode == 0, done.stderr
    both = results.read_text()
    assert both.startswith(first) and len(both.splitlines()) == 6

    assert run().returncode == 0 and results.read_text() == both  # nothing is left to do

    done = run(tokens=(32, 64, 128), dispatchers=("all_to_al",))
    assert done.returncode == 2 and "config.moe.dispatcher='all_to_al'" in (tmp_path / "rows.log").read_text()
    assert done.stderr.splitlines()[-1].startswith("error: the cell {'hosts': 2, 'network': 'leaves=1'")
    assert results.read_text() == both


def test_a_cell_has_the_device_of_its_tokens_and_the_order_of_its_network():
    networks = ("leaves=2,oversub=4", "leaves=2,oversub=4,order=alternating")
    grid = compare.Grid(**GRID | {"networks": networks, "tokens": (512, 8192), "us_per_token": (463.0, 226.0)})
    assert [(cell["tokens"], cell["us_per_token"]) for cell in grid.cells] == [(512, 463.0), (8192, 226.0)] * 2
    commands = [grid.command(cell) for cell in grid.cells]
    assert "--cells=512:0.237056" in commands[0] and "--cells=8192:1.85139" in commands[1]
    assert "--lab=leaves=2,oversub=4,order=alternating,nic=500mbit" in commands[2]
    one_device = compare.Grid(**GRID)
    assert {cell["us_per_token"] for cell in one_device.cells} == {100.0}
    with pytest.raises(
        UserError, match=r"us_per_token=\(1.0,\): give one number, or one for each of tokens=\(32, 64\)"
    ):
        compare.Grid(**GRID | {"us_per_token": (1.0,)})


def test_a_cell_has_its_hosts_its_dispatcher_and_whose_time_it_takes():
    grid = compare.Grid(**GRID | {"hosts": (2, 8), "tokens": (64,), "us_per_token": "real", "alone": True, "layers": 3})
    assert [(cell["hosts"], cell["dispatcher"]) for cell in grid.cells] == [
        (hosts, name) for hosts in (2, 8) for name in GRID["dispatchers"]
    ]
    command = grid.command(grid.cells[-1])
    assert {
        "--hosts=8",
        "--members=8",
        "--cells=64:real",
        f"--dispatchers={GRID['dispatchers'][-1]}",
        "--layers=3",
    } < set(command)
    mixed = compare.Grid(**GRID | {"us_per_token": ("real", 100.0)})
    assert "--cells=32:real" in mixed.command(mixed.cells[0]) and "--cells=64:0.0064" in mixed.command(mixed.cells[1])
    with pytest.raises(UserError, match="us_per_token='reel': give microseconds, or 'real'"):
        compare.Grid(**GRID | {"us_per_token": "reel"})


def test_without_a_network_a_cell_is_one_process():
    grid = compare.Grid(**GRID | {"networks": ("none",), "nics": (0,), "tokens": (32,)})
    (command,) = map(grid.command, grid.cells)
    assert command[:4] == ["python", "-m", "experiments.bench_stack", "--members=2"] and "--nic=0" in command
    for changes in ({"networks": ("none",)}, {"nics": (0,)}, {"networks": ("none", "leaves=1"), "nics": (0, 500)}):
        with pytest.raises(UserError, match=r"without a network, write \('none',\) and \(0,\)"):
            compare.Grid(**GRID | changes)


def test_a_table_that_is_not_there():
    with pytest.raises(UserError, match="sheets: 'sumary': there are summary, every_row, break_even"):
        compare.Grid(**GRID | {"sheets": ("sumary",)})


def test_every_grid_is_one_that_can_run():
    for path in (ROOT / "configs" / "compare").glob("[!_]*.py"):
        grid = compare.load_grid(str(path))
        assert grid.cells and all(map(workloads.is_workload, grid.workloads)), path
        for name in grid.dispatchers:
            validate(override(Config(), dispatcher_words(name)))
        for cell in grid.cells:
            if cell["network"] != "none":
                Lab("none", cell["hosts"], cell["network"])  # reads it; is not built


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
