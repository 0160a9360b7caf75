"""What the cost model knows of the machines: links and devices, as they were measured once.

Letters: R members.
"""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from fef.config import UserError
from fef.metrics import write_json_atomic


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Rates of a group of members. Choices depend on nothing else that was measured: equal files, equal choices.

    Attributes:
      bytes_per_s: of blocks and gradients, payload that one member receives, or sends, in a second, while all do.
      row_bytes_per_s: the same of token rows, with what it takes to gather them and to add up their results.
      latency_s: of a crossing of few rows, there or back.
      flops: rate of a large GEMM of one member, FLOP/s.
      half_rows: rows at which a GEMM has half of that rate.
      measured: where and how, for people.
    """

    bytes_per_s: float
    row_bytes_per_s: float
    latency_s: float
    flops: float
    half_rows: float
    measured: str = ""

    def save(self, path: pathlib.Path) -> None:
        """Writes it as JSON, whole or not at all."""
        write_json_atomic(path, dataclasses.asdict(self))


# Of no machine: what choices go by when nothing was measured and no file is named.
NOMINAL = Calibration(1.25e9, 1.25e9, latency_s=50e-6, flops=1e11, half_rows=32.0, measured="nominal")


_in_use: list[Calibration] = []


@contextlib.contextmanager
def using(calibration: Calibration) -> Iterator[None]:
    """Inside, dispatchers that choose by time and name no file choose by these rates."""
    _in_use.append(calibration)
    try:
        yield
    finally:
        _in_use.pop()


def current() -> Calibration:
    """The innermost one in use, or the nominal one."""
    return _in_use[-1] if _in_use else NOMINAL


def load(path: str | pathlib.Path) -> Calibration:
    """Reads what `Calibration.save` has written.

    Raises:
      UserError: no such file, or not a calibration; names the file, the field and its value.
    """
    try:
        fields: dict[str, Any] = json.loads(pathlib.Path(path).read_text())
        calibration = Calibration(**fields)
    except OSError as error:
        raise UserError(f"calibration {path}: {error.strerror}; python -m experiments.calibrate writes one") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"calibration {path}: {error}; python -m experiments.calibrate writes a new one") from None
    for name in ("bytes_per_s", "row_bytes_per_s", "latency_s", "flops", "half_rows"):
        value = getattr(calibration, name)
        lowest = 0.0 if name in ("latency_s", "half_rows") else np.finfo(np.float32).tiny
        if not isinstance(value, int | float) or not lowest <= value < np.inf:
            raise UserError(f"calibration {path}: {name}={value!r}: must be a number from {lowest:.2g} up")
    return calibration
