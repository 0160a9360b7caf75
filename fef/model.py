"""A decoder-only Transformer whose FFNs are dense or mixtures of experts; `make_model` makes any kind of model.

Shape letters: B batch, S sequence, D model width, V vocabulary, L MoE layers.

Source: A. Vaswani et al., "Attention Is All You Need", 2017, section 3.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from fef.attention import make_attention
from fef.config import Config
from fef.encoder_decoder import EncoderDecoder
from fef.layers import Block, LayerKind, Layers, stacked_metrics


class Decoder(Layers):
    """The whole model.

    Args:
      config: a validated configuration.
      mesh: from `fef.make_mesh`.
      rngs: source of the initial parameters, which do not depend on the mesh.
    """

    def __init__(self, config: Config, mesh: Mesh, rngs: nnx.Rngs):
        model = config.model
        embedding_VD = jax.random.normal(rngs.params(), (model.vocab_size, model.d_model)) * model.d_model**-0.5

        def make_block(kind: LayerKind) -> Block:
            return Block(config, mesh, kind.is_moe, make_attention(model, kind.window, rngs), rngs)

        super().__init__(config, mesh, make_block)
        self.add_ends(model, embedding_VD, rngs)

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
        """Predicts the next token everywhere.

        Args:
          tokens_BS: (B, S) int32, B sharded over all devices.
          mask_BS: (B, S) bool, False on padding; None means no padding.
          experts: what `dispatcher.prepare(model.experts)` returned; None prepares them here.
          step, key, train: see `MoeLayer`.
          replay: assignments to use, with a leading axis of MoE layers.

        Returns:
          logits_BSV (B, S, V) float32; aux_loss () float32, the mean over the MoE layers; metrics of the MoE layers,
          stacked on a leading axis L ({} for a dense model).
        """
        mask_BS = jnp.ones(tokens_BS.shape, bool) if mask_BS is None else mask_BS
        key = jax.random.key(0) if key is None else key
        x_BSD, metrics = self.apply_runs(
            range(len(self.runs)), self.embed(tokens_BS), mask_BS, tokens_BS=tokens_BS, experts=self.prepared(experts),
            step=step, key=key, train=train, replay=replay,
        )  # fmt: skip
        return self.predict(x_BSD), *stacked_metrics(metrics)


def make_model(config: Config, mesh: Mesh, rngs: nnx.Rngs) -> Layers:
    """The model that `config` describes; see its class for what it is called with."""
    return (EncoderDecoder if config.model.encoder.layers else Decoder)(config, mesh, rngs)
