"""reproduce: a table is completed, drawn and put into the README; its quick version leaves nothing behind."""

import importlib
import re
import runpy
import subprocess
import sys

import pytest
from needs import needs_lab
from result_rows import grid_row
from small import ROOT, SMALL, quick_environment

from experiments import bench_ffn, compare, readme_tables, render, reproduce, tables
from experiments.flags import from_file, override
from fef.config import Config, UserError
from fef.testing.workloads import is_workload
from fef.validation import validate

GRIDS = sorted((ROOT / "configs" / "compare").glob("[!_]*.py"))
GRID = {
    "networks": ("leaves=1",), "nics": (500,), "workloads": ("zipf:1",), "tokens": (1 << 20,), "us_per_token": 100.0,
    "hosts": 2, "experts": 4, "steps": 1, "dispatchers": ("all_gather", "fluid:mode=tokens"),
}  # fmt: skip


def reproduced(path, tmp_path, tmp_path_factory):
    """What the quick version prints; its temporary folder is of this test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    before = {file: file.stat().st_mtime_ns for file in [ROOT / "README.md", *(ROOT / "results").iterdir()]}
    done = subprocess.run(
        [sys.executable, "-m", "experiments.reproduce", str(path), "--quick"],
        cwd=ROOT, env=quick_environment(tmp_path_factory) | {"TMPDIR": str(folder)},
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not list(folder.glob("fef-*"))
    assert before == {file: file.stat().st_mtime_ns for file in [ROOT / "README.md", *(ROOT / "results").iterdir()]}
    return done.stdout


@needs_lab
def test_a_quick_grid(tmp_path, tmp_path_factory):
    path = tmp_path / "grid.py"
    path.write_text(
        f"def get_grid():\n    return {GRID!r}\n\n\ndef get_quick():\n    return get_grid() | {{'tokens': (32,)}}\n"
    )
    said = reproduced(path, tmp_path, tmp_path_factory)
    assert said.startswith("2 hosts with one member each, L=2, E=4, K=2, modelled device time of 100 us")
    (line,) = re.findall(r"^\| leaves=1 .*", said, re.M)
    assert line.startswith("| leaves=1 | auto | 500 | zipf:1 | 32 |") and "–" not in line.split("|")[8:10]


COMMON = ("all_to_all", "all_to_all:form=shifted", "all_gather", "fluid:mode=tokens", "pooled", "fluid")


def small(grid, has_all):
    """The last cell of a grid, on few hosts with few tokens; dispatchers that all grids have only if `has_all`."""
    own = [name for name in grid["dispatchers"] if name not in COMMON] or ["pooled"]
    us_per_token = grid["us_per_token"] if grid["us_per_token"] == "real" else 20.0
    relays = grid.get("relays", ("auto",))[-1:]
    return grid | {
        "hosts": 4 if relays == ("on",) else 2,  # a relay needs a second host on its leaf
        "networks": grid["networks"][-1:], "relays": relays, "nics": (1000,) if any(grid["nics"]) else (0,),
        "tokens": (32,), "workloads": grid["workloads"][-1:], "us_per_token": us_per_token, "steps": 1,
        "dispatchers": grid["dispatchers"] if has_all else tuple(own),
    }  # fmt: skip


@needs_lab
@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_every_grid_runs_from_start_to_end(path, tmp_path, tmp_path_factory):
    """Small, as `small` says: what --quick takes minutes for is here to be seen to run, not to be measured."""
    grid = small(runpy.run_path(str(path))["get_grid"](), has_all=path.stem == "headline")
    copy = tmp_path / path.name
    copy.write_text(f"def get_grid():\n    return {grid!r}\n\n\nget_quick = get_grid\n")
    said = reproduced(copy, tmp_path, tmp_path_factory)
    assert said.startswith(f"{grid['hosts']} ") and f"L={grid.get('layers', 2)}, E=8, K=2" in said
    for name in grid["dispatchers"]:
        assert f"`{name}`" in said
    assert len(re.findall(r"^\| --- \|", said, re.M)) == len(grid.get("sheets", ("summary",)))


def test_a_quick_table(tmp_path, tmp_path_factory):
    path = tmp_path / "table.py"
    settings = SMALL | {"mesh.devices": 1, "run.report": False, "run.tensorboard": False, "train.sample_bytes": 0}
    path.write_text(
        "def get_table():\n"
        f"    return {{'settings': {settings!r}, 'seeds': (0, 1), 'sections': {{'A': {{'plain': {{}}}}}}}}\n\n\n"
        "def get_quick():\n"
        f"    return get_table() | {{'seeds': (0,), 'settings': {settings | {'train.steps': 2}!r}}}\n"
    )
    said = reproduced(path, tmp_path, tmp_path_factory)
    assert said.startswith("2 steps, 1 seeds; measures")
    loss = float(re.findall(r"^\| `plain` \| ([\d.]+) \|", said, re.M)[0])
    assert 3 < loss < 8


def test_a_quick_program(tmp_path, tmp_path_factory):
    said = reproduced("bench_ffn", tmp_path, tmp_path_factory)
    assert "| 256 | 512 | 8 | random |" in said and "median of 2 repeats" in said


def test_a_program_that_fails_changes_nothing(tmp_path, monkeypatch):
    rows = tmp_path / "bench_ffn.json"
    rows.write_text("[]")
    fails = "import pathlib, sys; pathlib.Path(sys.argv[1][7:]).write_text('[1]'); sys.exit(3)"
    monkeypatch.setattr(bench_ffn, "COMMANDS", (f'python -c "{fails}"',))
    with pytest.raises(UserError, match="ended with status 3; nothing is changed"):
        reproduce.program("bench_ffn", quick=False)(rows)
    assert rows.read_text() == "[]" and [file.name for file in tmp_path.iterdir()] == ["bench_ffn.json"]
    monkeypatch.setattr(bench_ffn, "COMMANDS", ("python -c 'import time; time.sleep(60)'",))
    monkeypatch.setattr(reproduce, "PROGRAM_TIMEOUT_S", 0.2)
    with pytest.raises(UserError, match="took more than 0.2 s; nothing is changed"):
        reproduce.program("bench_ffn", quick=False)(rows)


def test_a_program_replaces_its_rows_when_all_of_it_is_there(tmp_path, monkeypatch):
    append = "import pathlib, sys; file = pathlib.Path(sys.argv[1][7:]); file.write_text(file.read_text()[:-1] + ',2]')"
    write = "import pathlib, sys; pathlib.Path(sys.argv[1][7:]).write_text('[1]')"
    monkeypatch.setattr(bench_ffn, "COMMANDS", (f'python -c "{write}"', f'python -c "{append}"'))
    monkeypatch.setitem(readme_tables.TABLES, "bench_ffn", lambda rows: f"rows {rows}")
    assert reproduce.program("bench_ffn", quick=False)(tmp_path / "bench_ffn.json") == "rows [1, 2]"
    assert (tmp_path / "bench_ffn.json").read_text() == "[1,2]"


@pytest.mark.parametrize("name", readme_tables.TABLES)
def test_every_program_has_commands_and_short_ones(name):
    module = importlib.import_module(f"experiments.{name}")
    for command in (*module.COMMANDS, *module.QUICK):
        assert f"python -m experiments.{name}" in command
    assert reproduce.find(name) == ROOT / f"experiments/{name}.py"


def test_a_table_is_completed_drawn_and_put_into_the_readme(tmp_path, monkeypatch):
    results, readme = tmp_path / "results", tmp_path / "README.md"
    readme.write_text("before\n<!-- grid: leaves -->\nold\n<!-- end -->\nafter\n")
    monkeypatch.setattr(reproduce, "RESULTS", results)
    monkeypatch.setattr(render, "ROOT", tmp_path)
    monkeypatch.setattr(readme_tables, "RESULTS", results)
    monkeypatch.setattr(readme_tables, "README", readme)
    measured = []

    def run_cell(grid, cell, code, *_):
        measured.append(cell)
        row = grid_row("fluid", 100.0 * len(measured), cell["tokens"])
        return [row | {"cell": cell | compare._shared(grid), "code": code}]

    monkeypatch.setattr(compare, "run_cell", run_cell)
    reproduce.main(["reproduce", "leaves"])
    assert len(measured) == 6 and len((results / "leaves.jsonl").read_text().splitlines()) == 6
    text = readme.read_text()
    assert "old" not in text and "| leaves=2,oversub=4 | on | 100 | balanced | 4,096 |" in text
    assert "<!-- end -->\nafter" in text
    assert {"results.html", "leaves.md", "leaves.svg"} <= {file.name for file in results.iterdir()}
    reproduce.main(["reproduce", str(ROOT / "configs/compare/leaves.py")])
    assert len(measured) == 6  # nothing was missing


def test_what_is_no_table_is_refused(tmp_path):
    for word in ("", "none", "none.py", "README.md"):
        with pytest.raises(UserError, match=f"{word!r}: is no table; there are .*headline, .*routing"):
            reproduce.find(word)
    path = tmp_path / "grid.py"
    path.write_text(f"def get_grid():\n    return {GRID!r}\n")
    with pytest.raises(UserError, match="so its rows have no place in results"):
        reproduce.completion(path, quick=False)
    with pytest.raises(UserError, match=r"has no function get_quick\(\)"):
        reproduce.completion(path, quick=True)


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_every_grid_has_a_smaller_one_of_the_same_kind(path):
    whole, quick = (from_file(path, function, compare.Grid) for function in ("get_grid", "get_quick"))
    assert set(quick.dispatchers) <= set(whole.dispatchers) and set(quick.networks) <= set(whole.networks)
    assert set(quick.tokens) <= set(whole.tokens) and all(map(is_workload, quick.workloads))
    assert len(quick.cells) * len(quick.workloads) <= len(whole.cells) * len(whole.workloads)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "tables").glob("[!_]*.py")), ids=lambda path: path.stem)
def test_every_table_has_a_smaller_one(path):
    whole, quick = (from_file(path, function, tables.Table) for function in ("get_table", "get_quick"))
    assert len(quick.runs()) < len(whole.runs())
    for settings in quick.runs():
        validate(override(Config(), [f"--config.{key}={value}" for key, value in settings.items()]))
