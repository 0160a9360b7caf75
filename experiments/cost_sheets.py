"""Tables of what a grid says beside step times: the break-even, stalls by layer, memory, CPU time, other clusters."""

import math
from collections.abc import Sequence
from typing import Any

from experiments import bounds, grid_sheets
from experiments.sheet import Cell, Head, Line, Sheet, number, word

WEIGHTS, TOKENS = "pooled", "fluid:mode=tokens"  # the dispatchers that move only these
Rows = list[dict[str, Any]]


def break_even(rows: Rows) -> Sheet:
    """From how many tokens on moving weights takes less time than moving tokens, measured and by formula."""
    texts = ("measured T", "rows", "T by bytes", "rows (T*)", "T by time", "rows by time")
    heads = [*grid_sheets.place_heads(rows)[:-1], *(Head(text, is_number=True) for text in texts)]
    groups: dict[tuple, list[Rows]] = {}
    for of_cell in grid_sheets.by_cell(rows):
        groups.setdefault(tuple(cell.text for cell in grid_sheets.place(of_cell[0], rows)[:-1]), []).append(of_cell)
    lines = []
    for cells in groups.values():
        first = cells[0][0]
        rows_of_token = first["flags"]["choices"] / first["flags"]["experts"]
        measured = _crossing(cells)
        by_bytes, by_time = bounds.break_even_rows(first), bounds.break_even_tokens(first)
        line = [*grid_sheets.place(first, rows)[:-1], measured]
        line.append(number(measured.value * rows_of_token if isinstance(measured.value, float) else None))
        line += [number(value) for value in (by_bytes / rows_of_token, by_bytes, by_time, by_time * rows_of_token)]
        lines.append(Line(line, [row for of_cell in cells for row in of_cell]))
    note = (
        f"Where `{WEIGHTS}` and `{TOKENS}` take equally long, between the measured T by a straight line through the "
        "logarithms. `rows`: of one expert on one member. `by bytes`: T*, where the bytes are equal. `by time`: where "
        "weights that hide under compute take as long as compute and the token rows after it, with balanced routing "
        "at the link's rate."
    )
    return Sheet("Break-even", heads, lines, [note])


def _crossing(cells: Sequence[Rows]) -> Cell:
    """The T from which on weights are faster."""
    points = []
    for of_cell in cells:
        times = {row["dispatcher"]: row["step_ms"] for row in of_cell}
        if WEIGHTS in times and TOKENS in times:
            points.append((of_cell[0]["tokens"], math.log(times[WEIGHTS] / times[TOKENS])))
    points.sort()
    if not points:
        return number(None)
    if points[0][1] <= 0:
        return Cell(None, f"below {points[0][0]:,}")
    for (low, above), (high, below) in zip(points, points[1:], strict=False):
        if below <= 0:
            return number(low * (high / low) ** (above / (above - below)))
    return Cell(None, f"above {points[-1][0]:,}")


def realism(rows: Rows) -> Sheet:
    """How many rows other clusters need for weights to hide under compute."""
    first = rows[0]
    setting = first["flags"]
    members = setting["members"]
    lab_flop_per_byte = bounds.flop_per_byte(first)
    there = first["tokens"] * setting["choices"] / setting["experts"]
    clusters = (
        ("this lab", lab_flop_per_byte, bounds.ELEMENT_BYTES, 1, there),
        ("400 TFLOP/s, 400 Gbit/s, bfloat16", 400e12 / (400e9 / 8), 2, 1, None),
        ("the same, 8 devices share what they read", 400e12 / (400e9 / 8), 2, 8, None),
    )
    heads = [Head("cluster")]
    heads += [Head(text, is_number=True) for text in ("FLOP a byte", "rows needed", "rows here")]
    lines = []
    for name, flop_per_byte, element_bytes, sharing, rows_there in clusters:
        needed = bounds.hiding_rows(members, element_bytes, flop_per_byte) / sharing
        cells = [word(name), number(flop_per_byte), number(needed), number(rows_there)]
        lines.append(Line(cells, [first] if rows_there else []))
    note = (
        "Weights hide under compute from (R - 1) / R * b / 3 rows of an expert and member for each FLOP that a device "
        "does while a byte passes its link, b bytes an element: 6 P FLOP a row, forward and backward, against "
        "2 (R - 1) / R P b bytes for the block and its gradient. The second cluster is an assumption, nothing was run "
        "on one. Below that many rows tokens should move, and `fluid` moves them."
    )
    return Sheet("Rows that other clusters need", heads, lines, [note])


def stalls(rows: Rows) -> Sheet:
    """What each layer waits for in the pool."""
    layers = rows[0]["flags"]["layers"]
    heads = [*grid_sheets.place_heads(rows), Head("dispatcher")]
    heads += [Head(f"layer {layer}", is_number=True) for layer in range(layers)]
    heads += [Head(text, is_number=True) for text in ("all", "step ms", "utilisation")]
    lines = []
    for row in rows:
        if not grid_sheets.uses_pool(row):
            continue
        of_layers = [sum(of_kind) for of_kind in zip(*row["waits_ms"].values(), strict=True)]
        cells = [*grid_sheets.place(row, rows), word(row["dispatcher"], is_code=True), *map(number, of_layers)]
        cells += [number(sum(of_layers)), number(row["step_ms"]), number(bounds.utilisation(row), "{:.1%}")]
        lines.append(Line(cells, [row]))
    note = (
        "ms of the last step in which the first member's device could only wait, forward and backward, by the layer "
        "that waited. What else a step has beyond compute is outside of the layers: gradients on their way home, the "
        "next step's blocks."
    )
    return Sheet("Stalls by layer", heads, lines, [note])


def memory(rows: Rows) -> Sheet:
    """What a host needs for each dispatcher."""
    names = {
        "arguments": "arguments", "outputs": "outputs", "temporaries": "temporaries", "shared": "pool, shared",
        "peak": "peak of the process",
    }  # fmt: skip
    heads = [*grid_sheets.place_heads(rows), Head("dispatcher"), *(Head(n, is_number=True) for n in names.values())]
    lines = [
        Line(
            [
                *grid_sheets.place(row, rows),
                word(row["dispatcher"], is_code=True),
                *(number(row["memory"][key] / 1e6, "{:,.1f}") for key in names),
            ],
            [row],
        )
        for row in rows
    ]
    note = (
        "MB of the first host, each dispatcher alone in its processes. `arguments`, `outputs`, `temporaries`: XLA's "
        "figures for a member's compiled step. `pool, shared`: slots and gradients in memory that others may map. The "
        "peak has all of it, Python, compiler and what the pool keeps of other hosts' blocks; freed memory is not "
        "returned."
    )
    return Sheet("Memory", heads, lines, [note])


def dispatch_cost(rows: Rows) -> Sheet:
    """What a dispatcher costs where nothing crosses a network."""
    heads = [*grid_sheets.place_heads(rows), Head("dispatcher")]
    heads += [Head(text, is_number=True) for text in ("CPU ms", "CPU us a token and layer", "step ms")]
    lines = []
    for row in rows:
        of_process = row["tokens"] * row["flags"]["members"] / row["hosts"] * row["flags"]["layers"]
        cells = [*grid_sheets.place(row, rows), word(row["dispatcher"], is_code=True)]
        cells += [number(row["cpu_ms"]), number(row["cpu_ms"] * 1e3 / of_process, "{:.2f}"), number(row["step_ms"])]
        lines.append(Line(cells, [row]))
    note = (
        "CPU time of all threads of a process in a step. The experts' matmuls are left out, all else is there: "
        "sorting, gathering and adding up rows, copies, publishing, gradients, the update."
    )
    return Sheet("Cost of dispatch", heads, lines, [note])
