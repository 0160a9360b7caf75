"""A Hugging Face checkpoint to a configuration and arrays of fef, and back.

An import is a folder with `config.py`, which experiments.train takes, and `checkpoints/0`, the parameters that its
`train.init_from` names. float16 and bfloat16 become float32, which fef's parameters are.
"""

import json
import math
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
from tqdm import tqdm

from fef.checkpoint import Checkpointer
from fef.config import Config, UserError, assign, check_fields, flatten, head_dim, moe_layers, scopes
from fef.hf import Family, family_of
from fef.hf.fields import Fields, read_fields
from fef.hf.tensors import TensorFiles, write_tensors
from fef.layers import make_router, run_lengths
from fef.validation import check_model

TOKENIZER = "tokenizer.json"
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

# Keys that the function does not depend on: how it starts, is computed or is trained.
_BESIDE_THE_FUNCTION = (
    "model.init_scale", "model.dtype", "model.scan_layers", "balance_coef", "balance_scope", "z_coef", "sequence_coef",
    "update_rate", "capacity_factor", "moe.every", "moe.leading_dense",
)  # fmt: skip


def read(folder: pathlib.Path) -> tuple[Config, dict[str, np.ndarray], Family]:
    """The model of a Hugging Face checkpoint.

    Args:
      folder: with config.json and the tensors, in one file or in shards.

    Returns:
      its configuration, its arrays by their names in a checkpoint of fef (float32, experts in logical order), and
      its family.

    Raises:
      UserError: a file that is missing or cut; a field of config.json that fef does not know or cannot follow; tensors
        that are missing, unexpected or misshapen, listed. Nothing is left at a random value.
    """
    fields = read_fields(folder)
    family = family_of(fields)
    config = _config(family, fields)
    fields.check_all_read()
    files = TensorFiles(folder)
    parts = family.parts(config)
    wanted = {name: shape for part in parts for name, shape in part.tensors.items()}
    files.check(wanted, {name for name in files.shapes if family.is_beside_the_model(name, config)})
    arrays: dict[str, np.ndarray] = {}
    for part in tqdm(parts, "reading tensors", unit="array", leave=False):
        values = part.join([files.read(name) for name in part.tensors])
        arrays |= {leaf: np.ascontiguousarray(value) for leaf, value in zip(part.leaves, values, strict=True)}
    return config, arrays, family


def import_checkpoint(source: pathlib.Path, target: pathlib.Path) -> Config:
    """Makes the folder `target`, which must not exist, of the Hugging Face checkpoint in `source`.

    Returns:
      the configuration. Raises: as `read`, before anything is written.
    """
    if target.exists():
        raise UserError(f"{target}: is there already; name a folder that is not, nothing is overwritten")
    config, arrays, family = read(source)
    target.mkdir(parents=True)
    with Checkpointer(target / "checkpoints", keep=1, keep_best=0) as checkpointer:
        checkpointer.save(0, arrays, {"family": family.model_type})
    if (source / TOKENIZER).is_file():
        shutil.copyfile(source / TOKENIZER, target / TOKENIZER)
    (target / "config.py").write_text(_config_py(config, source, family, (target / TOKENIZER).is_file()))
    return config


def export_checkpoint(
    config: Config, arrays: dict[str, Any], family: Family, target: pathlib.Path, dtype: str, shard_bytes: int
) -> list[str]:
    """Makes the folder `target`, which must not exist, a Hugging Face checkpoint.

    Args:
      config: of the model. arrays: its arrays by their names in a checkpoint, or what NumPy reads as such.
      family: what it shall be.
      dtype: of the tensors, "float32" or "bfloat16".
      shard_bytes: size from which on there are several files.

    Returns:
      the files written.

    Raises:
      UserError: the family has no place for something in the configuration (each key is named), or the tokenizer of
        the configuration is gone.
    """
    if target.exists():
        raise UserError(f"{target}: is there already; name a folder that is not, nothing is overwritten")
    said = fields_of(family, config)
    parts = family.parts(config)
    item = DTYPES[dtype]
    tokenizer = config.data.tokenizer
    if tokenizer and not pathlib.Path(tokenizer).is_file():
        raise UserError(f"config.data.tokenizer={tokenizer!r}: no such file any more; the checkpoint would lack it")
    names = {leaf for part in parts for leaf in part.leaves}
    if names != set(arrays):
        raise UserError(f"the model's arrays are not those of {family.model_type}: {sorted(names ^ set(arrays))[:8]}")

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for part in tqdm(parts, "writing tensors", unit="array", leave=False):
            values = part.split([np.asarray(arrays[leaf]) for leaf in part.leaves])
            for name, value in zip(part.tensors, values, strict=True):
                yield name, np.ascontiguousarray(value, item)

    num_bytes = sum(int(np.prod(shape)) * item.itemsize for part in parts for shape in part.tensors.values())
    target.mkdir(parents=True)
    files = write_tensors(target, tensors(), num_bytes, shard_bytes)
    (target / "config.json").write_text(json.dumps(said | {"dtype": dtype}, indent=2) + "\n")
    if tokenizer:
        shutil.copyfile(tokenizer, target / TOKENIZER)
    return [*files, "config.json", *([TOKENIZER] if tokenizer else [])]


def model_arrays(checkpointer: Checkpointer, step: int, config: Config) -> dict[str, np.ndarray]:
    """Parameters and routers' states in a checkpoint, of a run or an import; its optimizer is not read.

    Args:
      config: of the checkpoint. Layers that it has stacked (`model.scan_layers`) are given one by one.
    """
    leaves = {name: shape for name, shape in checkpointer.leaves(step).items() if is_of_the_model(name)}
    template = {name: np.empty(shape, dtype) for name, (shape, dtype) in leaves.items()}
    arrays = checkpointer.restore(step, template, partly=True)[0]
    if not config.model.scan_layers:
        return arrays
    lengths = run_lengths(config)
    single = {}
    for name, array in arrays.items():
        words = name.split(".")  # dense.runs.3.ffn...
        if words[1] != "runs":
            single[name] = array
            continue
        first = sum(lengths[: int(words[2])])
        single |= {".".join([*words[:2], str(first + i), *words[3:]]): layer for i, layer in enumerate(array)}
    return single


def is_of_the_model(leaf: str) -> bool:
    """Whether a leaf of a checkpoint is a parameter or a router's state."""
    return leaf.split(".")[0] in ("experts", "dense", "router")


def _config(family: Family, fields: Fields) -> Config:
    config = Config()
    for key, value in family.read(fields).items():
        assign(config, key, value)
    check_fields(config)
    check_model(config)
    make_router(config)  # which checks its options
    return config


def fields_of(family: Family, config: Config) -> dict[str, Any]:
    """config.json of a Config. What it says is read back, which shows whether the family can say it all."""
    if config.moe.router != family.router:
        raise UserError(f"config.moe.router={config.moe.router!r}: {family.model_type} has {family.router}")
    said = {"architectures": [family.architecture], "model_type": family.model_type, **family.write(config)}
    again = _function(_config(family, Fields(said, f"config.json of family {family.model_type}")))
    lost = [f"{key}={value!r}" for key, value in _function(config).items() if not _is_close(value, again.get(key))]
    if lost:
        raise UserError(f"{family.model_type} has no place for {', '.join(lost)}; choose another --family")
    return said


def _function(config: Config) -> dict[str, Any]:
    """What defines the model's function; keys without a meaning in this Config are left out."""
    model, scope = config.model, scopes(config)
    unused = ["model.head_dim", "model.num_kv_heads"] if model.mla.kv_rank else ["model.mla."]
    unused += ["model.yarn."] if model.yarn.factor == 1 else []
    unused += [] if model.encoder.layers else ["model.encoder.buckets", "model.encoder.max_distance"]
    unused += [] if model.attention.window else ["model.attention.window_every"]
    unused += ["model.d_ff"] if all(moe_layers(config)) else []
    of_the_model = ("model.", "moe.", f"routing.{config.moe.router}.")
    function = {
        f"config.{key}": value
        for key, value in (flatten(config) | {"model.head_dim": head_dim(model)}).items()
        if scope[key] == "model" and key.startswith(of_the_model)
        and not key.startswith(tuple(unused)) and not key.endswith(_BESIDE_THE_FUNCTION)
    }  # fmt: skip
    return function | {"layers with experts": moe_layers(config)}


def _is_close(a: Any, b: Any) -> bool:
    return math.isclose(a, b, rel_tol=1e-6) if isinstance(a, float) and isinstance(b, float) else a == b


def _config_py(config: Config, source: pathlib.Path, family: Family, has_tokenizer: bool) -> str:
    defaults = flatten(Config())
    lines = [f"    config.{key} = {value!r}" for key, value in flatten(config).items() if value != defaults[key]]
    if has_tokenizer:
        lines.append(f'    config.data.tokenizer = str(HERE / "{TOKENIZER}")')
    body = "\n".join(lines)
    return f'''"""{family.architecture}, imported from {source.resolve().name} by experiments.convert."""

import pathlib

from fef.config import Config

HERE = pathlib.Path(__file__).resolve().parent


def get_config() -> Config:
    config = Config()
{body}
    config.train.init_from = str(HERE / "checkpoints")
    return config
'''
