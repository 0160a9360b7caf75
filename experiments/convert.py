"""Takes a Hugging Face checkpoint into fef, and a run of fef back to one.

    python -m experiments.convert import HF_FOLDER IMPORTED
    python -m experiments.train --config=IMPORTED/config.py --workdir=RUN
    python -m experiments.convert export RUN HF_FOLDER --family=mixtral

An import holds config.py, the parameters that the first step of a training with it starts from, and the tokenizer if
there was one. What is exported is a run, its newest checkpoint or that of --step, or an import. Of a checkpoint all is
checked before anything is written: files that are missing or cut, tensors that are missing, unexpected or misshapen,
and fields of config.json that fef cannot follow.
"""

import json
import pathlib

from absl import flags

from experiments.flags import load_config, parse_flags, run, words_first
from fef.checkpoint import Checkpointer
from fef.config import Config, UserError, from_dict
from fef.hf import FAMILIES, convert, get_family
from fef.registry import scan

_USAGE = "import HF_FOLDER IMPORTED or export RUN HF_FOLDER --family=NAME"


def define(values: flags.FlagValues) -> None:
    scan("fef.hf")
    families = ", ".join(FAMILIES)
    flags.DEFINE_string("family", None, f"export: what the checkpoint shall be: {families}", flag_values=values)
    flags.DEFINE_integer("step", None, "export: which checkpoint of the run; the newest if absent", flag_values=values)
    flags.DEFINE_enum("dtype", "float32", list(convert.DTYPES), "export: type of the tensors", flag_values=values)
    flags.DEFINE_float(
        "shard_gb", 5.0, "export: size from which on there are several files, 1e9 bytes", flag_values=values,
        lower_bound=1e-6,
    )  # fmt: skip


def main(argv: list[str]) -> None:
    words, argv = words_first(argv)
    values = parse_flags(argv, define, doc=__doc__ or "")
    if len(words) != 3 or words[0] not in ("import", "export"):
        raise UserError(f"say {_USAGE}, not {' '.join(words) or 'nothing'}")
    action, source, target = words[0], pathlib.Path(words[1]), pathlib.Path(words[2])
    if action == "import":
        convert.import_checkpoint(source, target)
        print(f"{target}: train it with python -m experiments.train --config={target / 'config.py'} --workdir=...")
        return
    if not values.family:
        raise UserError(f"export needs --family, one of {', '.join(FAMILIES)}")
    family = get_family(values.family)
    config = _config_of(source)
    if not (source / "checkpoints").is_dir():
        raise UserError(f"{source}: has no folder checkpoints; give the folder of a run or of an import")
    with Checkpointer(source / "checkpoints", keep=1, keep_best=0) as checkpointer:
        step = checkpointer.latest()[0] if values.step is None else values.step
        if step is None:
            raise UserError(f"{source}: holds no complete checkpoint")
        arrays = convert.model_arrays(checkpointer, step, config)
    files = convert.export_checkpoint(config, arrays, family, target, values.dtype, int(values.shard_gb * 1e9))
    print(f"{target}: step {step} in {', '.join(files)}")


def _config_of(source: pathlib.Path) -> Config:
    """The configuration of a run (config.json) or of an import (config.py)."""
    if (source / "config.py").is_file():
        return load_config(str(source / "config.py"))
    try:
        return from_dict(json.loads((source / "config.json").read_text()))
    except (OSError, ValueError) as error:
        raise UserError(f"{source}: has neither config.py nor a readable config.json: {error}") from None


if __name__ == "__main__":
    run(main)
