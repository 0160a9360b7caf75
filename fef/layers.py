"""The layers of a model: blocks of attention and an FFN, one by one or stacked and scanned over.

Shape letters: B batch, S sequence, T tokens of a memory, D model width, F hidden width, H heads, L MoE layers.

Source: A. Vaswani et al., "Attention Is All You Need", 2017, section 3.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from fef import sharding
from fef.attention import Linear, RelativeAttention, rms_norm
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
    """x + attention(norm(x)), with `cross` x + cross(norm(x), memory), then x + ffn(norm(x)).

    Args:
      config: a validated configuration.
      mesh: from `fef.make_mesh`.
      is_moe: whether the FFN is experts plus shared experts, or dense.
      attention: of the block to itself, called with x_BSD and mask_BS. cross: to a memory, or None.
      rngs: source of the initial parameters of the FFN.
    """

    def __init__(
        self, config: Config, mesh: Mesh, is_moe: bool, attention: Callable[..., jax.Array], rngs: nnx.Rngs,
        cross: RelativeAttention | None = None,
    ):  # fmt: skip
        model, moe = config.model, config.moe
        self.eps = model.norm_eps
        self.attention_norm = nnx.Param(jnp.ones(model.d_model))
        self.attention = attention
        if cross is not None:
            self.cross_norm, self.cross = nnx.Param(jnp.ones(model.d_model)), cross
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

    def __call__(
        self, x_BSD: jax.Array, mask_BS: jax.Array, *, bias_HSS: Any = None, memory: Any = None, **moe_inputs: Any
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Returns (B, S, D) and the metrics of the MoE layer, {} without one.

        Args:
          x_BSD: (B, S, D). mask_BS: (B, S) bool, False on padding.
          bias_HSS: (H, S, S) of `RelativeAttention`; None for the other kinds.
          memory: (x_BTD, mask_BT) that `cross` attends to.
          moe_inputs: of `MoeLayer`.
        """
        bias = {} if bias_HSS is None else {"bias_HSS": bias_HSS}
        x_BSD = x_BSD + self.attention(rms_norm(x_BSD, self.attention_norm[...], self.eps), mask_BS, **bias)
        if hasattr(self, "cross"):
            x_BSD = x_BSD + self.cross.attend(rms_norm(x_BSD, self.cross_norm[...], self.eps), *memory)
        normed_BSD = rms_norm(x_BSD, self.ffn_norm[...], self.eps)
        if not hasattr(self, "moe"):
            return x_BSD + self.ffn(normed_BSD), {}
        y_BSD, metrics = self.moe(normed_BSD, mask_BS=mask_BS, **moe_inputs)
        if hasattr(self, "shared"):
            y_BSD = y_BSD + self.shared(normed_BSD)
        return x_BSD + y_BSD, metrics


class Layers(nnx.Module):
    """The base of a model. Its blocks stand in runs: one block each, or equal blocks stacked when layers are scanned.

    Args:
      config: a validated configuration.
      mesh: from `fef.make_mesh`.
      make_block: makes the block of a kind; called in the order of the layers.
    """

    def __init__(self, config: Config, mesh: Mesh, make_block: Callable[["LayerKind"], Block]):
        self.remat, self.mesh, self.is_scanned = config.model.remat, mesh, config.model.scan_layers
        self.run_lengths = tuple(run_lengths(config))
        kinds, runs = iter(layer_kinds(config)), []
        for length in self.run_lengths:
            blocks = [make_block(kind) for kind in itertools.islice(kinds, length)]
            runs.append(_stack(blocks) if self.is_scanned else blocks[0])
        self.runs = nnx.List(runs)
        self.dtype, self.eps = config.model.dtype, config.model.norm_eps

    def add_ends(self, model: ModelConfig, embedding_VD: jax.Array, rngs: nnx.Rngs) -> None:
        """The embedding, the last norm and, unless the embedding is it, the output projection."""
        self.embedding_VD = nnx.Param(embedding_VD * model.init_scale)
        self.final_norm = nnx.Param(jnp.ones(model.d_model))
        if not model.tie_embeddings:
            self.output = Linear(model.d_model, model.vocab_size, model.init_scale, rngs)

    def embed(self, tokens_BS: jax.Array) -> jax.Array:
        """(B, S, D) in the compute type, B sharded over all devices."""
        x_BSD = self.embedding_VD[...][tokens_BS].astype(self.dtype)
        return jax.lax.with_sharding_constraint(x_BSD, sharding.named(self.mesh, sharding.TOKENS))

    def predict(self, x_BSD: jax.Array, tied_factor: float = 1.0) -> jax.Array:
        """Logits (B, S, V) float32 of what the layers gave; a tied embedding gets `tied_factor` times as much."""
        x_BSD = rms_norm(x_BSD, self.final_norm[...], self.eps).astype(jnp.float32)
        if hasattr(self, "output"):
            return self.output(x_BSD)
        return (x_BSD if tied_factor == 1 else x_BSD * tied_factor) @ self.embedding_VD[...].T

    def prepared(self, experts: Any) -> Any:
        """What the dispatcher made of all experts; None makes it here."""
        return self.moe_runs[0].moe.dispatcher.prepare(self.experts) if experts is None and self.moe_runs else experts

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

    def apply_runs(
        self,
        which: range,
        x_BSD: jax.Array,
        mask_BS: jax.Array,
        *,
        tokens_BS: jax.Array,
        experts: Any,
        step: jax.Array | int,
        key: jax.Array,
        train: bool,
        replay: Any,
        **attended: Any,
    ) -> tuple[jax.Array, list[dict[str, Any]]]:
        """Applies the runs of these numbers.

        Args:
          x_BSD, mask_BS, attended: see `Block`. tokens_BS: (B, S) int32, of which x was made.
          experts: of all runs of the model, as `Dispatcher.prepare` made them. step, key, train: see `MoeLayer`.
          replay: assignments of all MoE layers of the model, with a leading axis of them, or None.

        Returns:
          (B, S, D), and the metrics of each run that has experts, with a leading axis of the run's layers.
        """
        metrics: list[dict[str, Any]] = []
        before = [length for run, length in zip(self.runs, self.run_lengths, strict=True) if hasattr(run, "moe")]
        number = sum(hasattr(self.runs[i], "moe") for i in range(which.start))  # of the next run with experts
        for i in which:
            run, length = self.runs[i], self.run_lengths[i]
            is_moe = hasattr(run, "moe")
            first = sum(before[:number])  # number of the run's first MoE layer
            layers_l = jnp.arange(first, first + length, dtype=jnp.int32)
            own = experts[number] if is_moe and isinstance(experts, list) else None
            replay_l = jax.tree.map(lambda a, s=slice(first, first + length): a[s], replay) if is_moe else None

            def block_fn(state: Any, x_BSD: jax.Array, own: Any, layer: jax.Array, replay: Any, graph: Any) -> Any:
                return nnx.merge(graph, state)(
                    x_BSD,
                    mask_BS,
                    **attended,
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
                number += 1
        return x_BSD, metrics

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


def stacked_metrics(metrics: list[dict[str, Any]]) -> tuple[jax.Array, dict[str, Any]]:
    """The mean auxiliary loss () float32 of the MoE layers, and their metrics on a leading axis L; 0 and {} of none."""
    if not metrics:
        return jnp.float32(0), {}
    stacked = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *metrics)
    return stacked.pop("aux_loss").mean(), stacked


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


class LayerKind(NamedTuple):
    """What layers differ in: whether they belong to the decoder, have experts, and the window of their attention."""

    is_decoder: bool
    is_moe: bool
    window: int


def layer_kinds(config: Config) -> list[LayerKind]:
    """Of each layer; the encoder's come first, if there is one."""
    model = config.model
    sides = [False] * model.encoder.layers + [True] * model.num_layers
    widths = [0] * model.encoder.layers + windows(model)
    return [LayerKind(*kind) for kind in zip(sides, moe_layers(config), widths, strict=True)]


def run_lengths(config: Config) -> list[int]:
    """How many layers each run has: one, or when layers are scanned as many equal ones as follow each other."""
    kinds = layer_kinds(config)
    return [len(list(group)) for _, group in itertools.groupby(kinds)] if config.model.scan_layers else [1] * len(kinds)


def _stack(blocks: list[Block]) -> Block:
    """Equal blocks as one whose variables have a leading axis of layers."""
    graph, _ = nnx.split(blocks[0])
    states = [nnx.split(block)[1] for block in blocks]
    return nnx.merge(graph, jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))
