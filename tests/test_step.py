"""The training step: one function of the parameters, whatever carries it out."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from small import (  # noqa: F401
    SMALL,
    assert_close,
    assert_empty_positions_are_zero,
    assert_equal,
    batch,
    fast_compilation,
    leaves,
    small_config,
    take_steps,
)

from fef import sharding
from fef.checkpoint import to_logical
from fef.pool.pool import Pool
from fef.step import Stepper, is_expert

# Each way of carrying out a step is in one of these at least.
VARIANTS = {
    "all_to_all, data 2 x expert 2": {"moe.dispatcher": "all_to_all", "mesh.data": 2},
    "all_gather, remat dots, 2 microbatches": {
        "moe.dispatcher": "all_gather",
        "model.remat": "dots",
        "train.microbatches": 2,
    },
    "pooled": {"moe.dispatcher": "pooled", "model.num_layers": 2},
    "pooled, jax matmul, remat full, data 2 x expert 2": {
        "moe.dispatcher": "pooled",
        "dispatch.matmul": "jax",
        "model.num_layers": 2,
        "model.remat": "full",
        "mesh.data": 2,
    },
    "fluid, remat full, 2 microbatches": {
        "moe.dispatcher": "fluid",
        "dispatch.fluid.mode": "tokens",
        "model.num_layers": 2,
        "model.remat": "full",
        "train.microbatches": 2,
    },
    "fluid by bytes, layers scanned, data 2 x expert 2": {
        "moe.dispatcher": "fluid",
        "dispatch.fluid.cost": "bytes",
        "model.num_layers": 2,
        "model.scan_layers": True,
        "mesh.data": 2,
    },
    "pooled, layers scanned, 2 microbatches": {
        "moe.dispatcher": "pooled",
        "model.num_layers": 2,
        "model.scan_layers": True,
        "train.microbatches": 2,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_way_gives_the_loss_curve_of_the_reference(variant):
    changes = VARIANTS[variant]
    expected, steps = take_steps({"model.num_layers": changes.get("model.num_layers", 1)}), take_steps(changes)
    assert expected.curve()[-1] < expected.curve()[0] - 0.3  # the steps went somewhere
    for name in ("loss", "aux_loss", "grad_norm", "entropy_L"):
        np.testing.assert_allclose(steps.curve(name), expected.curve(name), rtol=1e-5, atol=1e-6, err_msg=name)
    for name in ("load_LE", "kept_LE", "tokens", "skipped_updates"):
        np.testing.assert_array_equal(steps.curve(name), expected.curve(name), err_msg=name)
    if not changes.get("model.scan_layers"):  # whose leaves stack the layers
        assert_close(steps.after.params, expected.after.params)


def test_bfloat16_stays_near_float32():
    # Eight bits of mantissa: a relative error of 4e-3 in each activation, much less in a mean over 78 tokens.
    expected, steps = take_steps(), take_steps({"moe.dispatcher": "pooled", "model.dtype": "bfloat16"})
    np.testing.assert_allclose(steps.curve(), expected.curve(), atol=0.02)
    assert not np.array_equal(steps.curve(), expected.curve())
    assert all(leaf.dtype == np.float32 for leaf in leaves(steps.after.params).values())


# D-04: each parameter counts once in the norm of the gradient, and no factor depends on the number of members.


@pytest.mark.parametrize("members", [1, 2])
def test_the_gradient_and_its_norm_do_not_depend_on_the_members(members):
    on_four, steps = take_steps(), take_steps({"moe.dispatcher": "pooled", "mesh.devices": members}, 1)
    assert_equal(steps.before, on_four.before)
    np.testing.assert_allclose(steps.rows[0]["grad_norm"], on_four.rows[0]["grad_norm"], rtol=1e-5)
    gradient = one_gradient(steps.before, steps.after)
    norm = np.sqrt(sum(np.square(leaf, dtype=np.float64).sum() for leaf in leaves(gradient).values()))
    np.testing.assert_allclose(steps.rows[0]["grad_norm"], norm, rtol=1e-4)
    after, _ = on_four.step(on_four.before, batch(0))
    assert_close(gradient, one_gradient(on_four.before, after))


def test_parameters_do_not_depend_on_the_mesh():
    stepper = Stepper(small_config({"mesh.devices": 1}), sharding.make_mesh(1))
    state = to_logical(stepper.init(), is_expert, stepper.table.position_E)
    assert_equal(state, take_steps().before)


# M-03: parts of unequal size, weighted by their tokens.


def test_microbatches_are_weighted_by_their_tokens():
    """A batch in parts gives the mean, weighted by tokens, of what each part gives by itself: the cross entropy of
    the batch, however it is split, and the balance loss as a mean over microbatches."""
    changes = {"moe.dispatcher": "all_gather", "mesh.devices": 2, "routing.top_k.balance_coef": 1.0}
    whole = take_steps(changes, 1)
    for count in (1, 2, 4):
        steps = take_steps(changes | {"train.microbatches": count}, 1)
        parts = [whole.step(whole.before, masked(batch(0), part, count)) for part in range(count)]
        tokens = np.array([row["tokens"] for _, row in parts])
        assert len(set(tokens)) == count and tokens.sum() == steps.rows[0]["tokens"]
        shares = tokens / tokens.sum()
        aux_loss = np.average([row["aux_loss"] for _, row in parts], weights=shares)
        gradients = [one_gradient(whole.before, after) for after, _ in parts]
        gradient = jax.tree.map(lambda *g, shares=shares: np.average(g, axis=0, weights=shares), *gradients)
        np.testing.assert_allclose(steps.rows[0]["loss"], whole.rows[0]["loss"], rtol=1e-5)
        np.testing.assert_allclose(steps.rows[0]["aux_loss"], aux_loss, rtol=1e-5)
        assert_close(one_gradient(steps.before, steps.after), gradient)
        for name in ("load_LE", "kept_LE"):
            np.testing.assert_array_equal(steps.rows[0][name], whole.rows[0][name])
        np.testing.assert_allclose(steps.rows[0]["entropy_L"], whole.rows[0]["entropy_L"], rtol=1e-5)


def test_an_evaluation_is_a_sum_over_tokens_and_that_of_training_without_drops():
    steps = take_steps()
    evaluate = jax.jit(steps.stepper.eval_step)
    state = jax.device_put(steps.stepper.init(), steps.stepper.shardings())
    whole, *parts = (evaluate(state, some) for some in (batch(0), masked(batch(0), 0, 2), masked(batch(0), 1, 2)))
    assert parts[0][1] != parts[1][1] and whole[1] == parts[0][1] + parts[1][1] == steps.rows[0]["tokens"]
    np.testing.assert_allclose(whole[0], parts[0][0] + parts[1][0], rtol=1e-5)
    np.testing.assert_allclose(whole[0] / whole[1], steps.rows[0]["loss"], rtol=1e-5)


def masked(batch, part, count):
    """Only part `part` of `count` equal parts of the batch, the rest as padding."""
    sequence_B1 = np.arange(len(batch["mask_BS"]))[:, None]
    return batch | {"mask_BS": batch["mask_BS"] & (sequence_B1 // (len(sequence_B1) // count) == part)}


def one_gradient(before, after):
    """The gradient of the only step between two states, read off the update."""
    return jax.tree.map(lambda a, b: (a - b) / SMALL["optim.learning_rate"], before.params, after.params)


def test_adamw_lowers_the_loss_and_leaves_empty_positions_alone():
    changes = {"optim.name": "adamw", "optim.learning_rate": 0.01, "optim.weight_decay": 0.1, "optim.clip_norm": 1.0}
    steps = take_steps(changes | {"moe.dispatcher": "all_gather"}, 4)  # 6 experts, 8 positions: asserted in every step
    assert steps.curve()[-1] < steps.curve()[0] - 0.1
    assert np.all(steps.curve("grad_norm") > 1.0)  # what is logged is the norm before clipping


def test_the_check_of_empty_positions_can_fail():
    stepper = take_steps().stepper
    state = jax.eval_shape(stepper.init)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state)
    assert_empty_positions_are_zero(stepper, zeros)
    with pytest.raises(AssertionError, match="optimizer.*w_down_PFD"):
        filled = jax.tree.map(lambda leaf: leaf + 1, zeros.optimizer)
        assert_empty_positions_are_zero(stepper, dataclasses.replace(zeros, optimizer=filled))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("part", ["experts", "dense"])
def test_an_update_that_is_not_finite_is_left_out_and_counted(part, value):
    steps = take_steps()
    first = next(iter(jax.tree.leaves(getattr(steps.after, part)))).reshape(-1)[0]
    damaged = jax.tree.map(lambda leaf: np.where(leaf == first, value, leaf), getattr(steps.after, part))
    state = dataclasses.replace(steps.after, **{part: damaged})
    for count in (1, 2):
        after, row = steps.step(state, batch(0))
        assert row["skipped_updates"] == after.skipped == count
        assert after.step == state.step + 1
        assert not np.isfinite(row["loss"]) or not np.isfinite(row["grad_norm"])
        assert_equal(after.params, state.params)
        assert_equal(after.optimizer, state.optimizer)
        state = after
    # With sound parameters again, training goes on.
    after, row = steps.step(dataclasses.replace(state, **{part: getattr(steps.after, part)}), batch(0))
    assert row["skipped_updates"] == 2 and np.isfinite(row["loss"])
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (after.params, steps.after.params)), strict=True))


@pytest.mark.parametrize("dispatcher", ["pooled", "fluid"])
def test_the_program_is_the_same_for_every_pool(dispatcher, monkeypatch):
    """XLA may round another program otherwise, and then a process's first pool, of handle [0, 1], gives other bits."""
    config = small_config({"moe.dispatcher": dispatcher, "dispatch.fluid.cost": "bytes"})
    mesh = sharding.make_mesh(config.mesh.devices)
    stepper = Stepper(config, mesh)
    programs = []
    with Pool(mesh):
        for incarnation in (1, 2):
            handle_2 = np.array([0, incarnation], np.int32)
            monkeypatch.setattr(Pool, "table", lambda *args, handle_2=handle_2: handle_2)
            step = jax.jit(functools.partial(stepper.train_step))  # another function, which is traced anew
            text = step.lower(jax.eval_shape(stepper.init), batch(0)).compile().as_text()
            programs.append(text.replace(f"incarnation = {incarnation} : i32", "incarnation"))
    assert programs[0] == programs[1]
