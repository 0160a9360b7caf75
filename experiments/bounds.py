"""What a measured step is held against: utilisation, the floor, and the bound of a perfectly overlapped all_to_all.

All of it comes from fields of a row of experiments.bench_stack: `tokens` (T), `layer_s` (the time of a layer for T*K
rows at the rate of a large GEMM, modelled or measured), `step_ms`, `bytes` (received by the busiest member), `flags`.

    compute      the time of all real rows, shared out evenly: what no dispatcher can save
    wire         this dispatcher's bytes at the rate of a host's link
    utilisation  compute / step. Imbalance, small GEMMs and waiting all count as loss.
    floor        the larger of compute and the wire time of the fewest bytes among the dispatchers of a cell
    overlapped   all_to_all at its best: a row for each choice, without padding, all hidden under the compute of another
                 micro-batch. The larger of the busiest member's compute and of its rows' time on the link, for rows do
                 not leave a hot expert's home: that loss no overlap hides.
    straggler    rows that the busiest member computes, by the mean: where tokens travel, of the experts' homes; where
                 weights do, of the members that hold the tokens. None for a dispatcher that mixes both.
    dropped      what slots of capacity factor 1.25 would drop; no dispatcher here drops anything
    break-even   where moving weights and moving tokens cost the same, in bytes (T*) or in time

Links between leaves count in none of them.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fef.dispatch.base import UnitSizes
from fef.fabric.cost import CROSSINGS, Layer
from fef.ffn import SWIGLU
from fef.pool.table import ExpertTable
from fef.testing.workloads import workload

ELEMENT_BYTES = 4  # of a row's float32
CAPACITY_FACTOR = 1.25  # GShard's in training, by which others drop


def compute_ms(row: dict[str, Any]) -> float:
    """The device's time for all real rows of a step, of a member when all have as many."""
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


def straggler(row: dict[str, Any]) -> float | None:
    """The busiest member's rows by the mean, 1 at best."""
    load_ME, name = _load_ME(row), row["dispatcher"]
    if name.startswith(("all_to_all", "fluid:mode=tokens")):
        rows_M = _sent_MH(row).sum(0)
    elif name.startswith(("all_gather", "pooled")):
        rows_M = load_ME.sum(1)
    else:
        return None
    return float(rows_M.max() / rows_M.mean())


def dropped(row: dict[str, Any]) -> float:
    """The part of the rows beyond a capacity of CAPACITY_FACTOR times the mean of each member and expert."""
    load_ME = _load_ME(row)
    capacity = math.ceil(CAPACITY_FACTOR * _places(row) / row["flags"]["experts"])
    return float(np.maximum(load_ME - capacity, 0).sum() / load_ME.sum())


def overlapped_ms(row: dict[str, Any]) -> float:
    """The shortest step of an all_to_all whose exchange is hidden, under this row's routing."""
    setting, sent_MH = row["flags"], _sent_MH(row)
    served_M = sent_MH.sum(0)
    own_M = sent_MH.diagonal()
    # Half of a row's crossings come to its home, half go back to where it came from.
    received_M = CROSSINGS / 2 * ((served_M - own_M) + (sent_MH.sum(1) - own_M))
    row_bytes = setting["layers"] * setting["d_model"] * ELEMENT_BYTES
    busiest_ms = _full_ms(row) * float(served_M.max()) / _places(row)
    return max(busiest_ms, _on_link_ms(float(received_M.max()) * row_bytes, row))


def break_even_rows(row: dict[str, Any]) -> float:
    """T*: rows of one expert on one member from which on its weights are the fewer bytes."""
    return _layer(row).break_even


def break_even_tokens(row: dict[str, Any]) -> float:
    """T from which on weights take less time than token rows, under balanced routing.

    Weights hide under compute, token rows do not: max(c T, w) = (c + r) T, with c the device's time of a token in a
    layer, r that of its rows on the link and w that of all remote blocks and gradients. So T = w / (c + r).
    """
    setting, layer = row["flags"], _layer(row)
    remote = 1 - 1 / setting["members"]
    token_ms = row["layer_s"] * 1e3 / row["tokens"]
    rows_ms = _on_link_ms(setting["choices"] * remote * layer.row_bytes, row)
    weights_ms = _on_link_ms(setting["experts"] * remote * layer.weight_bytes, row)
    return weights_ms / (token_ms + rows_ms)


def flop_per_byte(row: dict[str, Any]) -> float:
    """FLOP that a device does while a byte passes its link."""
    flops_per_s = _layer(row).flops_per_row * _places(row) / row["layer_s"]
    return flops_per_s * _on_link_ms(1.0, row) / 1e3


def hiding_rows(members: int, element_bytes: float, flop_per_byte: float) -> float:
    """Rows of each expert on each member from which on weights hide under compute.

    A row takes 6 P FLOP, forward and backward; a member that uses all experts receives (R - 1) / R of the blocks and of
    its own gradients, P b bytes each.
    """
    return (members - 1) / members * element_bytes * flop_per_byte / 3


def _layer(row: dict[str, Any]) -> Layer:
    setting = row["flags"]
    d_model, d_expert = setting["d_model"], setting["d_expert"]
    units = UnitSizes(ELEMENT_BYTES).for_shapes(SWIGLU, d_model, d_expert)
    return Layer(
        ExpertTable(setting["experts"], setting["members"]), units, 3 * SWIGLU.flops_per_row(d_model, d_expert)
    )


def _sent_MH(row: dict[str, Any]) -> np.ndarray:
    """(R, R): a member's rows for the experts that are at home on another."""
    setting, load_ME = row["flags"], _load_ME(row)
    home_E = ExpertTable(setting["experts"], setting["members"]).home_E
    return np.stack([load_ME[:, home_E == home].sum(1) for home in range(setting["members"])], 1)


def _full_ms(row: dict[str, Any]) -> float:
    """Of a member that has a row for each of its T*K places."""
    return row["flags"]["layers"] * row["layer_s"] * 1e3


def _places(row: dict[str, Any]) -> int:
    return row["tokens"] * row["flags"]["choices"]


def _on_link_ms(num_bytes: float, row: dict[str, Any]) -> float:
    bits_per_ms = row["flags"]["nic"] * 1e3
    return num_bytes * 8 / bits_per_ms if bits_per_ms else 0.0  # no link, nothing to wait for


def _load_ME(row: dict[str, Any]) -> np.ndarray:
    setting = row["flags"]
    return _load_of(
        setting["workload"], setting["members"], row["tokens"], setting["experts"], setting["choices"]
    )  # fmt: skip


@functools.cache  # a grid has a row for each dispatcher, and a workload takes a while to draw
def _load_of(name: str, members: int, tokens: int, experts: int, choices: int) -> np.ndarray:
    """(R, E): a member's rows of each expert."""
    return np.asarray(workload(name, members, tokens, experts, choices).metrics["load_E"])
