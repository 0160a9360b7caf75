"""reproduce: a table is completed, drawn and put into the README; its quick version leaves nothing behind."""

import re
import subprocess
import sys

import pytest
from needs import needs_lab
from result_rows import grid_row
from small import ROOT, SMALL, quick_environment

from experiments import compare, readme_tables, render, reproduce, tables
from experiments.flags import from_file, override
from fef.config import Config, UserError
from fef.testing.workloads import is_workload
from fef.validation import validate

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


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "compare").glob("[!_]*.py")), ids=lambda path: path.stem)
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
