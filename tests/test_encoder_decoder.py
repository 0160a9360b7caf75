"""A model with an encoder: what it sees, predicts and counts, and that it trains with every dispatcher."""

import jax
import numpy as np
import pytest
from flax import nnx
from small import assert_close, batch, fast_compilation, small_config, take_steps  # noqa: F401

from fef import sharding, train
from fef.config import ConfigError, moe_layers
from fef.encoder_decoder import EncoderDecoder
from fef.flops import matmul_params_active, train_flops_per_token
from fef.layers import layer_kinds
from fef.metrics import read_jsonl
from fef.model import make_model
from fef.sample import sample
from fef.step import Stepper

SETTINGS = {
    "model.encoder.layers": 2, "model.num_layers": 2, "model.num_kv_heads": 2, "model.ffn": "relu", "moe.every": 2,
    "model.encoder.buckets": 4, "model.encoder.max_distance": 6, "moe.router": "switch", "moe.num_choices": 1,
    "routing.switch.balance_coef": 0.0, "routing.switch.capacity_factor": 0.0, "mesh.devices": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def logits_of():
    config = small_config(SETTINGS | {"moe.dispatcher": "reference", "mesh.devices": 1})
    model = make_model(config, sharding.make_mesh(1), nnx.Rngs(0))
    assert isinstance(model, EncoderDecoder)
    graph, state = nnx.split(model)
    return jax.jit(lambda tokens, mask: nnx.merge(graph, state)(tokens, mask, train=False)[0])


def changed(tokens_BS, place):
    return np.where(np.arange(16) == place, (tokens_BS + 1) % 256, tokens_BS).astype(np.int32)


def test_what_a_prediction_depends_on(logits_of):
    """Each on all that the encoder reads, and on what the decoder has read up to it."""
    tokens_BS, mask_BS = batch(0)["inputs_BS"], np.ones((8, 16), bool)
    logits_BPV = logits_of(tokens_BS, mask_BS)
    assert logits_BPV.shape == (8, 8, 256)
    for place in range(16):
        differs_P = np.abs(logits_of(changed(tokens_BS, place), mask_BS) - logits_BPV).max((0, 2)) > 1e-6
        np.testing.assert_array_equal(differs_P, [place < 8 or i >= place - 8 for i in range(8)])


def test_padding_has_no_part(logits_of):
    tokens_BS, mask_BS = batch(0)["inputs_BS"], np.ones((8, 16), bool)
    for place, seen in ((6, slice(None)), (14, slice(6))):
        mask_BS[:, place] = False
        before = logits_of(tokens_BS, mask_BS)[:, seen]
        np.testing.assert_array_equal(logits_of(changed(tokens_BS, place), mask_BS)[:, seen], before)


def test_layers_and_their_experts():
    config = small_config(SETTINGS | {"model.encoder.layers": 3, "model.num_layers": 2})
    assert moe_layers(config) == [False, True, False, False, True]
    assert [kind.is_decoder for kind in layer_kinds(config)] == [False] * 3 + [True] * 2


def test_only_the_second_half_has_a_loss():
    """The tokens are those that are predicted; targets of the first half are not looked at."""
    steps = take_steps(SETTINGS | {"moe.dispatcher": "all_gather"}, 1)
    assert steps.rows[0]["tokens"] == batch(0)["mask_BS"][:, 8:].sum()
    other = {name: array.copy() for name, array in batch(0).items()}
    other["targets_BS"][:, :8] = 0
    _, row = steps.step(steps.before, other)
    assert row["loss"] == steps.rows[0]["loss"]
    other["targets_BS"][0, 9] += 1
    _, row = steps.step(steps.before, other)
    assert row["loss"] != steps.rows[0]["loss"]


@pytest.mark.parametrize("name", ["all_gather", "pooled"])  # one that takes a layer's experts, one with all in a table
def test_it_trains_as_with_reference(name):
    expected = take_steps(SETTINGS | {"moe.dispatcher": "reference"})
    found = take_steps(SETTINGS | {"moe.dispatcher": name})
    assert expected.curve()[-1] < expected.curve()[0]
    np.testing.assert_allclose(found.curve(), expected.curve(), rtol=1e-5)
    assert_close(found.after.params, expected.after.params)


def test_scanned_layers_are_the_same():
    """Dense ones, since a layer of experts never follows one of its side here."""
    settings = SETTINGS | {"moe.every": 0}
    plain, scanned = (take_steps(settings | {"model.scan_layers": scan}) for scan in (False, True))
    np.testing.assert_allclose(plain.curve(), scanned.curve(), rtol=1e-5)
    assert len(scanned.before.dense["runs"]) == 2


def test_a_run_goes_on_where_it_was_interrupted_and_replays(tmp_path):
    quiet = {"run.report": False, "run.tensorboard": False, "train.sample_bytes": 4, "moe.dispatcher": "pooled"}
    settings = SETTINGS | quiet | {"train.eval_batches": 1, "checkpoint.every": 2}
    trace = str(tmp_path / "trace.npz")
    train.run(small_config(settings | {"train.steps": 4, "routing.record": trace}), str(tmp_path / "whole"))
    train.run(small_config(settings | {"train.steps": 2}), str(tmp_path / "parts"))
    train.run(small_config(settings | {"train.steps": 4}), str(tmp_path / "parts"))
    replay = settings | {"train.steps": 4, "routing.replay": trace, "moe.dispatcher": "all_gather"}
    train.run(small_config(replay), str(tmp_path / "again"))
    whole, parts, again = (
        [row["loss"] for row in read_jsonl(tmp_path / name / "metrics.jsonl")[0]]
        for name in ("whole", "parts", "again")
    )
    assert whole == parts and len(whole) == 4
    np.testing.assert_allclose(again, whole, rtol=1e-6)


def test_flops_by_hand():
    """D=16, H*A=16, V=256, F=32, S=16: 6 attentions of 4 * 16 * 16, 2 dense ReLUs and 2 experts of 2 * 16 * 32, 2 gates
    of 16 * 6, and the output; scores of 8 x 8, of which the decoder's own are half."""
    config = small_config(SETTINGS)
    assert matmul_params_active(config) == 6 * 1024 + 2 * 1024 + 2 * 1024 + 2 * 96 + 4096
    flops = train_flops_per_token(config)
    assert flops.matmul == 6 * matmul_params_active(config)
    square = 12 * 16 * 8
    assert flops.attention == 2 * square // 2 + 2 * square + 2 * square
    model = nnx.eval_shape(lambda: make_model(config, sharding.make_mesh(1), nnx.Rngs(0)))
    sizes = [leaf.size for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)) if leaf.ndim >= 2]
    experts, biases = 2 * 5 * 1024, 2 * 4 * 2  # five of six experts are not chosen; biases of distances are no matmuls
    assert sum(sizes) == matmul_params_active(config) + experts + biases


def test_a_sample_goes_through_the_encoder():
    """With halves of 8, a text of 11 bytes: the encoder has read the first 8, the decoder goes on with 3."""
    stepper = Stepper(small_config(SETTINGS | {"moe.dispatcher": "all_gather"}), sharding.make_mesh(2))
    seen = []

    class Watched:
        config, mesh = stepper.config, stepper.mesh

        def logits(self, state, tokens_BS, mask_BS):
            jax.debug.callback(lambda tokens, mask: seen.append((tokens[0], mask[0])), tokens_BS, mask_BS)
            return stepper.logits(state, tokens_BS, mask_BS)

    state = stepper.init()
    text = sample(Watched(), state, 1, b"0123456789a")
    jax.effects_barrier()
    tokens_S, mask_S = seen[0]
    assert bytes(tokens_S[:11].astype(np.uint8)) == b"0123456789a"
    assert list(mask_S) == [True] * 11 + [False] * 5
    assert text == sample(stepper, state, 1, b"0123456789a")
    assert len(sample(stepper, state, 20, b"\n")) >= 1


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"data.seq_len": 15}, "config.data.seq_len=15: .* make it even"),
        ({"model.num_kv_heads": 1}, "config.model.num_kv_heads=1: .*set it to model.num_heads=2"),
        ({"model.attention.window": 3}, "config.model.attention.window=3: is not for relative positions"),
        ({"model.mla.kv_rank": 3}, "config.model.mla.kv_rank=3: is not for relative positions"),
        ({"model.yarn.factor": 2.0}, "config.model.yarn.factor=2.0: is not for relative positions"),
        ({"model.encoder.max_distance": 2}, "config.model.encoder.max_distance=2: must be > buckets / 2 = 2"),
    ],
)
def test_what_an_encoder_does_not_go_with(changes, message):
    with pytest.raises(ConfigError, match=message):
        small_config(SETTINGS | changes)
