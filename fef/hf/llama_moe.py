"""What the families with softmax gates share: a decoder named as Llama's, some of whose FFNs are SwiGLU experts."""

from typing import Any

from fef.config import Config, moe_layers
from fef.hf import Part
from fef.hf.fields import Fields
from fef.hf.parts import attention, gate, norms, outside_of_layers, swiglu, swiglu_experts


class LlamaMoe:
    """Parts of such a family, and what its gate says in config.json.

    Attributes:
      moe: name of a layer's experts and gate.
      expert_names: of an expert's Linears: gate, up, down.
    """

    router = "top_k"
    moe = "mlp"
    expert_names = ("gate_proj", "up_proj", "down_proj")

    def read_gate(self, fields: Fields, renormalise: bool) -> dict[str, Any]:
        """A softmax over all experts, of which the K best count; `renormalise`: divided by their sum."""
        num_choices = fields.need("num_experts_per_tok")
        if renormalise and num_choices == 1:
            reason = "a single renormalised weight is always 1; fef keeps its probability"
            fields.refuse("num_experts_per_tok", 1, reason)
        return {
            "moe.num_choices": num_choices,
            "moe.router": self.router,
            "routing.top_k.renormalise": renormalise,
            "routing.top_k.balance_coef": float(fields.need("router_aux_loss_coef")),
            "routing.top_k.z_coef": 0.0,
        }

    def write_gate(self, config: Config) -> dict[str, Any]:
        """The inverse of `read_gate`, without what says whether weights are renormalised."""
        return {
            "num_experts_per_tok": config.moe.num_choices,
            "router_aux_loss_coef": config.routing.top_k.balance_coef,
        }

    def parts(self, config: Config) -> list[Part]:
        parts = outside_of_layers(config)
        for i, is_moe in enumerate(moe_layers(config)):
            layer = f"model.layers.{i}"
            parts += norms(i, config) + attention(i, config)
            if is_moe:
                parts.append(gate(i, f"{layer}.{self.moe}.gate.weight", config))
                parts += swiglu_experts(i, f"{layer}.{self.moe}.experts", config, self.expert_names)
            else:
                parts += swiglu(f"dense.runs.{i}.ffn", f"{layer}.mlp", config.model.d_model, config.model.d_ff)
        return parts

    def is_beside_the_model(self, tensor: str, config: Config) -> bool:
        return tensor.endswith("rotary_emb.inv_freq")
