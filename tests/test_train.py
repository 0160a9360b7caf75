"""A run: what it leaves, how it goes on after a kill or with other settings, and what it refuses."""

import contextlib
import gzip
import io
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import tokenizers
from small import ROOT, SMALL, assert_equal, fast_compilation, quick_environment, small_config  # noqa: F401

import fef.train
from experiments import flags
from fef import data, sharding
from fef.checkpoint import Checkpointer, to_logical
from fef.config import ConfigError, UserError
from fef.dispatch import DISPATCHERS
from fef.metrics import load_entropy, read_jsonl
from fef.pool.pool import Pool
from fef.profiler import Profiler
from fef.registry import scan
from fef.routing import ROUTERS
from fef.step import is_expert
from fef.testing.traces import ARRAYS, Trace, TraceHeader

RUN = {
    "optim.name": "adamw",
    "optim.learning_rate": 0.01,
    "optim.weight_decay": 0.1,
    "optim.clip_norm": 1.0,
    "routing.top_k.balance_coef": 0.01,
    "train.steps": 6,
    "train.eval_every": 3,
    "train.eval_batches": 1,
    "train.sample_bytes": 0,
    "checkpoint.every": 2,
    "run.report": False,
    "run.tensorboard": False,
}
TIMES = {"step_ms", "data_ms", "wait_ms", "waits_ms", "tokens_per_s"}


def run(folder, changes=None, **kwargs):
    """A run in this process; returns its summary and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        summary = fef.train.run(small_config(RUN | (changes or {})), str(folder), **kwargs)
    return summary, out.getvalue()


def rows_of(folder):
    """The rows of metrics.jsonl, which must be strict JSON, without the times."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "uninterrupted"
    run(folder, {"train.steps": 9})
    return folder


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory):
    """A finished run, not to be changed, and its summary and output."""
    folder = tmp_path_factory.mktemp("runs") / "six_steps"
    summary, out = run(folder, {"run.tensorboard": True})
    return folder, summary, out


@pytest.fixture
def six_steps_copy(six_steps, tmp_path):
    return shutil.copytree(six_steps[0], tmp_path / "run")


# What a run leaves and says.


def test_a_run_leaves_its_files_and_a_summary(six_steps):
    folder, summary, out = six_steps
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "metrics.jsonl", "summary.json", "checkpoints", "tensorboard",
    }  # fmt: skip
    assert json.loads((folder / "summary.json").read_text()) == summary
    keys = """heldout_loss train_loss tokens_per_s step_ms wait_ms bytes_per_step dropped_fraction max_vio steps
              params_total params_active config_hash commit versions""".split()
    assert set(keys) <= set(summary)
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "heldout_loss" in row] == [3, 6]
    assert summary["steps"] == 6 and summary["skipped_updates"] == 0
    assert summary["heldout_loss"] == rows[-1]["heldout_loss"]
    assert summary["train_loss"] == pytest.approx(np.mean([row["loss"] for row in rows]))
    assert summary["max_vio"] == pytest.approx(np.mean([row["max_vio"] for row in rows], axis=0))
    assert all(row["tokens"] == 8 * 16 for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert all(0 < row["gate_entropy"][0] <= math.log(6) + 1e-6 for row in rows)
    assert rows[-1]["entropy"] == pytest.approx(load_entropy(rows[-1]["load"]).tolist())
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == ["4", "6"]
    lines = out.splitlines()
    assert lines[0].startswith("4 cpu devices (data 1 x expert 4); corpus ")
    assert [line for line in lines if line.startswith("saved")] == [f"saved step {step}" for step in (2, 4, 6)]
    assert any(line.startswith("held-out loss") for line in lines)


def test_the_first_step_is_the_golden_one(six_steps):
    """float32 sums round differently on other CPUs, by a few units of the seventh digit."""
    path = ROOT / "tests/golden/first_step.json"
    golden, row = json.loads(path.read_text()), rows_of(six_steps[0])[0]
    row = {key: row[key] for key in golden}
    message = (
        f"the first step of a fixed configuration has changed. If that was meant, put this into {path}, and say in the "
        f"change log that earlier results cannot be reproduced:\n{json.dumps(row)}"
    )
    assert row["load"] == golden["load"], message
    for key in golden:
        np.testing.assert_allclose(row[key], golden[key], rtol=1e-5, err_msg=message)


def test_a_finished_run_prints_its_summary_and_is_left_alone(six_steps):
    folder, summary, _ = six_steps
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    again, out = run(folder, {"train.log_every": 2})
    assert again == summary
    assert out.startswith(f"{folder}: finished; --fresh starts over") and "held-out loss" in out
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


# How a run goes on.


def test_a_finished_run_with_more_steps_goes_on_past_what_a_kill_left(six_steps_copy, uninterrupted):
    """A row beyond the checkpoint, a line that was cut (M-01), and two saves that were (C-02)."""
    with open(six_steps_copy / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "loss": 0.0}\n{"step": 8, "lo')
    unfinished = [six_steps_copy / "checkpoints" / name for name in ("8", "8.orbax-checkpoint-tmp")]
    for folder in unfinished:
        folder.mkdir()
    summary, out = run(six_steps_copy, {"train.steps": 9})
    assert "continuing at step 6 of 9" in out and "config.train.steps: 6 -> 9" in out
    assert "metrics.jsonl: the last line was cut off; removed 15 bytes" in out
    assert all(f"skipped {folder.absolute()}: not a complete checkpoint" in out for folder in unfinished)
    assert "saved step 8" in out and "saved step 9" in out
    assert rows_of(six_steps_copy) == rows_of(uninterrupted)
    assert summary["steps"] == 9
    assert ["train.steps", 6, 9] in summary["run_fields_changed"]


def test_fresh_starts_over(six_steps_copy, six_steps):
    (six_steps_copy / "notes.txt").write_text("mine")
    run(six_steps_copy, {"train.steps": 2}, fresh=True)
    rows, expected = rows_of(six_steps_copy), rows_of(six_steps[0])
    assert [row["loss"] for row in rows] == [row["loss"] for row in expected[:2]]
    assert [path.name for path in (six_steps_copy / "checkpoints").iterdir()] == ["2"]
    assert not (six_steps_copy / "changes.jsonl").exists() and not (six_steps_copy / "tensorboard").exists()
    assert (six_steps_copy / "notes.txt").exists()


@pytest.mark.parametrize(
    "change",
    [{"data.path": "/nowhere"}, {"moe.dispatcher": "ragged_all_to_all"}, {"mesh.devices": 16, "data.batch_size": 16}],
)
def test_fresh_deletes_nothing_when_the_new_run_cannot_start(change, six_steps):
    before = {path: path.stat().st_mtime_ns for path in six_steps[0].rglob("*")}
    with pytest.raises(UserError):
        run(six_steps[0], change, fresh=True)
    assert {path: path.stat().st_mtime_ns for path in six_steps[0].rglob("*")} == before


def test_fluid_goes_on_by_the_rates_that_it_began_with(tmp_path):
    """Continued after 3 steps, or begun by the same file: the same choices."""
    changes = {"moe.dispatcher": "fluid", "train.steps": 6, "optim.decay_steps": 6}
    run(tmp_path / "whole", changes)
    rates = (tmp_path / "whole/calibration.json").read_text()
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/calibration.json").write_text(rates)
    run(tmp_path / "parts", changes | {"train.steps": 3})
    (tmp_path / "parts/calibration.json").unlink()  # the checkpoint has it too
    run(tmp_path / "parts", changes)
    named = changes | {"dispatch.fluid.calibration": str(tmp_path / "whole/calibration.json")}
    run(tmp_path / "named", named)
    assert not (tmp_path / "named/calibration.json").exists()
    rows = rows_of(tmp_path / "whole")
    for name in ("parts", "named"):
        for row, other in zip(rows, rows_of(tmp_path / name), strict=True):
            for key in ("planned_ms", "bytes_by_purpose", "bytes_received", "load", "loss", "grad_norm"):
                assert row[key] == other[key], (name, row["step"], key)
    assert (tmp_path / "parts/calibration.json").read_text() == rates


@pytest.mark.parametrize(("members", "dispatcher"), [(2, "all_gather"), (1, "pooled")])
def test_a_checkpoint_goes_on_with_another_number_of_devices(members, dispatcher, six_steps_copy, uninterrupted):
    """6 experts on 8 positions, then on 6; the norm of the gradient stays the same too (D-04)."""
    config = small_config(RUN | {"train.steps": 9, "mesh.devices": members, "moe.dispatcher": dispatcher})
    with Checkpointer(six_steps_copy / "checkpoints", keep=9, keep_best=0) as checkpointer:
        shapes = {name: np.zeros(shape, dtype) for name, (shape, dtype) in checkpointer.leaves(6).items()}
        saved, _ = checkpointer.restore(6, shapes)
    mesh = sharding.make_mesh(members)
    changes = fef.train._changes(six_steps_copy, config)
    with contextlib.ExitStack() as stack, contextlib.redirect_stdout(io.StringIO()) as out:
        stack.enter_context(Pool(mesh, config.pool))
        training = fef.train.Training(config, six_steps_copy, data.load_corpus(config.data), mesh, stack)
        training.resume(changes)
        logical = to_logical(jax.device_get(training.state), is_expert, training.stepper.table.position_E)
        training.loop()
        summary = training.finish()
    restored = {
        jax.tree_util.keystr(p, simple=True, separator="."): x for p, x in jax.tree_util.tree_leaves_with_path(logical)
    }
    assert_equal(restored, saved)
    assert training.step == 9 and int(training.state.optimizer[1].count) == 9
    rows, expected = rows_of(six_steps_copy), rows_of(uninterrupted)
    for key in ("loss", "aux_loss", "grad_norm", "learning_rate"):
        values, others = ([row[key] for row in some] for some in (rows, expected))
        np.testing.assert_allclose(values, others, rtol=1e-5, err_msg=key)
    assert [row["load"] for row in rows] == [row["load"] for row in expected]
    assert summary["heldout_loss"] == pytest.approx(expected[-1]["heldout_loss"], rel=1e-5)
    for key, old, new in (("mesh.devices", 4, members), ("moe.dispatcher", "reference", dispatcher)):
        assert f"config.{key}: {old!r} -> {new!r}" in out.getvalue()
        assert [key, old, new] in summary["run_fields_changed"]
        assert {"step": 6, "key": key, "old": old, "new": new} in read_jsonl(six_steps_copy / "changes.jsonl")[0]


# A trace of some steps.


def traced_steps(folder):
    """The steps marked in each trace, in the order of time."""
    steps = []
    for path in sorted(folder.glob("profile/plugins/profile/*/*.trace.json.gz")):
        events = [event for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if "ts" in event]
        marks = sorted((event["ts"], event["args"]["step_num"]) for event in events if event["name"] == "train")
        steps.append([int(step) for _, step in marks])
    return steps


def test_a_trace_holds_the_steps_that_were_asked_for(tmp_path):
    _, out = run(tmp_path, {"run.profile_steps": (2, 3), "train.steps": 4, "moe.every": 0})
    line = f"trace of steps 2 to 3: {tmp_path}/profile; "
    assert out.count(line) == 1 and "xprof" in out and "perfetto" in out
    assert traced_steps(tmp_path) == [[2, 3]]
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3, 4]


def test_steps_that_are_done_are_not_traced(tmp_path, capsys):
    Profiler(tmp_path / "profile", (2, 3), done=4).run(5, lambda state: state, 0)
    assert "no trace: config.run.profile_steps=(2, 3) are done, the run goes on at step 4" in capsys.readouterr().out
    assert not (tmp_path / "profile").exists()


def test_a_run_that_fails_leaves_no_trace_open(tmp_path):
    def failing(state):
        raise UserError("a step failed")

    with pytest.raises(UserError, match="a step failed"), contextlib.ExitStack() as stack:
        profiler = Profiler(tmp_path / "profile", (1, 3), done=1)
        stack.callback(profiler.close)
        assert profiler.run(1, lambda state: state + 1, 1) == 2  # done before: not traced
        assert profiler.run(2, lambda state: state + 1, 1) == 2
        profiler.run(3, failing, 1)
    assert traced_steps(tmp_path) == [[2, 3]]
    with pytest.raises(RuntimeError, match="No profile started"):
        jax.profiler.stop_trace()


# What a run refuses.


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.d_model": 32}, r"config\.model\.d_model=32: the run to be continued has 16.*--workdir.*--fresh"),
        ({"optim.name": "sgd"}, r"config\.optim\.name='sgd': the run to be continued has 'adamw'"),
        ({"data.seed": 1}, r"config\.data\.seed=1: the run to be continued has 0, and a data field cannot change"),
    ],
)
def test_another_model_or_other_data_is_refused(change, words, six_steps):
    with pytest.raises(ConfigError, match=words):
        run(six_steps[0], change)


def test_a_run_with_a_tokenizer_goes_on_with_the_same_file_only(tmp_path):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "the": 300}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    changes = {
        "data.tokenizer": str(tmp_path / "tokenizer.json"), "model.vocab_size": 301, "mesh.devices": 1,
        "train.steps": 2, "train.sample_bytes": 4, "run.report": True,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"config.model.vocab_size=300: .* has 301 token ids; set"):
        run(tmp_path / "run", changes | {"model.vocab_size": 300})
    summary, out = run(tmp_path / "run", changes)
    assert summary["token"] == "token" and re.search(r"held-out loss +\d\.\d+ nats/token", out)
    assert set(out.split("sample:\n")[1].split()) <= {"?", "the"}
    assert "nats per token" in (tmp_path / "run/report.html").read_text()
    on = changes | {"train.steps": 3, "train.sample_bytes": 0, "run.report": False}
    assert run(tmp_path / "run", on)[0]["steps"] == 3
    tokenizer.add_tokens(["of"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"config.data.tokenizer='.*': the tokenizer has changed since step 3 \("):
        run(tmp_path / "run", on | {"train.steps": 4, "model.vocab_size": 301})


def test_a_changed_text_is_refused(tmp_path, six_steps):
    text = tmp_path / "text.txt"
    text.write_bytes(b"abcdefgh" * 100)
    changes = {"data.path": str(text), "data.heldout_fraction": 0.0, "train.steps": 1, "moe.every": 0}
    _, out = run(tmp_path / "run", changes)
    assert "no held-out evaluation: config.data.heldout_fraction=0" in out
    text.write_bytes(b"abcdefgi" * 100)
    with pytest.raises(ConfigError, match=r"config\.data\.path=.*text\.txt.*has changed since step 1.*--fresh"):
        run(tmp_path / "run", changes | {"train.steps": 2})
    text.write_bytes(b"abcdefgh" * 100)
    summary, _ = run(tmp_path / "run", changes | {"train.steps": 2})
    assert summary["steps"] == 2 and summary["heldout_loss"] is None
    # A dense model, which has the same fields.
    assert summary.keys() == six_steps[1].keys() and summary["max_vio"] == [] and summary["bytes_per_step"] == 0
    assert rows_of(tmp_path / "run")[0].keys() == rows_of(six_steps[0])[0].keys()


@pytest.mark.parametrize("name", ["run", "run/below"])
def test_a_workdir_that_cannot_be_a_folder(tmp_path, name):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(UserError, match="cannot be the run's folder: .*; choose another --workdir"):
        run(tmp_path / name)


# Steps that are not finite (M-01).


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_an_absurd_learning_rate_is_survived_counted_and_said(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(fef.train.Training, "_evaluate", lambda self: math.nan)
    changes = {"optim.learning_rate": 1e39, "checkpoint.keep": 9}  # infinite in float32
    summary, out = run(tmp_path, changes)
    rows = rows_of(tmp_path)  # strict JSON
    assert [row["skipped_updates"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["learning_rate"] is None and "learning_rate" in row["not_finite"] for row in rows)
    assert rows[2]["heldout_loss"] is None and "heldout_loss" in rows[2]["not_finite"]
    assert summary["skipped_updates"] == 6
    assert re.search(r"^skipped updates +6 ", out, re.MULTILINE) and re.search(
        r"^held-out loss +\N{EN DASH}$", out, re.M
    )
    assert "6 updates skipped" in capfd.readouterr().err  # beside the progress bar
    with Checkpointer(tmp_path / "checkpoints", keep=9, keep_best=0) as checkpointer:
        shapes = {name: np.zeros(shape, dtype) for name, (shape, dtype) in checkpointer.leaves(6).items()}
        early, late = (checkpointer.restore(step, shapes)[0] for step in (2, 6))
    changed = {name for name in shapes if not np.array_equal(early[name], late[name])}
    assert changed == {"step", "skipped"}
    again, out = run(tmp_path, changes)  # null where there is no number
    assert again["heldout_loss"] is None and "skipped updates" in out


# Recorded assignments.


def test_a_recorded_run_is_repeated_on_any_dispatcher(tmp_path, uninterrupted):
    trace = tmp_path / "trace.npz"
    for steps in (2, 4):  # the second one goes on with the recording
        run(tmp_path / "recorded", {"routing.record": str(trace), "train.steps": steps})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recorded", "trace.npz"]
    expected = rows_of(uninterrupted)[:4]
    header = TraceHeader("top_k", 1, 8, 16, 6, 2)
    for step, assignments in enumerate(map(Trace(trace, header).step, range(4))):
        assert set(assignments) == set(ARRAYS)
        load_E = np.bincount(assignments["expert_N"][0], minlength=6)
        assert load_E.tolist() == expected[step]["load"][0]

    # A replaying program is another program than a recording one, so XLA may round the last digit otherwise.
    for dispatcher, tolerance in (("reference", 1e-6), ("all_gather", 1e-5)):
        folder = tmp_path / dispatcher
        run(folder, {"routing.replay": str(trace), "train.steps": 4, "moe.dispatcher": dispatcher})
        rows = rows_of(folder)
        assert [row["load"] for row in rows] == [row["load"] for row in expected]
        losses, expected_losses = ([row["loss"] for row in some] for some in (rows, expected))
        np.testing.assert_allclose(losses, expected_losses, rtol=tolerance)
    block = 2 * 3 * 16 * 32 * 4  # of each of the other members both positions, and their gradients back
    every_pair = (block * (1 - np.eye(4, dtype=int))).tolist()
    assert all(row["bytes_received"] == {"weights": every_pair, "gradients": every_pair} for row in rows)

    with pytest.raises(UserError, match=r"trace\.npz: recorded with num_choices=2, but this run has num_choices=1"):
        run(tmp_path / "refused", {"routing.replay": str(trace), "moe.num_choices": 1})
    with pytest.raises(UserError, match=r"has steps 0 to 3, but this run replays steps 0 to 5 and step 4 is missing"):
        run(tmp_path / "short", {"routing.replay": str(trace)})


# A user's own file.

PARITY_ROUTER = '''
import dataclasses
import jax.numpy as jnp
from fef.routing import ROUTERS
from fef.routing.gate import token_choice

@ROUTERS.register("parity")
@dataclasses.dataclass(frozen=True)
class Parity:
    """Even bytes to expert 0, odd ones to expert 1; its state counts the steps and the tokens it has seen."""

    @dataclasses.dataclass(unsafe_hash=True)
    class Options:
        pass

    causal = True
    num_experts: int
    num_choices: int
    options: Options = dataclasses.field(default_factory=Options)

    def init(self, key, d_model):
        return {}

    def init_state(self):
        return {"steps": jnp.int32(0), "tokens": jnp.int32(0)}

    def __call__(self, params, x_BSD, ctx):
        expert_BSK = (ctx.token_ids_BS % 2)[..., None]
        ones_BSK = jnp.ones(expert_BSK.shape)
        assignment = token_choice(
            expert_BSK, ones_BSK, ctx.mask_BS[..., None], ctx.mask_BS, num_experts=self.num_experts,
            entropy_BS=jnp.zeros(x_BSD.shape[:2]), aux_loss=jnp.zeros(()),
        )
        return assignment, jnp.sum(ctx.mask_BS, dtype=jnp.int32)

    def next_state(self, state, seen):
        return {"steps": state["steps"] + 1, "tokens": state["tokens"] + seen}
'''


@pytest.mark.parametrize("is_scanned", [False, True])
def test_a_users_router_trains_and_its_state_is_saved(is_scanned, tmp_path, monkeypatch):
    """Its state changes once per step, by the sum over members and microbatches."""
    for registry, folder in ((ROUTERS, "fef.routing"), (DISPATCHERS, "fef.dispatch")):
        scan(folder)
        monkeypatch.setattr(registry, "_table", dict(registry._table))
    (tmp_path / "parity.py").write_text(PARITY_ROUTER)
    changes = SMALL | RUN | {
        "routing.module": f"{tmp_path}/parity.py", "moe.router": "parity", "moe.num_choices": 1, "train.steps": 2,
        "model.num_layers": 2, "model.scan_layers": is_scanned, "train.microbatches": 2,
    }  # fmt: skip
    config, _ = flags.parse(["train", *(f"--config.{key}={value}" for key, value in changes.items())])
    with contextlib.redirect_stdout(io.StringIO()):
        fef.train.run(config, str(tmp_path / "run"))
    for row in rows_of(tmp_path / "run"):
        for load_E in row["load"]:
            assert sum(load_E[:2]) == 8 * 16 and not any(load_E[2:])
    with Checkpointer(tmp_path / "run/checkpoints", keep=9, keep_best=0) as checkpointer:
        shapes = {name: np.zeros(shape, dtype) for name, (shape, dtype) in checkpointer.leaves(2).items()}
        state, _ = checkpointer.restore(2, shapes)
    for name, value in {"steps": 2, "tokens": 2 * 8 * 16}.items():
        of_layers = [np.ravel(leaf) for key, leaf in state.items() if key.endswith(name) and "router" in key]
        assert np.concatenate(of_layers).tolist() == [value] * 2


# The program itself: whole processes.

PROGRAM = {key: value for key, value in (SMALL | RUN).items() if key != "moe.dispatcher"} | {
    "train.steps": 60,
    "train.eval_every": 30,
    "checkpoint.every": 5,
    "run.report": True,
    "run.tensorboard": True,
}  # fmt: skip


def command(folder, *words):
    settings = [f"--config.{key}={value}" for key, value in PROGRAM.items()]
    return [sys.executable, "-m", "experiments.train", f"--workdir={folder}", *settings, *words]


@pytest.fixture
def environment(tmp_path_factory):
    return quick_environment(tmp_path_factory)


def test_a_killed_run_started_again_equals_one_that_was_not_killed(tmp_path, environment):
    def start(folder, env=environment):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command(folder), cwd=tmp_path, env=env, **pipes)

    whole = start(tmp_path / "whole")
    out, err = whole.communicate(timeout=300)
    assert whole.returncode == 0, err
    bar = re.sub(r"\s*\d+%\|[^|]*\| \d+/60 \[[^]]*\]", "", err)
    assert not bar.strip()  # beside the progress bar, nobody writes to the terminal
    assert {path.name for path in (tmp_path / "whole").iterdir()} == {
        "config.json", "metrics.jsonl", "summary.json", "report.html", "checkpoints", "tensorboard",
    }  # fmt: skip

    # Delays in the pool change no value, and leave time to kill it before it ends.
    killed = start(tmp_path / "killed", environment | {"FEF_CHAOS": "1"})
    metrics, end = tmp_path / "killed/metrics.jsonl", time.monotonic() + 300
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 13:
        assert killed.poll() is None and time.monotonic() < end, killed.communicate()
        time.sleep(0.002)
    killed.kill()
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed/summary.json").exists()

    again = start(tmp_path / "killed")
    out, err = again.communicate(timeout=300)
    assert again.returncode == 0, err
    assert "continuing at step " in out and "continuing at step 0" not in out
    rows = rows_of(tmp_path / "killed")
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert rows == rows_of(tmp_path / "whole")
    whole_summary, summary = (
        json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "killed")
    )
    for key in ("heldout_loss", "train_loss", "max_vio", "bytes_per_step", "steps", "config_hash"):
        assert summary[key] == whole_summary[key]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed", "whole"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--config.moe.num_choices=7", "error: config.moe.num_choices=7: must be <= moe.num_experts=6\n"),
        ("--config.mesh.devices=3", "error: config.data.batch_size=8: must be a multiple of mesh.devices * "),
    ],
)
def test_a_mistake_ends_the_program_with_2_and_one_line(word, message, tmp_path, environment):
    done = subprocess.run(
        command(tmp_path / "run", word), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(message) and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
