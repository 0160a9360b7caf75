"""measure: the matmuls that are timed are those that are counted."""

import re

import jax

from fef.fabric import measure
from fef.ffn import SWIGLU
from fef.sharding import make_mesh


def test_every_matmul_that_is_counted_is_timed(monkeypatch):
    programs = []

    def median_seconds(run, *args):
        programs.append(run.lower(*args).compile().as_text())
        return 1e-3 * (1 + args[0].shape[0])  # seconds: one, and one for each row, of a thousand

    monkeypatch.setattr(measure, "_median_seconds", median_seconds)
    mesh = make_mesh(1)
    flops, half_rows = measure.gemm_rate(mesh, SWIGLU, 16, 8, "native", rows=(32, 64))
    for text in programs:
        assert len(re.findall(r'custom_call_target="fef_grouped_\w+"', text)) == 9  # three forward, six backward
    assert jax.numpy.allclose(flops, 9 * 2 * 16 * 8 / 1e-3) and jax.numpy.allclose(half_rows, 1)
