"""What a measured step is held against: utilisation, the floor, and the bound of a perfectly overlapped all_to_all.

All of it comes from fields of a row of experiments.bench_stack: `tokens` (T), `layer_s` (the modelled time of a layer
for T*K rows at the rate of a large GEMM), `step_ms`, `bytes` (received by the busiest member) and `flags`.

    compute      the time of all real rows, shared out evenly: what no dispatcher can save
    wire         this dispatcher's bytes at the rate of a host's link
    utilisation  compute / step. Imbalance, small GEMMs and waiting all count as loss.
    floor        the larger of compute and the wire time of the fewest bytes among the dispatchers of a cell
    overlapped   all_to_all at its best: a row for each choice, without padding, all hidden under the compute of another
                 micro-batch. The larger of the busiest member's compute and of its rows' time on the link, for rows do
                 not leave a hot expert's home: that loss no overlap hides.

Links between leaves count in none of them.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from fef.fabric.cost import CROSSINGS
from fef.pool.table import ExpertTable
from fef.testing.workloads import workload

ELEMENT_BYTES = 4  # of a row's float32


def compute_ms(row: dict[str, Any]) -> float:
    """The modelled time of all real rows of a step, of a member when all have as many."""
    return _full_ms(row) * float(_load_ME(row).sum()) / (row["flags"]["members"] * _places(row))


def wire_ms(row: dict[str, Any]) -> float:
    """The time of the busiest member's bytes on its link, without headers."""
    return _on_link_ms(row["bytes"], row)


def utilisation(row: dict[str, Any]) -> float:
    """The part of the step in which a device computes, 0 to 1."""
    return compute_ms(row) / row["step_ms"]


def floor_ms(rows: Sequence[dict[str, Any]]) -> float:
    """The shortest step that dispatchers which move the fewest bytes of these rows, of one cell, could take."""
    return max(compute_ms(rows[0]), min(wire_ms(row) for row in rows))


def overlapped_ms(row: dict[str, Any]) -> float:
    """The shortest step of an all_to_all whose exchange is hidden, under this row's routing."""
    setting, load_ME = row["flags"], _load_ME(row)
    home_E = ExpertTable(setting["experts"], setting["members"]).home_E
    sent_MH = np.stack([load_ME[:, home_E == home].sum(1) for home in range(setting["members"])], 1)
    served_M = sent_MH.sum(0)
    own_M = sent_MH.diagonal()
    # Half of a row's crossings come to its home, half go back to where it came from.
    received_M = CROSSINGS / 2 * ((served_M - own_M) + (sent_MH.sum(1) - own_M))
    row_bytes = setting["layers"] * setting["d_model"] * ELEMENT_BYTES
    busiest_ms = _full_ms(row) * float(served_M.max()) / _places(row)
    return max(busiest_ms, _on_link_ms(float(received_M.max()) * row_bytes, row))


def _full_ms(row: dict[str, Any]) -> float:
    """Of a member that has a row for each of its T*K places."""
    return row["flags"]["layers"] * row["layer_s"] * 1e3


def _places(row: dict[str, Any]) -> int:
    return row["tokens"] * row["flags"]["choices"]


def _on_link_ms(num_bytes: float, row: dict[str, Any]) -> float:
    return num_bytes * 8 / (row["flags"]["nic"] * 1e3)


def _load_ME(row: dict[str, Any]) -> np.ndarray:
    setting = row["flags"]
    return _load_of(
        setting["workload"], setting["members"], row["tokens"], setting["experts"], setting["choices"]
    )  # fmt: skip


@functools.cache  # a grid has a row for each dispatcher, and a workload takes a while to draw
def _load_of(name: str, members: int, tokens: int, experts: int, choices: int) -> np.ndarray:
    """(R, E): a member's rows of each expert."""
    return np.asarray(workload(name, members, tokens, experts, choices).metrics["load_E"])
