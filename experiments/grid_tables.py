"""Which tables show a grid: those that its file names, by the names that stand here."""

from collections.abc import Callable, Sequence
from typing import Any

from experiments import cost_sheets, grid_sheets
from experiments.sheet import Sheet

Rows = list[dict[str, Any]]
SHEETS: dict[str, Callable[[Rows], Sheet]] = {
    "summary": grid_sheets.summary,
    "every_row": grid_sheets.every_row,
    "break_even": cost_sheets.break_even,
    "realism": cost_sheets.realism,
    "stalls": cost_sheets.stalls,
    "memory": cost_sheets.memory,
    "dispatch_cost": cost_sheets.dispatch_cost,
}


def tables(rows: Rows, names: Sequence[str]) -> list[Sheet]:
    """The tables of the rows of a grid, by their names."""
    return [SHEETS[name](rows) for name in names]


def markdown(rows: Rows, names: Sequence[str]) -> str:
    """What was run, and the tables; the first one needs no title."""
    first, *others = tables(rows, names)
    texts = [grid_sheets.caption(rows), first.markdown()]
    for sheet in others:
        texts += [f"{sheet.title}:", sheet.markdown()]
    return "\n\n".join(texts)
