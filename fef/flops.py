"""Arithmetic of a training step, by counting matrix multiplications.

Convention (stated beside every number made from it):
- A matmul parameter costs 2 FLOPs a token forward (multiply and add) and 4 backward: 6 a token in training.
- Only parameters that a token meets count: the K chosen experts and the shared ones, not all E. For a scheme whose
  tokens visit a varying number of experts, K is the mean; drops are not subtracted.
- The router (D*E) and the output projection (D*V, tied to the embedding or not) are matmuls and count. The embedding
  look-up, norms, rotary positions, softmax, biases and activations are none and count 0, and so does recomputation
  (remat).
- Attention scores and the weighted sum of values are no parameters: 12 * heads * head_dim * S per token and layer over
  the full square, half of it when causal (the mean query sees S/2 keys). Windows are not subtracted. Where queries and
  values have different widths (latent attention, whose expanded form is counted), each counts half of that.
- With an encoder, a token is one that is predicted; each comes with one that the encoder reads, so that both stacks
  count once, and S is the half of a sequence. Encoder and cross attention have no causal mask.

Source: A. Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways" (arXiv:2204.02311, 2022), appendix B.
"""

import dataclasses

from fef.config import Config, ModelConfig, head_dim, moe_layers, tokens_per_layer
from fef.ffn import FFNS


@dataclasses.dataclass(frozen=True)
class TrainFlops:
    """FLOPs per token of one training step, forward and backward, in two parts."""

    matmul: int
    attention: int

    @property
    def total(self) -> int:
        return self.matmul + self.attention


def matmul_params_active(config: Config) -> int:
    """Parameters of the matrices that one token is multiplied with."""
    model, moe = config.model, config.moe
    ffn = FFNS.get(model.ffn)
    dense_ffn = ffn.num_matmul_elems(model.d_model, model.d_ff)
    experts = (moe.num_choices + moe.num_shared) * ffn.num_matmul_elems(model.d_model, moe.d_expert)
    router = model.d_model * moe.num_experts
    is_moe = moe_layers(config)
    num_attentions = model.num_layers + (model.encoder.layers + model.num_layers if model.encoder.layers else 0)
    return (
        num_attentions * _attention_params(model)
        + is_moe.count(True) * (router + experts)
        + is_moe.count(False) * dense_ffn
        + model.d_model * model.vocab_size
    )


def train_flops_per_token(config: Config, causal: bool = True) -> TrainFlops:
    """FLOPs per token of one training step; see the module's docstring for the convention.

    Args:
      config: the run's configuration; S is config.data.seq_len.
      causal: whether attention counts the half square that a causal mask leaves, or the full one.
    """
    model, mla = config.model, config.model.mla
    widths = 2 * head_dim(model)
    if mla.kv_rank:
        widths = mla.nope_dim + mla.rope_dim + mla.value_dim
    square = 6 * model.num_heads * widths * tokens_per_layer(config)
    own = model.num_layers * square
    own = own // 2 if causal else own
    other = (model.encoder.layers + model.num_layers) * square if model.encoder.layers else 0
    return TrainFlops(6 * matmul_params_active(config), own + other)


def _attention_params(model: ModelConfig) -> int:
    """Parameters of a layer's projections."""
    mla = model.mla
    if not mla.kv_rank:
        q_width, kv_width = model.num_heads * head_dim(model), model.num_kv_heads * head_dim(model)
        return 2 * model.d_model * q_width + 2 * model.d_model * kv_width  # query and output; key and value
    q_width = model.num_heads * (mla.nope_dim + mla.rope_dim)
    query = mla.q_rank * (model.d_model + q_width) if mla.q_rank else model.d_model * q_width
    key_value = model.d_model * (mla.kv_rank + mla.rope_dim)
    key_value += mla.kv_rank * model.num_heads * (mla.nope_dim + mla.value_dim)
    return query + key_value + model.num_heads * mla.value_dim * model.d_model
