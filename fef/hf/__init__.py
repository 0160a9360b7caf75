"""Checkpoints of Hugging Face transformers: which configuration and which parameters they hold. One family a file.

A family says, both ways, how `config.json` reads as a `Config` and which tensors make which of fef's arrays. The layout
of a tensor comes from the family, never from its shape: a square matrix looks the same transposed.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from fef.config import Config, UserError
from fef.hf.fields import Fields
from fef.registry import Registry, scan


@dataclasses.dataclass(frozen=True)
class Part:
    """Arrays of fef and the tensors that make them; most often one of each.

    Attributes:
      leaves: the arrays' names in a checkpoint of fef; experts are in logical order, E is their first dimension.
      tensors: name -> shape.
      join: the tensors, float32 and in the order of `tensors`, to the arrays, in the order of `leaves`.
      split: the arrays to the tensors.
    """

    leaves: tuple[str, ...]
    tensors: dict[str, tuple[int, ...]]
    join: Callable[[list[np.ndarray]], list[np.ndarray]]
    split: Callable[[list[np.ndarray]], list[np.ndarray]]


class Family(Protocol):
    """A kind of model that transformers knows.

    Attributes:
      model_type, architecture: what config.json calls it.
      router: fef's name of its routing scheme.
    """

    model_type: str
    architecture: str
    router: str

    def read(self, fields: Fields) -> dict[str, Any]:
        """What config.json says, as values of a Config by key; keys that it does not name have their default."""
        ...

    def write(self, config: Config) -> dict[str, Any]:
        """The fields of config.json that this family has for a Config, beside `model_type` and `architectures`."""
        ...

    def parts(self, config: Config) -> list[Part]:
        """All parameters and routers' states of a Config that `read` has made."""
        ...

    def is_beside_the_model(self, tensor: str, config: Config) -> bool:
        """Whether a checkpoint of this family may have this tensor, which belongs to no part."""
        ...


FAMILIES: Registry = Registry("family")


def family_of(fields: Fields) -> Family:
    """The family that config.json names. Raises UserError when fef does not know it."""
    scan("fef.hf")
    model_type = fields.need("model_type")
    if model_type not in FAMILIES.names():
        fields.refuse("model_type", model_type, f"fef reads {', '.join(FAMILIES)}")
    return FAMILIES.get(model_type)()


def get_family(name: str) -> Family:
    """The family of that name. Raises UserError."""
    scan("fef.hf")
    try:
        return FAMILIES.get(name)()
    except ValueError as error:
        raise UserError(f"--family={name}: {error}") from None
