"""Tables of what a grid says beside step times: the break-even, stalls by layer, memory, CPU time, other clusters."""

import math
from collections.abc import Sequence
from typing import Any

from experiments import bounds, grid_sheets
from experiments.sheet import Cell, Head, Line, Sheet, number, word

MB = 1e6
WEIGHTS, TOKENS = "pooled", "fluid:mode=tokens"  # the dispatchers that move only these
OF_DISPATCHER = (Head("routing"), Head("T", is_number=True), Head("dispatcher"))
XLA, POOL = ("arguments", "outputs", "temporaries"), ("slots", "stages", "cache")
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
        "next step's blocks. With `matmul=jax` reads wait side by side, and their sum may exceed the step."
    )
    return Sheet("Stalls by layer", heads, lines, [note])


def memory(rows: Rows) -> Sheet:
    """A line for each dispatcher: MB of the first host, of XLA, the pool, and the process if it was alone in it."""
    texts = (*XLA, "aliased", *POOL, "XLA and pool", "RSS before", "peak RSS")
    heads = [*OF_DISPATCHER, *(Head(text, is_number=True) for text in texts)]
    lines = []
    for row in rows:
        of_row = row["memory"]
        together = sum(of_row[key] for key in (*XLA, *POOL)) - of_row["aliased"]
        sizes = [*(of_row[key] for key in (*XLA, "aliased", *POOL)), together]
        is_alone = "dispatcher" in row["cell"]
        sizes += [of_row[key] if is_alone else None for key in ("rss_before", "peak_rss")]
        numbers = [number(None if size is None else size / MB, "{:,.1f}") for size in sizes]
        lines.append(Line([*_of_dispatcher(row), *numbers], [row]))
    note = (
        "MB of the first host (1 MB = 10^6 bytes). `arguments`, `outputs`, `temporaries`: of the compiled step, XLA's "
        "own figures; `aliased` is the part of arguments and outputs that is the same memory, and counts once in `XLA "
        "and pool`. `slots`: published blocks, every version that is held; `stages`: gradients on their way; both as "
        "the kernel has given them. `cache`: other hosts' blocks, by closed form. `RSS before`: the peak of the "
        "process before anything of this dispatcher was made; `peak RSS` has the compiler's memory too."
    )
    return Sheet("Memory", heads, lines, [note])


def dispatch_cost(rows: Rows) -> Sheet:
    """A line for each row: microseconds of CPU time for a token of the first host, beside the step time."""
    texts = ("CPU us / token", "CPU us / token and layer", "CPU ms", "step ms")
    heads = [*OF_DISPATCHER, *(Head(text, is_number=True) for text in texts)]
    lines = []
    for row in rows:
        setting = row["flags"]
        tokens = setting["members"] // row["hosts"] * row["tokens"]
        us = row["cpu_ms"] * 1e3 / tokens
        numbers = [number(us, "{:,.1f}"), number(us / setting["layers"], "{:,.1f}")]
        numbers += [number(row["cpu_ms"]), number(row["step_ms"])]
        lines.append(Line([*_of_dispatcher(row), *numbers], [row]))
    note = (
        "CPU time, user and system, of all threads of the first host's process in a step, forward, backward and "
        "update, by the tokens of its members. Modelled device time is slept through and costs none. What is left is "
        "the dispatcher, a stand-in for the matmuls, which reads all weights, and the update of the experts: a part "
        "of it is the same for any number of tokens."
    )
    return Sheet("CPU time of dispatch", heads, lines, [note])


def _of_dispatcher(row: dict[str, Any]) -> list[Cell]:
    return [
        word(row["flags"]["workload"]), number(row["tokens"], "{:,}"), word(row["dispatcher"], is_code=True)
    ]  # fmt: skip
