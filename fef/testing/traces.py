"""Recorded assignments: write those of a run to a file, and route a later run by them.

Replay gives every dispatcher, mesh or program version the same assignments, although the gates, whose numbers differ
by rounding, would part ways after some steps. Runs that are compared must see the same data.

Format: an .npz file (numpy.load reads it) with `header`, JSON of a `TraceHeader`, and for each recorded step s the
arrays `<s as 8 digits>/token_N`, `expert_N`, `weight_N` and `valid_N`, each (L, N): L MoE layers, and the N assignments
of the global batch in the order of its sequences, whatever the mesh was; token_N counts tokens over the global batch.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fef.config import UserError
from fef.routing import Assignment
from fef.routing.gate import count_by_expert

ARRAYS = {"token_N": np.int32, "expert_N": np.int32, "weight_N": np.float32, "valid_N": np.bool_}


@dataclasses.dataclass(frozen=True)
class TraceHeader:
    """What the run that replays must have in common with the one that recorded."""

    router: str
    num_layers: int
    batch_size: int
    seq_len: int
    num_experts: int
    num_choices: int


class TraceWriter:
    """Records the assignments of each step.

        with TraceWriter(path, header, first_step=step) as writer:
            writer.append(step, {"token_N": ..., "expert_N": ..., "weight_N": ..., "valid_N": ...})

    Every step is at once on disk, in the folder `<path>.parts`; `close` makes the file of them. A run that was killed
    goes on with the folder: what it recorded from its `first_step` on is dropped and recorded again.

    Args:
      path: the file, replaced as a whole by `close`.
      header: what the file is to say about the run.
      first_step: number of the first step that will come. Steps before it are kept, from the folder or the file.

    Raises:
      UserError: the path cannot be written, or holds a recording of another kind of run that is to be continued.
    """

    def __init__(self, path: str | os.PathLike, header: TraceHeader, first_step: int = 0):
        self.path, self.header = pathlib.Path(path), header
        self._parts = pathlib.Path(f"{self.path}.parts")
        self._kept_from_file: list[int] = []
        try:
            if first_step:
                self._resume(first_step)
            else:
                shutil.rmtree(self._parts, ignore_errors=True)
            self._parts.mkdir(parents=True, exist_ok=True)
            _write(self._parts / "header.npz", iter([("header", _header_array(header))]))
        except OSError as error:
            raise UserError(f"{self.path}: cannot record assignments here: {error.strerror or error}") from error

    def _resume(self, first_step: int) -> None:
        if (self._parts / "header.npz").exists():
            _check(self._parts, self.header, _read_header(self._parts / "header.npz"))
        for part in self._parts.glob("[0-9]*.npz"):
            if int(part.stem) >= first_step:
                part.unlink()
        if self.path.exists():
            earlier = Trace(self.path, self.header)
            self._kept_from_file = [step for step in earlier.steps if step < first_step]

    def append(self, step: int, assignments: Mapping[str, Any]) -> None:
        """Writes one step.

        Args:
          step: its number.
          assignments: (L, N) token_N, expert_N, weight_N, valid_N of all members, joined along N in the order of the
            batch's sequences. Tokens may be counted per member, as routers do, or over the whole batch.

        Raises:
          ValueError: the arrays do not have this order.
          UserError: the disk is full or has failed.
        """
        arrays: dict[str, np.ndarray] = {name: np.asarray(assignments[name], dtype) for name, dtype in ARRAYS.items()}
        header, (num_layers, num_places) = self.header, arrays["token_N"].shape
        if num_layers != header.num_layers or num_places % header.batch_size:
            raise ValueError(
                f"{self.path}: assignments of shape (L, N) = {(num_layers, num_places)} do not fit num_layers="
                f"{header.num_layers} and batch_size={header.batch_size}"
            )
        token_LBA = arrays["token_N"].reshape(num_layers, header.batch_size, -1)
        sequence_LBA = token_LBA // header.seq_len
        if (sequence_LBA != sequence_LBA[..., :1]).any():
            raise ValueError(f"{self.path}: router {header.router!r} does not order its assignments by sequence")
        first_LBA = np.arange(header.batch_size)[:, None] * header.seq_len
        arrays["token_N"] = (first_LBA + token_LBA % header.seq_len).reshape(num_layers, -1).astype(np.int32)
        _write(self._parts / f"{step:08}.npz", iter(arrays.items()))

    def close(self) -> None:
        """Joins what was recorded into the file and removes the folder."""

        def entries() -> Iterator[tuple[str, np.ndarray]]:
            yield "header", _header_array(self.header)
            if self._kept_from_file:
                earlier = Trace(self.path, self.header)
                for step in self._kept_from_file:
                    yield from ((f"{step:08}/{name}", array) for name, array in earlier.step(step).items())
            for part in sorted(self._parts.glob("[0-9]*.npz")):
                if int(part.stem) not in self._kept_from_file:
                    with np.load(part) as arrays:
                        for name in ARRAYS:
                            yield f"{part.stem}/{name}", arrays[name]

        _write(self.path, entries())
        shutil.rmtree(self._parts)

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(self, error_type: Any, *_: Any) -> None:
        if error_type is None:  # else the folder stays, for the run that continues this one
            self.close()


class Trace:
    """A recording to be replayed.

    Args:
      path: a file written by `TraceWriter`.
      header: what the replaying run is.
      steps: the steps it will ask for.

    Raises:
      UserError: not a trace, damaged, or recorded by a run that differs; names the file and both values.
    """

    def __init__(self, path: str | os.PathLike, header: TraceHeader, steps: range = range(0)):
        self.path = pathlib.Path(path)
        _check(self.path, header, _read_header(self.path))
        self._file = np.load(self.path)
        self.steps = sorted({int(key.split("/")[0]) for key in self._file.files if "/" in key})
        missing = sorted(set(steps) - set(self.steps))
        if missing:
            there = f"steps {self.steps[0]} to {self.steps[-1]}" if self.steps else "no steps"
            raise UserError(
                f"{self.path}: has {there}, but this run replays steps {steps[0]} to {steps[-1]} and step {missing[0]} "
                "is missing; record more steps, or set config.train.steps to what is there"
            )

    def step(self, step: int) -> dict[str, np.ndarray]:
        """The arrays (L, N) of one step; along N they can be split over members like the batch's sequences.

        Raises:
          UserError: the step was not recorded, or is damaged.
        """
        try:
            return {name: self._file[f"{step:08}/{name}"] for name in ARRAYS}
        except (KeyError, ValueError, OSError, zipfile.BadZipFile) as error:
            raise UserError(f"{self.path}: step {step} is missing or damaged ({error}); record it again") from error


def last_step(path: str | os.PathLike) -> tuple[TraceHeader, dict[str, np.ndarray]]:
    """The newest step of a file, whatever run it was: its header, and the arrays (L, N) as of `Trace.step`.

    Raises:
      UserError: not a trace, or damaged.
    """
    try:
        header = TraceHeader(**_read_header(pathlib.Path(path)))
    except TypeError as error:
        raise UserError(f"{path}: not a file of recorded assignments ({error})") from error
    trace = Trace(path, header)
    if not trace.steps:
        raise UserError(f"{path}: has no steps; record some")
    return header, trace.step(trace.steps[-1])


def replay_assignment(live: Assignment, recorded: Mapping[str, jax.Array], mask_BS: jax.Array) -> Assignment:
    """The recorded assignment, with the gate still in training.

    Experts, tokens and drops are the recorded ones. A (token, expert) pair that the live gate chose too has the live
    weight, which carries the gradient to the gate; any other has the recorded weight, as a constant. So a replay of
    the recorded run repeats it but for rounding, and where the gate has moved away it still learns from what both agree
    on.

    Args:
      live: what the router gave for this member and layer.
      recorded: (N,) arrays of this member and layer, cut out of `Trace.step`.
      mask_BS: (B, S) bool, False on padding.

    Returns:
      The assignment; aux_loss and entropy are the live gate's, the counts those of the recorded choices.

    Raises:
      ValueError: another number of assignments than the router makes.
    """
    if recorded["expert_N"].shape != live.expert_N.shape:
        raise ValueError(f"replay of {recorded['expert_N'].shape} assignments, the router makes {live.expert_N.shape}")
    num_tokens, num_experts = mask_BS.size, live.metrics["load_E"].shape[0]
    table_TE = jnp.zeros((num_tokens, num_experts), jnp.float32)
    weight_TE = table_TE.at[live.token_N, live.expert_N].add(jnp.where(live.valid_N, live.weight_N, 0.0))
    chosen_TE = table_TE.at[live.token_N, live.expert_N].add(live.valid_N.astype(jnp.float32))

    token_N, expert_N, valid_N = recorded["token_N"] % num_tokens, recorded["expert_N"], recorded["valid_N"]
    weight_N = jnp.where(chosen_TE[token_N, expert_N] > 0, weight_TE[token_N, expert_N], recorded["weight_N"])
    kept_E = count_by_expert(expert_N, valid_N, num_experts)
    claims_N = valid_N if live.num_choices is None else mask_BS.reshape(-1)[token_N]
    return dataclasses.replace(
        live,
        token_N=token_N,
        expert_N=expert_N,
        weight_N=jnp.where(valid_N, weight_N, 0.0),
        valid_N=valid_N,
        metrics=live.metrics | {"load_E": count_by_expert(expert_N, claims_N, num_experts), "kept_E": kept_E},
    )


def _check(path: pathlib.Path, ours: TraceHeader, recorded: dict[str, Any]) -> None:
    for name, value in dataclasses.asdict(ours).items():
        if recorded.get(name) != value:
            raise UserError(
                f"{path}: recorded with {name}={recorded.get(name)!r}, but this run has {name}={value!r}; "
                "run with the recorded value, or name another file"
            )


def _header_array(header: TraceHeader) -> np.ndarray:
    return np.array(json.dumps(dataclasses.asdict(header)))


def _read_header(path: pathlib.Path) -> dict[str, Any]:
    try:
        with np.load(path) as file:
            return json.loads(str(file["header"]))
    except (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        raise UserError(f"{path}: not a file of recorded assignments, or damaged ({error})") from error


def _write(path: pathlib.Path, entries: Iterator[tuple[str, np.ndarray]]) -> None:
    """Writes an .npz entry by entry, under another name until it is complete."""
    unfinished = pathlib.Path(f"{path}.tmp")
    try:
        with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for name, array in entries:
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, array, allow_pickle=False)
        os.replace(unfinished, path)
    except OSError as error:
        cause = error.strerror or error
        raise UserError(f"{path}: cannot be written: {cause}; free its disk or name another") from error
