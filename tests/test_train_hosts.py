"""Training on several hosts: whole programs, which must do what one process with as many devices does."""

import contextlib
import io
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from needs import UCX_EMULATED
from small import ROOT, SMALL, fast_compilation, quick_environment, small_config  # noqa: F401

import fef.train

RUN = {
    "moe.num_experts": 8,
    "mesh.devices": 4,
    "optim.name": "adamw",
    "optim.learning_rate": 0.01,
    "routing.top_k.balance_coef": 0.01,
    "train.eval_every": 5,
    "train.eval_batches": 2,
    "train.sample_bytes": 0,
    "checkpoint.every": 4,
    "run.report": False,
    "run.tensorboard": False,
}
TIMES = {"step_ms", "data_ms", "wait_ms", "waits_ms", "tokens_per_s"}


def run(folder, **changes):
    """A run in this process, on as many devices."""
    with contextlib.redirect_stdout(io.StringIO()):
        return fef.train.run(small_config(RUN | changes), str(folder))


def rows_of(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def assert_same_run(folder, other):
    rows, others = rows_of(folder), rows_of(other)
    assert [row["step"] for row in rows] == [row["step"] for row in others]
    assert [row["load"] for row in rows] == [row["load"] for row in others]
    for key in ("loss", "aux_loss", "grad_norm", "learning_rate", "tokens"):
        np.testing.assert_allclose([row[key] for row in rows], [row[key] for row in others], rtol=1e-5, err_msg=key)
    # A run that was continued has one more where it ended.
    heldout = [(a["heldout_loss"], b["heldout_loss"]) for a, b in zip(rows, others, strict=True) if "heldout_loss" in b]
    np.testing.assert_allclose(*np.transpose(heldout).reshape(2, -1), rtol=1e-5)


@pytest.fixture
def launch(tmp_path_factory, tmp_path):
    """Starts a program on several hosts; what runs at the end of the test is killed."""
    environment = quick_environment(tmp_path_factory) | {"PYTHONPATH": str(ROOT)} | UCX_EMULATED
    started = []

    def launch(num_hosts, *words):
        process = subprocess.Popen(
            [sys.executable, "-m", "experiments.launch", f"--hosts={num_hosts}", "--", sys.executable, *words],
            cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        return process

    yield launch
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def start(launch):
    """Starts experiments.train on two hosts."""

    def start(folder, **changes):
        settings = [f"--config.{key}={value}" for key, value in (SMALL | RUN | changes).items()]
        return launch(2, "-m", "experiments.train", f"--workdir={folder}", *settings)

    return start


@pytest.fixture
def start_runs(launch, tmp_path):
    """Starts several runs, one after the other in the same processes; each has a folder of its name."""

    def start_runs(num_hosts, **changes_by_name):
        runs = [[str(tmp_path / name), changes] for name, changes in changes_by_name.items()]
        return launch(num_hosts, str(ROOT / "tests/train_program.py"), json.dumps(runs))

    return start_runs


def finish(process):
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, out + err
    return out


def test_two_hosts_train_as_one_process_does_and_go_on_after_a_kill_and_from_each_others_checkpoints(start, tmp_path):
    folder = tmp_path / "hosts"
    killed = start(folder, **{"train.steps": 900, "moe.dispatcher": "all_gather"})
    metrics, end = folder / "metrics.jsonl", time.monotonic() + 300
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 7:
        assert killed.poll() is None and time.monotonic() < end, killed.communicate()
        time.sleep(0.002)
    children = pathlib.Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    out, err = killed.communicate(timeout=60)
    assert killed.returncode == 128 + signal.SIGKILL
    assert re.search(rf"^launch: host 1 \(pid {children[1]}\) ended by SIGKILL after .*; ending the others$", err, re.M)
    assert not [line for line in out.splitlines() if line.startswith("h1|")]  # host 0 speaks
    before = rows_of(folder)

    out = finish(start(folder, **{"train.steps": 9, "moe.dispatcher": "all_gather"}))
    (step,) = re.findall(r"^h0\| continuing at step (\d+) of 9$", out, re.M)
    assert 4 <= int(step) <= len(before)
    rows = rows_of(folder)
    shared = min(len(before), len(rows))
    assert [row["loss"] for row in rows[:shared]] == [row["loss"] for row in before[:shared]]
    assert out.count("h0| 4 cpu devices (data 1 x expert 4) on 2 hosts; ") == 1 and out.count("held-out loss") == 1

    run(folder, **{"train.steps": 12, "moe.dispatcher": "all_gather"})
    out = finish(start(folder, **{"train.steps": 15, "moe.dispatcher": "all_to_all"}))
    assert "h0| continuing at step 12 of 15\n" in out and "h0| saved step 15\n" in out

    alone = run(tmp_path / "alone", **{"train.steps": 15, "moe.dispatcher": "all_gather"})
    assert_same_run(folder, tmp_path / "alone")
    ours = json.loads((folder / "summary.json").read_text())
    for key in ("steps", "params_total", "params_active", "skipped_updates"):
        assert ours[key] == alone[key]
    assert not list((folder / "checkpoints").glob("*tmp*"))


def assert_equal_rows(some, others):
    for key in ("loss", "grad_norm", "load", "heldout_loss"):
        assert [row.get(key) for row in some] == [row.get(key) for row in others], key


def test_the_pool_over_two_hosts_trains_as_one_process_does(start_runs, tmp_path):
    changes = RUN | {"train.steps": 15, "moe.dispatcher": "pooled", "model.num_layers": 2, "train.microbatches": 2}
    (tmp_path / "blocks").mkdir()
    in_files = {"pool.memory": f"file:{tmp_path}/blocks"}
    tcp, mmap = changes | {"pool.transport": "tcp"}, changes | in_files | {"pool.transport": "mmap"}
    visits = tcp | {"moe.dispatcher": "fluid", "dispatch.fluid.cost": "bytes"}
    finish(start_runs(2, tcp=tcp, mmap=mmap, visits=visits))
    for transport in ("tcp", "mmap"):
        summary = json.loads((tmp_path / transport / "summary.json").read_text())
        assert (summary["transport"], summary["refused"]) == (transport, 0)
    run(tmp_path / "alone", **changes)
    for name in ("tcp", "visits"):
        assert_same_run(tmp_path / name, tmp_path / "alone")
    for row in rows_of(tmp_path / "visits"):  # fetched ahead, and a row goes once to two experts of a host
        moved, planned = row["bytes_by_purpose"], row["planned_bytes_by_purpose"]
        assert 0 < moved["tokens"] <= planned["tokens"]
        assert moved["weights"] <= planned["weights"]  # a host fetches for both of its members
    rows, mapped = (rows_of(tmp_path / transport) for transport in ("tcp", "mmap"))
    assert_equal_rows(rows, mapped)
    # A host fetches a block once for both of its members, who share what mapped members read one by one.
    for row, other in zip(rows, mapped, strict=True):
        moved, moved_mapped = row["bytes_by_purpose"], other["bytes_by_purpose"]
        assert 0 < moved["weights"] <= moved_mapped["weights"]
        assert moved["gradients"] == moved_mapped["gradients"] > 0


@pytest.mark.ucx
def test_the_pool_trains_one_sided_as_over_tcp(start_runs, tmp_path):
    changes = RUN | {"train.steps": 10, "moe.dispatcher": "pooled", "model.num_layers": 2, "train.microbatches": 2}
    finish(start_runs(2, **{name: changes | {"pool.transport": name} for name in ("tcp", "rma")}))
    summary = json.loads((tmp_path / "rma" / "summary.json").read_text())
    assert (summary["transport"], summary["refused"]) == ("rma", 0)
    rows, others = rows_of(tmp_path / "tcp"), rows_of(tmp_path / "rma")
    assert_equal_rows(rows, others)
    for row, other in zip(rows, others, strict=True):
        assert row["bytes_by_purpose"]["gradients"] == other["bytes_by_purpose"]["gradients"] > 0


def test_the_pool_over_four_hosts_takes_50_steps_as_one_process_does(start_runs, tmp_path):
    """With the routing of a run in one process; what a member receives from each other one adds up to what moved.

    fluid, as far as it neither fetches ahead nor sends a row once for two experts, moves exactly what it has planned.
    """
    changes = RUN | {
        "train.steps": 50, "checkpoint.every": 50, "moe.dispatcher": "pooled",
        "model.d_model": 32, "model.num_layers": 2, "model.scan_layers": True, "data.seq_len": 8, "moe.d_expert": 4,
        "data.heldout_fraction": 0.0,
        "optim.name": "sgd", "optim.learning_rate": 0.1, "optim.momentum": 0.0,
    }  # fmt: skip
    routing = tmp_path / "routing.npz"
    run(tmp_path / "alone", **changes, **{"routing.record": str(routing)})
    tcp, mmap = (changes | {"routing.replay": str(routing), "pool.transport": name} for name in ("tcp", "mmap"))
    fluid = tcp | {"moe.dispatcher": "fluid", "dispatch.fluid.cost": "bytes", "dispatch.fluid.room": 3.0}
    fluid |= {"dispatch.fluid.deduplicate": False, "pool.fetch_ahead": False}
    finish(start_runs(4, tcp=tcp, again=tcp, mmap=mmap, fluid=fluid))
    rows = rows_of(tmp_path / "tcp")
    for row in rows_of(tmp_path / "fluid"):
        moved, planned = row["bytes_by_purpose"], row["planned_bytes_by_purpose"]
        assert 0 < moved["weights"] and 0 < moved["tokens"] and 0 < moved["metadata"]
        assert moved | {"metadata": 0} == planned
    for name in ("tcp", "mmap", "fluid"):
        assert_same_run(tmp_path / name, tmp_path / "alone")
    for name in ("again", "mmap"):
        assert_equal_rows(rows, rows_of(tmp_path / name))
    for row in rows:
        for received_MR in row["bytes_received"].values():
            assert np.shape(received_MR) == (4, 4) and not np.diag(received_MR).any()
        sums = {purpose: int(np.sum(received_MR)) for purpose, received_MR in row["bytes_received"].items()}
        assert sums == {purpose: moved for purpose, moved in row["bytes_by_purpose"].items() if moved}


def test_a_host_that_never_comes_is_named_with_the_address(tmp_path):
    command = ["experiments.train", "--coordinator=127.0.0.1:1", "--num_processes=2", "--process_id=1"]
    done = subprocess.run(
        [sys.executable, "-m", *command, "--join_timeout_s=1", f"--workdir={tmp_path}/run"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"error: host 0 of 2 did not come: host 1 found nobody at 127\.0\.0\.1:1 within 1 s \(.*\); .*\n", done.stderr
    )
    assert not list(tmp_path.iterdir())
