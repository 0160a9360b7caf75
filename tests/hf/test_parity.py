"""Imported models compute what transformers computes, to 1e-5 in the logits and 1e-6 in the load-balance loss."""

import json
import shutil

import numpy as np
import optax
import pytest
from hf_harness import CASES, GOLDEN, build, compare, predict
from small import fast_compilation  # noqa: F401

from fef.hf import FAMILIES, convert
from fef.registry import scan

scan("fef.hf")


def test_every_family_has_a_golden_checkpoint():
    assert sorted(path.name for path in GOLDEN.iterdir()) == list(FAMILIES)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "switch_transformers"])
def test_golden(name):
    """Three sequences, the last of them padded. transformers' loss function was asked for each layer alone."""
    config, expected, difference, aux_loss = compare(GOLDEN / name)
    assert difference < 1e-5
    if "balance_loss_L" in expected:
        coef = getattr(config.routing, config.moe.router).balance_coef
        np.testing.assert_allclose(aux_loss / coef, np.mean(expected["balance_loss_L"]), atol=1e-6)


def test_golden_encoder_and_decoder():
    """Padding is at the end of what the encoder reads, and experts are full: their capacity holds in evaluation."""
    config, arrays, _ = convert.read(GOLDEN / "switch_transformers")
    expected = json.loads((GOLDEN / "switch_transformers/expected.json").read_text())
    model, mask_BP = build(config, arrays), np.array(expected["attention_mask"])
    ids_BS = np.concatenate([expected["input_ids"], expected["decoder_input_ids"]], axis=1)
    mask_BS = np.concatenate([mask_BP, np.ones_like(mask_BP)], axis=1)
    logits_BPV, _, metrics = predict(model, ids_BS, mask_BS)
    np.testing.assert_allclose(logits_BPV, expected["logits"], atol=1e-5)
    assert metrics["kept_E"].sum() < metrics["load_E"].sum()

    _, aux_loss, _ = predict(model, ids_BS[:1], np.ones_like(ids_BS[:1]))
    options = config.routing.switch
    wanted = options.balance_coef * np.array(expected["balance_loss_L"]) + options.z_coef * np.array(
        expected["z_loss_L"]
    )
    np.testing.assert_allclose(aux_loss, wanted.mean(), atol=1e-6 * options.balance_coef)


def test_square_experts():
    """H-01: any transposition would be legal. The loss is that of the reference, balance loss included."""
    config, arrays, _ = convert.read(CASES / "mixtral_square")
    expected = json.loads((CASES / "mixtral_square/expected.json").read_text())
    ids_BS = np.array(expected["input_ids"])
    logits_BSV, aux_loss, _ = predict(build(config, arrays), ids_BS, np.ones(ids_BS.shape))
    np.testing.assert_allclose(logits_BSV, expected["logits"], atol=1e-5)
    balance_coef = config.routing.top_k.balance_coef
    np.testing.assert_allclose(aux_loss / balance_coef, expected["aux_loss"], atol=1e-6)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits_BSV[:, :-1], ids_BS[:, 1:]).mean()
    np.testing.assert_allclose(loss + aux_loss, expected["loss_with_aux"], atol=2e-6)

    transposed = dict(arrays)
    for name in ("w_gate_PDF", "w_up_PDF", "w_down_PFD"):
        transposed[f"experts.runs.0.moe.{name}.value"] = arrays[f"experts.runs.0.moe.{name}.value"].swapaxes(1, 2)
    wrong_BSV, _, _ = predict(build(config, transposed), ids_BS, np.ones(ids_BS.shape))
    assert np.abs(wrong_BSV - np.array(expected["logits"])).max() > 1


@pytest.mark.parametrize("file", ["config.json", "config_v4_style.json"])
@pytest.mark.parametrize("norm_topk_prob", [False, True])
def test_fields_of_config_json(tmp_path, file, norm_topk_prob):
    """H-03: the same model by the newer and the older names of its fields, and with renormalised weights."""
    shutil.copytree(CASES / "qwen3moe_fields", tmp_path, dirs_exist_ok=True)
    fields = json.loads((tmp_path / file).read_text()) | {"norm_topk_prob": norm_topk_prob}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    expected = json.loads((tmp_path / "expected.json").read_text())
    config, arrays, _ = convert.read(tmp_path)
    assert (config.model.head_dim, config.model.rope_theta, config.moe.leading_dense) == (6, 500.0, 1)
    ids_BS = np.array(expected["input_ids"])
    logits_BSV, _, _ = predict(build(config, arrays), ids_BS, np.ones(ids_BS.shape))
    wanted = expected["logits_if_norm_topk_prob_true" if norm_topk_prob else "logits"]
    np.testing.assert_allclose(logits_BSV, wanted, atol=1e-5)


def test_logits_of_shards():
    assert compare(CASES / "sharded_ok")[2] < 1e-5
