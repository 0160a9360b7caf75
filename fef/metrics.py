"""What a run measures, and how it is written: metrics.jsonl, summary.json and TensorBoard events.

Files are strict JSON (RFC 8259), which has no NaN and no Infinity: such a value is written as null, and the object
names the places in `not_finite`, e.g. {"step": 2, "loss": null, "not_finite": ["loss"]}; a place inside a list or an
object reads "max_vio.1" or "bytes_by_purpose.weights".

One row of metrics.jsonl (lists hold one entry per MoE layer; [] in a dense model):
  step; loss (nats per token, cross entropy only); aux_loss; grad_norm (before clipping); learning_rate;
  step_ms (wall time of a step and of the wait for its batch, without evaluation and saving), of which wait_ms (waiting
  for experts, mean over members) and data_ms (waiting for the batch); tokens (of the step, all members);
  tokens_per_s; bytes (moved between members, all members), bytes_by_purpose {weights, refetch, gradients, tokens,
  metadata, missed, relayed, gathered}, bytes_received {purpose: [[from each rank of its group] per member]}, without
  the purposes that moved nothing; where the pool's hosts know their leaf of the network also bytes_in_leaf and
  bytes_crossing, which add up to bytes; waits_ms {published, stage, closed, tokens: [per layer]}, what wait_ms was
  spent on: blocks, staging of gradients, the others' gradients, token rows; of a dispatcher that chooses what moves
  also what it had planned, planned_bytes_by_purpose, and for how long that keeps a member's link busy, planned_ms
  {weights, tokens};
  dropped_fraction; max_vio, entropy (of the load), gate_entropy (of the gate, mean over tokens), dead_experts; load
  ([[E choices] per layer]); skipped_updates (so far in the run);
  heldout_loss on steps with an evaluation; not_finite where there is something to name.
"""

import json
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

# --- JSON files ------------------------------------------------------------------------------------------------------


def strict_json(obj: dict[str, Any], indent: int | None = None) -> str:
    """The object as strict JSON: numpy values as plain ones, non-finite ones as null and named in `not_finite`."""
    not_finite: list[str] = list(obj.get("not_finite", []))

    def plain(value: Any, place: str) -> Any:
        if isinstance(value, (np.ndarray, np.generic)):
            value = value.tolist()
        if isinstance(value, float) and not math.isfinite(value):
            not_finite.append(place)
            return None
        if isinstance(value, dict):
            return {str(key): plain(item, f"{place}.{key}" if place else str(key)) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item, f"{place}.{index}") for index, item in enumerate(value)]
        return value

    clean = plain(obj, "")
    if not_finite:
        clean["not_finite"] = not_finite
    return json.dumps(clean, indent=indent, allow_nan=False)


def write_atomic(path: str | os.PathLike, content: bytes) -> None:
    """Writes a file so that a reader, or a kill, sees the old content or the new, never a part."""
    temporary = f"{os.fspath(path)}.tmp"
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_json_atomic(path: str | os.PathLike, obj: dict[str, Any]) -> None:
    """Writes one object, such as summary.json, as strict JSON, whole or not at all."""
    write_atomic(path, (strict_json(obj, indent=2) + "\n").encode())


def read_jsonl(path: str | os.PathLike) -> tuple[list[dict[str, Any]], list[str]]:
    """Reads a file of one JSON object a line.

    Returns:
      rows: the objects, in file order.
      notices: one line for each line of the file that is no JSON object and was left out, e.g. the last one of a
        run that was killed while it wrote.
    """
    rows, notices = [], []
    lines = pathlib.Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        row = _parse(line)
        if row is not None:
            rows.append(row)
        elif line.strip():
            what = "was cut off" if number == len(lines) else "is no JSON object"
            notices.append(f"{path}:{number}: the line {what}; left out: {line[:40]!r}")
    return rows, notices


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:  # also UnicodeDecodeError
        return None
    return row if isinstance(row, dict) else None


class JsonlWriter:
    """Appends one strict-JSON object a line to a file; each line has left the process when `write` returns.

    A line cut by a kill is removed when the file is opened, so that the next one starts on a line of its own.

    Attributes:
      notices: what was repaired on opening, one line each, for the caller to show.
    """

    def __init__(self, path: str | os.PathLike):
        self._path = pathlib.Path(path)
        self.notices = self._repair()
        self._file = open(self._path, "a", encoding="utf-8")

    def _repair(self) -> list[str]:
        if not self._path.exists():
            return []
        content = self._path.read_bytes()
        start = content.rfind(b"\n") + 1
        tail = content[start:]
        if not tail:
            return []
        with open(self._path, "r+b") as file:
            if _parse(tail) is not None:  # only the line end is missing
                file.seek(0, os.SEEK_END)
                file.write(b"\n")
                return []
            file.truncate(start)
        return [f"{self._path}: the last line was cut off; removed {len(tail)} bytes: {tail[:40]!r}"]

    def write(self, row: dict[str, Any]) -> None:
        """Appends a row."""
        self._file.write(strict_json(row) + "\n")
        self._file.flush()

    def truncate_after(self, step: int) -> int:
        """Drops the rows with a step beyond `step`, which a run resumed at that step writes again; returns how many."""
        lines = self._path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if (_parse(line) or {}).get("step", step) <= step]
        if len(kept) < len(lines):
            self._file.close()
            write_atomic(self._path, b"".join(kept))
            self._file = open(self._path, "a", encoding="utf-8")
        return len(lines) - len(kept)

    def close(self) -> None:
        self._file.close()


# --- Statistics ------------------------------------------------------------------------------------------------------


def weighted_mean(values: Sequence[float] | np.ndarray, weights: Sequence[float] | np.ndarray) -> float:
    """sum(values * weights) / sum(weights): the mean over tokens of means over batches of unequal size.

    An entry of weight 0 takes no part, even if its value is NaN (the mean of an empty batch). NaN if all are 0.

    Raises:
      ValueError: the shapes differ, or a weight is negative.
    """
    values_N, weights_N = np.asarray(values, np.float64), np.asarray(weights, np.float64)
    if values_N.shape != weights_N.shape:
        raise ValueError(f"weighted_mean: {values_N.shape} values but {weights_N.shape} weights; give one weight each")
    if (weights_N < 0).any():
        raise ValueError(f"weighted_mean: negative weight {weights_N.min()}; give counts of tokens")
    total = weights_N.sum()
    if total == 0:
        return math.nan
    used_N = weights_N > 0
    return float((values_N[used_N] * weights_N[used_N]).sum() / total)


def perplexity(mean_loss: float) -> float:
    """exp of the mean loss over all tokens (never the mean of perplexities); infinite beyond float64's range."""
    with np.errstate(over="ignore"):
        return float(np.exp(np.float64(mean_loss)))


def max_vio(load_LE: np.ndarray) -> np.ndarray:
    """Maximal violation of balance per layer: max load / mean load - 1, 0 when balanced, E - 1 when collapsed.

    Args:
      load_LE: (L, E), token choices per layer and expert, before drops.

    Returns:
      (L,) float64; 0 in a layer without load.

    Source: L. Wang, H. Gao, C. Zhao, X. Sun, D. Dai, "Auxiliary-Loss-Free Load Balancing Strategy for
    Mixture-of-Experts" (arXiv:2408.15664, 2024), the definition of MaxVio.
    """
    load_LE = np.asarray(load_LE, np.float64)
    mean_L = load_LE.mean(axis=1)
    return np.where(mean_L > 0, load_LE.max(axis=1) / np.where(mean_L > 0, mean_L, 1) - 1, 0.0)


def load_entropy(load_LE: np.ndarray) -> np.ndarray:
    """Entropy of the share of choices over experts, per layer, in nats: log E when balanced, 0 when collapsed.

    Args:
      load_LE: (L, E), token choices per layer and expert, before drops.

    Returns:
      (L,) float64; 0 in a layer without load.
    """
    load_LE = np.asarray(load_LE, np.float64)
    total_L1 = load_LE.sum(axis=1, keepdims=True)
    share_LE = load_LE / np.where(total_L1 > 0, total_L1, 1)
    return 0.0 - (share_LE * np.log(np.where(share_LE > 0, share_LE, 1))).sum(axis=1)  # 0.0 -: no negative zero


def dropped_fraction(load: np.ndarray, kept: np.ndarray) -> float:
    """Share of all token choices that the router dropped: 1 - sum(kept) / sum(load); 0 without load."""
    total = int(np.sum(load))
    return 1.0 - int(np.sum(kept)) / total if total else 0.0


def load_metrics(load_LE: np.ndarray, kept_LE: np.ndarray) -> dict[str, Any]:
    """The part of a metrics row that says how the experts were used.

    Args:
      load_LE: (L, E) int, choices per MoE layer and expert before drops, summed over all members and microbatches.
      kept_LE: (L, E) int, the choices carried out.

    Returns:
      {"load", "max_vio", "entropy", "dead_experts" (experts without any choice), "dropped_fraction"}; [] and 0.0 for
      a dense model (L = 0).
    """
    load_LE = np.asarray(load_LE)
    if load_LE.size == 0:
        return {"load": [], "max_vio": [], "entropy": [], "dead_experts": [], "dropped_fraction": 0.0}
    return {
        "load": load_LE.tolist(),
        "max_vio": max_vio(load_LE).tolist(),
        "entropy": load_entropy(load_LE).tolist(),
        "dead_experts": (load_LE == 0).sum(axis=1).tolist(),
        "dropped_fraction": dropped_fraction(load_LE, kept_LE),
    }


# --- TensorBoard -----------------------------------------------------------------------------------------------------


class TensorBoard:
    """Writes rows of metrics.jsonl as TensorBoard events: numbers as scalars, the expert load as histograms.

    In a histogram of `load/layer_<i>` the horizontal axis is the expert's number. Non-finite numbers are left out.

    Args:
      folder: where the event files go.
      load_every: steps between histograms of the load.
      resumed_after: step of the checkpoint that a resumed run started from; TensorBoard then hides what an earlier
        part of the run wrote beyond it. None for a fresh run.
    """

    def __init__(self, folder: str | os.PathLike, load_every: int = 50, resumed_after: int | None = None):
        from tensorboardX import SummaryWriter  # only a run that asks for events needs it

        purge_step = None if resumed_after is None else resumed_after + 1
        self._writer = SummaryWriter(os.fspath(folder), purge_step=purge_step)
        self._load_every = load_every

    def write(self, row: dict[str, Any]) -> None:
        """Adds the events of one row."""
        step = row["step"]
        for tag, value in _scalars(row).items():
            if math.isfinite(value):
                self._writer.add_scalar(tag, value, step)
        if step % self._load_every == 0:
            for layer, load_E in enumerate(row.get("load", [])):
                self._add_load(f"load/layer_{layer}", np.asarray(load_E, np.float64), step)

    def _add_load(self, tag: str, load_E: np.ndarray, step: int) -> None:
        expert_E = np.arange(len(load_E))
        self._writer.add_histogram_raw(
            tag,
            min=0.0,
            max=float(len(load_E)),
            num=float(load_E.sum()),
            sum=float((load_E * expert_E).sum()),
            sum_squares=float((load_E * expert_E**2).sum()),
            bucket_limits=(expert_E + 1.0).tolist(),
            bucket_counts=load_E.tolist(),
            global_step=step,
        )

    def close(self) -> None:
        self._writer.close()


def _scalars(row: dict[str, Any]) -> dict[str, float]:
    """{"loss": .., "bytes/weights": .., "max_vio/layer_0": ..}; not the step, not the load."""
    flat: dict[str, float] = {}
    for key, value in row.items():
        if key in ("step", "load", "not_finite"):
            continue
        if key == "bytes_by_purpose":
            flat |= {f"bytes/{purpose}": count for purpose, count in value.items()}
        elif isinstance(value, list):
            flat |= {f"{key}/layer_{layer}": item for layer, item in enumerate(value) if item is not None}
        elif isinstance(value, (int, float)):
            flat[key] = value
    return flat
