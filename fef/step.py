"""One training step and one evaluation step, as functions of arrays.

Letters: B batch, S sequence, M members (devices), L MoE layers, E experts, Q ledger purposes, P positions.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fef import sharding
from fef.config import Config, moe_layers, tokens_per_layer
from fef.dispatch.base import Dispatcher
from fef.ffn import FFNS
from fef.layers import Layers
from fef.model import make_model
from fef.moe import ExpertParam, RouterState
from fef.optim import learning_rate, make_optimizer
from fef.pool.table import ExpertTable

EXPERT_NAMES = {FFNS.get(name).expert_name(part) for name in FFNS for part in FFNS.get(name).parts}


@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything a step changes.

    Attributes:
      step: () int32, optimizer steps done.
      experts: nnx.State of the expert parameters, positions sharded over the expert axis.
      dense: nnx.State of all other parameters, replicated.
      router: nnx.State of the routers' states, replicated.
      optimizer: optax state over {"experts", "dense"}, sharded likewise.
      skipped: () int32, updates left out because the loss, a gradient or the update was not finite.
      load_LE: (L, E) int32, assignments to each expert in the last step, by the mean of its microbatches; None for a
        model without experts. Replicated.
    """

    step: jax.Array
    experts: Any
    dense: Any
    router: Any
    optimizer: Any
    skipped: jax.Array
    load_LE: jax.Array | None

    @property
    def params(self) -> dict[str, Any]:
        """All parameters, as the optimizer takes them."""
        return {"experts": self.experts, "dense": self.dense}


jax.tree_util.register_dataclass(TrainState, [field.name for field in dataclasses.fields(TrainState)], meta_fields=[])


class Stepper:
    """The functions of one configuration on one mesh, to be compiled by the caller.

    Args:
      config: a validated configuration.
      mesh: from `fef.make_mesh`.
    """

    def __init__(self, config: Config, mesh: Mesh):
        self.config, self.mesh = config, mesh
        self.optimizer = make_optimizer(config)
        self.schedule = learning_rate(config)
        model = nnx.eval_shape(self._model)
        self.graph = nnx.split(model)[0]
        self.dispatcher: Dispatcher | None = model.moe_runs[0].moe.dispatcher if model.moe_runs else None

    def _model(self) -> Layers:
        return make_model(self.config, self.mesh, nnx.Rngs(self.config.train.seed))

    def init(self) -> TrainState:
        """The state before the first step; the same for every mesh but for the experts' empty positions."""
        state: Any = nnx.split(self._model(), ExpertParam, nnx.Param, RouterState)
        _, experts, dense, router = state
        optimizer = self.optimizer.init({"experts": experts, "dense": dense})
        layers = sum(moe_layers(self.config))
        load_LE = jnp.zeros((layers, self.config.moe.num_experts), jnp.int32) if layers else None
        return TrainState(jnp.int32(0), experts, dense, router, optimizer, jnp.int32(0), load_LE)

    def shardings(self) -> TrainState:
        """Where each array of the state lives."""

        def of(path: tuple, leaf: Any) -> NamedSharding:
            spec = PartitionSpec(*[None] * self.expert_axis, "expert") if is_expert(path) else sharding.REPLICATED
            return sharding.named(self.mesh, spec)

        return jax.tree_util.tree_map_with_path(of, jax.eval_shape(self.init))

    @property
    def expert_axis(self) -> int:
        """The dimension of the experts' positions: behind the layers where these are stacked."""
        return 1 if self.config.model.scan_layers else 0

    @property
    def table(self) -> ExpertTable:
        """Homes and positions of the experts on this mesh."""
        return ExpertTable(self.config.moe.num_experts, sharding.num_members(self.mesh))

    def train_step(self, state: TrainState, batch: dict[str, jax.Array], replay: Any = None) -> tuple:
        """One optimizer step over all microbatches.

        Args:
          state: donated by the caller.
          batch: inputs_BS, targets_BS int32 and mask_BS bool, B sharded over all devices.
          replay: assignments to use, (L, N) arrays as `fef.testing.traces.Trace.step` gives them.

        Returns:
          the new state and metrics (see `_metrics`). When the loss, a gradient or an update is not finite, parameters
          and optimizer stay as they were and `skipped` goes up by one. The cross entropy is the mean over the batch's
          unmasked tokens however it is split; the auxiliary loss is the mean, weighted by tokens, of what each
          microbatch gives, so a balance loss asks for balance in each microbatch.
        """
        num_tokens = self._predicted(batch["mask_BS"]).sum()

        def prepare(experts: Any) -> tuple:
            return _split_floats(self._prepare(self._merge(experts, state), state))

        # The experts are published once, outside of the microbatch loop; collect is the transpose of publish.
        published: Any = jax.vjp(prepare, state.experts, has_aux=True)
        prepared, collect, rest = published

        def microbatch(dense: Any, prepared: Any, index: jax.Array, batch: Any, replay: Any) -> tuple:
            experts = _join(prepared, rest)
            if self.dispatcher:
                experts = self.dispatcher.at_microbatch(experts, index)
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.config.train.seed), state.step), index)
            model = self._merge(state.experts, dataclasses.replace(state, dense=dense))
            logits_BSV, aux_loss, metrics = model(
                batch["inputs_BS"], batch["mask_BS"], experts=experts, step=state.step, key=key, replay=replay
            )
            share = self._predicted(batch["mask_BS"]).sum() / num_tokens
            loss = self._cross_entropy_sum(logits_BSV, batch) / num_tokens
            return loss + share * aux_loss, dict(metrics, loss=loss, aux_loss=share * aux_loss)

        run = jax.value_and_grad(microbatch, argnums=(0, 1), has_aux=True)
        (d_dense, d_prepared), metrics = self._accumulate(run, state.dense, prepared, batch, replay)
        (d_experts,) = collect(d_prepared)
        grads = {"experts": d_experts, "dense": d_dense}
        grad_norm = optax.tree.norm(grads)
        updates, optimizer = self.optimizer.update(grads, state.optimizer, state.params)
        is_finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(grad_norm) & jnp.isfinite(optax.tree.norm(updates))

        params = optax.apply_updates(state.params, updates)
        new = TrainState(
            step=state.step + 1,
            experts=params["experts"],
            dense=params["dense"],
            router=self._router_state(state, metrics.pop("seen", None)),
            optimizer=optimizer,
            skipped=state.skipped,
            load_LE=self._load(metrics),
        )
        kept = dataclasses.replace(state, step=state.step + 1, skipped=state.skipped + 1)
        new = jax.tree.map(lambda a, b: jnp.where(is_finite, a, b), new, kept)
        metrics = self._metrics(metrics, _join(prepared, rest), after=grad_norm, collected=True)
        rate = self.schedule(state.step - state.skipped)
        return new, dict(
            metrics, grad_norm=grad_norm, learning_rate=rate, skipped_updates=new.skipped, tokens=num_tokens
        )

    def eval_step(self, state: TrainState, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Sum of the cross-entropy over the batch's unmasked tokens () float32, nats, and their number () int32."""
        logits_BSV = self.logits(state, batch["inputs_BS"], batch["mask_BS"])
        return self._cross_entropy_sum(logits_BSV, batch), self._predicted(batch["mask_BS"]).sum()

    def logits(self, state: TrainState, tokens_BS: jax.Array, mask_BS: jax.Array) -> jax.Array:
        """The model's prediction without capacity limits or noise, (B, S, V) float32; with an encoder (B, S/2, V)."""
        model = self._merge(state.experts, state)
        prepared = self._prepare(model, state)
        logits_BSV, aux_loss, metrics = model(tokens_BS, mask_BS, experts=prepared, step=state.step, train=False)
        self._metrics(dict(metrics, aux_loss=aux_loss), prepared, after=logits_BSV.sum(), collected=False)
        return logits_BSV

    def _predicted(self, x_BS: jax.Array) -> jax.Array:
        """The places of (B, S) for which the model has a prediction: all, or with an encoder the second half."""
        return x_BS[:, -tokens_per_layer(self.config) :]

    def _cross_entropy_sum(self, logits_BSV: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
        targets_BS, mask_BS = self._predicted(batch["targets_BS"]), self._predicted(batch["mask_BS"])
        loss_BS = optax.softmax_cross_entropy_with_integer_labels(logits_BSV, targets_BS)
        return jnp.where(mask_BS, loss_BS, 0).sum()

    def _merge(self, experts: Any, state: TrainState) -> Layers:
        return nnx.merge(self.graph, experts, state.dense, state.router)

    def _prepare(self, model: Layers, state: TrainState) -> Any:
        return self.dispatcher.prepare(model.experts, state.load_LE) if self.dispatcher else []

    def _load(self, metrics: dict[str, Any]) -> jax.Array | None:
        return metrics["load_E"].sum(1) // self.config.train.microbatches if self.dispatcher else None

    def _router_state(self, state: TrainState, seen_L: Any) -> Any:
        if seen_L is None:
            return state.router
        model = self._merge(state.experts, state)
        model.update_routers(seen_L)
        return nnx.split(model, RouterState, ...)[1]

    def _accumulate(self, run: Callable, dense: Any, prepared: Any, batch: Any, replay: Any) -> tuple:
        """Gradients and metrics, summed over the microbatches; assignments are joined."""
        count = self.config.train.microbatches
        if count == 1:
            (_, metrics), grads = run(dense, prepared, jnp.int32(0), batch, replay)
            return grads, metrics
        batch = jax.tree.map(lambda a: self._parts(a, count), batch)
        replay = jax.tree.map(lambda a_LN: a_LN.reshape(a_LN.shape[0], count, -1).swapaxes(0, 1), replay)

        def add(sums: Any, part: tuple) -> tuple:
            (_, metrics), grads = run(dense, prepared, *part)
            return jax.tree.map(jnp.add, sums, grads), metrics

        zeros = jax.tree.map(jnp.zeros_like, (dense, prepared))
        grads, metrics = jax.lax.scan(add, zeros, (jnp.arange(count, dtype=jnp.int32), batch, replay))
        trace = metrics.pop("trace", None)
        metrics = jax.tree.map(lambda a: a.sum(0, dtype=a.dtype), metrics)
        if trace is not None:
            metrics["trace"] = jax.tree.map(lambda a: a.swapaxes(0, 1).reshape(a.shape[1], -1), trace)
        return grads, metrics

    def _parts(self, x_BS: jax.Array, count: int) -> jax.Array:
        parts = x_BS.reshape(count, -1, *x_BS.shape[1:])
        return jax.lax.with_sharding_constraint(parts, sharding.named(self.mesh, PartitionSpec(None, sharding.AXES)))

    def _metrics(self, metrics: dict[str, Any], prepared: Any, after: jax.Array, collected: bool) -> dict[str, Any]:
        """Sums over members what is counted per member, and closes the ledger.

        Returns:
          loss () and aux_loss () float32, nats per token; for models with experts also load_LE, kept_LE (L, E) int32,
          entropy_L (L,) float32 nats, moved_MLQP (M, L, Q, P) int32, waits_us_MLW (M, L, kinds) float32, and trace;
          planned_MLQP, as moved_MLQP, of a dispatcher that chooses what moves.
        """
        if not self.dispatcher:
            return metrics
        of_layers_MLQP = metrics["moved_QP"].swapaxes(0, 1)
        moved_MLQP, waits_us_MLW = self.dispatcher.finish(prepared, of_layers_MLQP, after, collected)
        routed_L = jnp.maximum(metrics["tokens"].sum(1), 1)
        return {
            **{name: metrics[name] for name in ("loss", "aux_loss", "trace") if name in metrics},
            **({"planned_MLQP": of_layers_MLQP} if self.dispatcher.rates else {}),
            "load_LE": metrics["load_E"].sum(1),
            "kept_LE": metrics["kept_E"].sum(1),
            "entropy_L": metrics["entropy_sum"].sum(1) / routed_L,
            "moved_MLQP": moved_MLQP,
            "waits_us_MLW": waits_us_MLW,
        }


def is_expert(path: tuple) -> bool:
    """Whether a leaf of the state has the experts' positions as a dimension."""
    return any(name in jax.tree_util.keystr(path) for name in EXPERT_NAMES)


def count_params(state: TrainState, config: Config) -> tuple[int, int]:
    """Parameters of the model, and those that one token meets; empty positions count in neither."""
    dense = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(state.dense))
    positions = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(state.experts))
    moe = config.moe
    table = ExpertTable(moe.num_experts, config.mesh.devices // config.mesh.data)
    per_expert = positions // table.num_positions
    return dense + per_expert * moe.num_experts, dense + per_expert * moe.num_choices


def _split_floats(tree: Any) -> tuple[Any, Any]:
    """The floating leaves of a tree, and the others; None stands where a leaf went to the other one."""
    is_float = jax.tree.map(lambda a: jnp.issubdtype(a.dtype, jnp.floating), tree)
    floats = jax.tree.map(lambda a, f: a if f else None, tree, is_float)
    return floats, jax.tree.map(lambda a, f: None if f else a, tree, is_float)


def _join(floats: Any, others: Any) -> Any:
    return jax.tree.map(lambda a, b: b if a is None else a, floats, others, is_leaf=lambda a: a is None)
