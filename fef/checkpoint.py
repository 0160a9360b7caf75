"""Checkpoints: written in the background, committed by one rename, checked by digest, in logical expert order.

A checkpoint is the folder `<directory>/<step>`: the arrays as orbax writes them, `fef.json` (step, metric, leaves and
the caller's own data) and SHA256SUMS. Everything is written to `<step>.orbax-checkpoint-tmp`, which gets its final name
last; a folder without SHA256SUMS is unfinished, whatever it is called. Nothing in a checkpoint depends on the number
of devices or of hosts. With several hosts all call each method, on a folder that all of them see; each writes its part
of the arrays, and host 0 alone makes, seals and deletes checkpoints.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
import pathlib
import re
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from fef import digest, hosts
from fef.config import UserError

_TMP_SUFFIX = ocp.path.atomicity.TMP_DIR_SUFFIX
_RECORD = "fef.json"
_POLL_INTERVAL_S = 0.005
_MAX_PROBLEMS_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class _Pending:
    """The save in flight."""

    step: int
    path: pathlib.Path
    record: str


class Checkpointer:
    """Saves and restores training states in one folder. A context manager: leaving it waits for the last save.

        with Checkpointer(workdir / "checkpoints", keep=2, keep_best=1) as checkpointer:
            step, notices = checkpointer.latest()
            ...
            checkpointer.save(100, state, extra={"data": iterator_state}, metric=heldout_loss)
            for step in checkpointer.poll(): print("saved", step)       # each step: cheap

    One save is in flight at most. A save that failed in the background is raised by the next `poll`, `save` or
    `close`. A program that ends without `close` may lose the save in flight, never an earlier one.

    Args:
      directory: folder of the checkpoints; it is created.
      keep: newest checkpoints kept, >= 1.
      keep_best: checkpoints with the lowest metric kept beside them, >= 0.
      deadline_s: longest wait for one save, in seconds.

    Raises:
      UserError: from every method, when the folder cannot be written or read; names path and cause.
    """

    def __init__(self, directory: str | os.PathLike, keep: int, keep_best: int, deadline_s: float = 600.0):
        if keep < 1 or keep_best < 0:
            raise ValueError(f"keep={keep} must be >= 1 and keep_best={keep_best} must be >= 0")
        # orbax logs each failure with several tracebacks before it raises it; the exception is enough.
        logging.getLogger("absl").addFilter(_is_not_from_orbax)
        self._directory = pathlib.Path(directory).absolute()
        self._keep, self._keep_best, self._deadline_s = keep, keep_best, deadline_s
        self._pending: _Pending | None = None
        self._committed: list[int] = []
        with _explaining(f"cannot create the folder {self._directory}"):
            self._directory.mkdir(parents=True, exist_ok=True)
        self._orbax = ocp.AsyncCheckpointer(
            _handler(),
            async_options=ocp.AsyncOptions(
                timeout_secs=math.ceil(deadline_s),
                post_finalization_callback=self._seal,  # called between the last write and the rename
                create_directories_asynchronously=False,
            ),
            checkpoint_metadata_store=ocp.metadata.metadata_store(enable_write=False),
        )

    def save(self, step: int, state: Any, extra: dict[str, Any], metric: float | None = None) -> None:
        """Starts to save; returns when the arrays have been copied, so that the caller may donate or change them.

        Waits for an earlier save. What unfinished saves left behind, up to this step, is removed first.

        Args:
          step: number of the checkpoint; saving a complete step again is a ValueError.
          state: pytree of jax.Arrays (typed RNG keys included), NumPy arrays, bools, ints and floats; experts in
            logical order (`to_logical`).
          extra: what JSON can hold, without NaN: configuration, state of the data iterator, ...
          metric: what `keep_best` compares, lower is better; None or NaN is never best.
        """
        self._wait()
        path = self._directory / str(step)
        if digest.is_sealed(path):
            raise ValueError(f"step {step} is already saved in {path}")
        leaves, _ = _by_name(state)
        arrays = {name: _to_array(name, leaf) for name, leaf in leaves.items()}
        record = {
            "step": step,
            "metric": float(metric) if metric is not None and math.isfinite(metric) else None,
            "leaves": {name: _signature(leaf) for name, leaf in leaves.items()},
            "key_impls": {name: jax.random.key_impl(leaf) for name, leaf in leaves.items() if _is_key(leaf)},
            "extra": extra,
        }
        pending = _Pending(step, path, json.dumps(record, allow_nan=False, indent=1))
        with _explaining(f"checkpoint {path} was not saved"):
            if hosts.is_main():
                self._remove_unfinished(step)  # the others wait for it in the save below
            self._pending = pending  # read by _seal in the background
            try:
                self._orbax.save(path, args=ocp.args.PyTreeSave(arrays))
            except BaseException:
                self._pending = None
                raise

    def poll(self) -> list[int]:
        """The steps committed since the last call. Raises what went wrong in the background. Costs a file look-up."""
        if self._pending is not None:
            self._settle(self._pending)
        committed, self._committed = self._committed, []
        return committed

    def close(self) -> list[int]:
        """Waits for the save in flight, at most `deadline_s`; returns what `poll` would."""
        self._wait()
        self._orbax.close()
        return self.poll()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, exc_type: Any, exc: BaseException | None, traceback: Any) -> None:
        try:
            self.close()
        except Exception as error:
            if exc is None:
                raise
            exc.add_note(str(error))  # what ended the program comes first

    def steps(self) -> list[int]:
        """The complete checkpoints, ascending."""
        return sorted(step for step, path in self._numbered() if digest.is_sealed(path))

    def latest(self) -> tuple[int | None, list[str]]:
        """The newest complete step, or None, and one line for each unfinished save that was passed over."""
        unfinished = [path for _, path in self._numbered() if not digest.is_sealed(path)] + self._temporary()
        notices = [f"skipped {path}: not a complete checkpoint" for path in sorted(unfinished)]
        return max(self.steps(), default=None), notices

    def leaves(self, step: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Path -> (shape, dtype) of every leaf, on any number of devices."""
        return {name: (tuple(shape), dtype) for name, (shape, dtype) in self._verified(step)["leaves"].items()}

    def extra(self, step: int) -> dict[str, Any]:
        """What was given to `save` as `extra`."""
        return self._verified(step)["extra"]

    def restore(self, step: int, template: Any, partly: bool = False) -> tuple[Any, dict[str, Any]]:
        """Reads a checkpoint on whatever devices the template names.

        Args:
          step: a complete step.
          template: pytree of the structure that was saved. jax.ShapeDtypeStruct and jax.Array leaves give jax.Arrays
            with their sharding, NumPy arrays give NumPy arrays, Python numbers give Python numbers.
          partly: whether the checkpoint may hold more; what the template lacks is not read.

        Returns:
          (state, extra).

        Raises:
          UserError: a file is damaged (names the file), or leaves are missing, unexpected or of another shape or
            dtype (names the leaves). Nothing is cast.
        """
        self._wait()
        path = self._directory / str(step)
        record = self._verified(step)
        leaves, treedef = _by_name(template)
        saved = record["leaves"]
        if partly:
            saved = {name: signature for name, signature in saved.items() if name in leaves}
        problems = _mismatches(saved, {name: _signature(leaf) for name, leaf in leaves.items()})
        if problems:
            shown = "; ".join(problems[:_MAX_PROBLEMS_SHOWN])
            more = f"; and {len(problems) - _MAX_PROBLEMS_SHOWN} more" if len(problems) > _MAX_PROBLEMS_SHOWN else ""
            raise UserError(f"checkpoint {path} does not fit this model and optimizer: {shown}{more}")
        restore_args = {name: _restore_args(leaf) for name, leaf in leaves.items()}
        with _explaining(f"checkpoint {path} cannot be read"):
            args = ocp.args.PyTreeRestore(item=leaves, restore_args=restore_args, partial_restore=partly)
            restored = self._orbax.restore(path, args=args)
        for name in record["key_impls"].keys() & leaves.keys():
            restored[name] = jax.random.wrap_key_data(restored[name], impl=record["key_impls"][name])
        values = [_like(leaf, restored[name]) for name, leaf in leaves.items()]
        return jax.tree.unflatten(treedef, values), record["extra"]

    def _seal(self) -> None:
        assert self._pending is not None
        folder = self._pending.path.with_name(self._pending.path.name + _TMP_SUFFIX)
        (folder / _RECORD).write_text(self._pending.record)
        digest.seal(folder)

    def _settle(self, pending: _Pending) -> None:
        """Notes whether the save in flight has failed or has been committed."""
        with _explaining(f"checkpoint {pending.path} was not saved"):
            try:
                self._orbax.check_for_errors()
            except Exception:
                self._pending = None
                raise
        if pending.path.is_dir():
            self._pending = None
            self._committed.append(pending.step)
            if hosts.is_main():
                self._remove_superseded()

    def _wait(self) -> None:
        end = time.monotonic() + self._deadline_s
        while self._pending is not None:
            self._settle(self._pending)
            if self._pending is not None:
                if time.monotonic() > end:
                    raise UserError(
                        f"checkpoint {self._pending.path} was not finished within {self._deadline_s:g} s; "
                        "is the file system still there?"
                    )
                time.sleep(_POLL_INTERVAL_S)

    def _remove_superseded(self) -> None:
        steps = self.steps()
        metrics = {step: metric for step in steps if (metric := self._metric(step)) is not None}
        best = sorted(metrics, key=lambda step: (metrics[step], -step))[: self._keep_best]
        with _explaining(f"cannot delete old checkpoints in {self._directory}"):
            for step in set(steps) - set(steps[-self._keep :]) - set(best):
                digest.unseal(self._directory / str(step))
                shutil.rmtree(self._directory / str(step))

    def _remove_unfinished(self, step: int) -> None:
        unfinished = [path for number, path in self._numbered() if number <= step and not digest.is_sealed(path)]
        for path in unfinished + self._temporary():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _metric(self, step: int) -> float | None:
        try:
            return json.loads((self._directory / str(step) / _RECORD).read_text())["metric"]
        except (OSError, ValueError, KeyError):
            return None  # damaged: it is nobody's best, and restoring it is refused

    def _verified(self, step: int) -> dict[str, Any]:
        """The record of a checkpoint of which every byte has been checked."""
        path = self._directory / str(step)
        if not digest.is_sealed(path):
            raise UserError(f"{path} is not a complete checkpoint; complete steps: {self.steps()}")
        try:
            with _explaining(f"checkpoint {path} cannot be read"):
                digest.verify(path)
                return json.loads((path / _RECORD).read_text())
        except digest.DamageError as error:
            others = [other for other in self.steps() if other != step]
            remedy = f"delete {path} to go on from step {others[-1]}" if others else f"delete {path} to start over"
            raise UserError(f"damaged checkpoint: {error}; {remedy}") from None

    def _numbered(self) -> list[tuple[int, pathlib.Path]]:
        return [(int(path.name), path) for path in self._entries() if re.fullmatch(r"0|[1-9][0-9]*", path.name)]

    def _temporary(self) -> list[pathlib.Path]:
        return [path for path in self._entries() if _TMP_SUFFIX in path.name]

    def _entries(self) -> list[pathlib.Path]:
        with _explaining(f"cannot read the folder {self._directory}"):
            return list(self._directory.iterdir())


def to_logical(tree: Any, is_expert: Callable[[tuple], bool], position_of_expert_E: np.ndarray, axis: int = 0) -> Any:
    """Expert leaves in the order of the experts: P positions -> E experts. Works eagerly and in jit.

    Args:
      tree: pytree; parameters and optimizer moments have the same paths below their roots, so one predicate does.
      is_expert: tells from a leaf's path (a tuple of jax.tree_util keys) whether `axis` counts positions.
      position_of_expert_E: (E,) int, position that holds each expert.
      axis: 0, or 1 for leaves that stack layers in front.

    Gradient: scatters back; empty positions get zero.
    """
    position_of_expert_E = np.asarray(position_of_expert_E)
    num_needed = int(position_of_expert_E.max()) + 1

    def gather(path: tuple, leaf: Any) -> Any:
        if not is_expert(path):
            return leaf
        if leaf.shape[axis] < num_needed:
            raise ValueError(f"{_name(path)} has {leaf.shape[axis]} positions; the table needs {num_needed}")
        if np.array_equal(position_of_expert_E, np.arange(leaf.shape[axis])):
            return leaf  # nothing moves, and the leaf keeps its sharding
        return jnp.take(leaf, position_of_expert_E, axis=axis, mode="clip")

    return jax.tree_util.tree_map_with_path(gather, tree)


def to_physical(
    tree: Any, is_expert: Callable[[tuple], bool], position_of_expert_E: np.ndarray, num_positions: int, axis: int = 0
) -> Any:
    """Inverse of `to_logical`: E experts -> `num_positions` positions, of which the empty ones are zero."""
    num_experts = len(position_of_expert_E)
    expert_of_position_P = np.full(num_positions, num_experts)  # out of range: filled with zeros
    expert_of_position_P[position_of_expert_E] = np.arange(num_experts)

    def gather(path: tuple, leaf: Any) -> Any:
        if not is_expert(path):
            return leaf
        if leaf.shape[axis] != num_experts:
            raise ValueError(f"{_name(path)} has {leaf.shape[axis]} experts; the table has {num_experts}")
        if np.array_equal(expert_of_position_P, np.arange(num_experts)):
            return leaf
        return jnp.take(leaf, expert_of_position_P, axis=axis, mode="fill", fill_value=0)

    return jax.tree_util.tree_map_with_path(gather, tree)


def logical_template(tree: Any, is_expert: Callable[[tuple], bool], num_experts: int, axis: int = 0) -> Any:
    """The template that restores, in logical order, what `tree` (of physical leaves) would hold.

    Sharding: expert leaves keep theirs where the devices divide E, and are replicated otherwise.
    """

    def template(path: tuple, leaf: Any) -> Any:
        if not is_expert(path):
            return leaf
        shape = (*leaf.shape[:axis], num_experts, *leaf.shape[axis + 1 :])
        sharding = leaf.sharding
        if isinstance(sharding, jax.sharding.NamedSharding):
            try:
                sharding.shard_shape(shape)
            except ValueError:
                sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(template, tree)


def _by_name(tree: Any) -> tuple[dict[str, Any], Any]:
    """{"0.mu.layers.w": leaf, ...} in the order of the tree, and its structure."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves = {_name(path): leaf for path, leaf in flat}
    if len(leaves) != len(flat):
        raise ValueError("two leaves of the state have the same path when its keys are joined by dots")
    return leaves, treedef


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _to_array(name: str, leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf) if _is_key(leaf) else leaf
    if isinstance(leaf, (np.ndarray, np.generic, bool, int, float)):
        return np.array(leaf)
    raise TypeError(f"leaf {name!r} is a {type(leaf).__name__}; a checkpoint holds arrays and numbers")


def _signature(leaf: Any) -> list:
    """[shape, dtype], comparable with what JSON gives back."""
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    return [list(leaf.shape), str(leaf.dtype)]


def _mismatches(saved: dict[str, list], wanted: dict[str, list]) -> list[str]:
    problems = [f"{name} is missing there" for name in wanted if name not in saved]
    problems += [f"{name} is there but not expected" for name in saved if name not in wanted]
    return problems + [
        f"{name} is {_describe(saved[name])} there, expected {_describe(signature)}"
        for name, signature in wanted.items()
        if name in saved and saved[name] != signature
    ]


def _describe(signature: list) -> str:
    shape, dtype = signature
    return f"{dtype}[{','.join(map(str, shape))}]"


def _handler() -> ocp.PyTreeCheckpointHandler:
    # By default each replica of an array writes a slice of it: hundreds of tiny compilations in the first save.
    array_handler = ocp.type_handlers.ArrayHandler(use_replica_parallel=False, enable_write_sharding_file=False)
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, array_handler), (np.ndarray, ocp.type_handlers.NumpyHandler())
    )
    return ocp.PyTreeCheckpointHandler(
        type_handler_registry=registry,
        use_compression=False,  # trained weights do not compress
    )


def _restore_args(leaf: Any) -> ocp.RestoreArgs:
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding)
    return ocp.RestoreArgs(restore_type=np.ndarray)


def _like(leaf: Any, value: Any) -> Any:
    return type(leaf)(value.item()) if isinstance(leaf, (bool, int, float)) else value


@contextlib.contextmanager
def _explaining(what: str) -> Iterator[None]:
    """One line for what the machine refused; anything else is a bug and keeps its traceback."""
    try:
        yield
    except (UserError, digest.DamageError):
        raise
    except Exception as error:
        cause = _os_cause(error)
        if cause is None:
            raise RuntimeError(f"{what}: {error}") from error
        raise UserError(f"{what}: {cause}; free its disk, make it writable, or name another --workdir") from error


def _os_cause(error: Exception) -> str | None:
    """What the operating system said, if it is the origin."""
    code = re.search(r"os_error_code='(\d+)'", str(error))  # how tensorstore tells it
    if code:
        return os.strerror(int(code[1]))
    if isinstance(error, OSError):  # a TimeoutError is one, without a strerror
        return error.strerror or str(error) or type(error).__name__
    return None


def _is_not_from_orbax(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname
