"""Mixtral: a Llama whose FFNs are experts, with a softmax gate whose top-k weights are renormalised.

Source: Jiang et al., "Mixtral of Experts", 2024, section 2; `MixtralForCausalLM` of transformers.
"""

from typing import Any

from fef.config import Config, head_dim
from fef.hf import FAMILIES
from fef.hf.fields import Fields
from fef.hf.llama_moe import LlamaMoe
from fef.hf.parts import read_llama, write_llama


@FAMILIES.register("mixtral")
class Mixtral(LlamaMoe):
    """See the module."""

    model_type = "mixtral"
    architecture = "MixtralForCausalLM"
    moe = "block_sparse_moe"
    expert_names = ("w1", "w3", "w2")

    def read(self, fields: Fields) -> dict[str, Any]:
        fields.expect("router_jitter_noise", 0, 0.0)
        return {
            **read_llama(fields),
            "model.head_dim": fields.get("head_dim", default=None),
            "model.attention.window": fields.get("sliding_window", default=0),
            "moe.num_experts": fields.need("num_local_experts", "num_experts"),
            "moe.d_expert": fields.need("intermediate_size"),
            **self.read_gate(fields, renormalise=True),
        }

    def write(self, config: Config) -> dict[str, Any]:
        model, moe = config.model, config.moe
        return {
            **write_llama(config),
            "head_dim": head_dim(model),
            "sliding_window": model.attention.window or None,
            "num_local_experts": moe.num_experts,
            "intermediate_size": moe.d_expert,
            **self.write_gate(config),
        }
