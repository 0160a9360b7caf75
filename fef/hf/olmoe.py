"""OLMoE: norms over the whole projection of queries and of keys, a softmax gate without renormalisation.

Source: Muennighoff et al., "OLMoE: Open Mixture-of-Experts Language Models", 2024, section 2; `OlmoeForCausalLM` of
transformers.
"""

from typing import Any

from fef.config import Config
from fef.hf import FAMILIES, Part
from fef.hf.fields import Fields
from fef.hf.parts import (
    attention,
    gate,
    norms,
    outside_of_layers,
    read_llama,
    read_softmax_gate,
    swiglu_experts,
    write_llama,
)


@FAMILIES.register("olmoe")
class Olmoe:
    """See the module."""

    model_type = "olmoe"
    architecture = "OlmoeForCausalLM"
    router = "top_k"

    def read(self, fields: Fields) -> dict[str, Any]:
        fields.expect("clip_qkv", None)
        return {
            **read_llama(fields),
            "model.attention.bias": fields.need("attention_bias"),
            "model.attention.qk_norm": "projection",
            "moe.num_experts": fields.need("num_experts", "num_local_experts"),
            "moe.d_expert": fields.need("intermediate_size"),
            **read_softmax_gate(fields, renormalise=fields.need("norm_topk_prob")),
        }

    def write(self, config: Config) -> dict[str, Any]:
        model, moe = config.model, config.moe
        return {
            **write_llama(config),
            "attention_bias": model.attention.bias,
            "clip_qkv": None,
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.num_choices,
            "intermediate_size": moe.d_expert,
            "norm_topk_prob": config.routing.top_k.renormalise,
            "router_aux_loss_coef": config.routing.top_k.balance_coef,
        }

    def parts(self, config: Config) -> list[Part]:
        parts = outside_of_layers(config)
        for i in range(config.model.num_layers):
            tensor = f"model.layers.{i}.mlp"
            parts += norms(i, config) + attention(i, config)
            parts.append(gate(i, f"{tensor}.gate.weight", config))
            parts += swiglu_experts(i, f"{tensor}.experts", config, ("gate_proj", "up_proj", "down_proj"))
        return parts

    def is_beside_the_model(self, tensor: str, config: Config) -> bool:
        return tensor.endswith("rotary_emb.inv_freq")
