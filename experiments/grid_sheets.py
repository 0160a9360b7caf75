"""Tables of the rows of experiments.compare: a line for each cell of the grid, and a line for each row."""

import json
import statistics
from typing import Any

from experiments import bounds
from experiments.sheet import DASH, Cell, Head, Line, Sheet, number, word

OURS = "fluid"  # of the dispatchers, what the others are compared with
BY_BYTES = "fluid:cost=bytes"  # has the least bytes
NEEDED = (  # of a row, a point leads inwards
    "cell.network", "cell.nic", "cell.tokens", "cell.us_per_token", "cell.steps", "flags.members", "flags.layers",
    "flags.experts", "flags.choices", "flags.d_model", "flags.nic", "flags.workload", "dispatcher", "hosts", "tokens",
    "layer_s", "step_ms", "bytes", "command", "commit", "versions.jax",
)  # fmt: skip
PLACE = (
    Head("network"), Head("relay"), Head("Mbit/s", is_number=True), Head("routing"), Head("T", is_number=True)
)  # fmt: skip


def caption(rows: list[dict[str, Any]]) -> str:
    """What all rows share, one line."""
    first = rows[0]
    return (
        f"{first['hosts']} hosts with one member each, L={first['flags']['layers']}, E={first['flags']['experts']}, "
        f"K={first['flags']['choices']}, modelled device time of {_us_per_token(rows)} a token and "
        f"layer; medians of {first['cell']['steps']} steps in ms; jax {first['versions']['jax']}, commit "
        f"{first['commit']}."
    )


def _us_per_token(rows: list[dict[str, Any]]) -> str:
    """The one value of all rows, or each with its tokens."""
    tokens_of: dict[float, list[int]] = {}
    for row in rows:
        of_value = tokens_of.setdefault(row["cell"]["us_per_token"], [])
        if row["cell"]["tokens"] not in of_value:
            of_value.append(row["cell"]["tokens"])
    if len(tokens_of) == 1:
        return f"{next(iter(tokens_of)):g} us"
    return ", ".join(
        f"{value:g} us (T = {' and '.join(f'{tokens:,}' for tokens in of_value)})"
        for value, of_value in tokens_of.items()
    )


def by_cell(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The rows of each cell and routing, in their order."""
    cells: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault(json.dumps([row["cell"], row["flags"]["workload"]], sort_keys=True), []).append(row)
    return list(cells.values())


def dispatchers(rows: list[dict[str, Any]]) -> list[str]:
    """Their names, in the order of the grid."""
    return list(dict.fromkeys(row["dispatcher"] for row in rows))


def markdown(rows: list[dict[str, Any]]) -> str:
    """What was run, and the table by cells."""
    return f"{caption(rows)}\n\n{summary(rows).markdown()}"


# A line for each cell.


def summary(rows: list[dict[str, Any]]) -> Sheet:
    """A line for each cell, with the step time of each dispatcher and how `fluid` stands among them."""
    cells, names = by_cell(rows), dispatchers(rows)
    heads = [*PLACE, Head("floor", is_number=True), Head("overlapped", is_number=True)]
    heads += [Head(name, is_number=True, is_code=True) for name in names]
    heads += [Head("ratio", is_number=True), Head("spread", is_number=True), Head("least")]
    ratios = [ratio for of_cell in cells if (ratio := _ratio(of_cell)) is not None]
    notes = [_note(ratios)] if ratios else []
    return Sheet("Step time", heads, [_line(of_cell, names) for of_cell in cells], notes)


def _note(ratios: list[float]) -> str:
    return (
        f"`ratio`: of `{OURS}` to the best of the others; median {statistics.median(ratios):.2f}, worst "
        f"{max(ratios):.2f}, at most 1.05 in {sum(ratio <= 1.05 for ratio in ratios)} of {len(ratios)} cells. "
        f"`spread`: its slowest step by its fastest. `floor`: the larger of the modelled time and the fewest bytes "
        f"of all dispatchers at the link's rate. `overlapped`: what all_to_all could reach at best, a row for each "
        f"choice, hidden under the compute of another micro-batch. `least`: whether `cost=bytes` has moved exactly the "
        f"sum of each member's and expert's minimum of rows' and weights' bytes."
    )


def _line(rows: list[dict[str, Any]], names: list[str]) -> Line:
    of_name = {row["dispatcher"]: row for row in rows}
    best = min(row["step_ms"] for row in rows)
    cells = [*_place(rows[0]), number(bounds.floor_ms(rows)), number(bounds.overlapped_ms(rows[0]))]
    for name in names:
        step_ms = of_name[name]["step_ms"] if name in of_name else None
        cells.append(Cell(step_ms, number(step_ms).text, is_strong=step_ms == best))
    cells += [number(_ratio(rows), "{:.2f}"), number(_spread(of_name.get(OURS, {})), "{:.2f}"), _least(rows)]
    return Line(cells, rows)


def _place(row: dict[str, Any]) -> list[Cell]:
    cell = row["cell"]
    relay = cell.get("relay", DASH)
    return [
        word(cell["network"]), word(relay), number(cell["nic"], "{:,}"), word(row["flags"]["workload"]),
        number(cell["tokens"], "{:,}"),
    ]  # fmt: skip


def _ratio(rows: list[dict[str, Any]]) -> float | None:
    """Of fluid's step to the best of the others."""
    times = {row["dispatcher"]: row["step_ms"] for row in rows}
    others = [ms for name, ms in times.items() if name != OURS]
    return times[OURS] / min(others) if OURS in times and others else None


def _spread(row: dict[str, Any]) -> float | None:
    """Of the timed steps, which stand behind those of the warm-up."""
    steps = row["steps_ms"][-row["cell"]["steps"] :] if row.get("steps_ms") else []
    return max(steps) / min(steps) if steps else None


def _least(rows: list[dict[str, Any]]) -> Cell:
    least = [row for row in rows if row["dispatcher"].startswith(BY_BYTES) and "least_bytes" in row]
    if not least:
        return Cell(None, DASH)
    is_least = all(map(moved_least, least))
    return Cell(is_least, "yes" if is_least else "no", is_strong=not is_least)


def moved_least(row: dict[str, Any]) -> bool:
    """Whether its bytes are the sum of each member's and expert's minimum."""
    moved = row["bytes_by_purpose"]
    return sum(moved.get(purpose, 0) for purpose in ("weights", "gradients", "tokens")) == row["least_bytes"]


# A line for each row.


def every_row(rows: list[dict[str, Any]]) -> Sheet:
    """A line for each dispatcher of each cell, beside what it is held against."""
    heads = [*PLACE, Head("dispatcher")]
    heads += [
        Head(text, is_number=True)
        for text in ("step ms", "utilisation", "floor ms", "step / floor", "overlapped ms", "wait ms", "MB")
    ]
    heads += [Head("straggler", is_number=True), Head("dropped", is_number=True)]
    lines = [Line(_cells(row, of_cell), [row]) for of_cell in by_cell(rows) for row in of_cell]
    note = (
        "`utilisation`: the modelled time of all real rows, shared out evenly, by the step. `floor` and `overlapped`: "
        "as above. `wait`: the time for which the first member's device could only wait in the pool. `MB`: what the "
        "busiest member receives in a step, without headers. `straggler`: rows that the busiest member computes, by "
        "the mean, of dispatchers that move only tokens or only weights. `dropped`: what a capacity factor of "
        f"{bounds.CAPACITY_FACTOR:g} would drop; these dispatchers drop nothing."
    )
    return Sheet("Every row", heads, lines, [note])


def _cells(row: dict[str, Any], of_cell: list[dict[str, Any]]) -> list[Cell]:
    floor_ms = bounds.floor_ms(of_cell)
    return [
        *_place(row),
        word(row["dispatcher"], is_code=True),
        number(row["step_ms"]),
        number(bounds.utilisation(row), "{:.1%}"),
        number(floor_ms),
        number(row["step_ms"] / floor_ms, "{:.2f}"),
        number(bounds.overlapped_ms(row)),
        number(row.get("wait_ms") if row["dispatcher"].startswith(("pooled", "fluid")) else None),
        number(row["bytes"] / 1e6, "{:,.1f}"),
        number(bounds.straggler(row), "{:.2f}"),
        number(bounds.dropped(row), "{:.1%}"),
    ]
