"""Runs a grid of dispatchers, tokens, routings and networks, each cell in a lab of its own, and keeps every row.

Command:  python -m experiments.compare --config=configs/compare/envelope.py
Hardware: as the grid's file says; the lab needs root, and a machine that does nothing else.

A grid's file has get_grid(), which returns a dict of what is to be combined (see `Grid`). A cell is one run of
`experiments.bench_stack` in which its dispatchers take turns on the same assignments, one workload after the other; its
rows go to the end of --results as JSON lines, with the cell, the command and the digest of the sources. The same
command goes on where an interrupted grid ended. A file holds rows of one state of the sources only.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import tempfile
from typing import Any

import tqdm
from absl import flags

from experiments import grid_sheets, grid_tables, rows_file
from experiments.flags import ROOT, exit_on_sigterm, from_file, parse_flags, run
from fef.config import UserError

SOURCES = (
    *rows_file.FEF, "experiments/bench_stack.py", "experiments/step_memory.py", "experiments/bounds.py",
    "experiments/l*.py", "scripts/*.sh", "configs/compare/*.npz",
)  # fmt: skip
CELL_TIMEOUT_S = 3600.0
GRACE_S = 10.0


@dataclasses.dataclass(frozen=True)
class Grid:
    """What is combined, and what all cells share. Cells come in this order, the last axis first.

    Attributes:
      networks: of experiments.launch's --lab, without the rate; "none" alone: all members in one process, no
        lab and no root.
      nics: rate of a host's link, Mbit/s; 0 without a network.
      tokens: T, of a member.
      workloads: of fef.testing.workloads; all in each cell, for they share the compiled programs.
      dispatchers: as bench_stack takes them.
      us_per_token: modelled device time of a layer for a token with its K choices, microseconds; a tuple has one for
        each of `tokens`. "real": the CPU computes.
      relays: config.pool.relay.
      hosts: with one member each; an axis where several are given.
      alone: whether each dispatcher has a cell of its own, so that its processes are its own.
      layers, experts, choices: L, E and K.
      steps: timed steps of each dispatcher.
      sheets: the tables that show it, of experiments.grid_tables.
    """

    networks: tuple[str, ...]
    nics: tuple[int, ...]
    tokens: tuple[int, ...]
    workloads: tuple[str, ...]
    dispatchers: tuple[str, ...]
    us_per_token: float | str | tuple[float | str, ...]
    relays: tuple[str, ...] = ("auto",)
    hosts: int | tuple[int, ...] = 4
    alone: bool = False
    layers: int = 2
    experts: int = 8
    choices: int = 2
    steps: int = 5
    sheets: tuple[str, ...] = ("summary",)

    def __post_init__(self) -> None:
        if isinstance(self.us_per_token, tuple) and len(self.us_per_token) != len(self.tokens):
            raise UserError(
                f"us_per_token={self.us_per_token}: give one number, or one for each of tokens={self.tokens}"
            )
        for us_per_token in self._us_T:
            if isinstance(us_per_token, str) and us_per_token != grid_sheets.REAL:
                raise UserError(f"us_per_token={us_per_token!r}: give microseconds, or {grid_sheets.REAL!r}")
        is_without = grid_sheets.NO_NETWORK in self.networks or 0 in self.nics
        if is_without and (self.networks, self.nics) != ((grid_sheets.NO_NETWORK,), (0,)):
            raise UserError(
                f"networks={self.networks} with nics={self.nics}: without a network, write "
                f"({grid_sheets.NO_NETWORK!r},) and (0,)"
            )

        for name in self.sheets:
            if name not in grid_tables.SHEETS:
                raise UserError(f"sheets: {name!r}: there are {', '.join(grid_tables.SHEETS)}")

    @property
    def _us_T(self) -> tuple[float | str, ...]:
        """One for each of `tokens`."""
        given = self.us_per_token
        return given if isinstance(given, tuple) else (given,) * len(self.tokens)

    @property
    def cells(self) -> list[dict[str, Any]]:
        """One dict for each combination, with what it takes from no axis."""
        us_of = dict(zip(self.tokens, self._us_T, strict=True))
        axes: dict[str, tuple] = {
            "hosts": self.hosts if isinstance(self.hosts, tuple) else (self.hosts,), "network": self.networks,
            "relay": self.relays, "nic": self.nics, "tokens": self.tokens,
        }  # fmt: skip
        if self.alone:
            axes["dispatcher"] = self.dispatchers
        cells: list[dict[str, Any]] = [
            dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())
        ]
        return [cell | {"us_per_token": us_of[cell["tokens"]]} for cell in cells]

    def command(self, cell: dict[str, Any]) -> list[str]:
        """What runs a cell; it wants --json=FILE at its end."""
        us_per_token, dispatchers = cell["us_per_token"], (cell["dispatcher"],) if self.alone else self.dispatchers
        layer = us_per_token if us_per_token == grid_sheets.REAL else f"{cell['tokens'] * us_per_token * 1e-6:g}"
        lab = [
            "python", "-m", "experiments.launch", f"--hosts={cell['hosts']}",
            f"--lab={cell['network']},nic={cell['nic']}mbit", "--",
        ]  # fmt: skip
        return [
            *(lab if cell["network"] != grid_sheets.NO_NETWORK else []),
            "python", "-m", "experiments.bench_stack", f"--members={cell['hosts']}", f"--layers={self.layers}",
            f"--experts={self.experts}", f"--choices={self.choices}", f"--cells={cell['tokens']}:{layer}",
            f"--nic={cell['nic']}", f"--steps={self.steps}", f"--relay={cell['relay']}",
            f"--workloads={','.join(self.workloads)}", f"--dispatchers={','.join(dispatchers)}",
        ]  # fmt: skip


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("config", None, "the grid: a .py file with get_grid()", flag_values=values)
    flags.DEFINE_string("results", "", "the file of rows; empty: results/NAME.jsonl", flag_values=values)
    flags.DEFINE_float("cell_timeout_s", CELL_TIMEOUT_S, "longest time of a cell", lower_bound=1, flag_values=values)


def main(argv: list[str]) -> None:
    values = parse_flags(argv, define, doc=__doc__ or "")
    if not values.config:
        raise UserError("--config is missing: name a grid, such as configs/compare/envelope.py")
    grid = load_grid(values.config)
    exit_on_sigterm()
    results = pathlib.Path(values.results or ROOT / "results" / f"{pathlib.Path(values.config).stem}.jsonl")
    print(grid_tables.markdown(measure(grid, results, values.cell_timeout_s), grid.sheets))


def measure(grid: Grid, results: pathlib.Path, cell_timeout_s: float) -> list[dict[str, Any]]:
    """Runs the cells that a file of rows lacks, and returns all its rows.

    Raises:
      UserError: a cell failed or took too long, or the file has rows of other sources.
    """
    code = rows_file.digest(SOURCES)
    rows = rows_file.read(results, code)
    done = [row["cell"] for row in rows]
    missing = [cell for cell in grid.cells if dict(cell, **_shared(grid)) not in done]
    with (
        tempfile.TemporaryDirectory() as folder,
        tqdm.tqdm(total=len(grid.cells), initial=len(grid.cells) - len(missing), unit="cell", smoothing=0) as bar,
    ):
        for cell in missing:
            bar.set_postfix_str(", ".join(f"{key}={value}" for key, value in cell.items()))
            new = run_cell(grid, cell, code, pathlib.Path(folder), results.with_suffix(".log"), cell_timeout_s)
            rows_file.append(results, new)
            rows += new
            bar.update()
    return rows


def load_grid(path: str) -> Grid:
    """The grid of a file.

    Raises:
      UserError: no such file, no get_grid(), or a field that is unknown or missing.
    """
    if not pathlib.Path(path).is_file():
        raise UserError(f"--config={path}: no such file")
    return from_file(pathlib.Path(path), "get_grid", Grid)


def run_cell(
    grid: Grid, cell: dict[str, Any], code: str, folder: pathlib.Path, said: pathlib.Path, timeout_s: float
) -> list[dict[str, Any]]:
    """Measures a cell.

    Args:
      grid, cell: what.
      code: digest of the sources.
      folder: for temporary files.
      said: the file for its output, which stays if it fails.
      timeout_s: then it is ended.

    Raises:
      UserError: it failed or took too long; names the file of its output.
    """
    command, measured = grid.command(cell), folder / "rows.json"
    this_python = [sys.executable if word == "python" else word for word in command]
    said.parent.mkdir(parents=True, exist_ok=True)
    with said.open("w") as output, subprocess.Popen(
        [*this_python, f"--json={measured}"], cwd=ROOT, stdout=output, stderr=output
    ) as process:  # fmt: skip
        try:
            status = process.wait(timeout_s)
            why = f"ended with status {status}"
        except subprocess.TimeoutExpired:
            status, why = 1, f"took more than {timeout_s:g} s (--cell_timeout_s)"
        finally:
            _end(process)
    if status:
        raise UserError(f"the cell {cell} {why}; its output is {said}, what was measured before is kept")
    said.unlink()
    shared = {
        "cell": dict(cell, **_shared(grid)), "code": code, "command": shlex.join(command),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        **rows_file.here_and_now(),
    }  # fmt: skip
    return [shared | row for row in json.loads(measured.read_text())]


def _shared(grid: Grid) -> dict[str, Any]:
    """What tells a cell from one of another grid."""
    return {field: getattr(grid, field) for field in ("layers", "experts", "choices", "steps")} | {
        "dispatchers": list(grid.dispatchers), "workloads": list(grid.workloads)
    }  # fmt: skip


def _end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)  # launch ends its hosts and its lab
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()


if __name__ == "__main__":
    run(main)
