"""Files of tensors: opened, checked as a whole before anything is used, and written.

Source of the format: safetensors, "Format" (8 bytes of length, a JSON header, the data).
"""

import json
import pathlib
import struct
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fef.config import UserError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FLOATS = ("F32", "F16", "BF16")
_MAX_SHOWN = 8


class TensorFiles:
    """The tensors of a folder, read one at a time.

    Args:
      folder: with model.safetensors, or its shards with or without their index.

    Raises:
      UserError: a file that is missing, cut, no safetensors file, or lacks a tensor that the index promises.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        promised = _promised(folder)
        self._file: dict[str, pathlib.Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._types: dict[str, str] = {}
        for path in sorted({folder / name for name in promised.values()} if promised else _shards(folder)):
            for name, (shape, kind) in _header(path).items():
                if promised.get(name, path.name) != path.name or name in self._file:
                    raise UserError(f"{path}: has tensor {name}, which is in another file too")
                self._file[name], self.shapes[name], self._types[name] = path, shape, kind
        missing = [f"{name} ({file})" for name, file in promised.items() if name not in self._file]
        if missing:
            raise UserError(f"{folder / _INDEX}: tensors are not in the files that it names: {_shown(missing)}")

    def check(self, wanted: dict[str, tuple[int, ...]], beside: set[str]) -> None:
        """Raises one UserError that lists every missing, unexpected, misshapen or non-float tensor.

        Args:
          wanted: name -> shape.
          beside: names that may be there as well, unused.
        """
        problems = {
            "missing": [name for name in wanted if name not in self.shapes],
            "unexpected": [name for name in self.shapes if name not in wanted and name not in beside],
            "of another shape": [
                f"{name} is {list(self.shapes[name])}, expected {list(shape)}"
                for name, shape in wanted.items()
                if name in self.shapes and self.shapes[name] != shape
            ],
            "of a type that is no float": [
                f"{name} is {self._types[name]}" for name in wanted if self._types.get(name, "F32") not in _FLOATS
            ],
        }
        found = [f"{len(names)} {what}: {_shown(names)}" for what, names in problems.items() if names]
        if found:
            raise UserError(f"{self.folder}: its tensors are not those of its config.json; {'; '.join(found)}")

    def read(self, name: str) -> np.ndarray:
        """One tensor as float32."""
        with safe_open(self._file[name], framework="numpy") as file:
            return file.get_tensor(name).astype(np.float32)


def write_tensors(folder: pathlib.Path, tensors: Any, num_bytes: int, shard_bytes: int) -> list[str]:
    """Writes model.safetensors, or shards with their index when it would pass `shard_bytes`; returns the files' names.

    Args:
      folder: is there and empty.
      tensors: iterator of (name, array); one shard is held in memory at a time.
      num_bytes: of all tensors.
      shard_bytes: size of a shard's tensors; a larger tensor has a shard of its own.
    """
    if num_bytes <= shard_bytes:
        save_file(dict(tensors), folder / _SINGLE, metadata={"format": "pt"})
        return [_SINGLE]
    shards: list[list[str]] = []
    shard: dict[str, np.ndarray] = {}

    def flush() -> None:
        save_file(shard, folder / f"part-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, array in tensors:
        if shard and sum(other.nbytes for other in shard.values()) + array.nbytes > shard_bytes:
            flush()
        shard[name] = array
    flush()
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for i, file in enumerate(files):
        (folder / f"part-{i}").rename(folder / file)
    weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return files


def _promised(folder: pathlib.Path) -> dict[str, str]:
    """Tensor -> file, as the index says; {} without one."""
    path = folder / _INDEX
    if not path.exists():
        return {}
    try:
        promised = json.loads(path.read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: is no index of shards: {error!r}") from None
    for file in sorted(set(promised.values())):
        if pathlib.PurePath(file).name != file or not (folder / file).is_file():
            raise UserError(f"{path}: names {file}, and {folder} has no such file; fetch the checkpoint whole")
    return promised


def _shards(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files of a folder without an index."""
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    found = sorted(folder.glob("model-*-of-*.safetensors"))
    if not found:
        raise UserError(f"{folder}: has neither {_SINGLE} nor shards model-*-of-*.safetensors")
    total = found[0].stem.rsplit("-", 1)[1]
    wanted = [f"model-{i + 1:05d}-of-{total}.safetensors" for i in range(int(total))] if total.isdigit() else []
    if [path.name for path in found] != wanted:
        raise UserError(f"{folder}: without {_INDEX} all of {', '.join(wanted)} are needed; there are "
                        f"{', '.join(path.name for path in found)}")  # fmt: skip
    return found


def _header(path: pathlib.Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Tensor -> shape and type; the file's size is checked by it."""
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size:
                raise ValueError(f"it says that its header has {length} bytes")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        needed = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        tensors = {name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise UserError(f"{path}: {size} bytes, is no whole safetensors file: {error}") from None
    if size != needed:
        raise UserError(f"{path}: has {size} of {needed} bytes; fetch it again")
    try:
        with safe_open(path, framework="numpy"):
            return tensors
    except SafetensorError as error:
        raise UserError(f"{path}: {error}") from None


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return ", ".join(names[:_MAX_SHOWN]) + more
