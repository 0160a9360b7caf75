"""The training step: one function of the parameters, whatever carries it out."""


import numpy as np
import pytest
from small import assert_close, assert_equal, batch, fast_compilation, leaves, take_steps  # noqa: F401

LAYERS_2 = {"model.num_layers": 2}

# Each way of carrying out a step is in one of these at least.
VARIANTS = {
    "all_to_all": {"moe.dispatcher": "all_to_all"},
    "all_to_all, shifted, remat dots": {
        "moe.dispatcher": "all_to_all",
        "dispatch.all_to_all.form": "shifted",
        "model.remat": "dots",
    },
    "all_gather, 2 microbatches": {"moe.dispatcher": "all_gather", "train.microbatches": 2},
    "reference, data 2 x expert 2": {"mesh.data": 2},
    "pooled": {"moe.dispatcher": "pooled"},
    "pooled, remat full, data 2 x expert 2": {
        "moe.dispatcher": "pooled",
        "model.remat": "full",
        "mesh.data": 2,
    },
    "pooled, layers scanned, 2 microbatches": {
        "moe.dispatcher": "pooled",
        "model.scan_layers": True,
        "train.microbatches": 2,
    },
    "pooled, jax matmul": {"moe.dispatcher": "pooled", "dispatch.matmul": "jax"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_way_gives_the_loss_curve_of_the_reference(variant):
    expected, steps = take_steps(LAYERS_2), take_steps(LAYERS_2 | VARIANTS[variant])
    assert expected.curve()[-1] < expected.curve()[0] - 0.3  # the steps went somewhere
    for name in ("loss", "aux_loss", "grad_norm", "entropy_L"):
        np.testing.assert_allclose(steps.curve(name), expected.curve(name), rtol=1e-5, atol=1e-6, err_msg=name)
    for name in ("load_LE", "kept_LE", "tokens", "skipped_updates"):
        np.testing.assert_array_equal(steps.curve(name), expected.curve(name), err_msg=name)
    if not VARIANTS[variant].get("model.scan_layers"):  # whose leaves stack the layers
        assert_close(steps.after.params, expected.after.params)
