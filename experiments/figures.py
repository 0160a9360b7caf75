"""Figures of results, drawn with matplotlib: one as a file, PNG and SVG, and each panel by itself for a page.

A panel is small, for a page puts as many side by side as fit. Its SVG has the page's colours by name, so that one
drawing serves light and dark screens; files are drawn on white.
"""

import dataclasses
import io
import itertools
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments import bounds, grid_sheets
from experiments.sheet import Sheet
from fef.config import UserError
from fef.report_style import LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("c1", "c2", "c3", "c4", "c5", "c7", "c8", "c6")
BOUNDS = (("floor", "ink", ":"), ("overlapped all_to_all", "soft", "--"))  # name, colour, line
MARKS = "os^Dvp*X"
# Each has the same colour and mark in all figures; others get what is left.
KNOWN = (
    "fluid", "pooled", "fluid:mode=tokens", grid_sheets.BY_BYTES, "all_gather", "all_to_all", "all_to_all:form=shifted"
)  # fmt: skip
WIDTH_IN, HEIGHT_IN = 4.6, 3.0  # of a panel
LETTERS = 11.0  # points; a page on a phone shows a panel at about its own size
MAX_COLUMNS = 3
MOST_LETTERS = 20  # in a line of a name beside bars
STYLE = {
    "font.family": "sans-serif", "font.size": LETTERS, "axes.spines.top": False, "axes.spines.right": False,
    "svg.fonttype": "none", "text.color": LIGHT["ink"], "axes.labelcolor": LIGHT["soft"],
    "axes.edgecolor": LIGHT["soft"], "xtick.color": LIGHT["soft"], "ytick.color": LIGHT["soft"],
    "grid.color": LIGHT["grid"], "axes.titlesize": LETTERS, "axes.titlelocation": "left", "axes.axisbelow": True,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Series:
    """Numbers of one name over a panel's places; NaN where there is none.

    Attributes:
      name: for the legend.
      y: one for each place, or a list of several.
      colour: of fef.report_style's.
      line: matplotlib's style of a line without marks; empty for a measured series.
      mark: matplotlib's, of a measured one.
    """

    name: str
    y: Sequence[Any]
    colour: str
    line: str = ""
    mark: str = "o"


@dataclasses.dataclass(frozen=True)
class Panel:
    """One picture.

    Attributes:
      title: what tells it from the others.
      kind: "lines" over numbers, "bars" over names, or "dots" of several values beside names.
      places: the numbers or names.
      series: what is drawn.
      place_label, label: of the axes of places and of values.
      span: ends of the axis of values, the same for all panels that are compared; None: what fits.
    """

    title: str
    kind: str
    places: Sequence[Any]
    series: Sequence[Series]
    place_label: str
    label: str
    span: tuple[float, float] | None = None


# What is drawn of which rows.


def of_grid(rows: list[dict[str, Any]]) -> list[Panel]:
    """Step time: over the tokens where there are several, else over networks and routings, for each rate of links."""
    cells, names = grid_sheets.by_cell(rows), grid_sheets.dispatchers(rows)
    several = len({of_cell[0]["cell"]["tokens"] for of_cell in cells}) > 1
    keys = ("hosts", "network", "relay", "routing")
    of_cells = [dict(_place(of_cell[0]), rows=of_cell) for of_cell in cells]
    varying = [key for key in keys if len({cell[key] for cell in of_cells}) > 1]
    groups: dict[str, list[dict[str, Any]]] = {}
    for cell in of_cells:
        shown = [cell[key] for key in varying] if several else []
        link = f"{cell['nic']:g} Mbit/s" if cell["nic"] else "no network"
        title = ", ".join([link, *shown, *([] if several else [f"T = {cell['tokens']:,}"])])
        groups.setdefault(title, []).append(cell)
    panels = []
    for title, group in groups.items():
        of_rows = [cell["rows"] for cell in group]
        if several:
            places: list[Any] = [cell["tokens"] for cell in group]
        else:
            places = ["\n".join(_wrapped(cell[key]) for key in varying) for cell in group]
        kind, label = ("lines", "tokens of a member (T)") if several else ("bars", "")
        panels.append(Panel(title, kind, places, _series(of_rows, names), label, "step, ms"))
    return _on_one_scale(panels)


def _wrapped(name: str) -> str:
    """In lines of MOST_LETTERS at most, where its parts allow, so that room is left for the bars beside it."""
    lines = [""]
    for part in re.split(r"(?<=[ :/])", name):
        if lines[-1] and len((lines[-1] + part).rstrip()) > MOST_LETTERS:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def _on_one_scale(panels: list[Panel]) -> list[Panel]:
    """Panels over numbers are compared by eye, so their axes have the same ends."""
    values = [y for panel in panels for series in panel.series for y in series.y if math.isfinite(y)]
    span = min(values) / 1.2, max(values) * 1.2
    return [dataclasses.replace(panel, span=span) if panel.kind == "lines" else panel for panel in panels]


def _place(row: dict[str, Any]) -> dict[str, Any]:
    cell = row["cell"]
    relay = f"relay {cell['relay']}" if "relay" in cell else ""
    network = cell["network"].replace(",", ", ")
    return {
        "hosts": f"{row['hosts']} hosts", "network": network, "relay": relay, "routing": row["flags"]["workload"],
        "nic": cell["nic"], "tokens": cell["tokens"],
    }  # fmt: skip


def _series(of_cells: list[list[dict[str, Any]]], names: list[str]) -> list[Series]:
    measured = [{row["dispatcher"]: row["step_ms"] for row in of_cell} for of_cell in of_cells]
    looks = _looks(names)
    series = [Series(name, [times.get(name, math.nan) for times in measured], *looks[name]) for name in names]
    limits = (
        [bounds.floor_ms(of_cell) for of_cell in of_cells],
        [bounds.overlapped_ms(of_cell[0]) for of_cell in of_cells],
    )
    return series + [Series(*what[:1], y, *what[1:]) for what, y in zip(BOUNDS, limits, strict=True)]


def _looks(names: Sequence[str]) -> dict[str, tuple[str, str, str]]:
    """Of each name its colour, line and mark."""
    places: dict[str, int] = {}
    for name in names:
        short = grid_sheets.BY_BYTES if name.startswith(grid_sheets.BY_BYTES) else name
        if short in KNOWN and KNOWN.index(short) not in places.values():
            places[name] = KNOWN.index(short)
    for name in names:
        if name not in places:
            places[name] = next(place for place in itertools.count() if place not in places.values())
    return {name: (COLOURS[i % len(COLOURS)], "", MARKS[i % len(MARKS)]) for name, i in places.items()}


def of_training(sheets: list[Sheet]) -> list[Panel]:
    """Held-out loss of each variant, a dot for each seed."""
    panels = []
    for sheet in sheets:
        lines = [line for line in sheet.lines if line.rows]
        losses = [[row["heldout_loss"] for row in line.rows] for line in lines]
        if lines:
            names = [str(line.cells[0].value) for line in lines]
            series = [Series("a seed", losses, COLOURS[0])]
            panels.append(Panel(sheet.title, "dots", names, series, "", "held-out loss, nats"))
    return panels


# How it is drawn.


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot
    except ImportError:
        raise UserError(
            "figures need matplotlib: pip install 'fef[figures]', or python -m pip install matplotlib"
        ) from (None)
    matplotlib.use("svg")
    return matplotlib.pyplot


def legend(panels: Sequence[Panel]) -> list[Series]:
    """All series of the panels, each name once."""
    return list({series.name: series for panel in panels for series in panel.series}.values())


def panel_svg(panel: Panel) -> str:
    """One panel without title and legend, which the page writes; its colours are the page's variables."""
    pyplot = _pyplot()
    with pyplot.rc_context(STYLE | {"svg.hashsalt": panel.title}):
        figure, axes = pyplot.subplots(figsize=(WIDTH_IN, _height(panel)), layout="constrained")
        _draw(axes, panel)
        text = _save(figure, "svg", transparent=True).decode()
        pyplot.close(figure)
    for name, colour in LIGHT.items():
        text = re.sub(re.escape(colour), f"var(--{name})", text, flags=re.I)
    return re.sub(r' (?:width|height)="[\d.]+pt"', "", text[text.index("<svg") :])


def files(panels: Sequence[Panel]) -> dict[str, bytes]:
    """All panels as one figure with a legend: suffix -> content. Nothing where there is no panel."""
    if not panels:
        return {}
    pyplot = _pyplot()
    columns = min(MAX_COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    height = max(map(_height, panels))
    with pyplot.rc_context(STYLE | {"svg.hashsalt": "fef"}):
        figure, grid = pyplot.subplots(
            lines, columns, figsize=(WIDTH_IN * columns, height * lines + 0.6), layout="constrained", squeeze=False
        )
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        for axes, panel in zip(grid.flat, panels, strict=False):
            _draw(axes, panel)
            axes.set_title(panel.title)
        handles: dict[str, Any] = {}
        for axes in grid.flat:
            for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
                handles.setdefault(name, handle)
        if len(handles) > 1:
            figure.legend(
                handles.values(), handles.keys(), loc="outside lower center", ncols=2 * columns, frameon=False
            )
        content = {suffix: _save(figure, suffix) for suffix in ("svg", "png")}
        pyplot.close(figure)
    return content


def _height(panel: Panel) -> float:
    """Lines for names take what they need."""
    bars = sum(not series.line for series in panel.series) if panel.kind == "bars" else 1
    letters = max(str(place).count("\n") for place in panel.places) + 1
    needed = 0.9 + len(panel.places) * max(0.2 * letters + 0.08, 0.15 * bars + 0.05)
    return HEIGHT_IN if panel.kind == "lines" else max(HEIGHT_IN, needed)


def _save(figure: Any, suffix: str, transparent: bool = False) -> bytes:
    out = io.BytesIO()
    metadata = {"Date": None} if suffix == "svg" else {"Software": None}  # equal rows give equal files
    figure.savefig(out, format=suffix, dpi=120, transparent=transparent, metadata=metadata)
    return out.getvalue()


def _draw(axes: "Axes", panel: Panel) -> None:
    {"lines": _draw_lines, "bars": _draw_bars, "dots": _draw_dots}[panel.kind](axes, panel)


def _draw_lines(axes: "Axes", panel: Panel) -> None:
    for series in panel.series:
        look: dict[str, Any] = {"linestyle": series.line} if series.line else {"marker": series.mark, "markersize": 5}
        axes.plot(panel.places, series.y, color=LIGHT[series.colour], label=series.name, **look)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(panel.places, [f"{place:,}" for place in panel.places])
    axes.minorticks_off()
    if panel.span:
        axes.set_ylim(panel.span)
    low, high = axes.get_ylim()
    ticks = [factor * 10**power for power in range(9) for factor in (1, 2, 5) if low <= factor * 10**power <= high]
    axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.grid(axis="y")
    axes.set_xlabel(panel.place_label)
    axes.set_ylabel(f"{panel.label}, logarithmic")


def _draw_bars(axes: "Axes", panel: Panel) -> None:
    """Lying, for names are long."""
    measured = [series for series in panel.series if not series.line]
    width = 0.84 / len(measured)
    for index, series in enumerate(measured):
        above = [place - 0.42 + index * width for place in range(len(panel.places))]
        axes.barh(above, series.y, width * 0.92, align="edge", color=LIGHT[series.colour], label=series.name)
    for series in panel.series:
        if series.line:
            for place, y in enumerate(series.y):
                label = series.name if not place else None
                ends = [place - 0.46, place + 0.46]
                axes.plot([y, y], ends, color=LIGHT[series.colour], linestyle=series.line, label=label)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.locator_params(axis="x", nbins=5)
    _name_places(axes, panel)


def _draw_dots(axes: "Axes", panel: Panel) -> None:
    for series in panel.series:
        for place, values in enumerate(series.y):
            at = [place] * len(values)
            label = series.name if not place else None
            axes.plot(values, at, series.mark, color=LIGHT[series.colour], markersize=5, alpha=0.7, label=label)
    _name_places(axes, panel)


def _name_places(axes: "Axes", panel: Panel) -> None:
    axes.set_yticks(range(len(panel.places)), panel.places)
    axes.invert_yaxis()  # the first one above
    axes.grid(axis="x")
    axes.set_xlabel(panel.label)
