"""Fields and parts that families share: those of a decoder named as Llama's, stacks of experts, softmax gates."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from fef.config import Config, flatten, head_dim, moe_layers
from fef.hf import Part
from fef.hf.fields import Fields, write_rope

# config.json <-> Config, where one field is one key.
_LLAMA = {
    "vocab_size": "model.vocab_size",
    "hidden_size": "model.d_model",
    "num_hidden_layers": "model.num_layers",
    "num_attention_heads": "model.num_heads",
    "num_key_value_heads": "model.num_kv_heads",
    "rms_norm_eps": "model.norm_eps",
    "tie_word_embeddings": "model.tie_embeddings",
}


def read_llama(fields: Fields, *, scores_scaled: bool = False) -> dict[str, Any]:
    """The fields of every decoder here, as values of a Config by key; `scores_scaled` as `Fields.rope` takes it."""
    fields.expect("hidden_act", "silu")
    fields.expect("attention_dropout", 0, 0.0)
    return {key: fields.need(name) for name, key in _LLAMA.items()} | fields.rope(scores_scaled=scores_scaled)


def write_llama(config: Config) -> dict[str, Any]:
    """The inverse of `read_llama`."""
    values, yarn = flatten(config), config.model.yarn
    fields = {name: values[key] for name, key in _LLAMA.items()}
    if yarn.factor > 1:
        fields["max_position_embeddings"] = round(yarn.factor * yarn.original_len)
    return fields | {"hidden_act": "silu", "rope_parameters": write_rope(config.model)}


def same(leaf: str, tensor: str, *shape: int) -> Part:
    """An array that is a tensor."""
    return Part((leaf,), {tensor: shape}, lambda tensors: tensors, lambda arrays: arrays)


def matrix(leaf: str, tensor: str, fan_in: int, fan_out: int) -> Part:
    """A matrix (in, out) that torch's Linear holds as (out, in)."""
    return Part((leaf,), {tensor: (fan_out, fan_in)}, lambda tensors: [tensors[0].T], lambda arrays: [arrays[0].T])


def matrices_of_experts(leaf: str, tensors: Iterable[str], fan_in: int, fan_out: int) -> Part:
    """A stack (E, in, out) of which torch has E Linears (out, in)."""
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(tensors, (fan_out, fan_in))
    join = lambda tensors: [np.stack([w.T for w in tensors])]  # noqa: E731
    return Part((leaf,), shapes, join, lambda arrays: [w.T for w in arrays[0]])


def linear(leaf: str, tensor: str, fan_in: int, fan_out: int, has_bias: bool = False) -> list[Part]:
    """A `Linear`."""
    weight = matrix(f"{leaf}.w.value", f"{tensor}.weight", fan_in, fan_out)
    return [weight, same(f"{leaf}.bias.value", f"{tensor}.bias", fan_out)] if has_bias else [weight]


def outside_of_layers(config: Config) -> list[Part]:
    """Embedding, last norm and output projection."""
    vocab, width = config.model.vocab_size, config.model.d_model
    parts = [same("dense.embedding_VD.value", "model.embed_tokens.weight", vocab, width)]
    parts.append(same("dense.final_norm.value", "model.norm.weight", width))
    return parts if config.model.tie_embeddings else parts + linear("dense.output", "lm_head", width, vocab)


def norms(i: int, config: Config) -> list[Part]:
    """The norms of layer i before attention and FFN."""
    names = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    width = config.model.d_model
    return [same(f"dense.runs.{i}.{fef}.value", f"model.layers.{i}.{hf}.weight", width) for fef, hf in names.items()]


def attention(i: int, config: Config) -> list[Part]:
    """Grouped-query attention of layer i, with the variants that the Config has."""
    model, variant = config.model, config.model.attention
    leaf, tensor = f"dense.runs.{i}.attention", f"model.layers.{i}.self_attn"
    q_width, kv_width = model.num_heads * head_dim(model), model.num_kv_heads * head_dim(model)
    parts = linear(f"{leaf}.query", f"{tensor}.q_proj", model.d_model, q_width, variant.bias)
    parts += linear(f"{leaf}.key", f"{tensor}.k_proj", model.d_model, kv_width, variant.bias)
    parts += linear(f"{leaf}.value", f"{tensor}.v_proj", model.d_model, kv_width, variant.bias)
    parts += linear(f"{leaf}.out", f"{tensor}.o_proj", q_width, model.d_model, variant.bias)
    if variant.qk_norm != "none":
        widths = (head_dim(model),) * 2 if variant.qk_norm == "head" else (q_width, kv_width)
        parts.append(same(f"{leaf}.query_norm.value", f"{tensor}.q_norm.weight", widths[0]))
        parts.append(same(f"{leaf}.key_norm.value", f"{tensor}.k_norm.weight", widths[1]))
    if variant.sinks:
        parts.append(same(f"{leaf}.sinks_H.value", f"{tensor}.sinks", model.num_heads))
    return parts


def swiglu(leaf: str, tensor: str, d_model: int, d_ff: int) -> list[Part]:
    """A dense SwiGLU."""
    parts = linear(f"{leaf}.gate", f"{tensor}.gate_proj", d_model, d_ff)
    parts += linear(f"{leaf}.up", f"{tensor}.up_proj", d_model, d_ff)
    return parts + linear(f"{leaf}.down", f"{tensor}.down_proj", d_ff, d_model)


def swiglu_experts(i: int, tensor: str, config: Config, names: tuple[str, str, str]) -> list[Part]:
    """The experts of layer i, each with Linears of the names gate, up, down below `tensor`."""
    d_model, d_expert = config.model.d_model, config.moe.d_expert

    def of_all(name: str) -> list[str]:
        return [f"{tensor}.{e}.{name}.weight" for e in range(config.moe.num_experts)]

    leaf, (gate, up, down) = f"experts.runs.{i}.moe", names
    return [
        matrices_of_experts(f"{leaf}.w_gate_PDF.value", of_all(gate), d_model, d_expert),
        matrices_of_experts(f"{leaf}.w_up_PDF.value", of_all(up), d_model, d_expert),
        matrices_of_experts(f"{leaf}.w_down_PFD.value", of_all(down), d_expert, d_model),
    ]


def gate(i: int, tensor: str, config: Config) -> Part:
    """The matrix of layer i's router."""
    return matrix(f"dense.runs.{i}.moe.gate.gate_DE.value", tensor, config.model.d_model, config.moe.num_experts)


def places_of_experts(*stacks: list[bool]) -> dict[str, int] | None:
    """`moe.leading_dense` and `moe.every` that put experts into just these layers of each stack; None: nothing does."""
    if not any(map(any, stacks)):
        return {"moe.every": 0}
    config, most = Config(), max(map(len, stacks))
    for config.moe.every in range(1, most + 1):
        for config.moe.leading_dense in range(most):
            if all(_layers_with_experts(config, len(stack)) == stack for stack in stacks):
                return {"moe.leading_dense": config.moe.leading_dense, "moe.every": config.moe.every}
    return None


def _layers_with_experts(config: Config, num_layers: int) -> list[bool]:
    config.model.num_layers = num_layers
    return moe_layers(config)
