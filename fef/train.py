"""A training run: set-up, resume, the loop, evaluation, and what a run leaves in its folder.

With several hosts all of them take each step, evaluate, save and sample together; host 0 writes all files but the
checkpoints' arrays and speaks to the user.
"""

import contextlib
import dataclasses
import json
import pathlib
import shutil
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec
from tqdm import tqdm

from fef import data, hosts, provenance, sharding
from fef.checkpoint import Checkpointer, logical_template, to_logical, to_physical
from fef.config import (
    Config,
    ConfigError,
    UserError,
    config_hash,
    flatten,
    moe_layers,
    resume_changes,
    to_dict,
    tokens_per_layer,
)
from fef.dispatch import DISPATCHERS
from fef.dispatch.base import Dispatcher
from fef.fabric import calibration
from fef.fabric.calibration import Calibration
from fef.fabric.measure import measure
from fef.ffn import FFNS
from fef.flops import train_flops_per_token
from fef.hosts import say
from fef.layers import make_device
from fef.metrics import JsonlWriter, TensorBoard, load_metrics, read_jsonl, write_json_atomic
from fef.pool.ledger import PURPOSES, WAITS, Units, bytes_by_leaf, bytes_by_purpose, bytes_received, relays
from fef.pool.pool import Pool, current
from fef.profiler import Profiler
from fef.report import write_report
from fef.sample import sample
from fef.step import Stepper, TrainState, count_params, is_expert
from fef.summary import format_summary, start_line
from fef.testing.traces import Trace, TraceHeader, TraceWriter

_CALIBRATION = "calibration.json"
_RUN_FILES = [_CALIBRATION, "config.json", "changes.jsonl", "metrics.jsonl", "summary.json", "report.html"]
_RUN_FILES += ["checkpoints", "tensorboard", "profile"]
_SUMMARY_ROWS = 20  # last rows over which the summary averages what fluctuates


def run(config: Config, workdir: str, fresh: bool = False) -> dict[str, Any] | None:
    """Trains `config` in `workdir`, continuing what is there; returns the summary, on host 0.

    Args:
      config: validated and frozen; the same on all hosts.
      workdir: folder of the run, made if absent; one that all hosts see.
      fresh: delete an earlier run in the folder and start over.

    Raises:
      UserError: the run in the folder has another model or other data (names the key and both values); data, mesh,
        dispatcher or checkpoints cannot be used; or a host differs from host 0 in any of these.
      PoolError: a pool operation failed; names rank, table, layer, expert and operation.
    """
    folder = pathlib.Path(workdir)
    hosts.check_same({"fresh": fresh} | {f"config.{key}": value for key, value in flatten(config).items()})
    changes = [] if fresh else _changes(folder, config)
    summary = hosts.from_main("the summary", None if fresh else _finished(folder, config))
    if summary is not None:
        say(f"{folder}: finished; --fresh starts over, a larger config.train.steps continues")
        say(format_summary(summary, folder))
        return summary
    _check_platform(config)
    corpus = data.load_corpus(config.data, config.model.vocab_size)
    mesh = sharding.make_mesh(config.mesh.devices, config.mesh.data)
    hosts.check_same({
        "the SHA-256 of the text": corpus.sha256, "the SHA-256 of the tokenizer": corpus.tokenizer.sha256
    })  # fmt: skip
    hosts.barrier("have read the text")
    if hosts.is_main():
        _make_folder(folder, fresh)  # only now: a run that cannot start must not have deleted the earlier one
    hosts.barrier("see the run's folder ready")
    for notice in corpus.notices:
        say(notice)
    with contextlib.ExitStack() as stack:
        if _dispatcher(config).uses_pool:
            stack.enter_context(Pool(mesh, config.pool))
        training = Training(config, folder, corpus, mesh, stack)
        training.resume(changes)
        training.loop()
        return training.finish()


class Training:
    """One process's part of a run. Everything that must be closed is entered into `stack`."""

    def __init__(
        self, config: Config, folder: pathlib.Path, corpus: data.Corpus, mesh: Any, stack: contextlib.ExitStack
    ):
        self.config, self.folder, self.corpus, self.mesh = config, folder, corpus, mesh
        self.uses_pool = _dispatcher(config).uses_pool
        self.checkpointer = stack.enter_context(
            Checkpointer(folder / "checkpoints", config.checkpoint.keep, config.checkpoint.keep_best)
        )
        rates = _rates(config, folder, mesh, self.checkpointer)
        if rates is not None:
            stack.enter_context(calibration.using(rates))
        self.stepper = Stepper(config, mesh)
        self.rates = self.stepper.dispatcher.rates if self.stepper.dispatcher else None
        self.shardings = self.stepper.shardings()
        self.tokens_sharding = sharding.named(mesh, sharding.TOKENS)
        self.loader = data.make_loader(
            corpus.train, config.data.seq_len, config.data.batch_size, config.data.seed,
            jax.process_index(), jax.process_count(),
        )  # fmt: skip
        stack.callback(self.loader.close)
        self.heldout = data.heldout_batches(
            corpus.heldout, config.data.seq_len, config.data.batch_size, config.train.eval_batches,
            jax.process_index(), jax.process_count(),
        )  # fmt: skip
        self.heldout_loss: float | None = None
        self.stack = stack

    def resume(self, changes: list) -> None:
        """Takes up the newest complete checkpoint, or starts at step 0."""
        step, notices = self.checkpointer.latest()
        for notice in notices:
            say(notice)
        self._check_same_folder(step)
        self.state = self._initial() if step is None else self._restore(step)
        self.step = step or 0
        self.writer: JsonlWriter | None = None
        self.tensorboard: TensorBoard | None = None
        if hosts.is_main():
            self._open_files(step, changes)
        self.replay, self.record = self._traces()
        self.profiler = Profiler(self.folder / "profile", self.config.run.profile_steps, self.step)
        self.stack.callback(self.profiler.close)
        say(self._start_line())

    def _check_same_folder(self, step: int | None) -> None:
        newest = hosts.from_main("its newest checkpoint", step)
        if step != newest:
            raise UserError(
                f"{self.folder}: here, host {jax.process_index()} finds {_checkpoint_name(step)} and host 0 finds "
                f"{_checkpoint_name(newest)}; give a --workdir on a file system that all hosts share"
            )

    def _open_files(self, step: int | None, changes: list) -> None:
        """Opens what a run writes, and takes away or adds what changes when it goes on at `step`."""
        self.writer = writer = JsonlWriter(self.folder / "metrics.jsonl")
        self.stack.callback(writer.close)
        for notice in writer.notices:
            say(notice)
        if step is not None:
            say(f"continuing at step {step} of {self.config.train.steps}")
        writer.truncate_after(self.step)
        if changes:
            with contextlib.closing(JsonlWriter(self.folder / "changes.jsonl")) as file:
                for key, old, new in changes:
                    say(f"config.{key}: {old!r} -> {new!r}")
                    file.write({"step": self.step, "key": key, "old": old, "new": new})
        write_json_atomic(self.folder / "config.json", to_dict(self.config))
        if self.config.run.tensorboard:
            self.tensorboard = TensorBoard(self.folder / "tensorboard", resumed_after=step)
            self.stack.callback(self.tensorboard.close)

    def _traces(self) -> tuple[Trace | None, TraceWriter | None]:
        config, routing = self.config, self.config.routing
        if not (config.moe.every and (routing.replay or routing.record)):
            return None, None
        layers = sum(moe_layers(config))
        moe, batch, tokens = config.moe, config.data.batch_size, tokens_per_layer(config)
        header = TraceHeader(moe.router, layers, batch, tokens, moe.num_experts, moe.num_choices)
        replay = Trace(routing.replay, header, range(self.step, config.train.steps)) if routing.replay else None
        record = None
        if routing.record and hosts.is_main():
            record = self.stack.enter_context(TraceWriter(routing.record, header, self.step))
        return replay, record

    def _initial(self) -> TrainState:
        """The state before step 1: drawn, or with the parameters of another checkpoint."""
        state, source = sharding.place(self.stepper.init(), self.shardings), self.config.train.init_from
        if not source:
            return state
        key, names = "train.init_from", ("experts", "dense", "router")
        if not pathlib.Path(source).is_dir():
            raise ConfigError(key, source, "no such folder; give a run's or an import's folder of checkpoints")
        with Checkpointer(source, keep=1, keep_best=0) as checkpointer:
            step, _ = checkpointer.latest()
            if step is None:
                raise ConfigError(key, source, "holds no complete checkpoint")
            whole = self._template()
            template = {name: getattr(whole, name) for name in names}
            saved, _ = checkpointer.restore(step, template, partly=True)
        say(f"parameters of {source}, step {step}")
        places = {name: getattr(self.shardings, name) for name in names}
        return dataclasses.replace(state, **self._to_positions(saved, places))

    def _restore(self, step: int) -> TrainState:
        saved, extra = self.checkpointer.restore(step, self._template())
        of_tokenizer = extra.get("tokenizer_sha256", "")  # absent from checkpoints of earlier versions, all of bytes
        for key, what, then, now in (
            ("path", "text", extra["corpus_sha256"], self.corpus.sha256),
            ("tokenizer", "tokenizer", of_tokenizer, self.corpus.tokenizer.sha256),
        ):
            if then != now:
                raise ConfigError(
                    f"data.{key}", getattr(self.config.data, key),
                    f"the {what} has changed since step {step} (sha256 {then[:12]} then, {now[:12]} now); "
                    f"give the old {what}, or start over with --fresh",
                )  # fmt: skip
        self.loader.set_state(extra["data"])
        self.heldout_loss = extra["heldout_loss"]
        return self._to_positions(saved, self.shardings)

    def _template(self) -> TrainState:
        """What a checkpoint of this run holds, experts in logical order."""
        template = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            jax.eval_shape(self.stepper.init), self.shardings,
        )  # fmt: skip
        return logical_template(template, is_expert, self.config.moe.num_experts, self.stepper.expert_axis)

    def _to_positions(self, saved: Any, shardings: Any) -> Any:
        """Puts the experts of a state, or of parts of one, where they live on this mesh."""
        place, axis = self.stepper.table, self.stepper.expert_axis

        def to_positions(tree: Any) -> Any:
            return to_physical(tree, is_expert, place.position_E, place.num_positions, axis)

        return jax.jit(to_positions, out_shardings=shardings)(saved)

    def _save(self) -> None:
        logical = to_logical(self.state, is_expert, self.stepper.table.position_E, self.stepper.expert_axis)
        is_number = self.heldout_loss is not None and np.isfinite(self.heldout_loss)
        loss = self.heldout_loss if is_number else None  # JSON has no NaN
        extra = {
            "data": self.loader.get_state(),
            "corpus_sha256": self.corpus.sha256,
            "tokenizer_sha256": self.corpus.tokenizer.sha256,
            "heldout_loss": loss,
            "config": to_dict(self.config),
            "calibration": dataclasses.asdict(self.rates) if self.rates else None,
        }
        is_evaluated = self.step % self.config.train.eval_every == 0 or self.step == self.config.train.steps
        self.checkpointer.save(self.step, logical, extra, loss if is_evaluated else None)

    def loop(self) -> None:
        """Trains up to config.train.steps."""
        config = self.config
        if self.step >= config.train.steps:
            return
        batch, data_ms = self._next_batch()
        replay = self._replay()
        # A host sees only its members' part of an array, so with several hosts each gets the whole metrics. With one
        # host they stay where they are: the members would have to wait for each other.
        whole = None if jax.process_count() == 1 else sharding.named(self.mesh, sharding.REPLICATED)
        train_step = jax.jit(
            self._train_step, donate_argnums=0, out_shardings=(self.shardings, whole)
        ).lower(self.state, batch, replay).compile()  # fmt: skip
        self._eval_step = jax.jit(self.stepper.eval_step, out_shardings=whole)
        with tqdm(
            total=config.train.steps, initial=self.step, unit="step", dynamic_ncols=True, disable=not hosts.is_main()
        ) as bar:
            while True:
                start = time.perf_counter()
                self.state, metrics = self.profiler.run(self.step + 1, train_step, self.state, batch, replay)
                metrics = jax.device_get(metrics)
                step_ms = (time.perf_counter() - start) * 1e3 + data_ms
                self.step += 1
                is_last = self.step == config.train.steps
                row = self._row(metrics, step_ms, data_ms)
                if self.record:
                    self.record.append(self.step - 1, metrics["trace"])
                if self.heldout and (is_last or self.step % config.train.eval_every == 0):
                    row["heldout_loss"] = self.heldout_loss = self._evaluate()
                if is_last or self.step % config.train.log_every == 0 or "heldout_loss" in row:
                    if self.writer:
                        self.writer.write(row)
                    if self.tensorboard:
                        self.tensorboard.write(row)
                bar.set_postfix_str(_postfix(row), refresh=False)
                bar.update()
                if is_last or self.step % config.checkpoint.every == 0:
                    self._save()
                for step in self.checkpointer.poll():
                    if hosts.is_main():
                        bar.write(f"saved step {step}")
                if is_last:
                    return
                batch, data_ms = self._next_batch()
                replay = self._replay()

    def _train_step(self, state: TrainState, batch: Any, replay: Any) -> tuple[TrainState, dict[str, Any]]:
        state, metrics = self.stepper.train_step(state, batch, replay)
        if not self.config.routing.record:
            metrics.pop("trace", None)  # the largest part, of use to a recording only
        return state, metrics

    def _next_batch(self) -> tuple[dict[str, jax.Array], float]:
        start = time.perf_counter()
        batch = self._to_devices(next(self.loader))
        return batch, (time.perf_counter() - start) * 1e3

    def _to_devices(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return {k: jax.make_array_from_process_local_data(self.tokens_sharding, v) for k, v in batch.items()}

    def _replay(self) -> Any:
        if self.replay is None:
            return None
        along_tokens = sharding.named(self.mesh, PartitionSpec(None, sharding.AXES))
        return sharding.place(self.replay.step(self.step), along_tokens)

    def _evaluate(self) -> float:
        losses, tokens = zip(
            *(jax.device_get(self._eval_step(self.state, self._to_devices(batch))) for batch in self.heldout),
            strict=True,
        )
        return float(np.sum(losses) / np.sum(tokens))

    def _row(self, metrics: dict[str, Any], step_ms: float, data_ms: float) -> dict[str, Any]:
        """The line of metrics.jsonl of the step just done."""
        row = {
            "step": self.step,
            "loss": float(metrics["loss"]),
            "aux_loss": float(metrics["aux_loss"]),
            "grad_norm": float(metrics["grad_norm"]),
            "learning_rate": float(metrics["learning_rate"]),
            "step_ms": step_ms,
            "data_ms": data_ms,
            "tokens": int(metrics["tokens"]),
            "tokens_per_s": int(metrics["tokens"]) / step_ms * 1e3,
            "skipped_updates": int(metrics["skipped_updates"]),
        }
        if self.stepper.dispatcher is None:
            nothing = {"bytes": 0, "bytes_by_purpose": dict.fromkeys(PURPOSES, 0), "bytes_received": {}}
            no_waits = {"wait_ms": 0.0, "waits_ms": {}, "gate_entropy": []}
            return row | nothing | no_waits | load_metrics(np.zeros((0, 1)), np.zeros((0, 1)))
        model, moe = self.config.model, self.config.moe
        units = self.stepper.dispatcher.units.for_shapes(FFNS.get(model.ffn), model.d_model, moe.d_expert)
        return row | {
            "wait_ms": float(metrics["waits_us_MLW"].sum((1, 2)).mean()) / 1e3,
            "waits_ms": dict(zip(WAITS, (metrics["waits_us_MLW"].mean(0).T / 1e3).tolist(), strict=True)),
            **self._moved(metrics["moved_MLQP"], units),
            **load_metrics(metrics["load_LE"], metrics["kept_LE"]),
            "gate_entropy": metrics["entropy_L"].tolist(),
            **(_planned(metrics["planned_MLQP"], units, self.rates) if self.rates else {}),
        }

    def _moved(self, moved_MLQP: np.ndarray, units: Units) -> dict[str, Any]:
        """Which bytes moved between members and, where they know their leaf of the network, how many crossed it."""
        moved, ranks = bytes_by_purpose(moved_MLQP.sum(0, dtype=np.int64), units), sharding.num_members(self.mesh)
        row: dict[str, Any] = {"bytes": sum(moved.values()), "bytes_by_purpose": moved}
        pool = current() if self.uses_pool else None
        relay_GRP = None
        if pool and pool.leaf_of_host:
            leaf_GR = np.array(pool.leaf_of_host)[pool.host_GR]
            row["bytes_in_leaf"], row["bytes_crossing"] = bytes_by_leaf(moved_MLQP, leaf_GR, units)
        if pool and pool.relay:
            relay_GRP = relays(pool.host_GR, pool.leaf_of_host, moved_MLQP.shape[-1])
        return row | {"bytes_received": bytes_received(moved_MLQP, ranks, units, relay_GRP)}

    def finish(self) -> dict[str, Any] | None:
        """Waits for the last checkpoint, writes summary and report, and prints what came out; the summary on host 0."""
        for step in self.checkpointer.close():
            say(f"saved step {step}")
        summary = None
        refused = sum(hosts.gather("its count of refusals", current().refused)) if self.uses_pool else None
        if hosts.is_main():
            summary = self._summary(refused)
            write_json_atomic(self.folder / "summary.json", summary)
            if self.config.run.report:
                write_report(self.folder)
            say(format_summary(summary, self.folder))
        if self.config.train.sample_bytes:
            text = sample(self.stepper, self.state, self.config.train.sample_bytes, tokenizer=self.corpus.tokenizer)
            say(f"sample:\n{text}")
        return summary

    def _start_line(self) -> str:
        total, active = count_params(self.state, self.config)
        return start_line(
            self.config, platform=jax.default_backend(), hosts=jax.process_count(),
            corpus_bytes=self.corpus.num_bytes, params_total=total, params_active=active,
        )  # fmt: skip

    def _summary(self, refused: int | None) -> dict[str, Any]:
        rows, _ = read_jsonl(self.folder / "metrics.jsonl")
        last = rows[-_SUMMARY_ROWS:]
        changed, _ = read_jsonl(self.folder / "changes.jsonl") if (self.folder / "changes.jsonl").exists() else ([], [])
        total, active = count_params(self.state, self.config)

        def median(key: str) -> float | None:
            values = [row[key] for row in rows if row.get(key) is not None]
            return float(np.median(values)) if values else None

        def last_mean(key: str) -> Any:
            values = [row[key] for row in last if row.get(key) is not None]
            return np.mean(values, axis=0).tolist() if values else None

        bytes_per_step = last_mean("bytes")
        moved = {p: [row["bytes_by_purpose"][p] for row in last] for p in last[-1].get("bytes_by_purpose", {})}
        return {
            "heldout_loss": self.heldout_loss,
            "train_loss": last_mean("loss"),
            "tokens_per_s": median("tokens_per_s"),
            "step_ms": median("step_ms"),
            "wait_ms": median("wait_ms"),
            "data_ms": median("data_ms"),
            "bytes_per_step": None if bytes_per_step is None else round(bytes_per_step),
            "bytes_by_purpose": {purpose: round(float(np.mean(values))) for purpose, values in moved.items()},
            "token": "token" if self.config.data.tokenizer else "byte",  # what the losses are per
            "dropped_fraction": last_mean("dropped_fraction"),
            "max_vio": last_mean("max_vio"),
            "skipped_updates": last[-1]["skipped_updates"],
            "steps": self.step,
            "params_total": total,
            "params_active": active,
            "train_flops_per_token": train_flops_per_token(self.config).total,
            "config_hash": config_hash(self.config),
            "transport": current().transport if self.uses_pool else None,
            "relay": current().relay if self.uses_pool else None,
            "refused": refused,
            "commit": provenance.commit(),
            "versions": provenance.versions(),
            "run_fields_changed": [[row["key"], row["old"], row["new"]] for row in changed],
        }


def _postfix(row: dict[str, Any]) -> str:
    """What the progress bar shows beside the steps and the time left."""
    skipped = f", {row['skipped_updates']} updates skipped" if row["skipped_updates"] else ""
    return f"loss {row['loss']:.3f}, {row['tokens_per_s']:,.0f} tokens/s{skipped}"


def _checkpoint_name(step: int | None) -> str:
    return "no checkpoint" if step is None else f"the checkpoint of step {step}"


def _changes(folder: pathlib.Path, config: Config) -> list:
    """The run fields that differ from those of the run in the folder, if it holds one."""
    path = folder / "config.json"
    return resume_changes(json.loads(path.read_text()), config) if path.exists() else []


def _make_folder(folder: pathlib.Path, fresh: bool) -> None:
    if fresh:
        for name in _RUN_FILES:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be the run's folder: {error.strerror}; choose another --workdir") from error


def _planned(planned_MLQP: np.ndarray, units: Units, rates: Calibration) -> dict[str, Any]:
    """What the dispatcher meant to move, and for how long that keeps a member's link busy."""
    planned = bytes_by_purpose(planned_MLQP.sum(0, dtype=np.int64), units)
    per_member = 1e3 / len(planned_MLQP)
    planned_ms = {
        "weights": (planned["weights"] + planned["gradients"]) / rates.bytes_per_s * per_member,
        "tokens": planned["tokens"] / rates.row_bytes_per_s * per_member,
    }
    return {"planned_bytes_by_purpose": planned, "planned_ms": planned_ms}


def _finished(folder: pathlib.Path, config: Config) -> dict[str, Any] | None:
    path = folder / "summary.json"
    if not path.exists():
        return None
    summary = json.loads(path.read_text())
    return summary if summary["steps"] >= config.train.steps else None


def _dispatcher(config: Config) -> type[Dispatcher]:
    return DISPATCHERS.get(config.moe.dispatcher) if config.moe.every else Dispatcher


def _rates(config: Config, folder: pathlib.Path, mesh: Any, checkpointer: Checkpointer) -> Calibration | None:
    """What the run chooses by, if it does: measured when it first starts, and kept with it and with its checkpoints."""
    if not _dispatcher(config).needs_rates(getattr(config.dispatch, config.moe.dispatcher, None)):
        return None
    path = folder / _CALIBRATION
    if hosts.is_main() and not path.exists():
        step, _ = checkpointer.latest()
        saved = None if step is None else checkpointer.extra(step)["calibration"]
        if saved:
            Calibration(**saved).save(path)
    if not hosts.from_main("whether it has rates", path.exists()):
        ffn, device = FFNS.get(config.model.ffn), make_device(config)
        rates = measure(mesh, ffn, config.model.d_model, config.moe.d_expert, device, config.dispatch.matmul)
        if hosts.is_main():
            rates.save(path)
        hosts.barrier("have rates")
    rates = calibration.load(path)
    say(
        f"rates ({rates.measured}): blocks {rates.bytes_per_s / 1e6:,.1f} MB/s, token rows "
        f"{rates.row_bytes_per_s / 1e6:,.1f} MB/s and {rates.latency_s * 1e6:,.0f} us a crossing, "
        f"{rates.flops / 1e9:,.1f} GFLOP/s, half of it at {rates.half_rows:.0f} rows; {path}"
    )
    return rates


def _check_platform(config: Config) -> None:
    if config.moe.every:
        DISPATCHERS.get(config.moe.dispatcher).check_platform(jax.default_backend())
    if config.device.flops is not None and jax.default_backend() != "cpu":
        raise ConfigError(
            "device.flops", config.device.flops, f"stands in for an accelerator; this is {jax.default_backend()}"
        )
