"""What a config.json says, read so that nothing in it is passed over: each field is used, known to be harmless, or
refused.
"""

import json
import math
import pathlib
from typing import Any, NoReturn

from fef.config import UserError
from fef.rope import growth

# They change neither the function nor its training in fef.
HARMLESS = {
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "decoder_start_token_id", "dtype", "eos_token_id",
    "initializer_factor", "initializer_range", "is_encoder_decoder", "max_position_embeddings", "max_window_layers",
    "model_type", "output_router_logits", "pad_token_id", "pretraining_tp", "torch_dtype", "transformers_version",
    "use_cache",
}  # fmt: skip
_YARN = {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow"}
_YARN |= {"mscale", "mscale_all_dim", "attention_factor", "truncate"}


class Fields:
    """The fields of one config.json.

    Args:
      values: what the file holds.
      where: the file, for messages.
    """

    def __init__(self, values: dict[str, Any], where: str):
        self._values, self._where, self._read = values, where, set(HARMLESS)

    def need(self, *names: str) -> Any:
        """The value of the first of these names that is there; a UserError when none is."""
        value = self.get(*names, default=self)
        if value is self:
            raise UserError(f"{self._where}: has no field {' or '.join(names)}; without it the model is not known")
        return value

    def get(self, *names: str, default: Any) -> Any:
        """The same with a default, for a field whose absence has a meaning; null counts as absent."""
        self._read.update(names)
        return next((self._values[name] for name in names if self._values.get(name) is not None), default)

    def expect(self, name: str, *allowed: Any) -> None:
        """Refuses a field that is there with another value than these."""
        value = self.get(name, default=allowed[0])
        if value not in allowed:
            self.refuse(name, value, f"fef has {' or '.join(map(repr, allowed))} only")

    def refuse(self, name: str, value: Any, reason: str) -> NoReturn:
        """Raises the UserError that says why a value cannot be."""
        raise UserError(f"{self._where}: {name}={value!r}: {reason}")

    def check_all_read(self) -> None:
        """Refuses fields that nobody has asked for."""
        unknown = {name: value for name, value in self._values.items() if name not in self._read and value is not None}
        if unknown:
            shown = ", ".join(f"{name}={value!r}" for name, value in unknown.items())
            raise UserError(f"{self._where}: fef does not know what these fields do to the model: {shown}")

    def rope(self, *, scores_scaled: bool = False) -> dict[str, Any]:
        """Rotary positions, as values of a Config by key, from the older and the newer way to say them.

        Args:
          scores_scaled: whether this family's `mscale_all_dim` changes the attention scores too.
        """
        said = self.get("rope_parameters", default=None)
        scaling = self.get("rope_scaling", default=None)
        said = dict(said) if said else {**(scaling or {}), "rope_theta": self.need("rope_theta")}
        self._read.add("rope_theta")
        if "rope_theta" not in said:
            said["rope_theta"] = self.need("rope_theta")
        kind = said.get("rope_type", said.get("type", "default"))
        if kind not in ("default", "yarn"):
            self.refuse("rope type", kind, "fef has default and yarn")
        known = _YARN if kind == "yarn" else {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
        unknown = {name: value for name, value in said.items() if name not in known and value is not None}
        if said.get("partial_rotary_factor", 1.0) != 1.0:
            unknown["partial_rotary_factor"] = said["partial_rotary_factor"]
        if unknown:
            self.refuse("rope parameters", unknown, f"fef does not know these of type {kind}")
        theta = {"model.rope_theta": float(said["rope_theta"])}
        return theta | (_yarn(said, scores_scaled) if kind == "yarn" else {})


def _yarn(said: dict[str, Any], scores_scaled: bool) -> dict[str, Any]:
    factor = float(said["factor"])
    mscale, mscale_all_dim = said.get("mscale"), said.get("mscale_all_dim")
    attention_factor = said.get("attention_factor")
    if attention_factor is None and mscale and mscale_all_dim:
        attention_factor = growth(factor, mscale) / growth(factor, mscale_all_dim)
    return {
        "model.yarn.factor": factor,
        "model.yarn.original_len": int(said["original_max_position_embeddings"]),
        "model.yarn.beta_fast": float(said.get("beta_fast") or 32),
        "model.yarn.beta_slow": float(said.get("beta_slow") or 1),
        "model.yarn.truncate": bool(said.get("truncate", True)),
        "model.yarn.attention_factor": None if attention_factor is None else float(attention_factor),
        "model.yarn.score_factor": growth(factor, mscale_all_dim) ** 2 if scores_scaled and mscale_all_dim else 1.0,
    }


def write_rope(model: Any) -> dict[str, Any]:
    """`rope_parameters` of a ModelConfig."""
    yarn = model.yarn
    if yarn.factor == 1:
        return {"rope_type": "default", "rope_theta": model.rope_theta}
    said = {
        "rope_type": "yarn",
        "rope_theta": model.rope_theta,
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_len,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "truncate": yarn.truncate,
    }
    if yarn.attention_factor is not None:
        said["attention_factor"] = yarn.attention_factor
    if yarn.score_factor != 1:
        said["mscale_all_dim"] = (math.sqrt(yarn.score_factor) - 1) / (0.1 * math.log(yarn.factor))
    return said


def read_fields(folder: pathlib.Path) -> Fields:
    """The config.json of a folder. Raises UserError when it is not there or no JSON object."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give the folder of a Hugging Face checkpoint") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: is no JSON object")
    return Fields(values, str(path))
