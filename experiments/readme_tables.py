"""Writes the parts of README.md that hold numbers, so that nobody types one.

Command:  python -m experiments.readme_tables

A part stands between `<!-- KIND: NAME -->` and `<!-- end -->`:

    table    a table of results/NAME.json, which experiments.NAME writes
    grid     the tables of results/NAME.jsonl, which experiments.compare writes, with configs/compare/NAME.py
    runs     tables of results/NAME.jsonl, which experiments.tables writes, with configs/tables/NAME.py
    output   what a program printed, kept in results/NAME.txt
    lines    the files of READING_ORDER with their number of lines and the first sentence of their docstring
"""

import ast
import json
import re
from collections.abc import Callable
from typing import Any

from experiments import (
    bench_collectives,
    bench_dispatch,
    bench_ffn,
    bench_pool,
    compare,
    grid_tables,
    rows_file,
    tables,
)
from experiments.flags import ROOT, parse_flags, run
from fef.config import UserError

README, RESULTS = ROOT / "README.md", ROOT / "results"
KINDS = "table|grid|runs|output|lines"
PART = re.compile(rf"(?P<begin><!-- (?P<kind>{KINDS}): (?P<name>\w+) -->\n).*?(?P<end><!-- end -->)", re.S)
READING_ORDER = (
    "experiments/train.py",
    "fef/config.py",
    "fef/train.py",
    "fef/step.py",
    "fef/model.py",
    "fef/layers.py",
    "fef/moe.py",
    "fef/ffn.py",
    "fef/routing/__init__.py",
    "fef/routing/top_k.py",
    "fef/dispatch/base.py",
    "fef/dispatch/reference.py",
    "fef/dispatch/all_to_all.py",
    "fef/dispatch/pooled.py",
    "fef/dispatch/fluid.py",
    "fef/fabric/cost.py",
    "fef/ops/permute.py",
    "fef/ops/grouped_matmul.py",
    "fef/ops/publish.py",
    "fef/ops/get.py",
    "fef/ops/pooled_ffn.py",
    "fef/pool/pool.py",
)


def main(argv: list[str]) -> None:
    parse_flags(argv, lambda values: None, doc=__doc__ or "")
    README.write_text(rewrite(README.read_text()))


def rewrite(text: str, kinds: tuple[str, ...] = tuple(KINDS.split("|"))) -> str:
    """The text with its parts of these kinds made anew.

    Raises:
      UserError: a part whose results are missing; says which command makes them.
    """

    def part(match: re.Match) -> str:
        kind, name = match["kind"], match["name"]
        return f"{match['begin']}{_RENDER[kind](name)}\n{match['end']}" if kind in kinds else match[0]

    return PART.sub(part, text)


def _table(name: str) -> str:
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise UserError(f"{path}: no such file; make it with python -m experiments.reproduce {name}")
    return TABLES[name](json.loads(path.read_text()))


def _grid(name: str) -> str:
    grid = compare.load_grid(str(ROOT / f"configs/compare/{name}.py"))
    return grid_tables.markdown(_rows(name), grid.sheets)


def _runs(name: str) -> str:
    return tables.markdown(tables.load_table(name), _rows(name))


def _rows(name: str) -> list[dict[str, Any]]:
    path = RESULTS / f"{name}.jsonl"
    if not path.exists():
        raise UserError(f"{path}: no such file; make it with python -m experiments.reproduce {name}")
    return rows_file.parse(path, path.read_bytes())


def _ffn_table(rows: list[dict[str, Any]]) -> str:
    """One line for each shape and routing: the ratios to a dense matmul of equal FLOPs."""
    cases: dict[tuple, dict[tuple, float]] = {}
    for row in rows:
        case = (row["d_model"], row["d_ff"], row["num_experts"], row["routing"])
        cases.setdefault(case, {})[row["implementation"], row["passes"]] = row["ratio"]
    columns = [column for column in next(iter(cases.values())) if column[0] != "dense"]
    lines = [
        f"{bench_ffn.NUM_TOKENS} tokens, {bench_ffn.NUM_CHOICES} experts a token, float32, one device; median of "
        f"{rows[0]['repeats']} repeats; time by the time of a dense FFN of equal FLOPs in the same repeat.",
        "",
        "| D | F | E | routing | " + " | ".join(f"{name}, {passes}" for name, passes in columns) + " |",
        "|" + " ---: |" * 3 + " --- |" + " ---: |" * len(columns),
    ]
    for case, ratios in cases.items():
        lines.append("| " + " | ".join([*map(str, case), *(f"{ratios[column]:.2f}" for column in columns)]) + " |")
    return "\n".join(lines)


def _output(name: str) -> str:
    path = RESULTS / f"{name}.txt"
    if not path.exists():
        raise UserError(f"{path}: no such file; put there what the program prints")
    lines = path.read_text().rstrip().splitlines()
    shown = ["".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line) for line in lines]
    return "\n".join(["````text", *shown, "````"])


def _lines(_: str) -> str:
    lines = ["| file | lines | what |", "| --- | ---: | --- |"]
    for path in READING_ORDER:
        source = (ROOT / path).read_text()
        doc = " ".join((ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0].split())
        lines.append(f"| `{path}` | {len(source.splitlines())} | {re.split(r'(?<=[.?]) ', doc)[0]} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[list[dict[str, Any]]], str]] = {  # of the rows of a program
    "bench_collectives": bench_collectives.table,
    "bench_dispatch": bench_dispatch.table,
    "bench_ffn": _ffn_table,
    "bench_pool": bench_pool.table,
}
_RENDER: dict[str, Callable[[str], str]] = {
    "table": _table,
    "grid": _grid,
    "runs": _runs,
    "output": _output,
    "lines": _lines,
}


if __name__ == "__main__":
    run(main)
