"""What an import refuses, and how it says so: nothing is skipped, guessed or left at a random value."""

import json
import shutil

import numpy as np
import pytest
from hf_harness import CASES, GOLDEN
from safetensors.numpy import load_file, save_file

from fef.config import UserError
from fef.hf import FAMILIES, convert
from fef.registry import scan

scan("fef.hf")


def edited(tmp_path, source, **fields):
    """A copy of a checkpoint with other fields in its config.json; a field that is given as None is left out."""
    folder = tmp_path / "edited"
    shutil.copytree(source, folder)
    values = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({name: v for name, v in values.items() if v is not None}))
    return folder


def with_tensors(tmp_path, change):
    """A copy of Mixtral's golden checkpoint with other tensors."""
    folder = tmp_path / "changed"
    shutil.copytree(GOLDEN / "mixtral", folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "case, words",
    [
        ("missing_shard", ["model-00002-of-00002.safetensors"]),
        ("truncated_shard", ["model-00001-of-00002.safetensors", "5816 of 5880 bytes"]),
        ("renamed_tensor", ["1 missing", "1 unexpected", "experts"]),
    ],
)
def test_incomplete_checkpoints(case, words):
    """H-02."""
    with pytest.raises(UserError) as error:
        convert.read(CASES / case)
    for word in words:
        assert word in str(error.value)


def test_shards_without_index_are_read_whole():
    """H-02: as with an index, or not at all."""
    _, with_index, _ = convert.read(CASES / "sharded_ok")
    _, without, _ = convert.read(CASES / "no_index")
    assert with_index.keys() == without.keys()
    for name, array in with_index.items():
        np.testing.assert_array_equal(without[name], array)


def test_one_shard_without_index_is_refused(tmp_path):
    folder = shutil.copytree(CASES / "no_index", tmp_path / "one")
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="all of model-00001-of-00002.safetensors, model-00002.* are needed"):
        convert.read(folder)


def test_all_faults_are_listed_at_once(tmp_path):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.0.mlp.extra"] = np.zeros(3, np.float32)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1]
        tensors["model.embed_tokens.weight"] = np.zeros((48, 16), np.int8)

    with pytest.raises(UserError) as error:
        convert.read(with_tensors(tmp_path, change))
    for words in (
        "1 missing: model.norm.weight",
        "1 unexpected: model.layers.0.mlp.extra",
        "1 of another shape: lm_head.weight is [47, 16], expected [48, 16]",
        "1 of a type that is no float: model.embed_tokens.weight is I8",
    ):
        assert words in str(error.value)


def test_half_precision_becomes_float32(tmp_path):
    def change(tensors):
        for name in tensors:
            tensors[name] = tensors[name].astype(np.float16)

    _, arrays, _ = convert.read(with_tensors(tmp_path, change))
    whole = load_file(GOLDEN / "mixtral/model.safetensors")["model.norm.weight"]
    np.testing.assert_array_equal(arrays["dense.final_norm.value"], whole.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize(
    "family, fields, words",
    [
        ("mixtral", {"model_type": "llama"}, "model_type='llama': fef reads deepseek_v3, gpt_oss, mixtral"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("mixtral", {"num_local_experts": None}, "has no field num_local_experts or num_experts"),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
        ("mixtral", {"softcap": 30.0}, "does not know what these fields do to the model: softcap=30.0"),
        ("mixtral", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope type='llama3'"),
        ("mixtral", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("mixtral", {"rope_parameters": None, "rope_theta": None}, "has no field rope_theta"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ("olmoe", {"norm_topk_prob": None}, "has no field norm_topk_prob"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]: fef has dense layers at the start"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False"),
        ("deepseek_v3", {"topk_group": 9}, "topk_groups=9: must be <= n_groups=4"),
        ("switch_transformers", {"router_type": "experts"}, "router_type='experts': fef has 'tokens_masked' only"),
        ("switch_transformers", {"num_sparse_decoder_layers": 2}, r"layers, sparse layers=\[\(4, 2\), \(2, 2\)\]"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 3}, "layer_types="),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit=5.0"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
    ],
)
def test_fields_that_cannot_be_followed(tmp_path, family, fields, words):
    with pytest.raises(UserError, match=words):
        convert.read(edited(tmp_path, GOLDEN / family, **fields))


def test_old_names_of_rope(tmp_path):
    """rope_scaling beside rope_theta says what rope_parameters says."""
    new, arrays, _ = convert.read(GOLDEN / "deepseek_v3")
    said = json.loads((GOLDEN / "deepseek_v3/config.json").read_text())["rope_parameters"]
    scaling = {name: value for name, value in said.items() if name != "rope_theta"}
    scaling["type"] = scaling.pop("rope_type")
    old = {"rope_parameters": None, "rope_theta": said["rope_theta"], "rope_scaling": scaling}
    config, _, _ = convert.read(edited(tmp_path, GOLDEN / "deepseek_v3", **old))
    assert config == new


def test_layers_for_further_tokens_are_left_out(tmp_path):
    """DeepSeek-V3 as published has a layer behind the last one; no other family may have such."""
    for family in ("deepseek_v3", "mixtral"):
        folder = shutil.copytree(GOLDEN / family, tmp_path / family)
        tensors = load_file(folder / "model.safetensors")
        save_file(
            tensors | {"model.layers.9.eh_proj.weight": np.zeros((2, 2), np.float32)}, folder / "model.safetensors"
        )
        if family == "deepseek_v3":
            _, arrays, _ = convert.read(folder)
            assert not any("runs.9" in name for name in arrays)
        else:
            with pytest.raises(UserError, match="1 unexpected: model.layers.9"):
                convert.read(folder)


PUBLISHED = {
    "mixtral": {"rope_theta": 1e6, "router_aux_loss_coef": 0.02, "max_position_embeddings": 32768},
    "olmoe": {"rope_scaling": None, "rope_theta": 1e4, "pad_token_id": 1},
    "qwen3_moe": {"rope_scaling": None, "rope_theta": 1e6, "max_window_layers": 48, "use_sliding_window": False},
    "deepseek_v3": {
        "rope_theta": 10000, "auto_map": {"AutoModel": "any"}, "ep_size": 1, "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "rope_scaling": {
            "type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": 4096,
        },
    },
    "gpt_oss": {
        "rope_theta": 150000, "experts_per_token": 4, "initial_context_length": 4096, "router_aux_loss_coef": 0.9,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "switch_transformers": {
        "batch_prioritized_routing": False, "feed_forward_proj": "relu", "is_gated_act": False, "output_past": True,
        "num_selected_experts": 1, "router_type": "tokens_masked", "tie_word_embeddings": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_fields_of_published_checkpoints_are_known(tmp_path, family):
    """The keys that the families' own repositories have beside or instead of those of the golden files."""
    fields = PUBLISHED[family] | ({} if family == "switch_transformers" else {"rope_parameters": None})
    convert.read(edited(tmp_path, GOLDEN / family, torch_dtype="bfloat16", transformers_version="4.55.0", **fields))


@pytest.mark.parametrize("damage", [b"", b"\x01", b"\xff" * 64, b"\x10" + b"\0" * 7 + b"{'a': 1        }"])
def test_files_that_are_no_tensors(tmp_path, damage):
    folder = shutil.copytree(GOLDEN / "mixtral", tmp_path / "damaged")
    (folder / "model.safetensors").write_bytes(damage)
    with pytest.raises(UserError, match=f"model.safetensors: {len(damage)} bytes, is no whole safetensors file"):
        convert.read(folder)


def test_no_checkpoint_at_all(tmp_path):
    with pytest.raises(UserError, match="config.json: no such file; give the folder"):
        convert.read(tmp_path)
    shutil.copy(GOLDEN / "mixtral/config.json", tmp_path)
    with pytest.raises(UserError, match="has neither model.safetensors nor shards"):
        convert.read(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="is no JSON object"):
        convert.read(tmp_path)


def test_index_that_names_a_file_elsewhere(tmp_path):
    folder = shutil.copytree(CASES / "sharded_ok", tmp_path / "outside")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "../sharded_ok/model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="has no such file"):
        convert.read(folder)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_nothing_is_written_by_an_import_that_fails(tmp_path, family):
    source = edited(tmp_path, GOLDEN / family, vocab_size=49)
    with pytest.raises(UserError, match="[12] of another shape: .* is .48, 16., expected .49, 16."):
        convert.import_checkpoint(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()
