"""OLMoE: norms over the whole projection of queries and of keys, a softmax gate without renormalisation.

Source: Muennighoff et al., "OLMoE: Open Mixture-of-Experts Language Models", 2024, section 2; `OlmoeForCausalLM` of
transformers.
"""

from typing import Any

from fef.config import Config
from fef.hf import FAMILIES
from fef.hf.fields import Fields
from fef.hf.llama_moe import LlamaMoe
from fef.hf.parts import read_llama, write_llama


@FAMILIES.register("olmoe")
class Olmoe(LlamaMoe):
    """See the module."""

    model_type = "olmoe"
    architecture = "OlmoeForCausalLM"

    def read(self, fields: Fields) -> dict[str, Any]:
        fields.expect("clip_qkv", None)
        return {
            **read_llama(fields),
            "model.attention.bias": fields.need("attention_bias"),
            "model.attention.qk_norm": "projection",
            "moe.num_experts": fields.need("num_experts", "num_local_experts"),
            "moe.d_expert": fields.need("intermediate_size"),
            **self.read_gate(fields, renormalise=fields.need("norm_topk_prob")),
        }

    def write(self, config: Config) -> dict[str, Any]:
        model, moe = config.model, config.moe
        return {
            **write_llama(config),
            "attention_bias": model.attention.bias,
            "clip_qkv": None,
            "num_experts": moe.num_experts,
            "intermediate_size": moe.d_expert,
            "norm_topk_prob": config.routing.top_k.renormalise,
            **self.write_gate(config),
        }
