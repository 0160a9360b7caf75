"""Training over hosts on leaves of a network: with the leaf relay as without it, and what crosses the spine halved."""

import json
import subprocess
import sys

import numpy as np
import pytest
from needs import needs_lab
from small import ROOT, quick_environment

RUN = {
    "moe.num_experts": 6,
    "mesh.devices": 4,
    "moe.dispatcher": "pooled",
    "model.num_layers": 2,
    "model.scan_layers": True,
    "train.steps": 4,
    "train.microbatches": 2,
    "train.eval_every": 5,
    "train.eval_batches": 1,
    "train.sample_bytes": 0,
    "run.report": False,
    "run.tensorboard": False,
    "pool.transport": "tcp",
}
OFF, ON = {"pool.relay": "off"}, {"pool.relay": "on"}
BLOCK_BYTES = 3 * 16 * 32 * 4
ALL_USED = {"moe.num_choices": 6}  # every member uses every expert
WIDE = ALL_USED | {"moe.d_expert": 512}


@pytest.fixture
def train(tmp_path_factory, tmp_path):
    """Runs, one after the other in the same processes, on hosts that stand on leaves; returns rows and summaries."""

    def train(words, **changes_by_name):
        runs = [[str(tmp_path / name), RUN | changes] for name, changes in changes_by_name.items()]
        program = [sys.executable, str(ROOT / "tests/train_program.py"), json.dumps(runs)]
        done = subprocess.run(
            [sys.executable, "-m", "experiments.launch", *words, "--", *program],
            env=quick_environment(tmp_path_factory) | {"PYTHONPATH": str(ROOT)},
            cwd=tmp_path, capture_output=True, text=True, timeout=540,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return [read(tmp_path / name) for name in changes_by_name]

    return train


def read(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["transport"], summary["refused"]) == ("tcp", 0)
    return rows, summary


def assert_same_losses(rows, others, rtol):
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose([row[key] for row in rows], [row[key] for row in others], rtol=rtol, err_msg=key)
    heldout = [(a["heldout_loss"], b["heldout_loss"]) for a, b in zip(rows, others, strict=True) if "heldout_loss" in a]
    np.testing.assert_allclose(*np.transpose(heldout), rtol=rtol)


def assert_adds_up(row, leaves, groups=1):
    """What each member received adds up to what moved, in each leaf and across; a host has one member."""
    moved, received = row["bytes_by_purpose"], row["bytes_received"]
    assert row["bytes_in_leaf"] + row["bytes_crossing"] == row["bytes"] == sum(moved.values())
    assert {purpose: int(np.sum(of_MR)) for purpose, of_MR in received.items()} == {p: n for p, n in moved.items() if n}
    leaf_GR = np.array(leaves).reshape(groups, -1)
    is_other_GRR = leaf_GR[:, :, None] != leaf_GR[:, None]
    of_GRR = [np.array(of_MR).reshape(is_other_GRR.shape) for of_MR in received.values()]
    assert sum(units_GRR[is_other_GRR].sum() for units_GRR in of_GRR) == row["bytes_crossing"]


def test_two_leaves_of_two_hosts(train):
    off, on, again = train(["--hosts=4", "--leaves=2"], off=ALL_USED | OFF, on=ALL_USED | ON, again=ALL_USED)
    (off, off_summary), (on, on_summary), (again, again_summary) = off, on, again
    assert [summary["relay"] for summary in (off_summary, on_summary, again_summary)] == [False, True, True]
    assert_same_losses(on, off, rtol=1e-6)
    assert_same_losses(on, again, rtol=0)
    layers, experts, microbatches = 2, 6, 2
    for row, other in zip(on, off, strict=True):
        assert_adds_up(row, [0, 0, 1, 1])
        assert_adds_up(other, [0, 0, 1, 1])
        # Of the blocks of each leaf one reaches the other leaf, and as many gradients come back in each microbatch.
        crossing = layers * experts * (1 + microbatches) * BLOCK_BYTES
        assert other["bytes_crossing"] == 2 * crossing
        assert row["bytes_crossing"] == crossing
        assert row["bytes"] == other["bytes"]  # the other half goes to the neighbour
        moved = row["bytes_by_purpose"]
        assert (moved["relayed"], moved["gathered"]) == (
            layers * experts * BLOCK_BYTES, layers * experts * microbatches * BLOCK_BYTES
        )  # fmt: skip


CASES = {
    "small_cache": {"pool.cache_bytes": 3 * BLOCK_BYTES},
    "fluid": {"moe.dispatcher": "fluid", "dispatch.fluid.cost": "bytes"},
    "groups": {"mesh.data": 2},
}


@pytest.mark.parametrize("name", CASES)
def test_uneven_leaves(train, name):
    """Leaves of two hosts, one and one; a cache of three blocks; fluid; two data-parallel groups, one within a leaf."""
    (off, _), (on, summary) = train(["--hosts=4", "--leaves=3"], off=CASES[name] | OFF, on=CASES[name] | ON)
    assert summary["relay"]
    assert_same_losses(on, off, rtol=1e-6)
    for row in on:
        assert_adds_up(row, [0, 0, 1, 2], groups=2 if name == "groups" else 1)
        assert (row["bytes_by_purpose"]["tokens"] > 0) == (name == "fluid")
    crossing, crossing_off = (sum(row["bytes_crossing"] for row in rows) for rows in (on, off))
    between_neighbours = sum(row["bytes_by_purpose"][p] for row in on for p in ("relayed", "gathered"))
    if name == "groups":  # in neither of them has a host both a neighbour and somebody on another leaf
        assert crossing == crossing_off > 0 and between_neighbours == 0
    else:
        assert crossing < crossing_off and between_neighbours > 0


@needs_lab
def test_the_spine_carries_less_by_what_the_ledger_says(train, tmp_path):
    sent, crossing = [], []
    for name, relay in (("off", OFF), ("on", {})):
        lab = "--lab=leaves=2,nic=500mbit,oversub=4,order=alternating"
        ((rows, summary),) = train(["--hosts=4", lab, f"--json={tmp_path}/{name}.json"], **{name: WIDE | relay})
        assert summary["relay"] == (name == "on")
        counted = json.loads((tmp_path / f"{name}.json").read_text())
        sent.append([row["sent_bytes"] for row in counted if "leaf" in row])
        crossing.append(sum(row["bytes_crossing"] for row in rows))
    assert crossing[0] == 2 * crossing[1]
    assert np.shape(sent) == (2, 2)
    assert np.subtract(*np.sum(sent, axis=1)) > crossing[0] - crossing[1]  # headers and an evaluation come on top
