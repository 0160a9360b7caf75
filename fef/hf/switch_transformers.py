"""Switch Transformers: an encoder and a decoder with relative positions, ReLU FFNs, experts in every n-th layer.

An expert takes `expert_capacity` tokens of a sequence, in evaluation as in training. transformers adds the losses of
encoder and decoder, each over its layers; fef takes the mean over all layers, so the coefficients are twice as large
here. Dropout, which the published models were trained with, fef does not have.

Source: W. Fedus, B. Zoph, N. Shazeer, "Switch Transformers", 2021, section 2;
`SwitchTransformersForConditionalGeneration` of transformers.
"""

from typing import Any

from fef.config import Config, head_dim, moe_layers
from fef.hf import FAMILIES, Part
from fef.hf.fields import Fields
from fef.hf.parts import gate, linear, matrices_of_experts, places_of_experts, same
from fef.layers import layer_kinds

_BESIDE = (  # of training with dropout, of generation, and what transformers makes of other fields
    "dropout_rate", "classifier_dropout", "encoder_sparse_step", "decoder_sparse_step", "is_decoder",
    "add_cross_attention", "n_positions", "output_past", "task_specific_params",
)  # fmt: skip
_FIXED = {
    "dense_act_fn": "relu",
    "feed_forward_proj": "relu",
    "is_gated_act": False,
    "router_bias": False,
    "router_dtype": "float32",
    "router_ignore_padding_tokens": False,
    "router_type": "tokens_masked",
    "num_selected_experts": 1,
    "batch_prioritized_routing": False,
    "add_router_probs": False,
}


@FAMILIES.register("switch_transformers")
class SwitchTransformers:
    """See the module."""

    model_type = "switch_transformers"
    architecture = "SwitchTransformersForConditionalGeneration"
    router = "switch"

    def read(self, fields: Fields) -> dict[str, Any]:
        for name, value in _FIXED.items():
            fields.expect(name, value)
        for name in _BESIDE:
            fields.get(name, default=None)
        num_heads = fields.need("num_heads")
        return {
            "model.vocab_size": fields.need("vocab_size"),
            "model.d_model": fields.need("d_model"),
            "model.num_layers": fields.need("num_decoder_layers"),
            "model.num_heads": num_heads,
            "model.num_kv_heads": num_heads,
            "model.head_dim": fields.need("d_kv"),
            "model.d_ff": fields.need("d_ff"),
            "model.ffn": "relu",
            "model.norm_eps": float(fields.need("layer_norm_epsilon")),
            "model.tie_embeddings": fields.get(
                "tie_word_embeddings", default=True
            ),  # which transformers need not write
            "model.encoder.layers": fields.need("num_layers"),
            "model.encoder.buckets": fields.need("relative_attention_num_buckets"),
            "model.encoder.max_distance": fields.get("relative_attention_max_distance", default=128),
            **self._places(fields),
            "moe.num_experts": fields.need("num_experts"),
            "moe.num_choices": 1,
            "moe.d_expert": fields.need("d_ff"),
            "moe.router": self.router,
            "routing.switch.capacity": fields.need("expert_capacity"),
            "routing.switch.capacity_at_eval": True,
            "routing.switch.jitter": float(fields.need("router_jitter_noise")),
            "routing.switch.balance_coef": 2 * float(fields.need("router_aux_loss_coef")),
            "routing.switch.z_coef": 2 * float(fields.need("router_z_loss_coef")),
        }

    def _places(self, fields: Fields) -> dict[str, int]:
        """transformers: every n-th layer, n = layers / sparse layers, starting with the second."""
        sizes = [
            (fields.need("num_layers"), fields.need("num_sparse_encoder_layers")),
            (fields.need("num_decoder_layers"), fields.need("num_sparse_decoder_layers")),
        ]
        stacks = []
        for layers, sparse in sizes:
            step = layers // sparse if sparse else layers
            stacks.append([i % step == 1 or step == 1 for i in range(layers)])
        places = places_of_experts(*stacks)
        if places is None:
            reason = "fef has experts in every n-th layer, in both stacks alike"
            fields.refuse("layers, sparse layers", sizes, reason)
        return places

    def write(self, config: Config) -> dict[str, Any]:
        model, encoder, options = config.model, config.model.encoder, config.routing.switch
        is_moe = moe_layers(config)
        return {
            "vocab_size": model.vocab_size,
            "d_model": model.d_model,
            "d_kv": head_dim(model),
            "d_ff": model.d_ff,
            "num_heads": model.num_heads,
            "num_layers": encoder.layers,
            "num_sparse_encoder_layers": sum(is_moe[: encoder.layers]),
            "num_decoder_layers": model.num_layers,
            "num_sparse_decoder_layers": sum(is_moe[encoder.layers :]),
            "num_experts": config.moe.num_experts,
            "expert_capacity": options.capacity,
            "relative_attention_num_buckets": encoder.buckets,
            "relative_attention_max_distance": encoder.max_distance,
            "layer_norm_epsilon": model.norm_eps,
            "tie_word_embeddings": model.tie_embeddings,
            "dense_act_fn": "relu",
            "router_jitter_noise": options.jitter,
            "router_aux_loss_coef": options.balance_coef / 2,
            "router_z_loss_coef": options.z_coef / 2,
            "is_encoder_decoder": True,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
        }

    def parts(self, config: Config) -> list[Part]:
        model, encoder = config.model, config.model.encoder
        parts = [
            same("dense.embedding_VD.value", "shared.weight", model.vocab_size, model.d_model),
            same("dense.encoder_norm.value", "encoder.final_layer_norm.weight", model.d_model),
            same("dense.final_norm.value", "decoder.final_layer_norm.weight", model.d_model),
        ]
        for side in ("encoder", "decoder"):
            bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            parts.append(same(f"dense.{side}_bias_NH.value", bias, encoder.buckets, model.num_heads))
        if not model.tie_embeddings:
            parts += linear("dense.output", "lm_head", model.d_model, model.vocab_size)
        for i, kind in enumerate(layer_kinds(config)):
            block = f"decoder.block.{i - encoder.layers}" if kind.is_decoder else f"encoder.block.{i}"
            sublayers = {"attention": f"{block}.layer.0.SelfAttention"}
            if kind.is_decoder:
                sublayers["cross"] = f"{block}.layer.1.EncDecAttention"
            for name, tensor in sublayers.items():
                parts += _attention(f"dense.runs.{i}.{name}", tensor, config)
            for n, name in enumerate([*sublayers, "ffn"]):
                parts.append(
                    same(f"dense.runs.{i}.{name}_norm.value", f"{block}.layer.{n}.layer_norm.weight", model.d_model)
                )
            mlp = f"{block}.layer.{len(sublayers)}.mlp"
            if not kind.is_moe:
                parts += linear(f"dense.runs.{i}.ffn.up", f"{mlp}.wi", model.d_model, model.d_ff)
                parts += linear(f"dense.runs.{i}.ffn.down", f"{mlp}.wo", model.d_ff, model.d_model)
                continue
            parts.append(gate(i, f"{mlp}.router.classifier.weight", config))
            experts = [f"{mlp}.experts.expert_{e}" for e in range(config.moe.num_experts)]
            widths, leaf = (model.d_model, config.moe.d_expert), f"experts.runs.{i}.moe"
            ups, downs = ([f"{expert}.{name}.weight" for expert in experts] for name in ("wi", "wo"))
            parts.append(matrices_of_experts(f"{leaf}.w_up_PDF.value", ups, *widths))
            parts.append(matrices_of_experts(f"{leaf}.w_down_PFD.value", downs, *reversed(widths)))
        return parts

    def is_beside_the_model(self, tensor: str, config: Config) -> bool:
        return tensor in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")  # shared.weight once more


def _attention(leaf: str, tensor: str, config: Config) -> list[Part]:
    d_model, inner = config.model.d_model, config.model.num_heads * head_dim(config.model)
    names = {"query": "q", "key": "k", "value": "v"}
    parts = [part for fef, hf in names.items() for part in linear(f"{leaf}.{fef}", f"{tensor}.{hf}", d_model, inner)]
    return parts + linear(f"{leaf}.out", f"{tensor}.o", inner, d_model)
