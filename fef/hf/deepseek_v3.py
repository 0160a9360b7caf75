"""DeepSeek-V3: latent attention, shared experts, dense layers at the start, a sigmoid gate with groups and a bias.

The checkpoint's rotary dimensions turn in neighbouring pairs (`rope_interleave`); fef turns dimension i with i + A/2,
so the columns of the rotary parts of queries and keys are put into that order. Scores do not change by it.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1; `DeepseekV3ForCausalLM` of transformers.
"""

from typing import Any

import numpy as np

from fef.config import Config, moe_layers
from fef.hf import FAMILIES, Part
from fef.hf.fields import Fields
from fef.hf.parts import gate, linear, norms, outside_of_layers, read_llama, same, swiglu, swiglu_experts, write_llama


@FAMILIES.register("deepseek_v3")
class DeepseekV3:
    """See the module."""

    model_type = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    router = "sigmoid_bias"

    def read(self, fields: Fields) -> dict[str, Any]:
        fields.expect("attention_bias", False)
        fields.expect("rope_interleave", True)
        fields.expect("scoring_func", "sigmoid")
        fields.expect("topk_method", "noaux_tc")
        fields.expect("moe_layer_freq", 1)
        for name in ("head_dim", "qk_head_dim"):  # written by transformers, made of other fields
            fields.get(name, default=None)
        for name in ("aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers"):  # of training and inference
            fields.get(name, default=None)
        fields.expect("num_key_value_heads", fields.need("num_attention_heads"))
        return {
            **read_llama(fields, scores_scaled=True),
            "model.head_dim": fields.need("qk_rope_head_dim"),
            "model.d_ff": fields.need("intermediate_size"),
            "model.mla.kv_rank": fields.need("kv_lora_rank"),
            "model.mla.q_rank": fields.get("q_lora_rank", default=0),
            "model.mla.nope_dim": fields.need("qk_nope_head_dim"),
            "model.mla.rope_dim": fields.need("qk_rope_head_dim"),
            "model.mla.value_dim": fields.need("v_head_dim"),
            "moe.leading_dense": fields.need("first_k_dense_replace"),
            "moe.num_experts": fields.need("n_routed_experts", "num_local_experts"),
            "moe.num_choices": fields.need("num_experts_per_tok"),
            "moe.d_expert": fields.need("moe_intermediate_size"),
            "moe.num_shared": fields.need("n_shared_experts"),
            "moe.router": self.router,
            "routing.sigmoid_bias.normalise": fields.need("norm_topk_prob"),
            "routing.sigmoid_bias.routed_scaling": float(fields.need("routed_scaling_factor")),
            "routing.sigmoid_bias.n_groups": fields.need("n_group"),
            "routing.sigmoid_bias.topk_groups": fields.need("topk_group"),
        }

    def write(self, config: Config) -> dict[str, Any]:
        model, moe, mla, gate = config.model, config.moe, config.model.mla, config.routing.sigmoid_bias
        return {
            **write_llama(config),
            "num_key_value_heads": model.num_heads,
            "intermediate_size": model.d_ff,
            "kv_lora_rank": mla.kv_rank,
            "q_lora_rank": mla.q_rank or None,
            "qk_nope_head_dim": mla.nope_dim,
            "qk_rope_head_dim": mla.rope_dim,
            "v_head_dim": mla.value_dim,
            "rope_interleave": True,
            "first_k_dense_replace": moe.leading_dense,
            "n_routed_experts": moe.num_experts,
            "num_experts_per_tok": moe.num_choices,
            "moe_intermediate_size": moe.d_expert,
            "n_shared_experts": moe.num_shared,
            "norm_topk_prob": gate.normalise,
            "routed_scaling_factor": gate.routed_scaling,
            "n_group": gate.n_groups,
            "topk_group": gate.topk_groups,
            "num_nextn_predict_layers": 0,
        }

    def parts(self, config: Config) -> list[Part]:
        model, moe = config.model, config.moe
        parts = outside_of_layers(config)
        for i, is_moe in enumerate(moe_layers(config)):
            tensor = f"model.layers.{i}.mlp"
            parts += norms(i, config) + _attention(i, config)
            if not is_moe:
                parts += swiglu(f"dense.runs.{i}.ffn", tensor, model.d_model, model.d_ff)
                continue
            parts.append(gate(i, f"{tensor}.gate.weight", config))
            bias = f"{tensor}.gate.e_score_correction_bias"
            parts.append(same(f"router.runs.{i}.moe.state.value.bias_E", bias, moe.num_experts))
            parts += swiglu_experts(i, f"{tensor}.experts", config, ("gate_proj", "up_proj", "down_proj"))
            if moe.num_shared:
                shared = f"{tensor}.shared_experts"
                parts += swiglu(f"dense.runs.{i}.shared", shared, model.d_model, moe.num_shared * moe.d_expert)
        return parts

    def is_beside_the_model(self, tensor: str, config: Config) -> bool:
        if tensor.endswith("rotary_emb.inv_freq"):
            return True
        words = tensor.split(".")  # layers behind the last one predict further tokens; fef does not have them
        return words[:2] == ["model", "layers"] and int(words[2]) >= config.model.num_layers


def _attention(i: int, config: Config) -> list[Part]:
    model, mla = config.model, config.model.mla
    leaf, tensor = f"dense.runs.{i}.attention", f"model.layers.{i}.self_attn"
    parts, query = [], "q_proj"
    if mla.q_rank:
        query = "q_b_proj"
        parts += linear(f"{leaf}.query_down", f"{tensor}.q_a_proj", model.d_model, mla.q_rank)
        parts.append(same(f"{leaf}.query_norm.value", f"{tensor}.q_a_layernorm.weight", mla.q_rank))
    heads = (model.num_heads, mla.nope_dim + mla.rope_dim)
    parts.append(_rotary(f"{leaf}.query", f"{tensor}.{query}", mla.q_rank or model.d_model, heads, mla.nope_dim))
    latent = (1, mla.kv_rank + mla.rope_dim)
    parts.append(_rotary(f"{leaf}.latent", f"{tensor}.kv_a_proj_with_mqa", model.d_model, latent, mla.kv_rank))
    parts.append(same(f"{leaf}.latent_norm.value", f"{tensor}.kv_a_layernorm.weight", mla.kv_rank))
    key_value = model.num_heads * (mla.nope_dim + mla.value_dim)
    parts += linear(f"{leaf}.key_value", f"{tensor}.kv_b_proj", mla.kv_rank, key_value)
    return parts + linear(f"{leaf}.out", f"{tensor}.o_proj", model.num_heads * mla.value_dim, model.d_model)


def _rotary(leaf: str, tensor: str, fan_in: int, heads: tuple[int, int], start: int) -> Part:
    """A Linear whose outputs are `heads` (count, width) with rotary dimensions from `start`: pairs to halves."""
    count, width = heads
    halves = np.concatenate([np.arange(start), np.arange(start, width, 2), np.arange(start + 1, width, 2)])

    def reordered(w_IO: np.ndarray, order: np.ndarray) -> np.ndarray:
        return w_IO.reshape(fan_in, count, width)[:, :, order].reshape(fan_in, count * width)

    return Part(
        (f"{leaf}.w.value",),
        {f"{tensor}.weight": (count * width, fan_in)},
        lambda tensors: [reordered(tensors[0].T, halves)],
        lambda arrays: [reordered(arrays[0], np.argsort(halves)).T],
    )
