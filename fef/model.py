"""A decoder-only Transformer whose FFNs are dense or mixtures of experts.

Shape letters: B batch, S sequence, D model width, F hidden width, V vocabulary, L MoE layers.

Sources: A. Vaswani et al., "Attention Is All You Need", 2017; N. Shazeer, "GLU Variants Improve Transformer", 2020.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from fef import sharding
from fef.attention import Linear, make_attention, rms_norm
from fef.config import Config, ModelConfig, moe_layers, windows
from fef.dispatch import DISPATCHERS
from fef.dispatch.base import Dispatcher
from fef.experts import Experts
from fef.ffn import FFNS
from fef.moe import MoeLayer
from fef.ops.device import Device
from fef.pool.table import ExpertTable
from fef.routing import ROUTERS

_REMAT_POLICIES = {"dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable, "full": None}


class DenseFfn(nnx.Module):
    """The configured kind of FFN, with hidden width d_ff."""

    def __init__(self, model: ModelConfig, d_ff: int, rngs: nnx.Rngs):
        self.kind = FFNS.get(model.ffn)
        shapes = self.kind.shapes(model.d_model, d_ff)
        for name in self.kind.maps:
            fan_in, fan_out = shapes[f"w_{name}"]
            setattr(self, name, Linear(fan_in, fan_out, model.init_scale, rngs, self.kind.has_biases))

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        return self.kind(x_BSD, lambda name, x: getattr(self, name)(x))


class Block(nnx.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)), where ffn is dense or experts plus shared experts."""

    def __init__(self, config: Config, mesh: Mesh, is_moe: bool, window: int, rngs: nnx.Rngs):
        model, moe = config.model, config.moe
        self.eps = model.norm_eps
        self.attention_norm = nnx.Param(jnp.ones(model.d_model))
        self.attention = make_attention(model, window, rngs)
        self.ffn_norm = nnx.Param(jnp.ones(model.d_model))
        if not is_moe:
            self.ffn = DenseFfn(model, model.d_ff, rngs)
            return
        self.moe = MoeLayer(
            model.d_model,
            moe.d_expert,
            moe.num_experts,
            moe.num_choices,
            mesh=mesh,
            rngs=rngs,
            router=make_router(config),
            dispatcher=make_dispatcher(config, mesh),
            init_scale=model.init_scale,
            ffn=model.ffn,
        )
        if moe.num_shared:
            self.shared = DenseFfn(model, moe.num_shared * moe.d_expert, rngs)

    def __call__(self, x_BSD: jax.Array, mask_BS: jax.Array, **moe_inputs: Any) -> tuple[jax.Array, dict[str, Any]]:
        x_BSD = x_BSD + self.attention(rms_norm(x_BSD, self.attention_norm[...], self.eps), mask_BS)
        normed_BSD = rms_norm(x_BSD, self.ffn_norm[...], self.eps)
        if not hasattr(self, "moe"):
            return x_BSD + self.ffn(normed_BSD), {}
        y_BSD, metrics = self.moe(normed_BSD, mask_BS=mask_BS, **moe_inputs)
        if hasattr(self, "shared"):
            y_BSD = y_BSD + self.shared(normed_BSD)
        return x_BSD + y_BSD, metrics


class Decoder(nnx.Module):
    """The whole model. Its blocks stand in runs: one block each, or equal blocks stacked when layers are scanned.

    Args:
      config: a validated configuration.
      mesh: from `fef.make_mesh`.
      rngs: source of the initial parameters, which do not depend on the mesh.
    """

    def __init__(self, config: Config, mesh: Mesh, rngs: nnx.Rngs):
        model = config.model
        self.dtype, self.eps, self.remat, self.mesh = model.dtype, model.norm_eps, model.remat, mesh
        embedding_VD = jax.random.normal(rngs.params(), (model.vocab_size, model.d_model)) * model.d_model**-0.5
        self.embedding_VD = nnx.Param(embedding_VD * model.init_scale)
        kinds = _kinds(config)
        self.is_scanned = model.scan_layers
        self.run_lengths = tuple(run_lengths(config))
        runs, first = [], 0
        for length in self.run_lengths:
            blocks = [Block(config, mesh, *kinds[first], rngs) for _ in range(length)]
            runs.append(_stack(blocks) if self.is_scanned else blocks[0])
            first += length
        self.runs = nnx.List(runs)
        self.final_norm = nnx.Param(jnp.ones(model.d_model))
        if not model.tie_embeddings:
            self.output = Linear(model.d_model, model.vocab_size, model.init_scale, rngs)

    @property
    def moe_runs(self) -> list[Block]:
        """The runs whose blocks have experts."""
        return [run for run in self.runs if hasattr(run, "moe")]

    @property
    def experts(self) -> list[Experts]:
        """The experts of each run that has some, as `Dispatcher.prepare` takes them."""
        return [run.moe.experts for run in self.moe_runs]

    def update_routers(self, seen_L: Any) -> None:
        """Gives the routers their states for the next step, from what they have seen, with a leading axis of layers."""
        first = 0
        for run, length in zip(self.runs, self.run_lengths, strict=True):
            if hasattr(run, "moe"):
                part = slice(first, first + length) if self.is_scanned else first
                seen = jax.tree.map(lambda a, part=part: a[part], seen_L)
                run.moe.update_router(seen, length if self.is_scanned else None)
                first += length

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
        if experts is None and self.moe_runs:
            experts = self.moe_runs[0].moe.dispatcher.prepare(self.experts)
        x_BSD = self.embedding_VD[...][tokens_BS].astype(self.dtype)
        x_BSD = jax.lax.with_sharding_constraint(x_BSD, sharding.named(self.mesh, sharding.TOKENS))

        metrics: list[dict[str, Any]] = []
        first = 0  # number of the run's first MoE layer
        for run, length in zip(self.runs, self.run_lengths, strict=True):
            is_moe = hasattr(run, "moe")
            layers_l = jnp.arange(first, first + length, dtype=jnp.int32)
            own = experts[len(metrics)] if is_moe and isinstance(experts, list) else None
            replay_l = jax.tree.map(lambda a, s=slice(first, first + length): a[s], replay) if is_moe else None

            def block_fn(state: Any, x_BSD: jax.Array, own: Any, layer: jax.Array, replay: Any, graph: Any) -> Any:
                return nnx.merge(graph, state)(
                    x_BSD,
                    mask_BS,
                    token_ids_BS=tokens_BS,
                    experts=experts if own is None else own,
                    layer=layer,
                    step=step,
                    key=jax.random.fold_in(key, layer),
                    train=train,
                    replay=replay,
                )

            x_BSD, run_metrics = self._run(run, block_fn, x_BSD, own, layers_l, replay_l)
            if is_moe:
                metrics.append(run_metrics)
                first += length

        x_BSD = rms_norm(x_BSD, self.final_norm[...], self.eps).astype(jnp.float32)
        logits_BSV = self.output(x_BSD) if hasattr(self, "output") else x_BSD @ self.embedding_VD[...].T
        if not metrics:
            return logits_BSV, jnp.float32(0), {}
        stacked = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *metrics)
        aux_loss_L = stacked.pop("aux_loss")
        return logits_BSV, aux_loss_L.mean(), stacked

    def _run(self, run: Block, block_fn: Any, x_BSD: jax.Array, own: Any, layers_l: jax.Array, replay_l: Any) -> tuple:
        """Applies one run; its metrics get a leading axis of the run's layers."""
        graph, state = nnx.split(run)
        apply: Callable = functools.partial(block_fn, graph=graph)
        if self.remat != "none":
            apply = jax.checkpoint(apply, policy=_REMAT_POLICIES[self.remat])
        if not self.is_scanned:
            replay = None if replay_l is None else jax.tree.map(lambda a: a[0], replay_l)
            x_BSD, metrics = apply(state, x_BSD, own, layers_l[0], replay)
            return x_BSD, jax.tree.map(lambda a: a[None], metrics)

        def scanned(x_BSD: jax.Array, xs: tuple) -> tuple:
            state, own, layer, replay = xs
            return apply(state, x_BSD, own, layer, replay)

        return jax.lax.scan(scanned, x_BSD, (state, own, layers_l, replay_l))


def make_router(config: Config) -> Any:
    """The router that `config` names, with its options."""
    name = config.moe.router
    return ROUTERS.get(name)(config.moe.num_experts, config.moe.num_choices, getattr(config.routing, name))


def make_device(config: Config) -> Device:
    """Whose time expert matmuls take."""
    return Device(config.device.flops or 0.0, config.device.half_rows, config.device.values)


def make_dispatcher(config: Config, mesh: Mesh) -> Any:
    """The dispatcher that `config` names, with its options."""
    name = config.moe.dispatcher
    return DISPATCHERS.get(name)(
        mesh,
        ExpertTable(config.moe.num_experts, sharding.num_members(mesh)),
        matmul=config.dispatch.matmul,
        dtype=config.model.dtype,
        rerun=config.model.remat != "none",
        device=make_device(config),
        options=getattr(config.dispatch, name, Dispatcher.Options()),
    )


def run_lengths(config: Config) -> list[int]:
    """How many layers each run has: one, or when layers are scanned as many equal ones as follow each other."""
    if not config.model.scan_layers:
        return [1] * config.model.num_layers
    return [len(list(group)) for _, group in itertools.groupby(_kinds(config))]


def _kinds(config: Config) -> list[tuple[bool, int]]:
    """Of each layer, whether it has experts, and the window of its attention."""
    return list(zip(moe_layers(config), windows(config.model), strict=True))


def _stack(blocks: list[Block]) -> Block:
    """Equal blocks as one whose variables have a leading axis of layers."""
    graph, _ = nnx.split(blocks[0])
    states = [nnx.split(block)[1] for block in blocks]
    return nnx.merge(graph, jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))
