"""A pool over several processes: what each of them does when another one dies, stops or strays."""

import contextlib
import json
import os
import pathlib
import queue
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from needs import UCX_EMULATED, needs_lab

from experiments.launch import reserved_port
from fef.pool.ledger import PURPOSES

PROGRAM = pathlib.Path(__file__).with_name("host_program.py")
ROOT = PROGRAM.parents[2]
TIMEOUT_S = 120
RMA = pytest.param("rma", marks=pytest.mark.ucx)
# The hardware reads a stopped process's memory as any other.
needs_emulation = pytest.mark.skipif(not UCX_EMULATED, reason="UCX_TLS is set: for emulated reads only")
RMA_EMULATED = pytest.param("rma", marks=[pytest.mark.ucx, needs_emulation])


class Host:
    """A process, its lines as they come, and its end."""

    def __init__(self, number, devices, scenario, environment, deadline_s):
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), scenario, str(devices), str(deadline_s)],
            env=environment | {"FEF_PROCESS_ID": str(number)}, cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.lines: queue.Queue = queue.Queue()
        self.err: list[str] = []
        threads = [
            threading.Thread(target=self._read, args=(self.process.stdout, self.lines.put), daemon=True),
            threading.Thread(target=self._read, args=(self.process.stderr, self.err.append), daemon=True),
        ]
        for thread in threads:
            thread.start()
        self.threads = threads

    @staticmethod
    def _read(stream, take):
        for line in stream:
            take(line.rstrip("\n"))

    def wait_for(self, start):
        """The first line that begins so."""
        end = time.monotonic() + TIMEOUT_S
        while True:
            try:
                line = self.lines.get(timeout=max(end - time.monotonic(), 0.01))
            except queue.Empty:
                raise AssertionError(f"no line {start!r}; " + "\n".join(self.err)) from None
            if line.startswith(start):
                return line

    def end(self):
        """Exit status and what it said on stderr."""
        status = self.process.wait(TIMEOUT_S)
        for thread in self.threads:
            thread.join(TIMEOUT_S)
        return status, "\n".join(line for line in self.err if "[Gloo]" not in line)


@pytest.fixture
def start():
    """Starts the hosts of a job, with one transport or each its own; what runs at the end of the test is killed."""
    started = []
    reserved = contextlib.ExitStack()

    def start(scenario, *transports, num_hosts=2, devices_per_host=1, deadline_s=60.0):
        environment = os.environ | {
            "FEF_COORDINATOR": reserved.enter_context(reserved_port()), "FEF_NUM_PROCESSES": str(num_hosts),
            "FEF_JOB": "test", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT),
        } | UCX_EMULATED  # fmt: skip
        for number in range(num_hosts):
            own = environment | {"FEF_TRANSPORT": transports[number % len(transports)]}
            started.append(Host(number, num_hosts * devices_per_host, scenario, own, deadline_s))
        return started[-num_hosts:]

    yield start
    for host in started:
        host.process.kill()
        host.process.wait()
    reserved.close()


@pytest.mark.parametrize(
    ("transport", "number"), [("tcp", 1), ("mmap", 1), ("tcp", 0), pytest.param("rma", 1, marks=pytest.mark.ucx)]
)
def test_a_host_that_is_killed_is_named_by_the_others(start, transport, number):
    survivors = start("read_for_ever", transport, num_hosts=3)
    assert survivors[0].wait_for("open").split()[1] == transport
    for host in survivors:
        host.wait_for("step")
    victim = survivors.pop(number)
    victim.process.kill()
    for host in survivors:
        status, err = host.end()
        assert status == 75, err
        assert re.search(rf"host {number} \(rank {number}\) is gone: its connection (was closed|broke)", err), err
        assert "Traceback" not in err


def test_a_host_that_aborts_does_so_and_is_named_by_the_other(start):
    other, victim = start("abort", "tcp")
    assert victim.end()[0] == -signal.SIGABRT
    status, err = other.end()
    assert status == 75 and re.search(GONE, err), err


def stop(host):
    """Returns when none of its threads runs any more."""
    host.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, host.process.pid, os.WSTOPPED | os.WNOWAIT)


def tell(host):
    host.process.stdin.write("go\n")
    host.process.stdin.flush()


BLOCK = r"get: table blocks, version \(\d+,3\), layer 1, expert 1: "
ROWS = r"tokens: table experts, version \(\d+,1\), layer 0: "
GONE = r"host 1 \(rank 1\) is gone: its connection (was closed|broke)"
READ, SEND = "read_what_was_not_fetched_ahead", "send_rows"


def start_and_wait_until_published(start, scenario, transport, **options):
    hosts = start(scenario, transport, **options)
    for host in hosts:
        host.wait_for("published")
    return hosts


@pytest.mark.parametrize("transport", ["tcp", "mmap", RMA])
@pytest.mark.parametrize(
    ("scenario", "said"), [(READ, BLOCK + GONE + "; its 20000 bytes are missing"), (SEND, ROWS + GONE)]
)
def test_waiting_for_a_dead_host_ends_with_what_was_awaited(start, scenario, transport, said):
    waiting, home = start_and_wait_until_published(start, scenario, transport)
    home.process.kill()
    home.process.wait()
    tell(waiting)
    status, err = waiting.end()
    assert status == 75, err
    assert re.search(said, err), err


@pytest.mark.parametrize("transport", ["tcp", RMA_EMULATED])
@pytest.mark.parametrize(
    ("scenario", "said"),
    [
        (READ, rf"{BLOCK}host 1 \(rank 1\) has not sent its 20000 bytes"),
        (SEND, rf"{ROWS}rank 1 has not sent its rows"),
    ],
)
def test_waiting_for_a_silent_host_ends_at_the_deadline(start, scenario, transport, said):
    waiting, home = start_and_wait_until_published(start, scenario, transport, deadline_s=3.0)
    stop(home)
    tell(waiting)
    status, err = waiting.end()
    assert status == 1, err
    assert re.search(rf"PoolTimeoutError: {said} within 3 s", err), err


def test_rows_are_waited_for(start):
    hosts = start_and_wait_until_published(start, SEND, "tcp")
    for host in hosts:
        tell(host)
    for host in hosts:
        host.wait_for("sent")
        assert host.end()[0] == 0


def test_a_host_that_dies_while_another_is_in_a_collective(start):
    waiting, victim = start("wait_in_a_collective", "tcp")
    for host in (waiting, victim):
        host.wait_for("waiting")
    victim.process.kill()
    status, err = waiting.end()
    assert status == 75, err
    assert re.search(r"host 1 \(rank 1\) is gone: its connection (was closed|broke)", err), err


def test_a_host_that_is_stopped_and_wakes_is_waited_for(start):
    reader, home = start("read_for_ever", "tcp")
    for host in (reader, home):
        host.wait_for("step")
    stop(home)
    time.sleep(1)
    home.process.send_signal(signal.SIGCONT)
    while not reader.lines.empty():
        reader.lines.get()
    first = int(reader.wait_for("step").split()[1])
    assert int(reader.wait_for("step").split()[1]) == first + 1


def test_exit_with_reads_pending(start):
    # A program of one device may run within the call that starts it.
    for host in start("leave_with_reads_pending", "tcp", devices_per_host=2):
        host.wait_for("pending")
        status, err = host.end()
        assert status == 0, err


def test_hosts_that_do_not_fit_are_refused_with_both_values(start):
    for host in start("read_for_ever", "tcp", "mmap"):
        status, err = host.end()
        assert status == 2, err
        assert re.search(r"error: pool: transport 'tcp' on host 0 \(.*\), 'mmap' on host 1 \(.*\); give all", err)


@pytest.mark.parametrize("transport", ["tcp", "mmap", RMA])
def test_a_version_whose_slots_are_refilled_is_refused_and_counted(start, transport):
    """Case P-01. Over TCP the home refuses, otherwise the reader itself; nobody gets another version's bytes."""
    reader, home = start("read_an_old_version", transport)
    where = ", home rank 1" if transport == "mmap" else "at host 1 (rank 1)"
    error = reader.wait_for("error").split("version ")
    assert error[0] == "error StaleVersionError get: table blocks, "
    assert re.fullmatch(
        rf"\(\d+,3\), layer 1, expert 1 ?{re.escape(where)}: no slot holds this version; it was refilled or .*",
        error[1],
    )
    assert reader.wait_for("read") == "read 8.0"
    assert reader.wait_for("refused") == ("refused 0 0" if transport == "tcp" else "refused 0 1")
    assert home.wait_for("refused") == ("refused 0 1" if transport == "tcp" else "refused 0 0")
    for host in (reader, home):
        assert host.end()[0] == 0


@pytest.mark.parametrize("transport", ["tcp", RMA])
def test_hints_that_nobody_follows_cost_no_memory(start, transport):
    """5,000 of them; 40 of the versions that are hinted at hold 160 MB."""
    for host in start("prefetch_for_ever", transport):
        words = host.wait_for("grown").split(maxsplit=3)
        assert int(words[1]) < 32 << 20, words
        assert words[3] == "[[7.5]]"
        assert host.end()[0] == 0


def launch(*words, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.launch", "--hosts=2", *words], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | environment,
    )  # fmt: skip


def finish(*processes):
    """What each has written."""
    try:
        return [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_two_jobs_at_the_same_time_see_their_own_blocks_only():
    program = ["--", sys.executable, str(PROGRAM), "steps_of_a_job", "2", "60"]
    jobs = [launch(*program, str(number), FEF_TRANSPORT="mmap") for number in (1, 2)]
    for number, (out, err) in enumerate(finish(*jobs), start=1):
        assert jobs[number - 1].returncode == 0, err
        assert sorted(re.findall(r"^h(\d)\| done with job (\d) refused 0$", out, re.M)) == [
            ("0", str(number)),
            ("1", str(number)),
        ]


@needs_lab
@pytest.mark.parametrize("comes_back", [False, True])
def test_a_cable_that_is_pulled(tmp_path, comes_back):
    """Silence is not death: the read waits for the cable until the deadline."""
    words = [
        "read_over_a_broken_link",
        "2",
        "60" if comes_back else "3",
        f"{tmp_path}/{'back' if comes_back else 'gone'}",
    ]
    process = launch("--lab=leaves=1", "--", sys.executable, str(PROGRAM), *words)
    ((out, err),) = finish(process)
    if comes_back:
        assert process.returncode == 0, err
        assert "h0| read after the cable came back\n" in out
    else:
        assert process.returncode == 1, err
        text = rf"PoolTimeoutError: {BLOCK}host 1 \(rank 1\) has not sent its 20000 bytes within 3 s"
        assert re.search(text, err), err


@needs_lab
@pytest.mark.parametrize("transport", ["tcp", RMA_EMULATED])
def test_the_ledger_counts_what_the_interfaces_count(tmp_path, transport):
    command = [sys.executable, str(PROGRAM), "count_bytes", "2", "60"]
    environment = UCX_EMULATED | {"UCX_NET_DEVICES": "eth0", "FEF_TRANSPORT": transport}
    process = launch("--lab=leaves=1,nic=500mbit", f"--json={tmp_path}/bytes.json", "--", *command, **environment)
    ((out, err),) = finish(process)
    assert process.returncode == 0, err
    steps, layers, block_bytes = 20, 2, 1 << 20
    assert re.findall(r"^h\d\| open (\w+)", out, re.M) == [transport] * 2
    for host in range(2):
        moved = dict(zip(PURPOSES, re.search(rf"^h{host}\| moved (.*)$", out, re.M)[1].split(), strict=True))
        blocks = str(steps * layers)  # the other member's, each step, in each layer
        assert moved == dict.fromkeys(PURPOSES, "0") | {"weights": blocks, "gradients": blocks}
    payload = 2 * steps * layers * block_bytes
    for row in json.loads((tmp_path / "bytes.json").read_text()):
        for direction in ("sent_bytes", "received_bytes"):
            assert 1 < row[direction] / payload < 1.08, row
