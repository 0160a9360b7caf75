"""Mixtral: a Llama whose FFNs are experts, with a softmax gate whose top-k weights are renormalised.

Source: Jiang et al., "Mixtral of Experts", 2024, section 2; `MixtralForCausalLM` of transformers.
"""

from typing import Any

from fef.config import Config, head_dim
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


@FAMILIES.register("mixtral")
class Mixtral:
    """See the module."""

    model_type = "mixtral"
    architecture = "MixtralForCausalLM"
    router = "top_k"

    def read(self, fields: Fields) -> dict[str, Any]:
        fields.expect("router_jitter_noise", 0, 0.0)
        return {
            **read_llama(fields),
            "model.head_dim": fields.get("head_dim", default=None),
            "model.attention.window": fields.get("sliding_window", default=0),
            "moe.num_experts": fields.need("num_local_experts", "num_experts"),
            "moe.d_expert": fields.need("intermediate_size"),
            **read_softmax_gate(fields, renormalise=True),
        }

    def write(self, config: Config) -> dict[str, Any]:
        model, moe = config.model, config.moe
        return {
            **write_llama(config),
            "head_dim": head_dim(model),
            "sliding_window": model.attention.window or None,
            "num_local_experts": moe.num_experts,
            "num_experts_per_tok": moe.num_choices,
            "intermediate_size": moe.d_expert,
            "router_aux_loss_coef": config.routing.top_k.balance_coef,
        }

    def parts(self, config: Config) -> list[Part]:
        parts = outside_of_layers(config)
        for i in range(config.model.num_layers):
            tensor = f"model.layers.{i}.block_sparse_moe"
            parts += norms(i, config) + attention(i, config)
            parts.append(gate(i, f"{tensor}.gate.weight", config))
            parts += swiglu_experts(i, f"{tensor}.experts", config, ("w1", "w3", "w2"))
        return parts

    def is_beside_the_model(self, tensor: str, config: Config) -> bool:
        return tensor.endswith("rotary_emb.inv_freq")
