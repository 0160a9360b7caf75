"""Reproduces a table: runs what is missing of it, then makes tables, figures and the parts of README.md anew.

Command:  python -m experiments.reproduce configs/compare/headline.py [--quick]
Hardware: as the table's own file says; those of configs/compare need root, for the lab.

The file is a grid of configs/compare, as experiments.compare runs it, or a table of training runs of configs/tables, as
experiments.tables does; rows go to results/NAME.jsonl. The same command goes on where an interrupted one ended.

--quick runs what the file's get_quick() says, a small version of the same comparison in minutes, prints its table, and
leaves results/ and README.md as they are.
"""

import pathlib
import shutil
import tempfile
from collections.abc import Callable

from absl import flags

from experiments import compare, grid_sheets, readme_tables, render, tables
from experiments.flags import ROOT, exit_on_sigterm, from_file, parse_flags, run
from fef.config import UserError

RESULTS, CONFIGS = ROOT / "results", ROOT / "configs"
FOLDERS = (CONFIGS / "compare", CONFIGS / "tables")


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_bool("quick", False, "the small version; nothing of it is kept", flag_values=values)


def main(argv: list[str]) -> None:
    path = argv[1] if len(argv) > 1 and not argv[1].startswith("-") else ""
    values = parse_flags([argv[0], *argv[2:]] if path else argv, define, doc=__doc__ or "")
    complete = completion(pathlib.Path(path), values.quick)
    exit_on_sigterm()
    name = f"{pathlib.Path(path).stem}.jsonl"
    if values.quick:
        folder = pathlib.Path(tempfile.mkdtemp(prefix="fef-"))
        print(complete(folder / name))
        shutil.rmtree(folder)  # a cell that fails leaves its output there
        return
    print(complete(RESULTS / name))
    render.main(["render"])
    readme_tables.main(["readme_tables"])


def completion(path: pathlib.Path, quick: bool) -> Callable[[pathlib.Path], str]:
    """What runs all that a file of rows lacks, and returns the table.

    Args:
      path: a file of FOLDERS; a quick one may be anywhere, for nothing is kept of it.
      quick: whether it is what the file's get_quick() says.

    Raises:
      UserError: no such file, or not the functions that it must have.
    """
    if not path.is_file() or not (quick or path.resolve().parent in FOLDERS):
        known = sorted(str(file.relative_to(ROOT)) for folder in FOLDERS for file in folder.glob("[!_]*.py"))
        raise UserError(f"{str(path)!r}: is no table of this repository; there are {', '.join(known)}")
    if "def get_table(" in path.read_text():
        table = from_file(path, "get_quick" if quick else "get_table", tables.Table)
        return lambda rows: tables.markdown(table, tables.measure(table, rows, tables.RUN_TIMEOUT_S))
    grid = from_file(path, "get_quick" if quick else "get_grid", compare.Grid)
    return lambda rows: grid_sheets.markdown(compare.measure(grid, rows, compare.CELL_TIMEOUT_S))


if __name__ == "__main__":
    run(main)
