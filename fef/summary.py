"""What a run says on the terminal: one line at the start, one table at the end; and numbers in human units.

The table reads summary.json: heldout_loss and train_loss (nats per byte, or what its field `token` says), tokens_per_s,
step_ms (median, compilation excluded), wait_ms and data_ms (parts of step_ms, medians), bytes_per_step and
bytes_by_purpose (mean per step, all members), dropped_fraction, max_vio (one per MoE layer), steps, skipped_updates,
params_total, params_active, config_hash, commit, versions, run_fields_changed. A missing or null value shows as a dash.
"""

import math
import os
import pathlib
from typing import Any

from fef.config import Config
from fef.metrics import perplexity

DASH = "\N{EN DASH}"


def start_line(
    config: Config, *, platform: str, hosts: int, corpus_bytes: int, params_total: int, params_active: int
) -> str:
    """One line of what runs where.

    Args:
      config: the validated configuration.
      platform: JAX's name of the devices, such as "cpu".
      hosts: number of JAX processes.
      corpus_bytes: size of the training text.
      params_total, params_active: parameters of the model, and those that one token meets.
    """
    mesh, moe = config.mesh, config.moe
    where = f"{mesh.devices} {platform} device{'s' * (mesh.devices > 1)} (data {mesh.data} x expert "
    where += f"{mesh.devices // mesh.data})" + f" on {hosts} hosts" * (hosts > 1)
    experts = f"{moe.num_experts} experts, {moe.num_choices} a token; router {moe.router}; dispatcher {moe.dispatcher}"
    return "; ".join(
        [
            where,
            f"corpus {bytes_text(corpus_bytes)}",
            f"parameters {count_text(params_total)} total, {count_text(params_active)} active",
            experts if moe.every else "dense, no experts",
        ]
    )


def format_summary(summary: dict[str, Any], workdir: str | os.PathLike | None = None) -> str:
    """The table that ends a run, of lines "name  value"; with `workdir`, also the paths of what the run wrote."""
    token = summary.get("token", "byte")  # absent from summaries of earlier versions
    rows = [
        ("held-out loss", _loss(summary.get("heldout_loss"), token)),
        ("train loss", _loss(summary.get("train_loss"), token)),
        ("tokens/s", count_text(summary.get("tokens_per_s"))),
        ("step", ms_text(summary.get("step_ms"))),
        ("waiting for experts", share_of_step(summary, "wait_ms")),
        ("bytes moved per step", bytes_text(summary.get("bytes_per_step"))),
        *((f"  {purpose}", bytes_text(count)) for purpose, count in (summary.get("bytes_by_purpose") or {}).items()),
        ("dropped fraction", percent_text(summary.get("dropped_fraction"))),
        ("MaxVio of expert load", max_vio_text(summary.get("max_vio"))),
        ("steps", count_text(summary.get("steps"))),
    ]
    if summary.get("skipped_updates"):
        rows.append(("skipped updates", f"{summary['skipped_updates']} (not finite)"))
    if workdir is not None:
        rows += [(name, str(path)) for name, path in _written(pathlib.Path(workdir)).items()]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _written(workdir: pathlib.Path) -> dict[str, pathlib.Path]:
    names = {"metrics": "metrics.jsonl", "report": "report.html", "checkpoints": "checkpoints"}
    return {name: workdir / file for name, file in names.items() if (workdir / file).exists()}


def is_number(value: Any) -> bool:
    """Whether a value read from JSON is a finite number (null stands for a non-finite or a missing one)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def number_text(value: Any, digits: int = 3) -> str:
    """A number with at least `digits` significant digits: 2.31, 0.000420, 12,345."""
    if not is_number(value):
        return DASH
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")  # 9.999 counts its digits as 10.0
    decimals = digits - 1 - math.floor(math.log10(abs(rounded)))
    return f"{value:,.{max(decimals, 0)}f}" if decimals <= 8 else f"{value:.{digits - 1}e}"


def _scaled(value: float, units: list[str]) -> str:
    power = 0
    while abs(value) >= 999.5 and power < len(units) - 1:
        value, power = value / 1000, power + 1
    return f"{number_text(value)} {units[power]}"


def bytes_text(value: Any) -> str:
    """Bytes in decimal units (1 MB = 10^6 bytes), three significant digits."""
    if not is_number(value):
        return DASH
    return f"{round(value)} B" if abs(value) < 999.5 else _scaled(value / 1000, ["kB", "MB", "GB", "TB", "PB"])


def count_text(value: Any) -> str:
    """A count: exact below a million, then in millions (M), billions (B) and trillions (T)."""
    if not is_number(value):
        return DASH
    return f"{round(value):,}" if abs(value) < 999_500 else _scaled(value / 1e6, ["M", "B", "T"])


def ms_text(value: Any) -> str:
    return f"{number_text(value)} ms" if is_number(value) else DASH


def percent_text(fraction: Any) -> str:
    return f"{number_text(100 * fraction)} %" if is_number(fraction) else DASH


def max_vio_text(max_vio: Any) -> str:
    """The worst of the MoE layers, or a dash without one."""
    per_layer = [value for value in (max_vio if isinstance(max_vio, list) else [max_vio]) if is_number(value)]
    if not per_layer:
        return DASH
    return number_text(max(per_layer)) + (f" (worst of {len(per_layer)} layers)" if len(per_layer) > 1 else "")


def share_of_step(summary: dict[str, Any], key: str) -> str:
    """A part of the step, with its share: "12.0 ms (8.0 % of the step)"."""
    part, step = summary.get(key), summary.get("step_ms")
    if not is_number(part) or not is_number(step) or not step:
        return ms_text(part)
    return f"{ms_text(part)} ({percent_text(part / step)} of the step)"


def _loss(loss: Any, token: str) -> str:
    if not is_number(loss):
        return DASH
    return f"{loss:.4f} nats/{token} (perplexity {number_text(perplexity(loss))})"
