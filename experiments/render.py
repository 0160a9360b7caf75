"""Makes of the rows in results/*.jsonl tables, figures and one page to browse them.

Command:  python -m experiments.render
Hardware: any; it takes some seconds, and measures nothing.

For each NAME.jsonl of experiments.compare or experiments.tables: NAME.md with its tables, NAME.csv with every row,
unrounded, NAME.svg and NAME.png with its figure; likewise of bench_collectives.json, and of experiments.traffic if its
rows are there, but without CSV. And results.html, a single file for a browser with all of it: tables that can be
sorted, and of each line the command that measured it. Nothing is written unless every row can be read.
The tables in README.md are the same ones; python -m experiments.readme_tables puts them there.
"""

import ast
import json
import pathlib
from typing import Any

from absl import flags

from experiments import bench_collectives, compare, figures, grid_sheets, grid_tables, rows_file, tables, traffic
from experiments.flags import ROOT, parse_flags, run
from experiments.results_page import Part, page
from experiments.sheet import provenance
from fef.config import UserError
from fef.metrics import write_atomic


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("results", "", "the folder of rows; empty: results/, beside experiments/", flag_values=values)
    flags.DEFINE_string("output", "", "the folder to write to; empty: that of --results", flag_values=values)


def main(argv: list[str]) -> None:
    values = parse_flags(argv, define, doc=__doc__ or "")
    results = pathlib.Path(values.results or ROOT / "results")
    output = pathlib.Path(values.output or results)
    files = render(results)
    output.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomic(output / name, content)
    print(f"{output / 'results.html'} and {len(files) - 1} files beside it")


def render(results: pathlib.Path) -> dict[str, bytes]:
    """Name and content of all files.

    Raises:
      UserError: no rows, or a line that is none; names the file and the line.
    """
    paths = sorted(results.glob("*.jsonl"))
    if not paths:
        raise UserError(f"{results}: has no *.jsonl; experiments.compare and experiments.tables write them")
    parts = [*map(_part, paths), *_others(results)]
    files = {"results.html": page(parts).encode()}
    for part in parts:
        drawn = {f"{part.name}.{suffix}": content for suffix, content in figures.files(part.panels).items()}
        files |= drawn | {f"{part.name}.md": _markdown(part, has_figure=bool(drawn)).encode()}
        if part.every_row:
            files[f"{part.name}.csv"] = part.every_row.csv().encode()
    return files


def _part(path: pathlib.Path) -> Part:
    rows = rows_file.parse(path, path.read_bytes())
    if not rows:
        raise UserError(f"{path}: is empty; take it away")
    name = path.stem
    if "settings" in rows[0]:
        _check(path, rows, tables.NEEDED)
        table = tables.load_table(name)
        sheets = tables.summary(table, rows)
        question = _question(ROOT / f"configs/tables/{name}.py")
        every_run = tables.every_run(table, rows)
        return Part(name, question, tables.caption(table, rows), sheets, every_run, figures.of_training(sheets))
    _check(path, rows, grid_sheets.NEEDED)
    config = ROOT / f"configs/compare/{name}.py"
    names = compare.load_grid(str(config)).sheets if config.is_file() else ("summary",)
    sheets = grid_tables.tables(rows, [name for name in names if name != "every_row"])
    every_row = grid_sheets.every_row(rows)
    panels = figures.of_grid(rows) if "summary" in names else []  # else it is not about step times
    return Part(name, _question(config), grid_sheets.caption(rows), sheets, every_row, panels)


def _others(results: pathlib.Path) -> list[Part]:
    """Of the programs with tables that are neither a grid's nor of training runs."""
    parts = []
    collectives, of_traffic = results / "bench_collectives.json", results / traffic.ROWS.name
    if collectives.exists():
        rows = json.loads(collectives.read_text())
        sheet, question = bench_collectives.sheet(rows), _question(ROOT / "experiments/bench_collectives.py")
        parts.append(Part("bench_collectives", question, bench_collectives.caption(rows), [sheet], None, []))
    if of_traffic.exists():
        sheets = traffic.sheets(rows_file.parse(of_traffic, of_traffic.read_bytes()))
        parts.append(Part("traffic", _question(ROOT / "experiments/traffic.py"), "", sheets, None, []))
    return parts


def _check(path: pathlib.Path, rows: list[dict[str, Any]], needed: tuple[str, ...]) -> None:
    for number, row in enumerate(rows, 1):
        for key in needed:
            value: Any = row
            for name in key.split("."):
                value = value.get(name) if isinstance(value, dict) else None
            if value is None:
                raise UserError(f"{path}, line {number}: has no {key}; measure it again, or take the line out")
        if row["code"] != rows[0]["code"]:
            raise UserError(
                f"{path}, line {number}: is of sources {row['code']}, line 1 of {rows[0]['code']}, which cannot be "
                "compared; keep them in different files"
            )


def _question(config: pathlib.Path) -> str:
    """The first line of a configuration's docstring."""
    if not config.is_file():
        return ""
    return (ast.get_docstring(ast.parse(config.read_text())) or "").partition("\n")[0]


def _markdown(part: Part, has_figure: bool) -> str:
    parts = [f"# {part.name}", part.question, part.caption]
    if has_figure:
        parts.append(f"![{part.name}, as a figure]({part.name}.svg)")
    for sheet in filter(None, [*part.summary, part.every_row]):
        parts += [f"## {sheet.title}", sheet.markdown()]
    if part.every_row:
        commands = provenance([row for line in part.every_row.lines for row in line.rows])["command"]
        parts += ["## Commands", "\n".join(["```sh", *commands, "```"])]
    return "\n\n".join(filter(None, parts)) + "\n"


if __name__ == "__main__":
    run(main)
