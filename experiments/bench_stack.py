"""How much of a step does each dispatcher leave to the network, when compute is an accelerator's?

Command:  python -m experiments.launch --hosts=4 --lab=leaves=1,nic=100mbit -- python -m experiments.bench_stack
Hardware: CPU, one device per host; meant for a machine that does nothing else. The lab needs root.
Time:     a quarter of an hour as it stands; the longest step takes 20 s.

A stack of MoE layers and nothing else, x <- x + moe(x), forward, backward (dx too) and an SGD step of the experts,
under assignments that are given (`--workloads`, of fef.testing.workloads). Expert matmuls take modelled device time and
leave the CPU to the network; `--values` computes them too, else a stand-in shows whether every row has met its expert.
Each of `--cells` is T:SECONDS, tokens of a member and the modelled time of a layer with the mean number of rows, a
third of it forward. T:real lets the CPU compute, which the hosts share; the time of a layer is then that of its rows at
the rate of a large GEMM, measured first, on all hosts at the same time. All dispatchers take turns, step by step, under
one workload after the other.

Utilisation and `floor`, here with this dispatcher's own bytes at the link's rate (`--nic`), are those of
experiments/bounds.py. `wait` is the time for which the first member's device had nothing to do but to wait in the pool.
`max loss difference` is to the first dispatcher.

A row's `cpu_ms` is the CPU time of the first host's process in a step, of all threads, user and system; what they do
between the steps of one dispatcher, such as fetching ahead, counts in those of the next. `memory` is what
experiments/step_memory.py says of the first host; its `peak_rss` is of all dispatchers so far.

`--dispatchers` takes registered names, with options after a colon: all_to_all:form=shifted. An option with a dot is a
key of the whole configuration: pooled:pool.fetch_ahead=False.
"""

import contextlib
import dataclasses
import json
import pathlib
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
from absl import flags
from jax.sharding import Mesh

from experiments import bounds, step_memory
from experiments.flags import dispatcher_words, override, parse_flags, run
from fef import hosts, provenance, sharding, startup
from fef.config import Config, UserError
from fef.experts import Experts, init_experts
from fef.fabric import calibration, cost
from fef.fabric.measure import gemm_rate, measure
from fef.ffn import SWIGLU
from fef.layers import make_dispatcher
from fef.pool.ledger import WAITS, bytes_received, relays
from fef.pool.pool import Pool
from fef.routing import Assignment
from fef.sharding import EXPERTS, REPLICATED, island, named
from fef.testing.workloads import WORKLOADS, is_workload, workload
from fef.validation import validate

WARM_UP_STEPS = 2
LEARNING_RATE = 1e-3
LARGE_ROWS = (512, 1024, 2048)  # of GEMMs so long that all hosts are at it


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_list(
        "dispatchers",
        ["all_to_all", "all_to_all:form=shifted", "all_gather", "pooled"],
        "what is compared: NAME or NAME:option=value",
        flag_values=values,
    )
    flags.DEFINE_list(
        "cells", ["8192:1.85", "4096:1.9", "1024:0.475", "512:0.237"], "T:SECONDS or T:real of each", flag_values=values
    )
    flags.DEFINE_list("workloads", ["balanced"], "which experts the tokens choose", flag_values=values)
    flags.DEFINE_integer("members", 4, "R, devices over all hosts", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("layers", 2, "L", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("experts", 8, "E", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("choices", 2, "K", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("d_model", 256, "D", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("d_expert", 341, "F; with D = 256 a block has 1 MiB", lower_bound=1, flag_values=values)
    flags.DEFINE_float("half_rows", 0.0, "rows at which a GEMM has half of its rate", flag_values=values)
    flags.DEFINE_enum("relay", "auto", ["off", "on", "auto"], "config.pool.relay", flag_values=values)
    flags.DEFINE_bool("values", False, "compute the matmuls too", flag_values=values)
    flags.DEFINE_float("nic", 100.0, "rate of a host's link for the floor, Mbit/s; 0: none", flag_values=values)
    flags.DEFINE_integer("steps", 5, "timed steps of each, after the warm-up", lower_bound=1, flag_values=values)
    flags.DEFINE_string("json", "", "write the rows to this file, as a JSON list", flag_values=values)


def main(argv: list[str]) -> None:
    values = parse_flags(argv, define, doc=__doc__ or "")
    cells = [_cell(text) for text in values.cells]
    for name in values.workloads:
        if not is_workload(name):
            raise UserError(f"--workloads: {name!r}: there are {', '.join([*WORKLOADS, 'zipf:S', 'trace:PATH'])}")
    jax.config.update("jax_platforms", "cpu")
    startup.prepare(values.members)
    mesh = sharding.make_mesh(values.members)
    with contextlib.ExitStack() as stack:
        rows = []
        for tokens, seconds in cells:
            cell = Cell(tokens, seconds or _layer_seconds(tokens, values, mesh), is_real=seconds is None)
            stacks = []
            for name in dict.fromkeys(values.dispatchers):
                config = _config(name, cell, values)
                # Each has a pool of its own, which fetches ahead what this one has used.
                pool = stack.enter_context(Pool(mesh, config.pool))
                stacks.append(Stack(name, cell, config, values, mesh))
            for workload in values.workloads:
                for one in stacks:
                    one.begin(workload)
                turns = [one for _ in range(WARM_UP_STEPS + values.steps) for one in stacks]
                desc = f"T={tokens} {workload}"
                with tqdm.tqdm(turns, desc=desc, unit="step", disable=None if hosts.is_main() else True) as bar:
                    for one in bar:
                        one.step()
                        bar.set_postfix_str(f"{one.name} {one.times_s[-1] * 1e3:,.0f} ms")
                rows += [_row(one, stacks[0], pool) for one in stacks]
    hosts.say(table(rows))
    if values.json and hosts.is_main():
        pathlib.Path(values.json).write_text(json.dumps(rows, indent=1) + "\n")


class Cell(NamedTuple):
    """Tokens of a member, the time of a layer with the mean number of rows, and whether the CPU computes it."""

    tokens: int
    layer_s: float
    is_real: bool


def _cell(text: str) -> tuple[int, float | None]:
    """Tokens, and seconds of a layer or None for real ones."""
    tokens, _, seconds = text.partition(":")
    try:
        cell = int(tokens), None if seconds == "real" else float(seconds)
    except ValueError:
        cell = (0, None)
    if cell[0] < 1 or not (cell[1] is None or 0 < cell[1] < float("inf")):
        raise UserError(f"--cells: {text!r}: write T:SECONDS, such as 4096:1.9, or T:real")
    return cell


def _layer_seconds(tokens: int, values: flags.FlagValues, mesh: Mesh) -> float:
    """Of the rows of `tokens` at the rate of large GEMMs, the mean of the hosts, which all compute: they share what the
    machine has.
    """
    rate, _ = gemm_rate(mesh, SWIGLU, values.d_model, values.d_expert, rows=LARGE_ROWS)
    return _layer_flops(tokens, values) / statistics.mean(hosts.gather("its rate of GEMMs", rate))


def _layer_flops(tokens: int, values: flags.FlagValues) -> float:
    """Forward and backward."""
    return 3.0 * SWIGLU.flops_per_row(values.d_model, values.d_expert) * tokens * values.choices


class Stack:
    """The layers of one cell under one dispatcher, and what its steps gave."""

    def __init__(self, name: str, cell: Cell, config: Config, values: flags.FlagValues, mesh: Mesh):
        self.name, self.cell, self.values, self.mesh = name, cell, values, mesh
        self.rss_before = step_memory.peak_rss()
        self.dispatcher = make_dispatcher(config, mesh)
        self.dispatcher.check_platform("cpu")
        self.rates = None
        if self.dispatcher.needs_rates(self.dispatcher.options):
            self.rates = measure(mesh, SWIGLU, values.d_model, values.d_expert, self.dispatcher.device)
        others = step_memory.open_segments()  # of other stacks, and those by which the rates were measured
        key = jax.random.key(0)
        shape = (values.members * cell.tokens, values.d_model)

        def init() -> list[Experts]:
            keys = jax.random.split(key, values.layers)
            return [init_experts(k, self.dispatcher.table, values.d_model, values.d_expert, 1.0) for k in keys]

        self.experts = jax.jit(init, out_shardings=named(mesh, EXPERTS))()
        self.x_TD = jax.jit(lambda: jax.random.normal(key, shape), out_shardings=named(mesh, sharding.TOKENS))()
        self.begin(values.workloads[0])
        step = jax.jit(self._train, donate_argnums=0, out_shardings=(named(mesh, EXPERTS), None))
        with calibration.using(self.rates) if self.rates else contextlib.nullcontext():
            self._step = step.lower(self.experts, self.x_TD, self.load_LE, self.assigned).compile()
        self.segments = step_memory.open_segments() - others

    def begin(self, name: str) -> None:
        """The steps from now on are under this workload."""
        values, self.workload = self.values, name
        of_members = workload(name, values.members, self.cell.tokens, values.experts, values.choices)
        self.num_choices = of_members.num_choices
        load_ME = np.asarray(of_members.metrics["load_E"])
        self.least_bytes = values.layers * self._least_bytes(load_ME)
        load_LE = np.tile(load_ME.sum(0), (values.layers, 1))  # of the last step, as of this one
        self.load_LE = sharding.place(load_LE, named(self.mesh, REPLICATED))
        fields = ("token_N", "expert_N", "weight_N", "valid_N")
        arrays = {field: np.asarray(getattr(of_members, field)).reshape(-1) for field in fields}
        self.assigned = sharding.place(arrays, named(self.mesh, sharding.TOKENS))
        self.losses: list[float] = []
        self.times_s: list[float] = []
        self.cpu_s: list[float] = []
        self.moved_MLQP = self.waits_us_MLW = np.zeros(0)

    def _least_bytes(self, rows_ME: np.ndarray) -> int:
        """Of a layer, all members together: for each remote expert its rows' bytes or its weights', the fewer."""
        table, d_model, d_expert = self.dispatcher.table, self.values.d_model, self.values.d_expert
        units = self.dispatcher.units.for_shapes(SWIGLU, d_model, d_expert)
        layer = cost.Layer(table, units, 3 * SWIGLU.flops_per_row(d_model, d_expert))
        fewer_ME = np.minimum(rows_ME * layer.row_bytes, layer.weight_bytes * (rows_ME > 0))
        return int(fewer_ME[table.home_E != np.arange(table.num_members)[:, None]].sum())

    def step(self) -> None:
        """One step, of all members together."""
        begin, cpu_begin = time.perf_counter(), time.process_time()
        self.experts, metrics = self._step(self.experts, self.x_TD, self.load_LE, self.assigned)
        jax.block_until_ready((self.experts, metrics))
        self.times_s.append(time.perf_counter() - begin)
        self.cpu_s.append(time.process_time() - cpu_begin)
        self.losses.append(float(metrics["loss"]))
        self.moved_MLQP, self.waits_us_MLW = (np.asarray(metrics[k]) for k in ("moved_MLQP", "waits_us_MLW"))

    def memory(self, pool: Pool, received: dict[str, np.ndarray]) -> dict[str, int]:
        """Of this host, bytes; `received` is of fef.pool.ledger.bytes_received."""
        return {
            **step_memory.of_program(self._step),
            **step_memory.of_segments(self.segments),
            "cache": step_memory.of_cache(pool, received) if self.dispatcher.uses_pool else 0,
            "rss_before": self.rss_before,
            "peak_rss": step_memory.peak_rss(),
        }

    def _train(
        self, experts: list[Experts], x_TD: jax.Array, load_LE: jax.Array, assigned: dict[str, jax.Array]
    ) -> tuple:
        run = jax.value_and_grad(self._loss, argnums=(0, 1), has_aux=True)
        (loss, (prepared, moved_MLQP)), (d_experts, d_x_TD) = run(experts, x_TD, load_LE, assigned)
        grad_norm = optax.tree.norm((d_experts, d_x_TD))
        moved_MLQP, waits_us_MLW = self.dispatcher.finish(prepared, moved_MLQP, after=grad_norm, collected=True)
        experts = jax.tree.map(lambda w, d: w - LEARNING_RATE * d, experts, d_experts)
        replicate = jax.sharding.NamedSharding(self.mesh, REPLICATED)
        seen = jax.lax.with_sharding_constraint({"moved_MLQP": moved_MLQP, "waits_us_MLW": waits_us_MLW}, replicate)
        return experts, dict(seen, loss=loss, grad_norm=grad_norm)

    def _loss(
        self, experts: list[Experts], x_TD: jax.Array, load_LE: jax.Array, assigned: dict[str, jax.Array]
    ) -> tuple:
        prepared = self.dispatcher.prepare(experts, load_LE)
        moved = []
        for layer in range(self.values.layers):
            of_layer = prepared[layer] if isinstance(prepared, list) else prepared
            y_TD, moved_MQP = self._layer(of_layer, x_TD, assigned, layer)
            x_TD = x_TD + y_TD
            moved.append(moved_MQP)
        return (x_TD**2).mean(), (prepared, jnp.stack(moved, 1))

    def _layer(self, experts: Any, x_TD: jax.Array, assigned: dict[str, jax.Array], layer: int) -> tuple:
        def member(experts: Any, x_TD: jax.Array, assigned: dict[str, jax.Array]) -> tuple:
            assignment = Assignment(**assigned, aux_loss=jnp.float32(0), metrics={}, num_choices=self.num_choices)
            y_TD, moved_QP = self.dispatcher(x_TD, assignment, experts, jnp.int32(layer))
            return y_TD, moved_QP[None]

        specs = (self.dispatcher.experts_spec, sharding.TOKENS, sharding.TOKENS)
        return island(self.mesh, member, specs, (sharding.TOKENS, sharding.TOKENS))(experts, x_TD, assigned)


def _config(name: str, cell: Cell, values: flags.FlagValues) -> Config:
    settings = {"moe.num_experts": values.experts, "moe.num_choices": values.choices, "pool.relay": values.relay}
    if not cell.is_real:
        settings |= {
            "device.flops": _layer_flops(cell.tokens, values) / cell.layer_s, "device.half_rows": values.half_rows,
            "device.values": values.values,
        }  # fmt: skip
    words = [f"--config.{key}={value}" for key, value in settings.items()]
    config = override(Config(), [*dispatcher_words(name), *words])
    validate(config)
    return config


def _row(one: Stack, first: Stack, pool: Pool) -> dict[str, Any]:
    values = one.values
    units = one.dispatcher.units.for_shapes(SWIGLU, values.d_model, values.d_expert)
    relay_GRP = relays(pool.host_GR, pool.leaf_of_host, one.moved_MLQP.shape[-1]) if pool.relay else None
    received = bytes_received(one.moved_MLQP, values.members, units, relay_GRP)
    busiest = int(np.max(sum(of_MR.sum(1) for of_MR in received.values())))
    row = {
        "dispatcher": one.name,
        "tokens": one.cell.tokens,
        "layer_s": one.cell.layer_s,
        "compute": "real" if one.cell.is_real else "modelled",
        "step_ms": float(np.median(one.times_s[WARM_UP_STEPS:])) * 1e3,
        "steps_ms": [t * 1e3 for t in one.times_s],
        "cpu_ms": float(np.median(one.cpu_s[WARM_UP_STEPS:])) * 1e3,
        "memory": one.memory(pool, received),
        "wait_ms": float(one.waits_us_MLW[0].sum()) / 1e3,
        "waits_ms": dict(zip(WAITS, (one.waits_us_MLW[0] / 1e3).round(1).T.tolist(), strict=True)),  # by layer
        "bytes": busiest,
        "bytes_by_purpose": {purpose: int(of_MR.sum()) for purpose, of_MR in received.items()},  # of all members
        "least_bytes": one.least_bytes,  # likewise
        "loss": one.losses[-1],
        "max_loss_difference": float(np.abs(np.subtract(one.losses, first.losses)).max()),
        "rates": one.rates and dataclasses.asdict(one.rates),
        "transport": pool.transport,
        "relay": pool.relay,
        "hosts": jax.process_count(),
        "flags": {key: getattr(values, key) for key in _SETTING} | {"workload": one.workload},
        "commit": provenance.commit(),
        "versions": provenance.versions(),
    }
    return row | {
        "utilisation": bounds.utilisation(row),
        "compute_ms": bounds.compute_ms(row),
        "wire_ms": bounds.wire_ms(row),
        "floor_ms": bounds.floor_ms([row]),
        "overlapped_ms": bounds.overlapped_ms(row),
    }


_SETTING = (
    "members", "layers", "experts", "choices", "d_model", "d_expert", "half_rows", "values", "nic", "steps",
)  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: what was run and a line for each dispatcher."""
    first, setting = rows[0], rows[0]["flags"]
    lines = [
        f"{first['hosts']} hosts, {setting['members']} members, L={setting['layers']}, E={setting['experts']}, "
        f"K={setting['choices']}, D={setting['d_model']}, F={setting['d_expert']}, {setting['workload']}, links of "
        f"{setting['nic']:g} Mbit/s, pool over {first['transport']}, "
        f"{'computed by the CPU' if first['compute'] == 'real' else 'modelled device time'}; median of "
        f"{setting['steps']} steps; jax {first['versions']['jax']}, commit {first['commit']}.",
        "",
        "| T | s a layer | dispatcher | step ms | utilisation | floor ms | wait ms | MB | max loss difference |",
        "| ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        waits = f"{row['wait_ms']:,.0f}" if row["dispatcher"].startswith(("pooled", "fluid")) else "\N{EN DASH}"
        cells = [f"{row['tokens']:,}", f"{row['layer_s']:g}", f"`{row['dispatcher']}`", f"{row['step_ms']:,.0f}"]
        cells += [f"{100 * row['utilisation']:.1f} %", f"{row['floor_ms']:,.0f}", waits, f"{row['bytes'] / 1e6:.1f}"]
        lines.append("| " + " | ".join([*cells, f"{row['max_loss_difference']:.1e}"]) + " |")
    lines += [
        "",
        "`floor` is the larger of the device's time and this dispatcher's own bytes at the link's rate, `MB` "
        "what the busiest member receives in a step, without headers, `wait` the time for which the first member's "
        "device could only wait in the pool. The first dispatcher of a cell is what losses are compared with.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    run(main)
