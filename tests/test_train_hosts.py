"""Training on two hosts: whole programs, which must do what one process with as many devices does."""

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
TIMES = {"step_ms", "data_ms", "wait_ms", "tokens_per_s"}


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
    heldout = [[row["heldout_loss"] for row in some if row["step"] in (5, 10, 15)] for some in (rows, others)]
    np.testing.assert_allclose(*heldout, rtol=1e-5)


@pytest.fixture
def start(tmp_path_factory, tmp_path):
    """Starts experiments.train on two hosts; what runs at the end of the test is killed."""
    environment = quick_environment(tmp_path_factory) | {"PYTHONPATH": str(ROOT)}
    started = []

    def start(folder, *words, transport="auto", **changes):
        settings = [f"--config.{key}={value}" for key, value in (SMALL | RUN | changes).items()]
        command = ["experiments.launch", "--hosts=2", "--", sys.executable, "-m", "experiments.train"]
        process = subprocess.Popen(
            [sys.executable, "-m", *command, f"--workdir={folder}", *settings, *words],
            cwd=tmp_path, env=environment | {"FEF_TRANSPORT": transport}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def finish(process):
    out, err = process.communicate(timeout=300)
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
    assert not any(line.startswith("h1|") for line in out.splitlines())  # host 0 speaks
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


def test_the_pool_over_two_hosts_trains_as_one_process_does(start, tmp_path):
    changes = {"train.steps": 15, "moe.dispatcher": "pooled", "model.num_layers": 2, "train.microbatches": 2}
    for transport in ("tcp", "mmap"):
        finish(start(tmp_path / transport, transport=transport, **changes))
        assert json.loads((tmp_path / transport / "summary.json").read_text())["transport"] == transport
    run(tmp_path / "alone", **changes)
    assert_same_run(tmp_path / "tcp", tmp_path / "alone")
    for key in ("loss", "grad_norm", "load", "heldout_loss"):
        rows, others = ([row.get(key) for row in rows_of(tmp_path / transport)] for transport in ("tcp", "mmap"))
        assert rows == others, key
    # A host fetches a block once for both of its members, who share what mapped members read one by one.
    for row, other in zip(rows_of(tmp_path / "tcp"), rows_of(tmp_path / "mmap"), strict=True):
        moved, mapped = row["bytes_by_purpose"], other["bytes_by_purpose"]
        assert 0 < moved["weights"] <= mapped["weights"]
        assert moved["gradients"] == mapped["gradients"] > 0


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
