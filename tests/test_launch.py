"""experiments.launch: real processes on this machine, what it prints of them, and how it ends them."""

import io
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from experiments import launch
from experiments.lab import Lab
from fef.config import UserError

ROOT = pathlib.Path(__file__).parent.parent


def start(*command, hosts=2):
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.launch", f"--hosts={hosts}", "--", *command],
        cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def is_running(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# Every host starts a child, says both their numbers, and waits; what it does then is its first argument.
SCRIPT = """
sleep 600 &
echo "pids $$ $!"
if [ $FEF_PROCESS_ID = 1 ]; then
  read _ <"$1"
  eval "$0"
fi
wait
"""


@pytest.mark.parametrize(
    ("last", "status", "said"),
    [
        ("exit 7", 7, r"launch: host 1 \(pid {pid}\) ended by exit status 7 after [\d.]+ s; ending the others\n"),
        ("kill -9 $$", 137, r"launch: host 1 \(pid {pid}\) ended by SIGKILL after [\d.]+ s; ending the others\n"),
        ("SIGINT", 130, r"interrupted\n"),
        ("SIGTERM", 143, r"launch: ended by SIGTERM\n"),
    ],
)
def test_the_end_of_one_host_or_of_launch_ends_all_with_their_children(last, status, said, tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    process = start("sh", "-c", SCRIPT, last, str(gate), hosts=3)
    try:
        words = sorted(process.stdout.readline().split() for _ in range(3))
        assert [word[:2] for word in words] == [["h0|", "pids"], ["h1|", "pids"], ["h2|", "pids"]]
        pids = [int(pid) for word in words for pid in word[2:]]
        assert all(map(is_running, pids))
        if last.startswith("SIG"):
            process.send_signal(signal.Signals[last])
        else:
            gate.write_text("now\n")
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == status
    first, *rest = err.splitlines(keepends=True)
    assert re.fullmatch(r"launch: job \w{8}: 3 hosts, coordinator 127\.0\.0\.1:\d+\n", first)
    assert re.fullmatch(said.format(pid=pids[2]), "".join(rest))
    end = time.monotonic() + 30
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(map(is_running, pids))


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("out", "host", "expected"),
    [
        (io.StringIO, 0, "h0| one\nh0| \nh0| 100%\nh0| cut off\n"),
        (Terminal, 1, "\r\x1b[Kh1| one\n\r\x1b[Kh1| \n\r\x1b[Kh1| 100%\n\r\x1b[Kh1| cut off\n"),
        (Terminal, 0, "\r\x1b[Kh0| one\n\r\x1b[Kh0| \n\r\x1b[Kh0|  50%\r\x1b[Kh0| 100%\n\r\x1b[Kh0| cut off\n"),
    ],
)
def test_lines_are_tagged_and_bars_are_for_a_terminal(out, host, expected):
    """Whatever the pieces in which the bytes come."""
    noise = b"[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n"
    said = b"one\n\n\r 50%\r100%\n" + noise + b"cut off"
    for size in (1, 7, 1000):
        file = out()
        tagger = launch.Tagger(host, file)
        for first in range(0, len(said), size):
            tagger.feed(said[first : first + size])
        tagger.feed(b"")
        assert file.getvalue() == expected


def test_what_gloo_prints_in_pieces_is_not_shown():
    number = "Expected number of connected peer ranks is : 3"
    pieces = [
        "[Gloo] Rank ",
        "[Gloo] Rank [Gloo] Rank 1 is connected to 3 peer ranks. ",
        f"20 peer ranks. {number}{number}",
        "3",
    ]
    file = io.StringIO()
    launch.Tagger(0, file).feed("\n".join([*pieces, "Rank 1 is connected to 3", "3\n"]).encode())
    assert file.getvalue() == "h0| Rank 1 is connected to 3\nh0| 3\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", "true"], "--hosts is missing"),
        (["--hosts=2"], "no command: write it after --"),
        (["--hosts=2", "true"], "'true' belongs to no flag"),
        (["--hosts=0", "--", "true"], "hosts"),
        (["--hosts=2", "--json=a.json", "--", "true"], "--json=a.json: only a lab counts bytes"),
        (["--hosts=4", "--leaves=2", "--lab=", "--", "true"], "--leaves=2: a lab has its own, --lab=leaves=2"),
        (["--hosts=2", "--lab=nic=fast", "--", "true"], "--lab=nic=fast: nic=fast: write a rate such as 100mbit"),
        (["--hosts=2", "--lab=speed=1", "--", "true"], "--lab=speed=1: unknown 'speed'; there are leaves, nic"),
    ],
)
def test_what_cannot_be_is_refused(words, message, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest keeps its own
    with pytest.raises(UserError, match=re.escape(message)):
        launch.main(["launch", *words])


def test_hosts_know_their_leaf(tmp_path):
    said = tmp_path / "said"
    words = ["--hosts=5", "--leaves=2", "--", "sh", "-c", f"echo $FEF_PROCESS_ID $FEF_LEAF >> {said}"]
    done = subprocess.run([sys.executable, "-m", "experiments.launch", *words], cwd=ROOT, timeout=60)
    assert done.returncode == 0
    assert sorted(said.read_text().splitlines()) == ["0 leaf0", "1 leaf0", "2 leaf0", "3 leaf1", "4 leaf1"]


@pytest.mark.parametrize(
    ("options", "leaves"),
    [
        ("leaves=2", "00011"),
        ("leaves=2,order=alternating", "01010"),
        ("leaves=3", "00112"),
        ("leaves=1", "00000"),
        ("leaves=2,oversub=0", "00000"),
        ("leaves=2,oversub=0,order=alternating", "00000"),
    ],
)
def test_which_leaf_a_host_of_the_lab_is_on(options, leaves):
    lab = Lab("test", 5, options)
    assert [lab.leaf(host) for host in range(5)] == [f"leaf{leaf}" for leaf in leaves]


# Two jobs at the same moment on one machine (L-01), in each of which host 1 fails at last while host 0 waits for it.
PROGRAM = """
import os
from experiments.flags import run
from fef import startup
startup.prepare(num_devices=4)
import jax
import numpy as np
from fef import hosts, sharding
from fef.config import UserError

def main(argv):
    host, mesh = jax.process_index(), sharding.make_mesh(4)
    token = int(os.environ["FEF_JOB"], 16) % 10_000
    mine = np.array([[10 * token + host]] * 2)
    placed = jax.make_array_from_process_local_data(sharding.named(mesh, sharding.TOKENS), mine)
    everyone = jax.jit(lambda a: a, out_shardings=sharding.named(mesh, sharding.REPLICATED))(placed)
    assert np.asarray(everyone).ravel().tolist() == [10 * token, 10 * token, 10 * token + 1, 10 * token + 1]
    hosts.barrier("are here")
    main_job = hosts.from_main("its job", os.environ["FEF_JOB"])
    print("job", os.environ["FEF_JOB"], host, main_job, jax.local_device_count())
    hosts.say("once")
    if host == 0:
        hosts.DEADLINE_S = 0.5
        try:
            hosts.barrier("have what they need")
        except UserError as error:
            print("job", error)
        hosts.DEADLINE_S = 100
    else:
        next(hosts._numbers)  # not there
    hosts.check_same({"same": 1, "other": min(host, 0)})
    hosts.check_same({"same": 1, "other": [host]})
    hosts.barrier("that never comes")

run(main)
"""


def test_two_jobs_at_the_same_moment_each_see_their_own_hosts():
    jobs = [start(sys.executable, "-c", PROGRAM) for _ in range(2)]
    try:
        outcomes = [job.communicate(timeout=120) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    tokens = set()
    for job, (out, err) in zip(jobs, outcomes, strict=True):
        (token,) = re.findall(r"^launch: job (\w+):", err)
        said = re.findall(r"^h\d\| (?:job .*|once)$", out, re.M)
        assert sorted(said) == sorted([
            f"h0| job {token} 0 {token} 2", "h0| once", f"h1| job {token} 1 {token} 2",
            "h0| job host 0 waited in vain, at most 0.5 s, until all hosts have what they need; missing: host 1",
        ])  # fmt: skip
        _, line, end = err.splitlines()
        assert line == "h1| error: other: host 1 has [1], host 0 has [0]; give all hosts the same"
        assert re.fullmatch(r"launch: host 1 \(pid \d+\) ended by exit status 2 after .*; ending the others", end)
        assert job.returncode == 2
        tokens.add(token)
    assert len(tokens) == 2


NO_PROGRAM = r"error: host 0 cannot be started: no such program: No such file or directory\n"
NO_DEVICES = r"(h\d\| error: config\.mesh\.devices=3: must be a multiple of the number of hosts, 2\n)+launch: host .*\n"
PREPARE = "from experiments.flags import run\nfrom fef import startup\nrun(lambda argv: startup.prepare(num_devices=3))"


@pytest.mark.parametrize(
    ("command", "said"), [(["no such program"], NO_PROGRAM), ([sys.executable, "-c", PREPARE], NO_DEVICES)]
)
def test_what_cannot_run_ends_with_2_and_a_line(command, said):
    process = start(*command)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert re.fullmatch(r"launch: job .*\n" + said, err)
