"""Qwen3-MoE: head-wise norms of queries and keys, some layers dense, a softmax gate over all experts.

Source: Qwen Team, "Qwen3 Technical Report", 2025, section 2; `Qwen3MoeForCausalLM` of transformers.
"""

from typing import Any

from fef.config import Config, head_dim, moe_layers
from fef.hf import FAMILIES
from fef.hf.fields import Fields
from fef.hf.llama_moe import LlamaMoe
from fef.hf.parts import places_of_experts, read_llama, write_llama


@FAMILIES.register("qwen3_moe")
class Qwen3Moe(LlamaMoe):
    """See the module."""

    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"

    def read(self, fields: Fields) -> dict[str, Any]:
        window = fields.get("sliding_window", default=0) if fields.get("use_sliding_window", default=False) else 0
        fields.get("sliding_window", default=0)
        return {
            **read_llama(fields),
            "model.head_dim": fields.get("head_dim", default=None),
            "model.d_ff": fields.need("intermediate_size"),
            "model.attention.bias": fields.need("attention_bias"),
            "model.attention.qk_norm": "head",
            "model.attention.window": window,
            **self._places(fields),
            "moe.num_experts": fields.need("num_experts", "num_local_experts"),
            "moe.d_expert": fields.need("moe_intermediate_size"),
            **self.read_gate(fields, renormalise=fields.need("norm_topk_prob")),
        }

    def _places(self, fields: Fields) -> dict[str, int]:
        dense, every = fields.get("mlp_only_layers", default=[]), fields.get("decoder_sparse_step", default=1)
        layers = range(fields.need("num_hidden_layers"))
        places = places_of_experts([i not in dense and (i + 1) % every == 0 for i in layers])
        if places is None:
            fields.refuse("mlp_only_layers", dense, "fef has dense layers at the start, then experts in every n-th")
        return places

    def write(self, config: Config) -> dict[str, Any]:
        model, moe = config.model, config.moe
        return {
            **write_llama(config),
            "head_dim": head_dim(model),
            "intermediate_size": model.d_ff,
            "attention_bias": model.attention.bias,
            "use_sliding_window": bool(model.attention.window),
            "sliding_window": model.attention.window or None,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i, is_moe in enumerate(moe_layers(config)) if not is_moe],
            "num_experts": moe.num_experts,
            "moe_intermediate_size": moe.d_expert,
            "norm_topk_prob": config.routing.top_k.renormalise,
            **self.write_gate(config),
        }
