"""Reproduces a table: runs what is missing of it, then makes tables, figures and the parts of README.md anew.

Command:  python -m experiments.reproduce headline [--quick]
Hardware: as the table's own file says; those of configs/compare need root, for the lab.

A table is named by its file: a grid of configs/compare, as experiments.compare runs it, or a table of training runs of
configs/tables, as experiments.tables does. Rows go to results/NAME.jsonl, and the same command goes on where an
interrupted one ended. Or it is named by the program that measures it, experiments/bench_*.py: then COMMANDS there are
run, and replace results/NAME.json when all have succeeded.

--quick runs what the file's get_quick() or QUICK says, a small version of the same comparison in minutes, prints its
table, and leaves results/ and README.md as they are.
"""

import importlib
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable

from absl import flags

from experiments import compare, grid_tables, readme_tables, render, tables
from experiments.flags import ROOT, exit_on_sigterm, from_file, parse_flags, run, words_first
from fef.config import UserError

RESULTS, CONFIGS = ROOT / "results", ROOT / "configs"
FOLDERS = (CONFIGS / "compare", CONFIGS / "tables")
PROGRAM_TIMEOUT_S = 3600.0  # of one command


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_bool("quick", False, "the small version; nothing of it is kept", flag_values=values)


def main(argv: list[str]) -> None:
    words, argv = words_first(argv, most=1)
    values = parse_flags(argv, define, doc=__doc__ or "")
    path = find("".join(words))
    is_program = path.stem in readme_tables.TABLES
    complete = program(path.stem, values.quick) if is_program else completion(path, values.quick)
    exit_on_sigterm()
    name = f"{path.stem}.json" if is_program else f"{path.stem}.jsonl"
    if values.quick:
        folder = pathlib.Path(tempfile.mkdtemp(prefix="fef-"))
        print(complete(folder / name))
        shutil.rmtree(folder)  # a cell that fails leaves its output there
        return
    print(complete(RESULTS / name))
    render.main(["render"])
    readme_tables.main(["readme_tables"])


def find(word: str) -> pathlib.Path:
    """The file of a table: of FOLDERS or a program's by its name, or the path of a file.

    Raises:
      UserError: there is none; names those there are.
    """
    files = {file.stem: file for folder in FOLDERS for file in folder.glob("[!_]*.py")}
    files |= {name: ROOT / f"experiments/{name}.py" for name in readme_tables.TABLES}
    path = files.get(word, pathlib.Path(word))
    if path.suffix != ".py" or not path.is_file():
        raise UserError(f"{word!r}: is no table; there are {', '.join(sorted(files))}")
    return path


def completion(path: pathlib.Path, quick: bool) -> Callable[[pathlib.Path], str]:
    """What runs all that a file of rows lacks, and returns the table.

    Args:
      path: a file of FOLDERS; a quick one may be anywhere, for nothing is kept of it.
      quick: whether it is what the file's get_quick() says.

    Raises:
      UserError: a file of another folder, or without the functions that it must have.
    """
    if not quick and path.resolve().parent not in FOLDERS:
        raise UserError(f"{path}: is not in {' or '.join(map(str, FOLDERS))}, so its rows have no place in results/")
    if "def get_table(" in path.read_text():
        table = from_file(path, "get_quick" if quick else "get_table", tables.Table)
        return lambda rows: tables.markdown(table, tables.measure(table, rows, tables.RUN_TIMEOUT_S))
    grid = from_file(path, "get_quick" if quick else "get_grid", compare.Grid)
    return lambda rows: grid_tables.markdown(compare.measure(grid, rows, compare.CELL_TIMEOUT_S), grid.sheets)


def program(name: str, quick: bool) -> Callable[[pathlib.Path], str]:
    """What runs a program of experiments anew, and returns the table.

    Raises:
      UserError: when run, a command failed or took too long; the file of rows is as it was.
    """
    module = importlib.import_module(f"experiments.{name}")

    def complete(path: pathlib.Path) -> str:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            rows = pathlib.Path(folder) / path.name
            for command in module.QUICK if quick else module.COMMANDS:
                _run([sys.executable if word == "python" else word for word in shlex.split(command)], rows)
            table = readme_tables.TABLES[name](json.loads(rows.read_text()))
            os.replace(rows, path)
        return table

    return complete


def _run(command: list[str], rows: pathlib.Path) -> None:
    said = shlex.join(command)
    with subprocess.Popen([*command, f"--json={rows}"], cwd=ROOT, stdout=sys.stderr) as process:
        try:
            status = process.wait(PROGRAM_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            raise UserError(f"{said}: took more than {PROGRAM_TIMEOUT_S:g} s; nothing is changed") from None
        except BaseException:
            process.terminate()
            raise
    if status:
        raise UserError(f"{said}: ended with status {status}; nothing is changed")


if __name__ == "__main__":
    run(main)
