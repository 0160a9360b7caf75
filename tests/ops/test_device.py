"""Modelled device time: what it costs by hand, and that every dispatcher gives the same under it."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dispatch_harness import Case, F, Inputs, Result, Variant, assert_close, expected, make_inputs, run, variants_on_cpu

from fef.config import Config, ConfigError
from fef.dispatch import DISPATCHERS
from fef.experts import Experts
from fef.ffn import SWIGLU
from fef.native import build
from fef.ops.device import Device
from fef.ops.expert_ffn import expert_ffn
from fef.ops.grouped_matmul import Segments
from fef.testing.workloads import workload
from fef.validation import validate

CASE = Case(members=4, experts=6, choices=2, tokens=8)
WITH_VALUES, WITHOUT_VALUES = Device(1e12, 3.0), Device(1e12, 3.0, has_values=False)
VARIANTS = [v for v in variants_on_cpu() if DISPATCHERS.get(v.dispatcher).models_device]
VARIANTS += [Variant("pooled", matmul="jax"), Variant("all_to_all", options=(("form", "shifted"),))]
VARIANTS += [Variant("fluid", options=(("mode", "tokens"),))]
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.label)


@pytest.fixture(scope="module", autouse=True)
def built_library():
    build.build()


@pytest.fixture(scope="module")
def stored() -> dict[str, Inputs]:
    names = ("hot_experts", "ragged_sources", "zero_load")
    return {name: inputs_of(CASE, name) for name in names}


def inputs_of(case: Case, name: str) -> Inputs:
    return make_inputs(case, workload(name, case.members, case.tokens, case.experts, case.choices))


def test_the_docstrings_example():
    assert Device(100.0, 5.0).seconds([20, 0], 10.0) == 2.5


@every_variant
def test_values_are_those_of_the_matmuls(variant, stored):
    for name, result in run(CASE, dataclasses.replace(variant, device=WITH_VALUES), stored).items():
        assert_close(result, expected(CASE, stored[name]), name)


@every_variant
@pytest.mark.parametrize("ffn", ["swiglu", "relu", "clamped_swiglu"])
def test_the_stand_in_is_the_same_everywhere(variant, ffn, stored):
    case = dataclasses.replace(CASE, ffn=ffn)
    if ffn != "swiglu":
        stored = {"hot_experts": inputs_of(case, "hot_experts")}
    for name, result in run(case, dataclasses.replace(variant, device=WITHOUT_VALUES), stored).items():
        assert_close(result, stood_in(stored[name]), name)


def stood_in(inputs: Inputs) -> Result:
    """y = x * w, w the sum of the matrices' means over F, and its gradients, row by row; biases have none."""
    x_TD, target_TD = inputs.x_TD.astype(np.float64), inputs.target_TD.astype(np.float64)
    experts = inputs.experts.astype(np.float64)
    matrices = {part: w for part, w in experts.parts.items() if part.startswith("w_")}
    w_PD = sum(w.mean(1 if part == "w_down" else 2) for part, w in matrices.items())
    y_TD, dx_TD, dweight_N = np.zeros_like(x_TD), np.zeros_like(x_TD), np.zeros(inputs.weight_N.shape)
    dw_PD = np.zeros(w_PD.shape)
    token_N, expert_N, valid_N = inputs.ints
    for n in np.flatnonzero(valid_N):
        t = n // (len(token_N) // CASE.members) * CASE.tokens + token_N[n]
        p, weight = CASE.table.position_E[expert_N[n]], float(inputs.weight_N[n])
        y_TD[t] += weight * x_TD[t] * w_PD[p]
        dx_TD[t] += weight * target_TD[t] * w_PD[p]
        dweight_N[n] = (x_TD[t] * w_PD[p]) @ target_TD[t]
        dw_PD[p] += weight * target_TD[t] * x_TD[t]
    dexperts = jax.tree.map(np.zeros_like, experts).parts
    for part in matrices:
        dexperts[part][:] = dw_PD[:, None] / F if part == "w_down" else dw_PD[:, :, None] / F
    return Result(np.sum(y_TD * target_TD), y_TD, dx_TD, dweight_N, Experts(experts.kind, dexperts))


def test_it_takes_its_time():
    """Of an expert with two segments, one without rows and one with one; a pass that computes sleeps for the rest."""
    d_model, d_expert, rows = 4, 4, np.array([3, 0, 2, 1], np.int32)
    segments = Segments(jnp.array([0, 3, 3, 5]), jnp.asarray(rows), jnp.array([0, 1, 0, 2]))
    device = Device(flops=6.0 * d_model * d_expert * 100, half_rows=2.0)
    forward_s = device.seconds([5, 0, 1], 6.0 * d_model * d_expert)
    assert forward_s == pytest.approx(0.1)
    experts = Experts(SWIGLU, dict.fromkeys(SWIGLU.parts, jnp.ones((3, 4, 4))))

    def loss(x_ND: jax.Array) -> jax.Array:
        return expert_ffn(x_ND, experts, segments, device=device).sum()

    x_ND = jnp.ones((6, 4))
    for function, wanted_s in ((loss, forward_s), (jax.value_and_grad(loss), 3 * forward_s)):
        compiled = jax.jit(function).lower(x_ND).compile()
        begin = time.monotonic()
        jax.block_until_ready(compiled(x_ND))
        assert time.monotonic() - begin >= wanted_s  # never less; how much more is the machine's affair


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"moe.dispatcher": "reference", "device.flops": 1e9}, "the reference dispatcher models no device time"),
        ({"model.remat": "full", "device.flops": 1e9}, "does not cover recomputation"),
        ({"device.values": False}, "leaves the matmuls out, so say how long they take: device.flops"),
    ],
)
def test_what_cannot_be_modelled_is_refused(values, message):
    config = Config()
    for key, value in values.items():
        section, name = key.split(".")
        setattr(getattr(config, section), name, value)
    with pytest.raises(ConfigError, match=message):
        validate(config)
