"""report.html: one self-contained page about a run, made from metrics.jsonl, summary.json and config.json.

No part of it comes from elsewhere: style, script and drawings are in the file, so it can be mailed or kept.
"""

import json
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from fef import charts
from fef.charts import Series, escape
from fef.config import Config, flatten, scopes
from fef.metrics import perplexity, read_jsonl, write_atomic
from fef.pool.ledger import PURPOSES
from fef.report_style import SCRIPT, STYLE
from fef.summary import (
    DASH,
    bytes_text,
    count_text,
    is_number,
    max_vio_text,
    ms_text,
    number_text,
    percent_text,
)

_COLOURS = ("c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8")
_MAX_PANELS = 16  # load panels of a deep model; more would be scrolled past
_MAX_CELLS = 40_000  # rectangles of all load panels together, about half a megabyte


def write_report(workdir: str | os.PathLike) -> pathlib.Path:
    """Writes report.html of a run, finished or not, and returns its path.

    Args:
      workdir: folder with metrics.jsonl, summary.json and config.json; each may be missing or cut by a kill, which
        the page then says.

    Raises:
      ValueError: there is no such folder.
    """
    workdir = pathlib.Path(workdir)
    if not workdir.is_dir():
        raise ValueError(f"{workdir}: no such folder; give the workdir of a run")
    path = workdir / "metrics.jsonl"
    rows, notices = read_jsonl(path) if path.exists() else ([], [])
    rows = [row for row in rows if is_number(row.get("step"))]
    summary, summary_notices = _read_object(workdir / "summary.json")
    config, config_notices = _read_object(workdir / "config.json")
    page = _page(workdir.resolve().name, rows, summary, config, notices + summary_notices + config_notices)
    target = workdir / "report.html"
    write_atomic(target, page.encode())
    return target


def _read_object(path: pathlib.Path) -> tuple[dict[str, Any], list[str]]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}, []
    except ValueError as error:
        return {}, [f"{path}: not JSON ({error}); left out"]
    return (value, []) if isinstance(value, dict) else ({}, [f"{path}: not a JSON object; left out"])


def _page(name: str, rows: list[dict], summary: dict, config: dict, notices: list[str]) -> str:
    figures = _means(rows) | {key: value for key, value in summary.items() if value is not None}
    flat = _flat(config)
    body = _header(name, rows, summary, figures, flat, notices + _run_notices(rows))
    if rows:
        step_N = _column(rows, "step")
        body += _section("Training", _loss_charts(rows, step_N, _token(flat)))
        body += _expert_section(rows, step_N)
        body += _section("Time of a step", _time_charts(rows, step_N))
        body += _bytes_section(rows, step_N)
    else:
        body += '<p class="empty">No rows in metrics.jsonl: the run has not finished a step.</p>'
    body += _config_section(flat) + _versions_section(summary)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)} - fef run</title><style>{STYLE}</style></head>"
        f"<body><main>{body}</main><script>{SCRIPT}</script></body></html>\n"
    )


def _section(title: str, figures: str) -> str:
    return f'<h2>{escape(title)}</h2><div class="charts">{figures}</div>'


# --- Numbers from the rows -------------------------------------------------------------------------------------------


def _column(rows: list[dict], *keys: str) -> np.ndarray:
    """(N,) float64 of one number per row, NaN where it is missing, null or not finite; several keys lead inwards."""
    values = []
    for row in rows:
        value: Any = row
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        values.append(float(value) if is_number(value) else math.nan)
    return np.array(values, np.float64)


def _layers(rows: list[dict], key: str) -> np.ndarray:
    """(N, L, ...) float64 of a list per row, NaN where it is missing; L = 0 in a dense model."""
    shape = next((np.shape(row[key]) for row in reversed(rows) if row.get(key)), (0,))
    values = np.full((len(rows), *shape), np.nan)
    for index, row in enumerate(rows):
        if np.shape(row.get(key, ())) == shape:
            values[index] = np.asarray(row[key], np.float64)  # None becomes NaN
    return values


def _last(rows: list[dict]) -> list[dict]:
    """The end of the run: the last tenth of the rows, at most 100."""
    return rows[-max(1, min(100, len(rows) // 10)) :]


def _mean(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


def _median(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else math.nan


def _means(rows: list[dict]) -> dict[str, Any]:
    """Key figures of a run without summary.json, under the names of that file."""
    heldout_N = _column(rows, "heldout_loss")
    evaluated = heldout_N[np.isfinite(heldout_N)]
    return {
        "heldout_loss": evaluated[-1] if len(evaluated) else None,
        "train_loss": _mean(_column(_last(rows), "loss")),
        "bytes_per_step": _mean(_column(rows, "bytes")),
        "dropped_fraction": _mean(_column(rows, "dropped_fraction")),
        "max_vio": [_mean(values) for values in _layers(_last(rows), "max_vio").T],
        "steps": rows[-1]["step"] if rows else 0,
    } | {key: _median(_column(rows, key)) for key in ("tokens_per_s", "step_ms", "wait_ms", "data_ms")}


def _run_notices(rows: list[dict]) -> list[str]:
    notices = []
    for key in sorted({key for row in rows for key in row.get("not_finite", [])}):
        steps = [row["step"] for row in rows if key in row.get("not_finite", [])]
        shown = ", ".join(f"{step:,}" for step in steps[:5]) + (", ..." if len(steps) > 5 else "")
        notices.append(f"{key} was not finite at {len(steps)} of {len(rows)} logged steps: {shown}")
    skipped = rows[-1].get("skipped_updates") if rows else 0
    if skipped:
        notices.append(f"{skipped} updates were skipped because the loss, a gradient or the update was not finite")
    return notices


# --- Header ----------------------------------------------------------------------------------------------------------


def _header(name: str, rows: list[dict], summary: dict, figures: dict, flat: dict, notices: list[str]) -> str:
    planned = flat.get("train.steps")
    progress = f"{count_text(figures['steps'])}{f' of {count_text(planned)}' if is_number(planned) else ''} steps"
    state = "finished" if summary else "not finished: no summary.json"
    head = f'<h1>{escape(name)}</h1><p class="soft">{escape("; ".join([progress, state, *_what_ran(flat)]))}</p>'
    if notices:
        head += f'<ul class="notices">{"".join(f"<li>{escape(notice)}</li>" for notice in notices)}</ul>'
    token = _token(flat)
    tiles = [
        (f"held-out loss, nats/{token}", _loss_text(figures.get("heldout_loss"))),
        (f"train loss, nats/{token}", _loss_text(figures.get("train_loss"))),
        (f"held-out perplexity per {token}", _perplexity_text(figures.get("heldout_loss"))),
        ("tokens/s", count_text(figures.get("tokens_per_s"))),
        ("per step", ms_text(figures.get("step_ms"))),
        ("per step, waiting for experts", ms_text(figures.get("wait_ms"))),
        ("moved between members per step", bytes_text(figures.get("bytes_per_step"))),
        ("of token choices dropped", percent_text(figures.get("dropped_fraction"))),
        ("MaxVio of expert load, worst layer", max_vio_text(figures.get("max_vio")).partition(" (")[0]),
        ("parameters, total", count_text(figures.get("params_total"))),
        ("parameters, active per token", count_text(figures.get("params_active"))),
    ]
    cards = (f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>' for label, value in tiles)
    return f'{head}<div class="tiles">{"".join(cards)}</div>'


def _loss_text(loss: Any) -> str:
    return f"{loss:.4f}" if is_number(loss) else DASH


def _perplexity_text(loss: Any) -> str:
    return number_text(perplexity(loss)) if is_number(loss) else DASH


def _token(flat: dict[str, Any]) -> str:
    """What the losses are per."""
    return "token" if flat.get("data.tokenizer") else "byte"


def _what_ran(flat: dict[str, Any]) -> list[str]:
    if not flat:
        return ["no config.json"]
    devices = f"{flat.get('mesh.devices')} devices"
    if not flat.get("moe.every"):
        return [devices, "dense, no experts"]
    experts = f"{flat.get('moe.num_experts')} experts, {flat.get('moe.num_choices')} a token"
    return [devices, experts, f"router {flat.get('moe.router')}", f"dispatcher {flat.get('moe.dispatcher')}"]


# --- Charts ----------------------------------------------------------------------------------------------------------


def _smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred mean over `window` rows, of what is finite there; NaN stays NaN, so that a gap stays a gap."""
    present = np.isfinite(values)
    ones = np.ones(window)
    total = np.convolve(np.where(present, values, 0.0), ones, mode="same")
    count = np.convolve(present.astype(np.float64), ones, mode="same")
    return np.where(present, total / np.maximum(count, 1), np.nan)


def _window(rows: list[dict]) -> int:
    """Rows over which noisy curves are averaged: about a fiftieth of the run, an odd number."""
    return 1 + 2 * (len(rows) // 100)


def _line(name: str, step_N: np.ndarray, y_N: np.ndarray, css: str) -> Series:
    return Series(name, charts.bucket_mean(step_N, charts.MAX_POINTS), charts.bucket_mean(y_N, charts.MAX_POINTS), css)


def _noisy(name: str, step_N: np.ndarray, y_N: np.ndarray, window: int) -> list[Series]:
    """A measured curve: a faint line with every peak, and its mean over `window` rows in front."""
    if window == 1:
        return [_line(name, step_N, y_N, "c1")]
    peaks = Series(f"{name}, single steps", *charts.extremes(step_N, y_N, charts.MAX_POINTS), "c1", "faint")
    return [peaks, _line(f"{name}, mean of {window} rows", step_N, _smooth(y_N, window), "c1")]


def _loss_charts(rows: list[dict], step_N: np.ndarray, token: str) -> str:
    loss_N, heldout_N, grad_norm_N = (_column(rows, key) for key in ("loss", "heldout_loss", "grad_norm"))
    steps, window = (step_N[0], step_N[-1]), _window(rows)
    loss = _noisy("train", step_N, loss_N, window)
    evaluated, broken = np.isfinite(heldout_N), np.isnan(loss_N)
    if evaluated.any():
        points = charts.extremes(step_N[evaluated], heldout_N[evaluated], charts.MAX_POINTS)
        loss.append(Series("held-out", *points, "c2", "points"))
    if broken.any():
        flags = charts.bucket_mean(step_N[broken], 60)
        loss.append(Series("not finite", flags, np.full(len(flags), np.nan), "c4", "flags"))
    grad_norm = _noisy("norm", step_N, grad_norm_N, window)
    rate = [_line("learning rate", step_N, _column(rows, "learning_rate"), "c1")]
    speed = [_line("tokens/s", step_N, _column(rows, "tokens_per_s"), "c1")]
    return (
        charts.line_chart("Loss", f"nats per {token}", loss, steps)
        + charts.line_chart("Gradient norm before clipping", "L2 norm", grad_norm, steps, from_zero=True)
        + charts.line_chart("Learning rate", "", rate, steps, from_zero=True)
        + charts.line_chart("Throughput", "tokens per second", speed, steps, from_zero=True)
    )


def _time_charts(rows: list[dict], step_N: np.ndarray) -> str:
    step_ms, wait_ms, data_ms = (_column(rows, key) for key in ("step_ms", "wait_ms", "data_ms"))
    compute_ms = np.maximum(step_ms - np.nan_to_num(wait_ms) - np.nan_to_num(data_ms), 0)
    parts = [
        ("compute", "c1", compute_ms),
        ("waiting for experts", "c2", wait_ms),
        ("waiting for data", "c3", data_ms),
    ]
    chart = charts.stacked_chart("Where the time of a step goes", "ms", step_N, parts)
    whole = _median(step_ms)
    lines = [[name, ms_text(_median(part)), percent_text(_median(part) / whole)] for name, _, part in parts]
    table = _table(["median of all steps", "time", "share"], [*lines, ["step", ms_text(whole), ""]], numbers=(1, 2))
    return chart + table


def _bytes_section(rows: list[dict], step_N: np.ndarray) -> str:
    by_purpose = {purpose: _column(rows, "bytes_by_purpose", purpose) for purpose in PURPOSES}
    totals = {purpose: float(np.nansum(column)) for purpose, column in by_purpose.items()}
    whole = sum(totals.values())
    if not whole:
        return _section("Bytes between members", '<p class="empty">No bytes were moved between members.</p>')
    largest = max(float(np.nansum(column)) for column in by_purpose.values()) / len(rows)
    power = min(3, int(math.log10(max(largest, 1)) // 3))
    unit = ("B", "kB", "MB", "GB")[power]
    parts = [
        (purpose, css, column / 1000**power)
        for (purpose, column), css in zip(by_purpose.items(), _COLOURS, strict=True)
        if totals[purpose]
    ]
    chart = charts.stacked_chart("Bytes moved, by purpose", f"{unit} per step", step_N, parts)
    lines = [
        [purpose, bytes_text(_mean(by_purpose[purpose])), bytes_text(total), percent_text(total / whole)]
        for purpose, total in totals.items()
    ]
    lines.append(["sum", bytes_text(whole / len(rows)), bytes_text(whole), ""])
    table = _table(["purpose", "per step", "logged steps", "share"], lines, numbers=(1, 2, 3))
    section = _section("Bytes between members", chart + table)
    return section + _planned_section(rows, step_N, power, unit) + _received_section(rows)


def _planned_section(rows: list[dict], step_N: np.ndarray, power: int, unit: str) -> str:
    """What the dispatcher meant to move and what has moved, by the two ways; nothing if it does not choose."""
    if not any("planned_ms" in row for row in rows):
        return ""
    purposes = {"weights": ("weights", "refetch", "relayed", "gradients", "gathered"), "tokens": ("tokens",)}
    waits = {"weights": "published", "tokens": "tokens"}
    lines_of_bytes, lines_of_ms = [], []
    for (way, of_way), (css, planned_css) in zip(purposes.items(), (("c1", "c2"), ("c3", "c4")), strict=True):
        moved, planned = (
            sum(np.nan_to_num(_column(rows, key, purpose)) for purpose in of_way) / 1000**power
            for key in ("bytes_by_purpose", "planned_bytes_by_purpose")
        )
        lines_of_bytes += [_line(f"{way}, moved", step_N, moved, css)]
        lines_of_bytes += [_line(f"{way}, planned", step_N, planned, planned_css)]
        waited = np.array([float(np.sum(row.get("waits_ms", {}).get(waits[way], []))) for row in rows])
        lines_of_ms += [_line(f"{way}, waited for", step_N, waited, css)]
        lines_of_ms += [_line(f"{way}, link busy by plan", step_N, _column(rows, "planned_ms", way), planned_css)]
    steps = (step_N[0], step_N[-1])
    return _section(
        "What was planned",
        charts.line_chart("Bytes planned and moved", f"{unit} per step", lines_of_bytes, steps, from_zero=True)
        + charts.line_chart("Time planned and waited", "ms per step and member", lines_of_ms, steps, from_zero=True),
    )


def _received_section(rows: list[dict]) -> str:
    """Who sends how much to whom: all purposes together, and each by itself where there are several."""
    received = {purpose: _received(rows, purpose) for purpose in PURPOSES}
    moved = {purpose: mean_MR for purpose, mean_MR in received.items() if mean_MR is not None}
    if not moved:
        return ""
    note = "bytes per step, mean of the logged steps; rows receive, columns send"
    maps = charts.heat_matrix("All purposes", np.sum(list(moved.values()), axis=0), note)
    if len(moved) > 1:
        maps += "".join(charts.heat_matrix(purpose.capitalize(), mean_MR, note) for purpose, mean_MR in moved.items())
    legend = charts.heat_legend("bytes / mean over the pairs of members that moved some")
    return f'<h2>Bytes from member to member</h2>{legend}<div class="charts">{maps}</div>'


def _received(rows: list[dict], purpose: str) -> np.ndarray | None:
    """(M, R) mean over the rows of what each member received from each rank, None when nothing was."""
    parts = [np.array((row.get("bytes_received") or {}).get(purpose) or [], np.float64) for row in rows]
    present = [part_MR for part_MR in parts if part_MR.ndim == 2]
    if not present:
        return None
    same = [part_MR for part_MR in present if part_MR.shape == present[-1].shape]  # a run may go on on other devices
    total_MR = np.sum(same, axis=0)
    return total_MR / (len(rows) - len(present) + len(same)) if total_MR.any() else None


# --- Experts ---------------------------------------------------------------------------------------------------------


def _expert_section(rows: list[dict], step_N: np.ndarray) -> str:
    load_NLE = _layers(rows, "load")
    if load_NLE.ndim != 3:
        return _section("Experts", '<p class="empty">A dense model: no expert load to show.</p>')
    mean_NL1 = load_NLE.mean(axis=2, keepdims=True)
    ratio_NLE = np.where(mean_NL1 > 0, load_NLE / np.where(mean_NL1 > 0, mean_NL1, 1), np.nan)
    last = len(_last(rows))
    ratio_LE = charts.bucket_mean(ratio_NLE[-last:], 1)[0]
    num_layers, num_experts = ratio_LE.shape
    shown = sorted({round(index) for index in np.linspace(0, num_layers - 1, min(num_layers, _MAX_PANELS))})
    columns = max(24, min(160, _MAX_CELLS // (num_experts * len(shown))))
    panels = "".join(
        charts.heat_over_time(f"MoE layer {layer}", step_N, ratio_NLE[:, layer], columns) for layer in shown
    )
    what = f"mean of the last {last} rows" if last > 1 else "the last row"
    figures = charts.heat_table("Load at the end, by layer and expert", ratio_LE, what)
    figures += _layer_table(_last(rows), ratio_LE, what) + _max_vio_chart(rows, step_N)
    dropped = _line("dropped", step_N, 100 * _column(rows, "dropped_fraction"), "c1")
    if np.nanmax(dropped.y_N, initial=0.0) > 0:
        figures += charts.line_chart("Token choices dropped", "%", [dropped], (step_N[0], step_N[-1]), from_zero=True)
    some = "" if len(shown) == num_layers else f'<p class="soft">{len(shown)} of {num_layers} MoE layers</p>'
    return (
        f'<h2>Experts</h2>{charts.heat_legend()}<div class="charts">{figures}</div>'
        f'<h2>Expert load over the run</h2>{some}{charts.heat_legend()}<div class="charts">{panels}</div>'
    )


def _max_vio_chart(rows: list[dict], step_N: np.ndarray) -> str:
    max_vio_NL = _layers(rows, "max_vio")
    if max_vio_NL.shape[1] <= len(_COLOURS):
        lines = {f"layer {layer}": max_vio_N for layer, max_vio_N in enumerate(max_vio_NL.T)}
    else:
        lines = {"worst layer": max_vio_NL.max(axis=1), "mean of the layers": max_vio_NL.mean(axis=1)}
    window = _window(rows)
    series = [
        _line(name, step_N, _smooth(max_vio_N, window), css)
        for (name, max_vio_N), css in zip(lines.items(), _COLOURS, strict=False)
    ]
    note = "max load / mean load - 1" + (f"; mean of {window} rows" if window > 1 else "")
    return charts.line_chart("MaxVio of expert load", "", series, (step_N[0], step_N[-1]), from_zero=True, note=note)


def _layer_table(rows: list[dict], ratio_LE: np.ndarray, what: str) -> str:
    max_vio_NL, entropy_NL, dead_NL = (_layers(rows, key) for key in ("max_vio", "entropy", "dead_experts"))
    lines = []
    for layer, ratio_E in enumerate(ratio_LE):
        hottest = f"{int(np.nanargmax(ratio_E))} ({np.nanmax(ratio_E):.2f})" if np.isfinite(ratio_E).any() else DASH
        means = [_mean(values_NL[:, layer : layer + 1]) for values_NL in (max_vio_NL, entropy_NL, dead_NL)]
        lines.append([str(layer), *map(number_text, means), hottest])
    note = f"{what}; entropy of the load in nats, {math.log(ratio_LE.shape[1]):.3f} when balanced"
    return _table(
        ["layer", "MaxVio", "entropy", "dead experts", "hottest (load / mean)"], lines, numbers=(1, 2, 3, 4), note=note
    )


# --- Tables ----------------------------------------------------------------------------------------------------------


def _table(
    head: Sequence[str], lines: Sequence[Sequence[str]], numbers: Sequence[int] = (), css: str = "", note: str = ""
) -> str:
    def cells(tag: str, line: Sequence[str]) -> str:
        names = ["number" if column in numbers else "text" for column in range(len(line))]
        return "".join(f'<{tag} class="{name}">{escape(text)}</{tag}>' for name, text in zip(names, line, strict=True))

    row = f'<tr class="{css}">' if css else "<tr>"
    body = "".join(f"{row}{cells('td', line)}</tr>" for line in lines)
    table = f"<table><thead><tr>{cells('th', head)}</tr></thead><tbody>{body}</tbody></table>"
    note = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<div class="table">{table}{note}</div>'


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"model": {"d_model": 128}} -> {"model.d_model": 128}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = tuple(value) if isinstance(value, list) else value  # JSON has no tuples
    return flat


def _config_section(flat: dict[str, Any]) -> str:
    if not flat:
        return ""
    standard = Config()
    defaults, scope_of = flatten(standard), scopes(standard)
    changed: list[list[str]] = []
    same: list[list[str]] = []
    for key, value in flat.items():
        default = repr(defaults[key]) if key in defaults else DASH  # an option of a user's own module
        line = [key, repr(value), default, scope_of.get(key, DASH)]
        (same if repr(value) == default else changed).append(line)
    head = ["key", "value", "default", "scope"]
    out = "<h2>Configuration</h2>"
    out += f'<p class="soft">{len(changed)} of {len(flat)} values differ from their default.</p>'
    if changed:
        out += _table(head, changed, css="changed")
    return out + f"<details><summary>The {len(same)} values at their default</summary>{_table(head, same)}</details>"


def _versions_section(summary: dict[str, Any]) -> str:
    if not summary:
        return ""
    lines = [["commit", str(summary.get("commit") or DASH)], ["config hash", str(summary.get("config_hash") or DASH)]]
    lines += [[str(name), str(version)] for name, version in (summary.get("versions") or {}).items()]
    lines += [["changed on resume", _change_text(change)] for change in summary.get("run_fields_changed") or []]
    return f"<h2>Versions</h2>{_table(['what', 'value'], lines)}"


def _change_text(change: Any) -> str:
    """A [key, old value, new value] of `fef.config.resume_changes`, read back from JSON, in words."""
    if isinstance(change, list) and len(change) == 3:
        return f"{change[0]}: {change[1]!r}, then {change[2]!r}"
    return str(change)
