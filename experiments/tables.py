"""Makes a table of training runs: runs what its results lack, one process for each run, and prints it.

Command:  python -m experiments.tables routing
Hardware: as configs/tables/NAME.py says.

The file configs/tables/NAME.py has get_table(), which returns what `Table` takes. Each of its variants is trained with
each of its seeds; what a run's metrics and summary say goes to the end of results/NAME.jsonl as one JSON line, with the
command and the digest of the sources. The same command goes on where an interrupted table ended.
"""

import dataclasses
import json
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np
import tqdm
from absl import flags

from experiments import rows_file
from experiments.flags import ROOT, exit_on_sigterm, from_file, parse_flags, run, words_first
from experiments.sheet import Cell, Head, Line, Sheet, number, word
from fef.config import UserError

SOURCES = (*rows_file.FEF, "experiments/flags.py", "experiments/train.py")
NEEDED = ("settings", "heldout_loss", "steps", "command", "commit", "versions.jax")  # of a row, a point leads inwards
RUN_TIMEOUT_S = 3600.0
LATE = 0.25  # of a run's steps, over which its measures are averaged

# Of a run, in the order of the columns: what, the row's key, its format.
MEASURES = (
    ("held-out loss", "heldout_loss", "{:.3f}"),
    ("MaxVio", "max_vio", "{:.2f}"),
    ("dropped", "dropped_fraction", "{:.1%}"),
    ("dead experts", "dead_experts", "{:.1f}"),
    ("gate entropy", "gate_entropy", "{:.2f}"),
)


@dataclasses.dataclass(frozen=True)
class Table:
    """What is trained.

    Attributes:
      settings: configuration that all variants share, by key.
      seeds: of initialisation and noise; data and their order are the same for all.
      sections: title -> variant -> its settings.
      published: variant -> what its source reports, a column; of a section without any it is left out.
    """

    settings: dict[str, Any]
    seeds: tuple[int, ...]
    sections: dict[str, dict[str, dict[str, Any]]]
    published: dict[str, str] = dataclasses.field(default_factory=dict)

    def run(self, settings: dict[str, Any], seed: int) -> dict[str, Any]:
        """All settings of a variant's run."""
        return {**self.settings, **settings, "train.seed": seed}

    def runs(self) -> list[dict[str, Any]]:
        """Seed by seed, so that an interrupted table has a bit of everything; equal runs of two sections once."""
        variants = [settings for section in self.sections.values() for settings in section.values()]
        runs: list[dict[str, Any]] = []
        for one in (self.run(settings, seed) for seed in self.seeds for settings in variants):
            if one not in runs:
                runs.append(one)
        return runs


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("results", "", "the file of rows; empty: results/NAME.jsonl", flag_values=values)
    flags.DEFINE_float("run_timeout_s", RUN_TIMEOUT_S, "longest time of a run", lower_bound=1, flag_values=values)


def main(argv: list[str]) -> None:
    words, argv = words_first(argv, most=1)
    name = "".join(words)
    values = parse_flags(argv, define, doc=__doc__ or "")
    exit_on_sigterm()
    table = load_table(name)
    path = pathlib.Path(values.results or ROOT / "results" / f"{name}.jsonl")
    print(markdown(table, measure(table, path, values.run_timeout_s)))


def measure(table: Table, path: pathlib.Path, run_timeout_s: float) -> list[dict[str, Any]]:
    """Makes the runs that a file of rows lacks, and returns all its rows.

    Raises:
      UserError: a run failed or took too long, or the file has rows of other sources.
    """
    code = rows_file.digest(SOURCES)
    rows = rows_file.read(path, code)
    done = [row["settings"] for row in rows]
    missing = [settings for settings in table.runs() if settings not in done]
    for settings in tqdm.tqdm(missing, unit="run", initial=len(done), total=len(done) + len(missing)):
        row = {"code": code, **train(settings, run_timeout_s)}
        rows_file.append(path, [row])
        rows.append(row)
    return rows


def load_table(name: str) -> Table:
    """The table of configs/tables/NAME.py.

    Raises:
      UserError: no such file, or fields that are unknown or missing; names the tables there are.
    """
    folder = ROOT / "configs" / "tables"
    names = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    if name not in names:
        raise UserError(f"table {name!r}: there are {', '.join(names)}; write python -m experiments.tables NAME")
    return from_file(folder / f"{name}.py", "get_table", Table)


def train(settings: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """One run in a process of its own.

    Raises:
      UserError: it failed or took too long; with its command and its last line.
    """
    words = [f"--config.{key}={value}" for key, value in settings.items()]
    command = ["python", "-m", "experiments.train", *words]
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, *command[1:], f"--workdir={folder}/run"],
                cwd=ROOT, capture_output=True, text=True, timeout=timeout_s,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise UserError(f"{shlex.join(command)}: took more than {timeout_s:g} s (--run_timeout_s)") from None
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            raise UserError(f"{shlex.join(command)}: ended with status {done.returncode}: {''.join(last)}")
        workdir = pathlib.Path(folder) / "run"
        summary = json.loads((workdir / "summary.json").read_text())
        steps = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {
        "settings": settings, "command": shlex.join(command), **rows_file.here_and_now(), **measures(summary, steps),
        **{key: summary[key] for key in ("commit", "versions", "params_total", "params_active", "steps")},
    }  # fmt: skip


def measures(summary: dict[str, Any], steps: list[dict[str, Any]]) -> dict[str, float]:
    """The final held-out loss, nats per byte, and means over the last steps and the MoE layers of the others."""
    late = steps[-max(1, int(len(steps) * LATE)) :]
    others = ("max_vio", "dropped_fraction", "dead_experts", "gate_entropy")
    means = {key: float(np.mean([row[key] for row in late])) for key in others}
    return {"heldout_loss": summary["heldout_loss"], **means}


def caption(table: Table, rows: list[dict[str, Any]]) -> str:
    """What all runs share, one line."""
    first = rows[0]
    return (
        f"{first['steps']} steps, {len(table.seeds)} seeds; measures over the last quarter of the steps and all MoE "
        f"layers, gate entropy in nats; jax {first['versions']['jax']}, commit {first['commit']}."
    )


def summary(table: Table, rows: list[dict[str, Any]]) -> list[Sheet]:
    """A table for each section: mean over the seeds and, of the loss, the standard deviation."""
    sheets = []
    for title, variants in table.sections.items():
        published = [name for name in variants if name in table.published]
        heads = [Head("variant"), *_measure_heads(), *([Head("published")] if published else [])]
        lines = []
        for name, settings in variants.items():
            of_seeds = [table.run(settings, seed) for seed in table.seeds]
            of_variant = [row for row in rows if row["settings"] in of_seeds]
            cells = [word(name, is_code=True), *_means(of_variant)]
            lines.append(Line(cells + ([word(table.published.get(name, ""))] if published else []), of_variant))
        sheets.append(Sheet(title, heads, lines))
    return sheets


def every_run(table: Table, rows: list[dict[str, Any]]) -> Sheet:
    """A line for each run, under each variant that it is of."""
    lines = []
    for title, variants in table.sections.items():
        for name, settings in variants.items():
            for seed in table.seeds:
                for row in rows:
                    if row["settings"] == table.run(settings, seed):
                        cells = [word(title), word(name, is_code=True), number(seed, "{}")]
                        cells += [number(row.get(key), form) for _, key, form in MEASURES]
                        lines.append(Line(cells, [row]))
    heads = [Head("section"), Head("variant"), Head("seed", is_number=True), *_measure_heads()]
    return Sheet("Every run", heads, lines)


def markdown(table: Table, rows: list[dict[str, Any]]) -> str:
    """What was run, and the tables by sections."""
    parts = [caption(table, rows)]
    for sheet in summary(table, rows):
        parts += [f"**{sheet.title}**", sheet.markdown()]
    return "\n\n".join(parts)


def _measure_heads() -> list[Head]:
    return [Head(what, is_number=True) for what, _, _ in MEASURES]


def _means(rows: list[dict[str, Any]]) -> list[Cell]:
    cells = []
    for _, key, form in MEASURES:
        of_seeds = [row[key] for row in rows if row.get(key) is not None]
        cell = number(statistics.fmean(of_seeds) if of_seeds else None, form)
        if key == "heldout_loss" and len(of_seeds) > 1:
            cell = Cell(cell.value, f"{cell.text} ± {statistics.stdev(of_seeds):.3f}")
        cells.append(cell)
    return cells


if __name__ == "__main__":
    run(main)
