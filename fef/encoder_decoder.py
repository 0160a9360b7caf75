"""An encoder and a decoder with relative positions, whose FFNs are dense or mixtures of experts (T5, Switch).

It predicts the second half of a sequence: the encoder reads the first half in both directions, and the decoder, which
attends to it, predicts what follows each token of the second (prefix language modelling). So every layer sees half of a
sequence's tokens, and half of them have a prediction.

Shape letters: B batch, S sequence, P = S/2 its half, D model width, H heads, V vocabulary, L MoE layers.

Sources: C. Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2020,
sections 2.1 and 3.2.1; W. Fedus, B. Zoph, N. Shazeer, "Switch Transformers", 2021, section 2.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from fef.attention import RelativeAttention, distance_buckets, rms_norm
from fef.config import Config
from fef.layers import Block, LayerKind, Layers, stacked_metrics


class EncoderDecoder(Layers):
    """The whole model; its runs are those of the encoder, then those of the decoder.

    Args:
      config: a validated configuration with `model.encoder.layers` > 0.
      mesh: from `fef.make_mesh`.
      rngs: source of the initial parameters, which do not depend on the mesh.
    """

    def __init__(self, config: Config, mesh: Mesh, rngs: nnx.Rngs):
        model, encoder = config.model, config.model.encoder
        self.buckets, self.max_distance = encoder.buckets, encoder.max_distance
        embedding_VD = jax.random.normal(rngs.params(), (model.vocab_size, model.d_model))

        def make_block(kind: LayerKind) -> Block:
            attention = RelativeAttention(model, kind.is_decoder, rngs)
            cross = RelativeAttention(model, False, rngs) if kind.is_decoder else None
            return Block(config, mesh, kind.is_moe, attention, rngs, cross)

        super().__init__(config, mesh, make_block)
        self.encoder_runs = sum(not hasattr(run, "cross") for run in self.runs)
        self.encoder_bias_NH = nnx.Param(self._draw_bias(model.num_heads, model.d_model, rngs))
        self.decoder_bias_NH = nnx.Param(self._draw_bias(model.num_heads, model.d_model, rngs))
        self.encoder_norm = nnx.Param(jnp.ones(model.d_model))
        self.add_ends(model, embedding_VD, rngs)

    def _draw_bias(self, num_heads: int, d_model: int, rngs: nnx.Rngs) -> jax.Array:
        return jax.random.normal(rngs.params(), (self.buckets, num_heads)) * d_model**-0.5

    def __call__(
        self,
        tokens_BS: jax.Array,
        mask_BS: jax.Array | None = None,
        *,
        experts: Any = None,
        step: jax.Array | int = 0,
        key: jax.Array | None = None,
        train: bool = True,
        replay: dict[str, jax.Array] | None = None,
    ) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
        """Predicts the next token everywhere in the second half.

        Args: see `fef.model.Decoder`; S is even.

        Returns:
          logits_BPV (B, S/2, V) float32; aux_loss () float32, the mean over the MoE layers; metrics of the MoE layers,
          stacked on a leading axis L, the encoder's first ({} for a dense model).
        """
        half = tokens_BS.shape[1] // 2
        mask_BS = jnp.ones(tokens_BS.shape, bool) if mask_BS is None else mask_BS
        key = jax.random.key(0) if key is None else key
        moe_inputs = dict(experts=self.prepared(experts), step=step, key=key, train=train, replay=replay)
        encoder_runs, decoder_runs = range(self.encoder_runs), range(self.encoder_runs, len(self.runs))

        tokens_BP, mask_BP = tokens_BS[:, :half], mask_BS[:, :half]
        bias_HPP = self._bias(self.encoder_bias_NH, half, is_causal=False)
        x_BPD, metrics = self.apply_runs(
            encoder_runs, self.embed(tokens_BP), mask_BP, tokens_BS=tokens_BP, bias_HSS=bias_HPP, **moe_inputs
        )
        memory = (rms_norm(x_BPD, self.encoder_norm[...], self.eps), mask_BP)

        tokens_BP = tokens_BS[:, half:]
        bias_HPP = self._bias(self.decoder_bias_NH, half, is_causal=True)
        x_BPD, decoder_metrics = self.apply_runs(
            decoder_runs, self.embed(tokens_BP), mask_BS[:, half:], tokens_BS=tokens_BP, bias_HSS=bias_HPP,
            memory=memory, **moe_inputs,
        )  # fmt: skip
        logits_BPV = self.predict(x_BPD, tied_factor=x_BPD.shape[-1] ** -0.5)  # the embedding is of the order of 1
        return logits_BPV, *stacked_metrics(metrics + decoder_metrics)

    def _bias(self, bias_NH: nnx.Param, length: int, is_causal: bool) -> jax.Array:
        buckets_PP = distance_buckets(length, self.buckets, self.max_distance, is_causal)
        return bias_NH[...][buckets_PP].transpose(2, 0, 1)
