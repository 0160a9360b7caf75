"""Charts as SVG text for report.html: lines over steps, stacked bars over steps, and heat maps.

Colours and letter sizes are classes and variables of the page's style sheet, so that one drawing serves light and dark
screens, and small ones. Units of drawing are those of a view box WIDTH wide; the page scales it to fit.
"""

import dataclasses
import html
import json
import math
from collections.abc import Callable, Sequence

import numpy as np

from fef.summary import bytes_text, number_text

WIDTH = 560
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 24, 32
_PLOT_WIDTH = WIDTH - _LEFT - _RIGHT
_PLOT_HEIGHT = 190
MAX_POINTS = 300  # of a line: more than the eye resolves at this width
MAX_BARS = 120
_HEAT_EDGES = (1.1, 1.3, 2.0, 4.0)  # load / mean load; the same factors below balance as above


@dataclasses.dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes:
      name: for the legend and the values shown on hover.
      x_N, y_N: (N,) float64, NaN in y where there is nothing to draw.
      css: class that gives the colour, "c1" to "c8".
      mark: "line", "faint" (a thin pale line behind the others), "points" (dots joined by a thin line) or "flags"
        (marks on the upper edge at x, whatever y).
    """

    name: str
    x_N: np.ndarray
    y_N: np.ndarray
    css: str
    mark: str = "line"


def escape(text: object) -> str:
    """Any text for use in HTML, between tags or in a quoted attribute."""
    return html.escape(str(text).encode("utf-8", "replace").decode())


def figure(title: str, body: str, legend: str = "", note: str = "") -> str:
    """A chart with its title, legend and a note below."""
    note = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<figure><figcaption>{escape(title)}</figcaption>{legend}{body}{note}</figure>"


def legend(entries: Sequence[tuple[str, str, str]]) -> str:
    """A row of (name, colour class, mark) keys."""
    keys = (f'<span class="key"><i class="{css} {mark}"></i>{escape(name)}</span>' for name, css, mark in entries)
    return f'<div class="legend">{"".join(keys)}</div>'


# --- Scales ----------------------------------------------------------------------------------------------------------


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers (1, 2 or 5 times a power of ten apart) within [low, high]."""
    step = 10.0 ** math.floor(math.log10((high - low) / count))
    while (high - low) / step > count:
        step *= 2.5 if f"{step:e}"[0] == "2" else 2
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if high / low < 200 else (1,)
    ticks = [factor * 10.0**power for power in powers for factor in factors]
    return [tick for tick in ticks if low <= tick <= high]


def _tick_text(value: float, ticks: Sequence[float]) -> str:
    step = min((abs(b - a) for a, b in zip(ticks, ticks[1:], strict=False)), default=abs(value) or 1.0)
    if len(ticks) > 2 and not math.isclose(ticks[1] - ticks[0], ticks[2] - ticks[1]):
        step = value  # a logarithmic axis: each tick has the digits it needs
    if step < 1e-4:
        return f"{value:.1e}" if value else "0"
    return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def _x_scale(low: float, high: float) -> Callable[[float], float]:
    return lambda x: _LEFT + (x - low) / (high - low) * _PLOT_WIDTH


def _axes(x_low: float, x_high: float, y_ticks: Sequence[float], y_of: Callable[[float], float], unit: str) -> str:
    """Grid lines, tick labels, the unit above the vertical axis and "step" beside the horizontal one."""
    bottom, x_of = _TOP + _PLOT_HEIGHT, _x_scale(x_low, x_high)
    parts = []
    for tick in y_ticks:
        y = y_of(tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text class="tick end" x="{_LEFT - 8}" y="{y + 4:.1f}">{_tick_text(tick, y_ticks)}</text>')
    parts.append(f'<path class="axis" d="M{_LEFT} {bottom}H{WIDTH - _RIGHT}"/>')
    parts.append(_step_labels(x_low, x_high, x_of, bottom))
    parts.append(f'<text class="unit" x="0" y="13">{escape(unit)}</text>')
    return "".join(parts)


def _step_labels(x_low: float, x_high: float, x_of: Callable[[float], float], bottom: float) -> str:
    labels = f'<text class="unit end" x="{_LEFT - 8}" y="{bottom + 22:.0f}">step</text>'
    for tick in nice_ticks(x_low, x_high, 4):
        if tick != round(tick):
            continue
        x = x_of(tick)
        at = f'class="tick mid" x="{x:.1f}"' if x < WIDTH - 40 else f'class="tick end" x="{WIDTH - _RIGHT}"'
        labels += (
            f'<path class="axis" d="M{x:.1f} {bottom:.0f}v4"/><text {at} y="{bottom + 22:.0f}">{round(tick):,}</text>'
        )
    return labels


def _svg(body: str, height: float, label: str, data: dict | None = None) -> str:
    values = f' data-values="{escape(json.dumps(data, separators=(",", ":"), allow_nan=False))}"' if data else ""
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}"{values}>{body}</svg>'


def _hover(columns: Sequence[tuple[str, np.ndarray, np.ndarray]], x_low: float, x_high: float) -> dict:
    """What the page's script needs to show the values under the pointer: (name, x, y) of each series."""
    return {
        "series": [[name, [round(float(x)) for x in x_N], [_short(y) for y in y_N]] for name, x_N, y_N in columns],
        "plot": [_LEFT, _PLOT_WIDTH, _TOP, _PLOT_HEIGHT, x_low, x_high],
    }


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


# --- Downsampling ----------------------------------------------------------------------------------------------------


def bucket_mean(values: np.ndarray, max_buckets: int) -> np.ndarray:
    """Means over at most `max_buckets` runs of equal length along the first axis; NaN entries take no part."""
    count = min(len(values), max_buckets)
    if count == len(values):
        return values
    starts = np.linspace(0, len(values), count, endpoint=False).astype(int)
    present = np.isfinite(values)
    totals = np.add.reduceat(np.where(present, values, 0.0), starts, axis=0)
    counts = np.add.reduceat(present.astype(np.float64), starts, axis=0)
    return np.where(counts > 0, totals / np.where(counts > 0, counts, 1), np.nan)


def extremes(x_N: np.ndarray, y_N: np.ndarray, max_points: int) -> tuple[np.ndarray, np.ndarray]:
    """At most `max_points` points that keep every peak: the smallest and the largest of each run, in order."""
    if len(y_N) <= max_points:
        return x_N, y_N
    keep: list[int] = []
    for run in np.array_split(np.arange(len(y_N)), max_points // 2):
        finite = run[np.isfinite(y_N[run])]
        ends = {int(finite[y_N[finite].argmin()]), int(finite[y_N[finite].argmax()])} if len(finite) else {int(run[0])}
        keep += sorted(ends)
    return x_N[keep], y_N[keep]


# --- Lines -----------------------------------------------------------------------------------------------------------


def line_chart(
    title: str,
    unit: str,
    series: Sequence[Series],
    steps: tuple[float, float],
    from_zero: bool = False,
    note: str = "",
) -> str:
    """Lines over steps; the vertical axis is logarithmic where a linear one would show nothing but a peak.

    Args:
      title, unit: of the chart and of its vertical axis.
      series: what to draw, the first one at the back.
      steps: first and last step of the run, the ends of the horizontal axis.
      from_zero: whether the vertical axis starts at 0.
      note: text below.
    """
    drawn = [item for item in series if np.isfinite(item.y_N).any() or item.mark == "flags"]
    measured = [item.y_N[np.isfinite(item.y_N)] for item in drawn if item.mark != "flags"]
    y_all = np.concatenate(measured) if measured else np.zeros(0)
    if not len(y_all):
        return figure(title, '<p class="empty">no finite values</p>')
    x_low, x_high = _span(np.array(steps))
    log = y_all.min() > 0 and y_all.max() > 20 * np.median(y_all)
    y_low, y_high = (y_all.min() / 1.2, y_all.max() * 1.2) if log else _span(y_all, zero=from_zero, margin=0.04)
    y_of = _y_scale(y_low, y_high, log)
    ticks = _log_ticks(y_low, y_high) if log else nice_ticks(y_low, y_high)
    x_of = _x_scale(x_low, x_high)
    body = _axes(x_low, x_high, ticks, y_of, unit + (", logarithmic" if log else ""))
    body += "".join(_draw(item, x_of, y_of) for item in drawn)
    columns = [(item.name, item.x_N, item.y_N) for item in drawn if item.mark in ("line", "points")]
    svg = _svg(body, _TOP + _PLOT_HEIGHT + _BOTTOM, title, _hover(columns, x_low, x_high))
    keys = legend([(item.name, item.css, item.mark) for item in drawn]) if len(drawn) > 1 else ""
    return figure(title, svg, keys, note)


def _span(values: np.ndarray, zero: bool = False, margin: float = 0.0) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    if zero:
        low = min(low, 0.0)
    if high == low:
        pad = abs(high) * 0.1 or 1.0
        return (low, high + pad) if zero else (low - pad, high + pad)
    pad = margin * (high - low)
    return (low if zero else low - pad), high + pad


def _y_scale(low: float, high: float, log: bool = False) -> Callable[[float], float]:
    if log:
        return lambda y: _TOP + (1 - math.log(y / low) / math.log(high / low)) * _PLOT_HEIGHT
    return lambda y: _TOP + (1 - (y - low) / (high - low)) * _PLOT_HEIGHT


def _draw(item: Series, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> str:
    if item.mark == "flags":
        marks = "".join(f"M{x_of(x):.1f} {_TOP - 1}l-4 -7h8z" for x in item.x_N)
        return f'<path class="{item.css} flags" d="{marks}"/>'
    path, dots = "", []
    is_open = False
    for index, (x, y) in enumerate(zip(item.x_N, item.y_N, strict=True)):
        if not math.isfinite(y):
            is_open = False
            continue
        last = index + 1 == len(item.y_N) or not math.isfinite(item.y_N[index + 1])
        if item.mark == "points" or (last and not is_open):  # a value between two gaps would be invisible as a line
            dots.append(f'<circle class="{item.css}" cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3.5"/>')
        path += f"{'L' if is_open else 'M'}{x_of(x):.1f} {y_of(y):.1f}"
        is_open = True
    return f'<path class="{item.css} {item.mark}" d="{path}"/>' + "".join(dots)


# --- Stacked bars ----------------------------------------------------------------------------------------------------


def stacked_chart(title: str, unit: str, x_N: np.ndarray, parts: Sequence[tuple[str, str, np.ndarray]]) -> str:
    """Parts of a whole over steps, as bars without gaps; a few bars far above the rest are cut and named in a note.

    Args:
      title, unit: of the chart and of its vertical axis.
      x_N: (N,) steps.
      parts: (name, colour class, (N,) values >= 0), from the bottom up.
    """
    total_N = np.sum([np.nan_to_num(y_N) for _, _, y_N in parts], axis=0)
    y_high, note = _cut(x_N, total_N, unit)
    x_B = bucket_mean(x_N, MAX_BARS)
    edge_B = np.concatenate([[x_N[0] - 0.5], (x_B[1:] + x_B[:-1]) / 2, [x_N[-1] + 0.5]])
    x_low, x_high = float(edge_B[0]), float(edge_B[-1])
    x_of, y_of = _x_scale(x_low, x_high), _y_scale(0.0, y_high)
    body = _axes(x_low, x_high, nice_ticks(0.0, y_high), y_of, unit)
    base_B, columns = np.zeros(len(x_B)), []
    for name, css, y_N in parts:
        y_B = np.nan_to_num(bucket_mean(y_N, MAX_BARS))
        low_B, high_B = np.minimum(base_B, y_high), np.minimum(base_B + y_B, y_high)
        path = "".join(
            f"M{x_of(left):.1f} {y_of(low):.1f}V{y_of(high):.1f}H{x_of(right):.1f}V{y_of(low):.1f}z"
            for left, right, low, high in zip(edge_B, edge_B[1:], low_B, high_B, strict=False)
            if high > low
        )
        body += f'<path class="{css} bar" d="{path}"/>'
        base_B = base_B + y_B
        columns.append((name, x_B, y_B))
    columns.append(("sum", x_B, base_B))
    svg = _svg(body, _TOP + _PLOT_HEIGHT + _BOTTOM, title, _hover(columns, x_low, x_high))
    return figure(title, svg, legend([(name, css, "bar") for name, css, _ in parts]), note)


def _cut(x_N: np.ndarray, total_N: np.ndarray, unit: str) -> tuple[float, str]:
    """The end of the vertical axis, and a note when some bars go beyond it."""
    usual = 3 * float(np.median(total_N))
    high = float(total_N.max())
    if not 0 < usual < high:
        return 1.05 * high or 1.0, ""
    cut = float(total_N[total_N <= usual].max())
    count = int((total_N > usual).sum())
    return 1.05 * cut, (
        f"Above the axis: {count} of {len(x_N)} steps, the highest with {number_text(high)} {unit} "
        f"at step {round(float(x_N[total_N.argmax()])):,} (compilation, for example)."
    )


# --- Heat maps -------------------------------------------------------------------------------------------------------


def heat_class(ratio: float) -> str:
    """Colour class of load / mean load: "h0" balanced, "h1" to "h4" above, "l1" to "l4" below, "none" without load."""
    if not math.isfinite(ratio) or ratio <= 0:
        return "none"
    level = sum(max(ratio, 1 / ratio) > edge for edge in _HEAT_EDGES)
    return f"{'h' if ratio > 1 or level == 0 else 'l'}{level}"


def heat_legend(meaning: str = "choices of an expert / mean over the experts of its layer") -> str:
    """The colour scale of all heat maps, and what a colour stands for."""
    edges = [f"{edge:.2g}" for edge in (*(1 / edge for edge in reversed(_HEAT_EDGES)), *_HEAT_EDGES)]
    between = [f"{low}\N{EN DASH}{high}" for low, high in zip(edges, edges[1:], strict=False)]
    classes = ["none", "l4", "l3", "l2", "l1", "h0", "h1", "h2", "h3", "h4"]
    texts = ["0", f"< {edges[0]}", *between, f"> {edges[-1]}"]
    swatches = "".join(
        f'<span class="swatch"><i class="{css}"></i>{escape(text)}</span>'
        for css, text in zip(classes, texts, strict=True)
    )
    return f'<p class="soft">Colour: {escape(meaning)}</p><div class="scale">{swatches}</div>'


def heat_over_time(title: str, x_N: np.ndarray, ratio_NE: np.ndarray, max_columns: int) -> str:
    """One layer's expert load over the run: a row per expert, a column per run of steps.

    Args:
      title: of the chart.
      x_N: (N,) steps.
      ratio_NE: (N, E) load / mean load of the layer, NaN where unknown.
      max_columns: how many columns to draw at most.
    """
    num_experts = ratio_NE.shape[1]
    ratio_CE = bucket_mean(ratio_NE, max_columns)
    x_C = bucket_mean(x_N, max_columns)
    height = max(110.0, min(220.0, 18.0 * num_experts))
    cell_width, cell_height = _PLOT_WIDTH / len(x_C), height / num_experts
    x_low, x_high = float(x_N[0]) - 0.5, float(x_N[-1]) + 0.5
    paths: dict[str, list[str]] = {}
    for expert in range(num_experts):
        names = [heat_class(ratio) for ratio in ratio_CE[:, expert]]
        start = 0
        for column in range(1, len(names) + 1):  # runs of one colour become one rectangle
            if column == len(names) or names[column] != names[start]:
                x, y = _LEFT + start * cell_width, _TOP + expert * cell_height
                box = f"M{x:.1f} {y:.1f}h{(column - start) * cell_width:.1f}v{cell_height:.1f}H{x:.1f}z"
                paths.setdefault(names[start], []).append(box)
                start = column
    body = "".join(f'<path class="{css} cell" d="{"".join(boxes)}"/>' for css, boxes in sorted(paths.items()))
    body += "".join(
        f'<text class="tick end" x="{_LEFT - 8}" y="{_TOP + (expert + 0.5) * cell_height + 4:.1f}">{expert}</text>'
        for expert in _expert_ticks(num_experts, cell_height)
    )
    body += f'<rect class="frame" x="{_LEFT}" y="{_TOP}" width="{_PLOT_WIDTH}" height="{height:.0f}"/>'
    body += _step_labels(x_low, x_high, _x_scale(x_low, x_high), _TOP + height)
    body += '<text class="unit" x="0" y="13">expert</text>'
    return figure(title, _svg(body, _TOP + height + _BOTTOM, f"{title}: expert load over steps"))


def _expert_ticks(num_experts: int, cell_height: float) -> list[int]:
    step = 1
    while step * cell_height < 16:
        step *= 2
    return list(range(0, num_experts, step))


def heat_table(title: str, ratio_LE: np.ndarray, note: str) -> str:
    """Expert load by layer (rows) and expert (columns), with the numbers where there is room.

    Args:
      title: of the chart.
      ratio_LE: (L, E) load / mean load of each layer.
      note: text below.
    """
    texts = [[f"{ratio:.2f}" if math.isfinite(ratio) else "" for ratio in ratio_E] for ratio_E in ratio_LE]
    hints = [
        [
            f"layer {layer}, expert {expert}: {number_text(float(ratio)) if math.isfinite(ratio) else 'none'}"
            for expert, ratio in enumerate(ratio_E)
        ]
        for layer, ratio_E in enumerate(ratio_LE)
    ]
    return _heat_cells(title, ("MoE layer", "expert"), ratio_LE, texts, hints, note)


def heat_matrix(title: str, bytes_MR: np.ndarray, note: str) -> str:
    """Bytes by receiving member (rows) and sending rank (columns); a colour is bytes / mean of what is not 0.

    Args:
      title: of the chart.
      bytes_MR: (members, ranks), not all 0.
      note: text below.
    """
    texts = [[bytes_text(value) if value else "" for value in row_R] for row_R in bytes_MR]
    hints = [
        [f"member {member} from rank {rank}: {bytes_text(value)}" for rank, value in enumerate(row_R)]
        for member, row_R in enumerate(bytes_MR)
    ]
    return _heat_cells(title, ("member", "from"), bytes_MR / bytes_MR[bytes_MR > 0].mean(), texts, hints, note)


def _heat_cells(
    title: str,
    axes: tuple[str, str],
    ratio_RC: np.ndarray,
    texts: Sequence[Sequence[str]],
    hints: Sequence[Sequence[str]],
    note: str,
) -> str:
    """Coloured cells with their texts, where there is room for them, and what the pointer shows."""
    num_rows, num_columns = ratio_RC.shape
    cell_width, cell_height = _PLOT_WIDTH / num_columns, 26 if num_rows <= 16 else 10
    with_texts = 8 * max(len(text) for row in texts for text in row) <= cell_width and cell_height >= 26
    gap = " gap" if cell_width >= 12 else ""
    body = ""
    for row in range(num_rows):
        y = _TOP + row * cell_height
        if cell_height >= 16 or row % 2 == 0:
            body += f'<text class="tick end" x="{_LEFT - 8}" y="{y + cell_height / 2 + 4}">{row}</text>'
        for column in range(num_columns):
            css, x = heat_class(ratio_RC[row, column]), _LEFT + column * cell_width
            body += (
                f'<rect class="{css} cell{gap}" x="{x:.1f}" y="{y}" width="{cell_width:.1f}" height="{cell_height}">'
                f"<title>{escape(hints[row][column])}</title></rect>"
            )
            if with_texts and texts[row][column]:
                center = f'x="{x + cell_width / 2:.1f}" y="{y + cell_height / 2 + 4}"'
                body += f'<text class="{css} value mid" {center}>{escape(texts[row][column])}</text>'
    bottom = _TOP + num_rows * cell_height
    step = 1
    while step * cell_width < 30:
        step *= 2
    for column in range(0, num_columns, step):
        x = _LEFT + (column + 0.5) * cell_width
        body += f'<text class="tick mid" x="{x:.1f}" y="{bottom + 22}">{column}</text>'
    body += f'<text class="unit" x="0" y="13">{escape(axes[0])}</text>'
    body += f'<text class="unit end" x="{_LEFT - 8}" y="{bottom + 22}">{escape(axes[1])}</text>'
    return figure(title, _svg(body, bottom + 28, title), note=note)
