"""Do all dispatchers train the same function, and what does each of them cost?

Command:  python -m experiments.bench_dispatch [--json=FILE] [--steps=20] [--dispatchers=A,B] [flags of the config]
Hardware: CPU, `config.mesh.devices` virtual devices in one process; meant for a machine that does nothing else.
Time:     minutes for configs/tiny.py on two cores, nearly all of it compilation.

One model, the same initial parameters and the same batches for every dispatcher. They take turns: in each step every
dispatcher runs once, so that a busy neighbour disturbs all alike. `ratio` is the median over the steps of its time by
the time of the fastest in the same step; the first steps are left out.

`moved` is the ledger's count: what would cross from member to member. `closed form` is the dispatcher's formula (see
`closed_form_bytes`) for the same assignments; the row `least` takes for every member and expert the cheaper of moving
the weights and moving the tokens. XLA:CPU has no network between virtual devices, and `pooled` reads the memory of its
own process: these times say nothing about a network.

The dispatchers differ by rounding. Where that turns a near-tie of two experts round, the losses part ways from that
step on; the default seed meets none in 20 steps (`config.routing.replay` routes all alike in longer comparisons).

`--dispatchers` takes registered names, with options after a colon: all_to_all:form=shifted. `reference` always runs.
"""

import contextlib
import json
import os
import pathlib
import time
from typing import Any

import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh

from experiments.flags import dispatcher_words, parse, run
from fef import data, provenance, sharding, startup
from fef.config import Config, ConfigError, config_hash
from fef.dispatch import DISPATCHERS
from fef.dispatch.all_to_all import capacity_sizes
from fef.ffn import FFNS
from fef.metrics import dropped_fraction
from fef.pool.ledger import Units, bytes_by_purpose
from fef.pool.pool import Pool
from fef.pool.table import ExpertTable
from fef.step import Stepper
from fef.summary import bytes_text, number_text, percent_text

COMMANDS = ("python -m experiments.bench_dispatch",)  # that experiments.reproduce runs
QUICK = ("python -m experiments.bench_dispatch --steps=3 --dispatchers=pooled",)
REFERENCE, LEAST = "reference", "least"
WARM_UP_STEPS = 2
_SHOWN = ("weights", "refetch", "gradients", "tokens")


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("json", "", "write the rows to this file, as a JSON list", flag_values=values)
    flags.DEFINE_integer(
        "steps", 20, "optimizer steps, sets config.train.steps", lower_bound=WARM_UP_STEPS + 1, flag_values=values
    )
    flags.DEFINE_list(
        "dispatchers",
        ["all_to_all", "all_to_all:form=shifted", "all_gather", "pooled"],
        "what is compared with reference: NAME or NAME:option=value",
        flag_values=values,
    )


def main(argv: list[str]) -> None:
    _, values = parse(argv, define, doc=__doc__ or "")
    names = list(dict.fromkeys([REFERENCE, *values.dispatchers]))
    configs = {name: _config(argv, name, values.steps) for name in names}
    config = configs[REFERENCE]
    if not config.moe.every:
        raise ConfigError("moe.every", 0, "a dense model has no dispatcher; choose a config with experts")
    jax.config.update("jax_platforms", "cpu")
    startup.prepare(config.mesh.devices, config.run.malloc, config.pool.deadline_s)
    for other in configs.values():
        DISPATCHERS.get(other.moe.dispatcher).check_platform(jax.default_backend())
    overrides = [word for word in argv[1:] if word.startswith(("--config.", "--noconfig."))]
    rows = measure(configs, _setting(config, [f"--config={values.config}", *overrides]))
    print(table(rows))
    if values.json:
        pathlib.Path(values.json).write_text(json.dumps(rows, indent=1) + "\n")


def _config(argv: list[str], name: str, steps: int) -> Config:
    """The configuration of the command line with another dispatcher."""
    return parse([*argv, f"--config.train.steps={steps}", *dispatcher_words(name)], define)[0]


def _setting(config: Config, words: list[str]) -> dict[str, Any]:
    """What all rows have in common."""
    return {
        "flags": " ".join(words),
        "steps": config.train.steps,
        "devices": config.mesh.devices,
        "members": config.mesh.devices // config.mesh.data,
        "platform": jax.default_backend(),
        "cores": os.cpu_count(),
        "tokens_per_step": config.data.batch_size * config.data.seq_len,
        "seed": config.train.seed,
        "commit": provenance.commit(),
        "versions": provenance.versions(),
    }


# Measuring


class _Trainer:
    """One dispatcher's model, and what its steps gave."""

    def __init__(self, config: Config, mesh: Mesh, batch: Any):
        self.config, stepper = config, Stepper(config, mesh)
        assert stepper.dispatcher is not None
        ffn = FFNS.get(config.model.ffn)
        self.units = stepper.dispatcher.units.for_shapes(ffn, config.model.d_model, config.moe.d_expert)
        shardings = stepper.shardings()
        self.state = jax.device_put(stepper.init(), shardings)
        compiled = jax.jit(stepper.train_step, donate_argnums=0, out_shardings=(shardings, None))
        self.train_step = compiled.lower(self.state, batch, None).compile()
        self.losses: list[float] = []
        self.times_ms: list[float] = []
        self.dropped: list[float] = []
        self.moved: list[dict[str, int]] = []
        self.routed: list[tuple[np.ndarray, int]] = []

    def step(self, batch: Any) -> None:
        start = time.perf_counter()
        self.state, metrics = self.train_step(self.state, batch, None)
        metrics = jax.device_get(metrics)
        self.times_ms.append((time.perf_counter() - start) * 1e3)
        self.losses.append(float(metrics["loss"]))
        self.dropped.append(dropped_fraction(metrics["load_LE"], metrics["kept_LE"]))
        self.moved.append(bytes_by_purpose(metrics["moved_MLQP"].sum(0, dtype=np.int64), self.units))
        self.routed.append(rows_by_member(self.config, metrics["trace"]))


def measure(configs: dict[str, Config], setting: dict[str, Any]) -> list[dict[str, Any]]:
    """Trains every configuration, in turns, and returns one row for each and one for the least bytes."""
    config = configs[REFERENCE]
    mesh = sharding.make_mesh(config.mesh.devices, config.mesh.data)
    place = sharding.named(mesh, sharding.TOKENS)
    corpus = data.load_corpus(config.data, config.model.vocab_size)
    with contextlib.ExitStack() as stack:
        if any(DISPATCHERS.get(other.moe.dispatcher).uses_pool for other in configs.values()):
            stack.enter_context(Pool(mesh, config.pool))
        loader = data.make_loader(corpus.train, config.data.seq_len, config.data.batch_size, config.data.seed)
        stack.callback(loader.close)
        batches = [jax.device_put(next(loader), place) for _ in range(config.train.steps)]
        trainers = {name: _Trainer(other, mesh, batches[0]) for name, other in configs.items()}
        for batch in batches:
            for trainer in trainers.values():
                trainer.step(batch)
    return _rows(trainers, setting)


def _rows(trainers: dict[str, _Trainer], setting: dict[str, Any]) -> list[dict[str, Any]]:
    times_ms = {name: np.array(trainer.times_ms[WARM_UP_STEPS:]) for name, trainer in trainers.items()}
    fastest = min(times_ms.values(), key=np.median)
    reference = trainers[REFERENCE]
    rows = []
    for name, trainer in trainers.items():
        closed = [closed_form_bytes(trainer.config, *step, trainer.units) for step in trainer.routed]
        rows.append(
            {
                "dispatcher": name,
                **setting,
                "config_hash": config_hash(trainer.config),
                "loss": trainer.losses[-1],
                "losses": trainer.losses,
                "max_loss_difference": float(np.abs(np.subtract(trainer.losses, reference.losses)).max()),
                "step_ms": float(np.median(times_ms[name])),
                "ratio": float(np.median(times_ms[name] / fastest)),
                "timed_steps": len(fastest),
                "bytes": _mean([sum(moved.values()) for moved in trainer.moved]),
                "bytes_by_purpose": {p: _mean([moved[p] for moved in trainer.moved]) for p in trainer.moved[0]},
                "closed_form_bytes": None if None in closed else _mean(closed),
                "dropped_fraction": float(np.mean(trainer.dropped)),
            }
        )
    least = [least_bytes(reference.config, counts, reference.units) for counts, _ in reference.routed]
    return [*rows, {"dispatcher": LEAST, **setting, "bytes": _mean(least)}]


def _mean(values: list[Any]) -> int:
    return round(float(np.mean(values)))


# Bytes by formula. Letters: L layers, I microbatches, M devices, E experts.


def rows_by_member(config: Config, trace: dict[str, np.ndarray]) -> tuple[np.ndarray, int]:
    """From the assignments of a step: rows (L, I, M, E) of each device for each expert, and N, its places for rows."""
    expert_LN, valid_LN = trace["expert_N"], trace["valid_N"]
    shape = (len(expert_LN), config.train.microbatches, config.mesh.devices, -1)
    expert_LIMN, valid_LIMN = expert_LN.reshape(shape), valid_LN.reshape(shape)
    one_hot = expert_LIMN[..., None] == np.arange(config.moe.num_experts)
    return (one_hot & valid_LIMN[..., None]).sum(3), expert_LIMN.shape[3]


def closed_form_bytes(config: Config, counts_LIME: np.ndarray, num_rows: int, units: Units) -> int | None:
    """Payload of a step, all members, by the formula of the dispatcher; None where there is none.

    all_to_all: C rows for every remote position, 4 times, where C is what holds the largest count of the layer.
    all_gather: every remote block, and its gradient back. pooled: the blocks of the remote experts that have rows, once
    for the forward and once for the backward pass, and their gradients back. Recomputation (remat) is left out.

    Args:
      config: names the dispatcher, the mesh and the shapes.
      counts_LIME: from `rows_by_member`.
      num_rows: N, a device's places for rows in a microbatch.
      units: bytes of a block, of its gradient and of a row.
    """
    layers, microbatches, devices, num_experts = counts_LIME.shape
    table = _table_of(config)
    remote_positions = devices * (table.num_positions - table.per_member)
    if config.moe.dispatcher == "all_to_all":
        num_tokens = config.data.batch_size * config.data.seq_len // (devices * microbatches)
        sizes = np.array(capacity_sizes(num_rows, num_tokens, num_experts))
        capacity_LI = sizes[np.searchsorted(sizes, counts_LIME.max((2, 3)))]
        return int(4 * remote_positions * capacity_LI.sum() * units.row_bytes)
    if config.moe.dispatcher == "all_gather":
        return layers * microbatches * remote_positions * (units.block_bytes + units.gradient_bytes)
    if config.moe.dispatcher == "pooled":
        used = int((counts_LIME[..., _is_remote_ME(config)] > 0).sum())
        return used * (2 * units.block_bytes + units.gradient_bytes)
    return None


def least_bytes(config: Config, counts_LIME: np.ndarray, units: Units) -> int:
    """Payload of a step if every (member, expert) took the cheaper way: its block and gradient, or 4 times its rows."""
    rows = counts_LIME[..., _is_remote_ME(config)]
    weights = np.where(rows > 0, units.block_bytes + units.gradient_bytes, 0)
    return int(np.minimum(weights, 4 * rows * units.row_bytes).sum())


def _table_of(config: Config) -> ExpertTable:
    return ExpertTable(config.moe.num_experts, config.mesh.devices // config.mesh.data)


def _is_remote_ME(config: Config) -> np.ndarray:
    """(M, E) bool, whether a device must reach out for an expert."""
    table = _table_of(config)
    rank_M = np.arange(config.mesh.devices) % table.num_members
    return rank_M[:, None] != table.home_E[None, :]


# The table


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: what was run, a line for each dispatcher, and how to read it."""
    first = rows[0]
    head = ["dispatcher", f"loss after {first['steps']} steps", "max loss difference", "step ms", "ratio"]
    head += ["moved per step", *_SHOWN, "closed form", "dropped"]
    versions = f"jax {first['versions']['jax']}, commit {first['commit']}"
    lines = [
        f"`{first['flags']}`, {first['steps']} steps of {first['tokens_per_step']:,} tokens, seed {first['seed']}; "
        f"XLA:CPU, {first['devices']} virtual devices in one process on {first['cores']} cores; {versions}.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + " --- |" + " ---: |" * (len(head) - 1),
    ]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
    lines += [
        "",
        "Loss differences are to `reference`, the largest of all steps. Times are medians of the last "
        f"{first['timed_steps']} steps, ratios are to the fastest in the same step. No network is between the members: "
        "bytes are what would cross from member to member, counted by the ledger, of all members (1 MB = 10^6 bytes; "
        "the sum includes metadata), and `pooled` reads mapped memory, so these times say nothing about a network. "
        "What XLA moves for `reference` is not counted. `least`: for each member and expert the cheaper of moving "
        "weights and moving tokens.",
    ]
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    if row["dispatcher"] == LEAST:
        return [LEAST, *["\N{EN DASH}"] * 4, bytes_text(row["bytes"]), *["\N{EN DASH}"] * (len(_SHOWN) + 2)]
    is_counted = row["dispatcher"] != REFERENCE
    moved = [row["bytes"], *(row["bytes_by_purpose"][purpose] for purpose in _SHOWN), row["closed_form_bytes"]]
    return [
        f"`{row['dispatcher']}`",
        f"{row['loss']:.6f}",
        f"{row['max_loss_difference']:.1e}",
        number_text(row["step_ms"]),
        f"{row['ratio']:.2f}",
        *(bytes_text(count if is_counted else None) for count in moved),
        percent_text(row["dropped_fraction"]),
    ]


if __name__ == "__main__":
    run(main)
