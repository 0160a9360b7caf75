"""Makes tests/golden/hf: tiny random checkpoints of each family, and what the reference implementation computes.

    python scripts/make_hf_goldens.py [FAMILY ...]

Needs torch and transformers, which neither fef nor its tests need. Each folder gets the checkpoint as transformers
writes it, and expected.json: token ids, a mask with padding, logits, and the load-balance loss by transformers' own
function, of each layer alone and for decoders of all layers at once. All is float32 and drawn from a fixed seed.
"""

import importlib
import json
import pathlib
import shutil
import sys

import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parent.parent / "tests/golden/hf"
BATCH, SEQ_LEN, VOCAB, PADDING = 3, 12, 48, 3

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "rms_norm_eps": 1e-5,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 1.0}
SWITCH = {
    "vocab_size": VOCAB, "d_model": 16, "d_kv": 6, "d_ff": 24, "expert_capacity": 3, "num_layers": 4, "num_heads": 4,
    "num_sparse_encoder_layers": 2, "num_decoder_layers": 2, "num_sparse_decoder_layers": 1, "num_experts": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10, "decoder_start_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "mixtral": (
        "Mixtral",
        {"num_hidden_layers": 2, "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"sliding_window": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
    ),
    "olmoe": (
        "Olmoe",
        {"num_hidden_layers": 2, "intermediate_size": 8, "num_experts": 8, "num_experts_per_tok": 3},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_hidden_layers": 3, "intermediate_size": 24, "moe_intermediate_size": 8, "head_dim": 6}
        | {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True, "mlp_only_layers": [0]}
        | {"attention_bias": True, "tie_word_embeddings": True},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {"num_hidden_layers": 3, "intermediate_size": 24, "moe_intermediate_size": 8, "num_key_value_heads": 4}
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "n_shared_experts": 2}
        | {"first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "kv_lora_rank": 10, "q_lora_rank": 12}
        | {"qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 5, "num_mtp_layers": 0}
        | {"rope_parameters": YARN | {"rope_theta": 1000.0, "mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    "gpt_oss": (
        "GptOss",
        {"num_hidden_layers": 3, "intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 2}
        | {"head_dim": 8, "sliding_window": 4, "rope_parameters": YARN | {"rope_theta": 1500.0, "truncate": False}},
    ),
}


def make(name: str) -> None:
    prefix, options = FAMILIES[name]
    torch.manual_seed(sum(map(ord, name)))
    config = getattr(transformers, f"{prefix}Config")(**COMMON | options)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    randomise(model)
    folder = ROOT / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, max_shard_size="20KB" if name == "olmoe" else "1GB")
    (folder / "generation_config.json").unlink(missing_ok=True)

    ids = torch.randint(0, VOCAB, (BATCH, SEQ_LEN))
    mask = torch.ones_like(ids)
    mask[-1, -PADDING:] = 0
    has_aux = name != "deepseek_v3"
    with torch.no_grad():
        out = model(ids, attention_mask=mask, **({"output_router_logits": True} if has_aux else {}))
    expected = {"input_ids": ids.tolist(), "attention_mask": mask.tolist(), "logits": rounded(out.logits)}
    if has_aux:
        module = importlib.import_module(type(model).__module__)
        experts, choices = model.num_experts, model.num_experts_per_tok
        layers = [layer for layer in out.router_logits if layer is not None]
        losses = [module.load_balancing_loss_func((layer,), experts, choices, mask).item() for layer in layers]
        expected |= {"balance_loss_L": losses, "balance_loss_pooled": out.aux_loss.item()}
    write(folder, expected)


def make_switch() -> None:
    """Encoder and decoder read as many tokens. The losses are of the first sequence, layer by layer."""
    torch.manual_seed(1)
    model = transformers.SwitchTransformersForConditionalGeneration(transformers.SwitchTransformersConfig(**SWITCH))
    model = model.eval()
    randomise(model)
    folder = ROOT / "switch_transformers"
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)

    ids, decoder_ids = torch.randint(1, VOCAB, (2, BATCH, SEQ_LEN))
    mask = torch.ones_like(ids)
    mask[-1, -PADDING:] = 0
    module = importlib.import_module(type(model).__module__)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, decoder_input_ids=decoder_ids).logits
        out = model(ids[:1], decoder_input_ids=decoder_ids[:1], output_router_logits=True)
    layers = [*out.encoder_router_logits, *out.decoder_router_logits]
    write(
        folder,
        {
            "input_ids": ids.tolist(),
            "attention_mask": mask.tolist(),
            "decoder_input_ids": decoder_ids.tolist(),
            "logits": rounded(logits),
            "balance_loss_L": [
                module.load_balancing_loss_func(layer.softmax(-1), layer.argmax(-1)).item() for layer in layers
            ],
            "z_loss_L": [module.router_z_loss_func(layer).item() for layer in layers],
        },
    )


def randomise(model: torch.nn.Module) -> None:
    """Values that let every tensor matter: norms off 1, biases off 0, routing far from uniform."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            centre, scale = (1.0, 0.2) if "norm" in name else (0.0, 0.2)
            tensor.copy_(centre + scale * torch.randn(tensor.shape))


def rounded(tensor: torch.Tensor) -> list:
    """Eight digits, which float32 does not exceed."""
    return torch.round(tensor.double(), decimals=8).tolist()


def write(folder: pathlib.Path, expected: dict) -> None:
    made_by = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, float32 on a CPU"
    (folder / "expected.json").write_text(json.dumps(expected | {"made_by": made_by}) + "\n")


if __name__ == "__main__":
    for family in sys.argv[1:] or [*FAMILIES, "switch_transformers"]:
        make_switch() if family == "switch_transformers" else make(family)
        print(f"{family}: {sum(path.stat().st_size for path in (ROOT / family).iterdir()):,} bytes")
