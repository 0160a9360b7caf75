"""gpt-oss: biases everywhere, attention sinks, every other layer with a window, clamped SwiGLU experts.

The tensors of all experts of a layer are one, in the order (in, out), gate and up in turn. Only unquantised
checkpoints can be read; the published MXFP4 ones have other tensors, which are refused by name.

Source: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025, section 2; `GptOssForCausalLM` of transformers.
"""

from typing import Any

import numpy as np

from fef.config import Config, head_dim, windows
from fef.hf import FAMILIES, Part
from fef.hf.fields import Fields
from fef.hf.parts import attention, gate, norms, outside_of_layers, read_llama, same, write_llama


@FAMILIES.register("gpt_oss")
class GptOss:
    """See the module."""

    model_type = "gpt_oss"
    architecture = "GptOssForCausalLM"
    router = "gpt_oss"

    def read(self, fields: Fields) -> dict[str, Any]:
        fields.expect("swiglu_alpha", 1.702)
        fields.expect("swiglu_limit", 7.0)
        if fields.get("quantization_config", default=None):
            fields.refuse("quantization_config", "...", "fef reads no quantised checkpoints; make it bfloat16 first")
        fields.get("initial_context_length", "experts_per_token", default=None)  # said by other fields too
        return {
            **read_llama(fields),
            "model.head_dim": fields.need("head_dim"),
            "model.ffn": "clamped_swiglu",
            "model.attention.bias": fields.need("attention_bias"),
            "model.attention.sinks": True,
            "model.attention.window": fields.need("sliding_window"),
            "model.attention.window_every": self._window_every(fields),
            "moe.num_experts": fields.need("num_local_experts", "num_experts"),
            "moe.num_choices": fields.need("num_experts_per_tok"),
            "moe.d_expert": fields.need("intermediate_size"),
            "moe.router": self.router,
            "routing.gpt_oss.balance_coef": float(fields.need("router_aux_loss_coef")),
        }

    def _window_every(self, fields: Fields) -> int:
        num_layers = fields.need("num_hidden_layers")
        alternating = ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]
        types = fields.get("layer_types", default=alternating)
        for every in range(1, num_layers + 1):
            if types == ["full_attention" if i % every else "sliding_attention" for i in range(num_layers)]:
                return every
        fields.refuse("layer_types", types, "fef has windows in layers 0, n, 2n, ...")

    def write(self, config: Config) -> dict[str, Any]:
        model, moe = config.model, config.moe
        return {
            **write_llama(config),
            "head_dim": head_dim(model),
            "attention_bias": model.attention.bias,
            "sliding_window": model.attention.window,
            "layer_types": ["sliding_attention" if window else "full_attention" for window in windows(model)],
            "num_local_experts": moe.num_experts,
            "num_experts_per_tok": moe.num_choices,
            "intermediate_size": moe.d_expert,
            "router_aux_loss_coef": config.routing.gpt_oss.balance_coef,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        }

    def parts(self, config: Config) -> list[Part]:
        parts = outside_of_layers(config)
        for i in range(config.model.num_layers):
            tensor = f"model.layers.{i}.mlp"
            parts += norms(i, config) + attention(i, config)
            parts.append(gate(i, f"{tensor}.router.weight", config))
            bias = f"dense.runs.{i}.moe.gate.bias_E.value"
            parts.append(same(bias, f"{tensor}.router.bias", config.moe.num_experts))
            parts += _experts(f"experts.runs.{i}.moe", f"{tensor}.experts", config)
        return parts

    def is_beside_the_model(self, tensor: str, config: Config) -> bool:
        return False


def _experts(leaf: str, tensor: str, config: Config) -> list[Part]:
    d_model, d_expert, experts = config.model.d_model, config.moe.d_expert, config.moe.num_experts
    return [
        _in_turn(leaf, ("w_gate_PDF", "w_up_PDF"), f"{tensor}.gate_up_proj", (experts, d_model, 2 * d_expert)),
        _in_turn(leaf, ("b_gate_PF", "b_up_PF"), f"{tensor}.gate_up_proj_bias", (experts, 2 * d_expert)),
        same(f"{leaf}.w_down_PFD.value", f"{tensor}.down_proj", experts, d_expert, d_model),
        same(f"{leaf}.b_down_PD.value", f"{tensor}.down_proj_bias", experts, d_model),
    ]


def _in_turn(leaf: str, names: tuple[str, str], tensor: str, shape: tuple[int, ...]) -> Part:
    """Two arrays whose last dimensions alternate in the tensor."""
    return Part(
        tuple(f"{leaf}.{name}.value" for name in names),
        {tensor: shape},
        lambda tensors: [tensors[0][..., 0::2], tensors[0][..., 1::2]],
        lambda arrays: [np.stack(arrays, axis=-1).reshape(shape)],
    )
