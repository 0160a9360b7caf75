"""How much slower than one dense matmul of equal FLOPs is an expert FFN?

Command:  python -m experiments.bench_ffn [--json=FILE] [--implementations=native,jax] [--repeats=9]
Hardware: CPU; meant for a machine that does nothing else.
Time:     about 4 minutes on two cores.

T = 2048 tokens, top-2, SwiGLU, float32, one device. `dense` is silu(X W1) * (X W3) W2 with one set of weights on the
N = T*K rows, by XLA. The others add what an MoE layer needs beside the router: sort, dispatch, grouped matmuls with
the weights of E experts, combine. Backward is with respect to the tokens, all weights and the combine weights.
In each repeat every implementation runs once, dense first; `ratio` is the median over repeats of time / time of dense
in the same repeat. `cpu ratio` is the same for the CPU time of all threads, which busy neighbours disturb least.

XLA's own dense matmul depends on PJRT_NPROC, the number of threads of its pool: the product of the weight gradient is
slow with many more threads than cores. fef.startup sets at least 16; set PJRT_NPROC to the number of cores to compare
with the fastest dense.
"""

import json
import os
import pathlib
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments.flags import parse_flags, run
from fef import provenance, startup
from fef.config import UserError
from fef.experts import Experts
from fef.ffn import SWIGLU
from fef.ops import permute
from fef.ops.expert_ffn import expert_ffn
from fef.ops.grouped_matmul import resolve, segments_of_counts
from fef.pool.native import NativeError
from fef.routing import Assignment

COMMANDS = ("python -m experiments.bench_ffn",)  # that experiments.reproduce runs
QUICK = ("python -m experiments.bench_ffn --repeats=2 --shapes=256x512x8",)
NUM_TOKENS = 2048
NUM_CHOICES = 2
NUM_ROWS = NUM_TOKENS * NUM_CHOICES


def define(values: flags.FlagValues) -> None:
    shapes = ["256x512x8", "256x512x16", "256x512x64", "512x1024x8", "512x1024x16", "512x1024x64"]
    flags.DEFINE_string("json", "", "write the rows to this file, as a JSON list", flag_values=values)
    flags.DEFINE_list("implementations", ["native", "jax"], "what is compared with dense", flag_values=values)
    flags.DEFINE_integer("repeats", 9, "timed calls of each, after one more", lower_bound=1, flag_values=values)
    flags.DEFINE_list("shapes", shapes, "DxFxE: model width, expert width, experts", flag_values=values)
    flags.DEFINE_list("routings", ["random", "skewed"], "random: all experts alike; or skewed", flag_values=values)


def main(argv: list[str]) -> None:
    values = parse_flags(argv, define, doc=__doc__ or "")
    jax.config.update("jax_platforms", "cpu")
    startup.prepare(num_devices=1)
    try:
        for name in values.implementations:
            resolve(name)
    except (ValueError, NativeError) as error:
        raise UserError(f"--implementations: {error}") from None
    shapes = [_shape(text) for text in values.shapes]
    unknown = set(values.routings) - {"random", "skewed"}
    if unknown:
        raise UserError(f"--routings={unknown.pop()}: choose random or skewed")
    setting = {"commit": provenance.commit(), "versions": provenance.versions()}
    rows = []
    for shape in shapes:
        for routing in values.routings:
            rows += _bench(*shape, routing, values.implementations, values.repeats, setting)
    print(_table(rows))
    if values.json:
        pathlib.Path(values.json).write_text(json.dumps(rows, indent=1) + "\n")


def _shape(text: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
    if not match or int(match[3]) <= NUM_CHOICES:
        raise UserError(f"--shapes={text}: write DxFxE as in 256x512x8, with more than {NUM_CHOICES} experts")
    return int(match[1]), int(match[2]), int(match[3])


def _bench(
    d_model: int,
    d_ff: int,
    num_experts: int,
    routing: str,
    implementations: list[str],
    repeats: int,
    setting: dict[str, Any],
) -> list[dict[str, Any]]:
    """Rows of the result for one shape and routing."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * shape[-2] ** -0.5)

    def weights(num: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        return normal(num, d_model, d_ff), normal(num, d_model, d_ff), normal(num, d_ff, d_model)

    # Routing is an argument: what a jitted function closes over, XLA tries to fold, the sort included.
    assignment, load = _route(rng, num_experts, routing)
    dense_args = (normal(NUM_ROWS, d_model), *(w[0] for w in weights(1)))
    moe_args = (normal(NUM_TOKENS, d_model), assignment.weight_N, *weights(num_experts))
    runs: dict[str, tuple[Callable[..., Any], tuple]] = {"dense": (_dense_ffn, dense_args)}
    runs |= {name: (_moe_ffn(name), (*moe_args, assignment)) for name in implementations}

    rows = []
    for passes, wrap in (("forward", jax.jit), ("forward+backward", _with_backward)):
        times_ms = _time({name: (wrap(f), args) for name, (f, args) in runs.items()}, repeats)
        dense_wall, dense_cpu = times_ms["dense"]
        for name, (wall, cpu) in times_ms.items():
            rows.append(
                {
                    "d_model": d_model,
                    "d_ff": d_ff,
                    "num_experts": num_experts,
                    "routing": routing,
                    "max_load": load,
                    "passes": passes,
                    "implementation": name,
                    "wall_ms": float(np.median(wall)),
                    "cpu_ms": float(np.median(cpu)),
                    "ratio": float(np.median(wall / dense_wall)),
                    "cpu_ratio": float(np.median(cpu / dense_cpu)),
                    "repeats": repeats,
                    **setting,
                    "num_cores": os.cpu_count(),
                    "pjrt_nproc": int(os.environ["PJRT_NPROC"]),
                }
            )
    return rows


def _route(rng: np.random.Generator, num_experts: int, routing: str) -> tuple[Assignment, float]:
    """A random top-2 assignment and its load of the fullest expert over the mean.

    skewed: expert popularity falls geometrically, to a quarter over the first half of the experts; the last is empty.
    """
    logits_TE = rng.gumbel(size=(NUM_TOKENS, num_experts))
    if routing == "skewed":
        logits_TE -= np.log(4.0) * 2 * np.arange(num_experts) / num_experts
        logits_TE[:, -1] = -np.inf
    expert_TK = np.argsort(-logits_TE, axis=1)[:, :NUM_CHOICES].astype(np.int32)
    counts_E = np.bincount(expert_TK.reshape(-1), minlength=num_experts)
    assignment = Assignment(
        token_N=jnp.repeat(jnp.arange(NUM_TOKENS, dtype=jnp.int32), NUM_CHOICES),
        expert_N=jnp.asarray(expert_TK.reshape(-1)),
        weight_N=jnp.asarray(rng.uniform(size=NUM_ROWS).astype(np.float32)),
        valid_N=jnp.ones(NUM_ROWS, bool),
        aux_loss=jnp.zeros(()),
        metrics={},
        num_choices=NUM_CHOICES,
    )
    return assignment, float(counts_E.max() / counts_E.mean())


def _dense_ffn(x_ND: jax.Array, w_gate_DF: jax.Array, w_up_DF: jax.Array, w_down_FD: jax.Array) -> jax.Array:
    return (jax.nn.silu(x_ND @ w_gate_DF) * (x_ND @ w_up_DF)) @ w_down_FD


def _moe_ffn(implementation: str) -> Callable[..., jax.Array]:
    def ffn(
        x_TD: jax.Array,
        weight_N: jax.Array,
        w_gate_EDF: jax.Array,
        w_up_EDF: jax.Array,
        w_down_EFD: jax.Array,
        routed: Assignment,
    ) -> jax.Array:
        assignment = Assignment(
            routed.token_N, routed.expert_N, weight_N, routed.valid_N, routed.aux_loss, {}, NUM_CHOICES
        )
        order = permute.sort_by_expert(assignment, w_gate_EDF.shape[0])
        x_ND = permute.gather_rows(x_TD, assignment, order)
        experts = Experts(SWIGLU, {"w_gate": w_gate_EDF, "w_up": w_up_EDF, "w_down": w_down_EFD})
        y_ND = expert_ffn(x_ND, experts, segments_of_counts(order.counts_E), implementation)
        return permute.combine_rows(y_ND, assignment, order, NUM_TOKENS)

    return ffn


def _with_backward(ffn: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The output and all gradients as arrays: a sum fused onto a product makes XLA's product many times slower."""

    def forward_and_backward(*args: Any) -> Any:
        differentiable = [arg for arg in args if isinstance(arg, jax.Array)]
        rest = args[len(differentiable) :]
        y, pull_back = jax.vjp(lambda *a: ffn(*a, *rest), *differentiable)
        return y, pull_back(y)

    return jax.jit(forward_and_backward)


def _time(runs: dict[str, tuple[Callable[..., Any], tuple]], repeats: int) -> dict[str, np.ndarray]:
    """For each run (2, repeats) milliseconds of wall and CPU time, all runs alternating."""
    times_ms: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, (f, args) in runs.items():
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            jax.block_until_ready(f(*args))
            if repeat > 0:  # the first call compiles
                times_ms[name].append(((time.perf_counter() - wall_s) * 1e3, (time.process_time() - cpu_s) * 1e3))
    return {name: np.array(of_name).T for name, of_name in times_ms.items()}


def _table(rows: list[dict[str, Any]]) -> str:
    """Markdown, one line for each shape, routing and implementation."""
    lines = [
        "| D | F | E | routing | max/mean load | implementation | fwd ms | ratio | cpu ratio "
        "| fwd+bwd ms | ratio | cpu ratio |",
        "| --- " * 12 + "|",
    ]
    forward = [row for row in rows if row["passes"] == "forward"]
    backward = [row for row in rows if row["passes"] != "forward"]
    for f, b in zip(forward, backward, strict=True):
        case = f"| {f['d_model']} | {f['d_ff']} | {f['num_experts']} | {f['routing']} | {f['max_load']:.2f} "
        times = [f"| {row['wall_ms']:.1f} | {row['ratio']:.2f} | {row['cpu_ratio']:.2f} " for row in (f, b)]
        lines.append(case + f"| {f['implementation']} " + "".join(times) + "|")
    return "\n".join(lines)


if __name__ == "__main__":
    run(main)
