"""Tables of the rows of experiments.compare: a line for each cell of the grid, and a line for each row."""

import json
import statistics
from collections.abc import Sequence
from typing import Any

from experiments import bounds
from experiments.sheet import DASH, Cell, Head, Line, Sheet, number, word

OURS = "fluid"  # of the dispatchers, what the others are compared with
BY_BYTES = "fluid:cost=bytes"  # has the least bytes
REAL, NO_NETWORK = "real", "none"  # us_per_token where the CPU computes, and the network of one process
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
        f"{_hosts(rows)}, L={first['flags']['layers']}, E={first['flags']['experts']}, K={first['flags']['choices']}, "
        f"{_device(rows)}; medians of {first['cell']['steps']} steps in ms; jax {first['versions']['jax']}, commit "
        f"{first['commit']}."
    )


def _hosts(rows: list[dict[str, Any]]) -> str:
    members = _listed(sorted({row["flags"]["members"] for row in rows}))
    is_one_process = all(row["cell"]["network"] == NO_NETWORK for row in rows)
    return f"{members} members in one process" if is_one_process else f"{members} hosts with one member each"


def _device(rows: list[dict[str, Any]]) -> str:
    """Whose time the experts take: the one value of all rows, or each with its tokens."""
    tokens_of: dict[float | str, list[int]] = {}
    for row in rows:
        of_value = tokens_of.setdefault(row["cell"]["us_per_token"], [])
        if row["cell"]["tokens"] not in of_value:
            of_value.append(row["cell"]["tokens"])
    if len(tokens_of) > 1:
        values = (f"{_time(value)} (T = {_listed(of_value)})" for value, of_value in tokens_of.items())
        return f"modelled device time of {', '.join(values)} a token and layer"
    (value,) = tokens_of
    return "computed by the CPU" if value == REAL else f"modelled device time of {_time(value)} a token and layer"


def _time(us_per_token: float | str) -> str:
    return "what the CPU takes" if us_per_token == REAL else f"{us_per_token:g} us"


def _listed(values: Sequence[int]) -> str:
    """1, 2 and 3."""
    *others, last = (f"{value:,}" for value in values)
    return f"{', '.join(others)} and {last}" if others else last


def by_cell(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The rows of each cell and routing, in their order; dispatchers that were measured alone come together."""
    cells: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        cell = {key: value for key, value in row["cell"].items() if key != "dispatcher"}
        cells.setdefault(json.dumps([cell, row["flags"]["workload"]], sort_keys=True), []).append(row)
    return list(cells.values())


def dispatchers(rows: list[dict[str, Any]]) -> list[str]:
    """Their names, in the order of the grid."""
    return list(dict.fromkeys(row["dispatcher"] for row in rows))


# A line for each cell.


def summary(rows: list[dict[str, Any]]) -> Sheet:
    """A line for each cell, with the step time of each dispatcher and how `fluid` stands among them."""
    cells, names = by_cell(rows), dispatchers(rows)
    heads = [*place_heads(rows), Head("floor", is_number=True), Head("overlapped", is_number=True)]
    heads += [Head(name, is_number=True, is_code=True) for name in names]
    heads += [Head("ratio", is_number=True), Head("spread", is_number=True), Head("least")]
    ratios = [ratio for of_cell in cells if (ratio := _ratio(of_cell)) is not None]
    notes = [_note(ratios)] if ratios else []
    lines = [Line(_summary_cells(of_cell, names, rows), of_cell) for of_cell in cells]
    return Sheet("Step time", heads, lines, notes)


def _note(ratios: list[float]) -> str:
    return (
        f"`ratio`: of `{OURS}` to the best of the others; median {statistics.median(ratios):.2f}, worst "
        f"{max(ratios):.2f}, at most 1.05 in {sum(ratio <= 1.05 for ratio in ratios)} of {len(ratios)} cells. "
        f"`spread`: its slowest step by its fastest. `floor`: the larger of the device's time and the fewest bytes "
        f"of all dispatchers at the link's rate. `overlapped`: what all_to_all could reach at best, a row for each "
        f"choice, hidden under the compute of another micro-batch. `least`: whether `cost=bytes` has moved exactly the "
        f"sum of each member's and expert's minimum of rows' and weights' bytes."
    )


def _summary_cells(rows: list[dict[str, Any]], names: list[str], of_grid: list[dict[str, Any]]) -> list[Cell]:
    of_name = {row["dispatcher"]: row for row in rows}
    best = min(row["step_ms"] for row in rows)
    cells = [*place(rows[0], of_grid), number(bounds.floor_ms(rows)), number(bounds.overlapped_ms(rows[0]))]
    for name in names:
        step_ms = of_name[name]["step_ms"] if name in of_name else None
        cells.append(Cell(step_ms, number(step_ms).text, is_strong=step_ms == best))
    return [*cells, number(_ratio(rows), "{:.2f}"), number(_spread(of_name.get(OURS, {})), "{:.2f}"), _least(rows)]


def place_heads(rows: list[dict[str, Any]]) -> list[Head]:
    """The columns that say where a line was measured; of the number of hosts only if there are several."""
    return [*([Head("hosts", is_number=True)] if _vary_in_hosts(rows) else []), *PLACE]


def place(row: dict[str, Any], of_grid: list[dict[str, Any]]) -> list[Cell]:
    """A row's cells of `place_heads`."""
    cell = row["cell"]
    relay = cell.get("relay", DASH)
    return [
        *([number(row["hosts"])] if _vary_in_hosts(of_grid) else []),
        word(cell["network"]), word(relay), number(cell["nic"], "{:,}"), word(row["flags"]["workload"]),
        number(cell["tokens"], "{:,}"),
    ]  # fmt: skip


def uses_pool(row: dict[str, Any]) -> bool:
    """Whether its dispatcher reads from the pool, and so can wait there."""
    return row["dispatcher"].startswith(("pooled", "fluid"))


def _vary_in_hosts(rows: list[dict[str, Any]]) -> bool:
    return len({row["hosts"] for row in rows}) > 1


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
    heads = [*place_heads(rows), Head("dispatcher")]
    heads += [
        Head(text, is_number=True)
        for text in ("step ms", "utilisation", "floor ms", "step / floor", "overlapped ms", "wait ms", "MB")
    ]
    heads += [Head("straggler", is_number=True), Head("dropped", is_number=True)]
    lines = [Line(_cells(row, of_cell, rows), [row]) for of_cell in by_cell(rows) for row in of_cell]
    note = (
        "`utilisation`: the device's time for all real rows, shared out evenly, by the step. `floor` and `overlapped`: "
        "as above. `wait`: the time for which the first member's device could only wait in the pool. `MB`: what the "
        "busiest member receives in a step, without headers. `straggler`: rows that the busiest member computes, by "
        "the mean, of dispatchers that move only tokens or only weights. `dropped`: what a capacity factor of "
        f"{bounds.CAPACITY_FACTOR:g} would drop; these dispatchers drop nothing."
    )
    return Sheet("Every row", heads, lines, [note])


def _cells(row: dict[str, Any], of_cell: list[dict[str, Any]], of_grid: list[dict[str, Any]]) -> list[Cell]:
    floor_ms = bounds.floor_ms(of_cell)
    return [
        *place(row, of_grid),
        word(row["dispatcher"], is_code=True),
        number(row["step_ms"]),
        number(bounds.utilisation(row), "{:.1%}"),
        number(floor_ms),
        number(row["step_ms"] / floor_ms, "{:.2f}"),
        number(bounds.overlapped_ms(row)),
        number(row.get("wait_ms") if uses_pool(row) else None),
        number(row["bytes"] / 1e6, "{:,.1f}"),
        number(bounds.straggler(row), "{:.2f}"),
        number(bounds.dropped(row), "{:.1%}"),
    ]
