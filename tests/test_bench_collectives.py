"""bench_collectives: the collectives give what they should, on two hosts too; closed forms by hand; the table."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from small import ROOT, fast_compilation, quick_environment  # noqa: F401

from experiments import bench_collectives as bench
from fef.config import UserError
from fef.sharding import make_mesh

NAMES = ["psum", "all_gather", "psum_scatter", "all_to_all", "all_to_all, shifted"]
TOGETHER, APART = [0, 0, 1, 1], [0, 1, 0, 1]


def test_two_hosts(tmp_path, tmp_path_factory):
    path = tmp_path / "rows.json"
    done = subprocess.run(
        [sys.executable, "-m", "experiments.launch", "--hosts=2", "--leaves=2", "--", sys.executable, "-m",
         "experiments.bench_collectives", "--bytes=65536", "--repeats=2", "--uplink=50", f"--json={path}"],
        cwd=ROOT, env=quick_environment(tmp_path_factory), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr  # it looks at every value itself
    rows = json.loads(path.read_text())
    assert [row["collective"] for row in rows] == NAMES
    for row in rows:
        assert len(row["times_ms"]) == 2 and row["ms"] == pytest.approx(np.mean(row["times_ms"]))
        rounds = 2 if row["collective"] == "psum" else 1
        assert row["leaves"] == [0, 1] and row["busy_link"] == "uplink" and row["sent_bytes"] == rounds * 32768
        assert row["busy_ms"] == pytest.approx(row["sent_bytes"] * 8 / 50e3)
    assert [line.removeprefix("h0| ") for line in done.stdout.splitlines()] == bench.table(rows).splitlines()


# Ranks 0 and 1 have 0, 1, 2, 3 and 8192, 8193, 8194, 8195; all_gather has the first half of each.
@pytest.mark.parametrize(
    ("name", "of_first", "of_second"),
    [
        ("psum", [8192, 8194, 8196, 8198], [8192, 8194, 8196, 8198]),
        ("all_gather", [0, 1, 8192, 8193], [0, 1, 8192, 8193]),
        ("psum_scatter", [8192, 8194], [8196, 8198]),
        ("all_to_all", [0, 1, 8192, 8193], [2, 3, 8194, 8195]),
        ("all_to_all, shifted", [0, 1, 8192, 8193], [2, 3, 8194, 8195]),
    ],
)
def test_values(name, of_first, of_second):
    got_RN = np.asarray(bench._program(make_mesh(2), name, 4)())
    np.testing.assert_array_equal(got_RN, [of_first, of_second])
    for rank, wanted in enumerate((of_first, of_second)):
        np.testing.assert_array_equal(bench.expected(name, rank, 2, 4), wanted)


def test_wrong_values_are_noticed(monkeypatch):
    rows = bench.measure(make_mesh(4), 64, 1)
    assert [row["collective"] for row in rows] == NAMES and all(row["ms"] > 0 for row in rows)
    gather = bench.COLLECTIVES["all_gather"]
    monkeypatch.setitem(bench.COLLECTIVES, "all_gather", lambda x_N: jax.numpy.roll(gather(x_N), 1))
    with pytest.raises(RuntimeError, match="all_gather has given rank 0 wrong values"):
        bench.measure(make_mesh(4), 64, 1)


def busy(name, leaves, uplink=100.0, num_bytes=1e6):
    link = bench.busiest_link(bench.traffic(name, len(leaves), num_bytes), nic=100.0, uplink=uplink, leaves=leaves)
    return link["busy_link"], pytest.approx(link["busy_ms"])


def test_why_the_all_reduce_is_perfect_and_the_expert_model_slow():
    """Eight hosts, two leaves, uplinks as fast as one host's link: 4:1. A million bytes take such a link 80 ms."""
    flat, together, apart = [0] * 8, [0] * 4 + [1] * 4, [0, 1] * 4
    ring = 2 * 7 / 8 * 80  # each hop of it carries as much
    assert busy("psum", flat) == busy("psum", together) == ("host", ring)
    assert busy("psum", apart) == ("uplink", 4 * ring)  # every hop crosses, four of them out of each leaf
    assert busy("all_gather", together) == ("host", ring / 2)
    for name in ("all_to_all", "all_to_all, shifted"):
        assert busy(name, flat) == ("host", 7 / 8 * 80)
        # Four hosts with four others each, an eighth of the buffer for every pair: wherever they stand.
        assert busy(name, together) == busy(name, apart) == ("uplink", 16 / 8 * 80)


def test_halving_has_the_bytes_that_a_lab_has_counted():
    # Half to the neighbour, a quarter to the one after it, and ranks 1 and 2 exchange their blocks, a quarter each.
    sent_HH = bench.traffic("psum_scatter", 4, 4.0)
    assert sent_HH.tolist() == [[0, 2, 1, 0], [2, 0, 1, 1], [1, 1, 0, 2], [0, 1, 2, 0]]
    # With headers a lab counted 0.80 and 1.34 buffers on each uplink.
    assert busy("psum_scatter", TOGETHER, uplink=10.0) == ("uplink", 0.75 * 800)
    assert busy("psum_scatter", APART, uplink=10.0) == ("uplink", 1.25 * 800)
    assert bench.traffic("psum_scatter", 6, 1.0) is None


def test_every_collective_sends_what_its_definition_needs():
    for members in (2, 3, 4, 8):
        for name in NAMES:
            sent_HH = bench.traffic(name, members, 1.0)
            if sent_HH is not None:
                needed = (2 if name == "psum" else 1) * (members - 1) / members
                assert (sent_HH.sum(1) >= needed - 1e-9).all() and not sent_HH.diagonal().any()
                np.testing.assert_allclose(sent_HH.sum(1), sent_HH.sum(0))


def row(collective, ms, leaves, **changes):
    link = bench.busiest_link(bench.traffic(collective, 4, 1 << 20), nic=100.0, uplink=50.0, leaves=leaves)
    return {
        "collective": collective, "ms": ms, "times_ms": [ms], "nic": 100.0, "uplink": 50.0, "leaves": leaves,
        "bytes": 1 << 20, "commit": "c0ffee", "versions": {"jax": "1"},
    } | link | changes  # fmt: skip


def test_table():
    rows = [row("psum", 250.0, [0] * 4), row("all_to_all", 100.0, [0] * 4)]
    rows = bench.joined(rows, [row("psum", 300.0, TOGETHER), row("psum_scatter", 90.0, TOGETHER, busy_ms=None)])
    lines = bench.joined(rows, [row("psum", 600.0, APART)])
    lines = bench.table(lines).splitlines()
    assert lines[0].startswith("4 hosts with one device each, 1 MiB a rank")
    names = ["flat", "uplinks of 50, neighbours together", "uplinks of 50, neighbours apart"]
    assert [cell for cell in lines[2].split(" | ") if cell.endswith("ms")] == [
        "100 Mbit/s flat, ms", *(f"100 Mbit/s, {name}, ms" for name in names[1:])
    ]  # fmt: skip
    # A ring of 1.5 MiB a hop: 126 ms on a host's link, twice and four times as long on the uplinks.
    assert lines[4] == "| psum | 1.6 | 250 | host, 50% | 300 | uplink, 84% | 600 | uplink, 84% |"
    assert lines[5] == "| all_to_all | 0.8 | 100 | host, 63% | – | – | – | – |"
    assert lines[6] == "| psum_scatter | 1.0 | – | – | 90 | – | – | – |"


def test_rows_that_no_line_can_compare_are_refused():
    old = [row("psum", 250.0, TOGETHER)]
    newer = [row("psum", 240.0, TOGETHER)]
    assert bench.joined(old, newer) == newer
    with pytest.raises(UserError, match="rows of 1048576 bytes and 4 hosts, these are of 8 and 4"):
        bench.joined(old, [row("psum", 240.0, TOGETHER, bytes=8)])


def test_one_host_is_refused():
    done = subprocess.run(
        [sys.executable, "-m", "experiments.bench_collectives"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and done.stderr.startswith("error: one host has nothing to send; start several with")


def test_leaves_without_the_rate_of_their_uplinks_are_refused():
    done = subprocess.run(
        [sys.executable, "-m", "experiments.launch", "--hosts=2", "--leaves=2", "--",
         sys.executable, "-m", "experiments.bench_collectives"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2 and "error: the hosts stand on several leaves: give the rate" in done.stderr
