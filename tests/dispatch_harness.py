"""Dispatchers by themselves, on stored assignments: how to run one, and what it must give (in numpy, float64).

Letters: M members of the whole mesh, T tokens and N assignments of a member, D, F widths, P positions, E experts.
"""

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fef import sharding
from fef.dispatch import DISPATCHERS
from fef.experts import Experts
from fef.ffn import FFNS
from fef.ops.device import REAL, Device
from fef.pool.pool import Pool
from fef.pool.table import ExpertTable
from fef.registry import scan
from fef.routing import Assignment
from fef.sharding import TOKENS, island

D, F = 8, 12
# A test compiles a program and runs it a few times: without these, three quarters of its time go into fast code.
COMPILER_OPTIONS = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes (members, experts, choices, tokens of a member, data axis), compute type, whether it is token choice,
    whether the layer is recomputed in the backward pass, and what the experts compute."""

    members: int
    experts: int
    choices: int
    tokens: int
    data: int = 1
    dtype: str = "float32"
    regular: bool = True
    rerun: bool = False
    ffn: str = "swiglu"

    @property
    def mesh(self) -> Any:
        return sharding.make_mesh(self.members * self.data, self.data)

    @property
    def table(self) -> ExpertTable:
        return ExpertTable(self.experts, self.members)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A dispatcher and what is set in it; `options` as (name, value)."""

    dispatcher: str
    matmul: str = "auto"
    options: tuple = ()
    device: Device = REAL

    @property
    def label(self) -> str:
        words = [self.dispatcher, *(f"{name}={value}" for name, value in self.options), self.matmul]
        return "-".join(word for word in words if word != "auto")

    def make(self, case: Case) -> Any:
        cls = DISPATCHERS.get(self.dispatcher)
        options = cls.Options(**dict(self.options))
        return cls(
            case.mesh,
            case.table,
            matmul=self.matmul,
            dtype=case.dtype,
            rerun=case.rerun,
            device=self.device,
            options=options,
        )


def variants_on_cpu() -> list[Variant]:
    """Every registered dispatcher that runs on CPUs."""
    scan("fef.dispatch")
    found = []
    for name in DISPATCHERS:
        try:
            DISPATCHERS.get(name).check_platform("cpu")
        except ValueError:
            continue
        found.append(Variant(name))
    return found


class Inputs(NamedTuple):
    """Global arrays; `ints` are token_N, expert_N and valid_N of all members."""

    x_TD: np.ndarray
    weight_N: np.ndarray
    experts: Experts
    ints: tuple[np.ndarray, np.ndarray, np.ndarray]
    target_TD: np.ndarray


class Result(NamedTuple):
    """The loss sum(y * target), y, and gradients; moved_MQP are the ledger's units."""

    loss: Any
    y_TD: Any
    dx_TD: Any
    dweight_N: Any
    dexperts: Experts
    moved_MQP: Any = None


def make_inputs(case: Case, assignment: Assignment, seed: int = 0) -> Inputs:
    """Random tokens, experts and target for an assignment with a leading axis of members (as `workload` gives)."""
    rng = np.random.default_rng(seed)
    num_tokens = case.members * case.data * case.tokens
    kind, table = FFNS.get(case.ffn), case.table
    scale = D**-0.5 * (4 if kind.has_biases else 1)  # so that something is clipped

    def expert_parts(*shape: int) -> np.ndarray:
        w = np.zeros((table.num_positions, *shape), np.float32)
        w[table.position_E] = rng.normal(size=(table.num_experts, *shape)) * scale
        return w

    experts = Experts(kind, {part: expert_parts(*shape) for part, shape in kind.shapes(D, F).items()})
    x_TD, target_TD = rng.normal(size=(2, num_tokens, D)).astype(np.float32)
    token, expert, weight, valid = (
        np.asarray(getattr(assignment, name)).reshape(-1) for name in ("token_N", "expert_N", "weight_N", "valid_N")
    )
    return Inputs(x_TD, weight, experts, (token, expert, valid), target_TD)


def run(case: Case, variant: Variant, stored: dict[str, Inputs]) -> dict[str, Result]:
    """The layer's results on each of the inputs, as numpy arrays, from one compiled program and one pool."""
    with Pool(case.mesh):
        step = jax.jit(functools.partial(value_and_grads, case, variant.make(case)), compiler_options=COMPILER_OPTIONS)
        return {name: jax.tree.map(np.asarray, jax.block_until_ready(step(inputs))) for name, inputs in stored.items()}


def value_and_grads(case: Case, dispatcher: Any, inputs: Inputs) -> Result:
    """One layer, forward and backward, with the ledger read at the end."""

    def loss(x_TD: jax.Array, weight_N: jax.Array, experts: Experts) -> tuple:
        prepared = dispatcher.prepare([experts])
        own = prepared[0] if isinstance(prepared, list) else prepared

        def member(x_TD, weight_N, ints, own):
            y_TD, moved_QP = dispatcher(x_TD, member_assignment(case, weight_N, ints), own, jnp.int32(0))
            return y_TD, moved_QP[None]

        specs = (TOKENS, TOKENS, TOKENS, dispatcher.experts_spec)
        layer = island(case.mesh, member, specs, TOKENS)
        layer = jax.checkpoint(layer) if case.rerun else layer
        y_TD, moved_MQP = layer(x_TD, weight_N, inputs.ints, own)
        return jnp.sum(y_TD * inputs.target_TD), (y_TD, moved_MQP, prepared)

    x_TD = inputs.x_TD.astype(case.dtype)
    run = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    (value, (y_TD, moved_MQP, prepared)), grads = run(x_TD, inputs.weight_N, inputs.experts)
    after = sum(jnp.sum(grad, dtype=jnp.float32) for grad in jax.tree.leaves(grads))
    moved_MLQP, _ = dispatcher.finish(prepared, moved_MQP[:, None], after, collected=True)
    return Result(value, y_TD, *grads, moved_MLQP[:, 0])


def member_assignment(case: Case, weight_N: jax.Array, ints: tuple) -> Assignment:
    token_N, expert_N, valid_N = ints
    choices = case.choices if case.regular else None
    return Assignment(token_N, expert_N, weight_N, valid_N, jnp.float32(0), {}, choices)


def expected(case: Case, inputs: Inputs) -> Result:
    """The same by hand: each expert on its tokens, in float64."""
    position_E = case.table.position_E
    x_TD, target_TD = inputs.x_TD.astype(np.float64), inputs.target_TD.astype(np.float64)
    experts = inputs.experts.astype(np.float64)
    dexperts = jax.tree.map(np.zeros_like, experts)
    y_TD, dx_TD, dweight_N = np.zeros_like(x_TD), np.zeros_like(x_TD), np.zeros(inputs.weight_N.shape)
    token_N, expert_N, valid_N = inputs.ints
    num_members = case.members * case.data
    first_N = np.repeat(np.arange(num_members) * case.tokens, token_N.size // num_members)
    for expert, p in enumerate(position_E):
        n = np.flatnonzero(valid_N & (expert_N == expert))
        t, weight = (first_N + token_N)[n], inputs.weight_N[n, None].astype(np.float64)
        x, target = x_TD[t], target_TD[t]
        w, dw = (jax.tree.map(operator.itemgetter(p), tree).parts for tree in (experts, dexperts))  # dw: views
        inner = experts.kind.inner
        hidden, slopes = ACTIVATIONS[case.ffn](*(x @ w[f"w_{name}"] + w.get(f"b_{name}", 0) for name in inner))
        out = hidden @ w["w_down"] + w.get("b_down", 0)
        np.add.at(y_TD, t, weight * out)
        dweight_N[n] = np.sum(out * target, axis=1)
        d_out = weight * target
        steps = [("down", hidden, d_out)]
        for name, slope in zip(inner, slopes, strict=True):
            steps.append((name, x, d_out @ w["w_down"].T * slope))
            np.add.at(dx_TD, t, steps[-1][2] @ w[f"w_{name}"].T)
        for name, given, d_given in steps:
            dw[f"w_{name}"][:] = given.T @ d_given
            if f"b_{name}" in dw:
                dw[f"b_{name}"][:] = d_given.sum(0)
    return Result(np.sum(y_TD * target_TD), y_TD, dx_TD, dweight_N, dexperts)


def _swiglu(g: np.ndarray, u: np.ndarray) -> tuple:
    sigmoid = 1 / (1 + np.exp(-g))
    return g * sigmoid * u, (u * sigmoid * (1 + g * (1 - sigmoid)), g * sigmoid)


def _gelu(u: np.ndarray) -> tuple:
    root = np.sqrt(2 / np.pi)
    tanh = np.tanh(root * (u + 0.044715 * u**3))
    return u / 2 * (1 + tanh), ((1 + tanh) / 2 + u / 2 * (1 - tanh**2) * root * (1 + 3 * 0.044715 * u**2),)


def _relu(u: np.ndarray) -> tuple:
    return np.maximum(u, 0), (u > 0,)


def _clamped_swiglu(g: np.ndarray, u: np.ndarray) -> tuple:
    is_free_g, is_free_u = g < 7, np.abs(u) < 7
    g, u = np.minimum(g, 7), np.clip(u, -7, 7)
    sigmoid = 1 / (1 + np.exp(-1.702 * g))
    slope_g = (u + 1) * sigmoid * (1 + 1.702 * g * (1 - sigmoid))
    return (u + 1) * g * sigmoid, (slope_g * is_free_g, g * sigmoid * is_free_u)


# The hidden layer, and its derivative by each argument.
ACTIVATIONS = {"swiglu": _swiglu, "gelu": _gelu, "relu": _relu, "clamped_swiglu": _clamped_swiglu}


def assert_close(result: Result, wanted: Result, where: str, tolerance: float = 1e-5) -> None:
    """Every array differs by at most `tolerance` of its largest element, and not at all where that is 0."""
    pairs = {"y": (result.y_TD, wanted.y_TD), "dx": (result.dx_TD, wanted.dx_TD)}
    pairs["dweight"] = (result.dweight_N, wanted.dweight_N)
    pairs |= {f"d {part}": (got, wanted.dexperts[part]) for part, got in result.dexperts.parts.items()}
    for name, (got, want) in pairs.items():
        assert got.shape == want.shape, f"{where}: {name} is {got.shape}, not {want.shape}"
        error = relative_error(got, want)
        assert error <= tolerance, f"{where}: {name} is off by {error} of its largest element"


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference as a share of the largest wanted element; infinite when only zeros are wanted."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    difference = np.abs(got - want).max()
    return difference and difference / max(np.abs(want).max(), np.finfo(np.float64).tiny)
