"""The MoE layer: router -> Assignment -> dispatcher -> y.

Shape letters: B batch, S sequence, T = B*S tokens of a member, D model width, F expert hidden width, E experts,
P positions, K choices per token, M members of the whole mesh, Q ledger purposes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from fef import sharding
from fef.dispatch import DISPATCHERS
from fef.dispatch.base import Dispatcher
from fef.experts import Experts, init_experts
from fef.ffn import FFNS, Ffn
from fef.pool.table import ExpertTable
from fef.registry import scan
from fef.routing import ROUTERS, Router, RouterContext, next_state
from fef.sharding import AXES, REPLICATED, TOKENS, island
from fef.testing.traces import replay_assignment


class ExpertParam(nnx.Param):
    """A parameter with a leading axis of expert positions, sharded over the mesh's expert axis."""


class RouterState(nnx.Variable):
    """A router's state that is no parameter, replicated; updated by the training step."""


class MoeLayer(nnx.Module):
    """A mixture of experts.

        with fef.Pool(mesh) as pool:
            layer = fef.MoeLayer(d_model=64, d_expert=128, num_experts=8, num_choices=2, mesh=mesh, rngs=nnx.Rngs(0))
            y_BSD, metrics = nnx.jit(lambda layer, x_BSD: layer(x_BSD))(layer, x_BSD)

    Call it inside a jitted function, as here: an eager call compiles the layer anew each time.

    Args:
      d_model: D.
      d_expert: F, hidden width of one expert.
      num_experts: E; any number, also fewer than members.
      num_choices: K, experts per token.
      mesh: from `fef.make_mesh`.
      rngs: source of the initial parameters.
      router: name of a routing scheme, or a router.
      dispatcher: name of a dispatcher, or a dispatcher. `pooled` needs an open `fef.Pool` whenever the layer is traced
        and run.
      init_scale: factor on the initial deviation of the experts.
      ffn: name of what an expert computes, see `fef.ffn`.

    Raises:
      ValueError: an unknown name, with the nearest one; or a dispatcher that this platform lacks.
    """

    def __init__(
        self,
        d_model: int,
        d_expert: int,
        num_experts: int,
        num_choices: int,
        *,
        mesh: Mesh,
        rngs: nnx.Rngs,
        router: str | Router = "top_k",
        dispatcher: str | Dispatcher = "pooled",
        init_scale: float = 1.0,
        ffn: str = "swiglu",
    ):
        scan("fef.routing")
        scan("fef.dispatch")
        table = ExpertTable(num_experts, sharding.num_members(mesh))
        self.router: Router = ROUTERS.get(router)(num_experts, num_choices) if isinstance(router, str) else router
        self.dispatcher: Dispatcher = (
            DISPATCHERS.get(dispatcher)(mesh, table) if isinstance(dispatcher, str) else dispatcher
        )
        self.dispatcher.check_platform(jax.default_backend())
        self.mesh = mesh
        self.gate = nnx.Dict({k: nnx.Param(v) for k, v in self.router.init(rngs.params(), d_model).items()})
        self.state = RouterState(self.router.init_state())
        self.ffn: Ffn = FFNS.get(ffn)
        experts = init_experts(rngs.params(), table, d_model, d_expert, init_scale, self.ffn)
        for part, array in experts.parts.items():
            setattr(self, self.ffn.expert_name(part), ExpertParam(array))

    @property
    def experts(self) -> Experts:
        """The experts' parameters as global arrays, positions sharded over the expert axis."""
        return Experts(self.ffn, {part: getattr(self, self.ffn.expert_name(part))[...] for part in self.ffn.parts})

    def __call__(
        self,
        x_BSD: jax.Array,
        *,
        mask_BS: jax.Array | None = None,
        token_ids_BS: jax.Array | None = None,
        experts: Any = None,
        layer: jax.Array | int = 0,
        step: jax.Array | int = 0,
        key: jax.Array | None = None,
        train: bool = True,
        replay: dict[str, jax.Array] | None = None,
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Sends every token through its experts.

        Args:
          x_BSD: (B, S, D) float32 or bfloat16; B is sharded over all devices and must be a multiple of them.
          mask_BS: (B, S) bool, False on padding; None means no padding.
          token_ids_BS: (B, S) int32, for schemes that route by token id.
          experts: what `dispatcher.prepare` made of all layers' experts (this layer's part of it, if it is a list);
            None prepares this layer's own.
          layer: number of the MoE layer among those that were prepared together.
          step: optimizer step. key: PRNG key, needed by schemes that draw.
          train: whether capacity limits and noise apply.
          replay: this layer's assignment from a trace, used instead of the router's (see `fef.testing.traces`).

        Returns:
          y_BSD (B, S, D), and metrics: `aux_loss` () float32, exact over the global batch; `seen`, for `update_router`;
          `trace`, the assignment; and per member on a leading axis M the router's counts and `moved_QP`.

        Sharding: B over both mesh axes in and out. Gradient: in x_BSD, the gate and the experts.
        Raises: errors of the dispatcher; with `pooled`, `fef.PoolError` subclasses.
        """
        batch, seq_len, _ = x_BSD.shape
        if batch % self.mesh.size:
            raise ValueError(
                f"MoeLayer: a batch of {batch} cannot be split over {self.mesh.size} devices; use a multiple"
            )
        mask_BS = jnp.ones((batch, seq_len), bool) if mask_BS is None else mask_BS
        token_ids_BS = jnp.zeros((batch, seq_len), jnp.int32) if token_ids_BS is None else token_ids_BS
        key = jax.random.key(0) if key is None else key
        layer, step = jnp.asarray(layer, jnp.int32), jnp.asarray(step, jnp.int32)
        if experts is None:
            prepared = self.dispatcher.prepare([self.experts])
            experts = prepared[0] if isinstance(prepared, list) else prepared
        gate = {name: param[...] for name, param in self.gate.items()}

        def member(gate, experts, x_BSD, mask_BS, token_ids_BS, key, layer, step, state, replay):
            key = jax.random.fold_in(key, jax.lax.axis_index(AXES))
            ctx = RouterContext(
                mask_BS, token_ids_BS, layer, step, key, train, state, psum=lambda tree: jax.lax.psum(tree, AXES)
            )
            assignment, seen = self.router(gate, x_BSD, ctx)
            if replay is not None:
                assignment = replay_assignment(assignment, replay, mask_BS)
            y_TD, moved_QP = self.dispatcher(x_BSD.reshape(-1, x_BSD.shape[-1]), assignment, experts, layer)
            counts = dict(assignment.metrics, aux_loss=assignment.aux_loss, moved_QP=moved_QP)
            trace = {name: getattr(assignment, name) for name in ("token_N", "expert_N", "weight_N", "valid_N")}
            return y_TD.reshape(x_BSD.shape), jax.tree.map(lambda a: a[None], counts), trace, jax.lax.psum(seen, AXES)

        in_specs = (
            REPLICATED, self.dispatcher.experts_spec, TOKENS, TOKENS, TOKENS, REPLICATED, REPLICATED, REPLICATED,
            REPLICATED, TOKENS,
        )  # fmt: skip
        run = island(self.mesh, member, in_specs, (TOKENS, TOKENS, TOKENS, REPLICATED))
        y_BSD, metrics, trace, seen = run(
            gate, experts, x_BSD, mask_BS, token_ids_BS, key, layer, step, self.state.get_value(), replay
        )
        metrics["aux_loss"] = metrics["aux_loss"].sum()
        return y_BSD, dict(metrics, trace=trace, seen=seen)

    def update_router(self, seen: Any, num_layers: int | None = None) -> None:
        """Gives the router its state for the next step; to be called once per optimizer step, after it.

        Args:
          seen: `metrics["seen"]`, summed over the step's microbatches.
          num_layers: of a layer that stands for so many, stacked; their states and `seen` have a leading axis of them.
        """
        update = functools.partial(next_state, self.router)
        if num_layers is not None:
            update = jax.vmap(update, axis_size=num_layers)
        self.state.set_value(update(self.state.get_value(), seen))
