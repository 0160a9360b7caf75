"""How the hosts of a job find each other, and what they say when one is missing or does not belong here."""

import concurrent.futures
import json
import re
import socket
import time

import pytest

from experiments.launch import reserved_port
from fef import compat
from fef.config import UserError
from fef.rendezvous import Job, meet


@pytest.fixture
def address():
    """An address on loopback where nothing listens."""
    with reserved_port() as address:
        yield address


def meet_all(jobs, timeout_s):
    """What each host's `meet` returned or raised."""

    def outcome(job):
        try:
            return meet(job, timeout_s)
        except UserError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as threads:
        return list(threads.map(outcome, jobs))


def test_all_hosts_meet_and_learn_their_own_address(address):
    assert meet_all([Job(address, 3, host, "ours") for host in (2, 0, 1)], timeout_s=60) == ["127.0.0.1"] * 3


def test_hosts_that_do_not_come_are_named_to_all_that_did(address):
    said = meet_all([Job(address, 4, host, "ours") for host in (0, 2)], timeout_s=1)
    expected = f"hosts 1, 3 of 4 did not come to host 0 at {address} within 1 s; look at what hosts 1, 3 printed"
    assert said == [expected, expected]


def test_a_missing_host_0_is_named(address):
    (said,) = meet_all([Job(address, 2, 1, "ours")], timeout_s=0.3)
    assert said.startswith(f"host 0 of 2 did not come: host 1 found nobody at {address} within 0.3 s (")


def test_a_host_of_another_job_is_sent_away_and_disturbs_nobody(address):
    theirs, *ours = meet_all([Job(address, 2, 1, "theirs"), Job(address, 2, 0, "ours")], timeout_s=1)
    assert (
        theirs == f"host 0 at {address} belongs to job 'ours', this host to 'theirs'; give each job a port of its own"
    )
    assert ours[0].startswith("host 1 of 2 did not come")


def connect(address):
    """A connection to a host 0 that is just starting."""
    name, _, port = address.rpartition(":")
    end = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection((name, int(port)), timeout=10)
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_what_is_no_host_is_passed_over(address):
    with concurrent.futures.ThreadPoolExecutor() as threads:
        main = threads.submit(meet, Job(address, 2, 0, "ours"), 60)
        for text in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b""):
            with connect(address) as connection:
                connection.sendall(text)
        assert meet(Job(address, 2, 1, "ours"), 60) == main.result(60) == "127.0.0.1"


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ([(1, 3), (1, 3)], r"two hosts came to 127.0.0.1:\d+ as host 1; give each its own --process_id"),
        ([(1, 2)], r"host 1 was started as one of 2 hosts, host 0 as one of 3"),
    ],
)
def test_hosts_that_contradict_each_other_end_at_once(others, message, address):
    jobs = [Job(address, count, host, "ours") for host, count in [(0, 3), *others]]
    said = meet_all(jobs, timeout_s=60)
    assert re.fullmatch(message, said[0])
    assert said == [said[0]] * len(jobs)


def test_a_port_that_is_taken(address):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=rf"host 0 cannot listen at 127.0.0.1:{port}: .*; choose another port"):
            meet(Job(f"127.0.0.1:{port}", 2, 0), 60)


def test_a_program_that_is_no_host_0(address):
    with socket.create_server(("127.0.0.1", 0)) as other, concurrent.futures.ThreadPoolExecutor() as threads:
        job = Job(f"127.0.0.1:{other.getsockname()[1]}", 2, 1, "ours")
        caller = threads.submit(meet, job, 60)
        connection, _ = other.accept()
        with connection:
            assert json.loads(connection.makefile().readline()) == {"job": "ours", "host": 1, "hosts": 2}
        with pytest.raises(UserError, match=f"host 1 had no answer from {job.coordinator}"):
            caller.result(60)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("10.0.0.1", 2, 0), "coordinator '10.0.0.1': give address:port of host 0"),
        (("10.0.0.1:99999", 2, 0), "coordinator '10.0.0.1:99999': give address:port"),
        (("10.0.0.1:7711", 2, 2), "host 2 of 2: hosts are numbered from 0 to 1"),
    ],
)
def test_a_job_that_cannot_be(arguments, message):
    with pytest.raises(UserError, match=re.escape(message)):
        Job(*arguments)


@pytest.mark.parametrize(
    ("coordinator", "bind"),
    [
        ("127.0.0.1:7", ("127.0.0.1", 7)),
        ("localhost:7", ("127.0.0.1", 7)),
        ("10.0.0.1:7", ("0.0.0.0", 7)),
        ("node1:7", ("0.0.0.0", 7)),  # may stand for loopback on node1 itself
        ("[fd00::1]:7", ("::", 7)),
        ("[::1]:7", ("::1", 7)),
    ],
)
def test_only_a_coordinator_on_loopback_listens_there_alone(coordinator, bind):
    assert Job(coordinator, 2, 0).bind_address == bind


def test_the_environment_of_a_launcher():
    assert Job.from_environment({}) is None
    environment = {"FEF_COORDINATOR": "127.0.0.1:7", "FEF_NUM_PROCESSES": "2", "FEF_PROCESS_ID": "1", "FEF_JOB": "a"}
    assert Job.from_environment(environment) == Job("127.0.0.1:7", 2, 1, "a")
    with pytest.raises(UserError, match="FEF_COORDINATOR is set: set FEF_NUM_PROCESSES and FEF_PROCESS_ID"):
        Job.from_environment({"FEF_COORDINATOR": "127.0.0.1:7", "FEF_NUM_PROCESSES": "two"})


def test_the_environment_of_a_cluster(monkeypatch):
    assert compat.detected_cluster(1) is None
    for name, value in {
        "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[03-04]", "SLURM_NTASKS": "2", "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "7711")
    assert compat.detected_cluster(1) == ("node03:7711", 2, 1, (0,))
    monkeypatch.setenv("SLURM_NTASKS", "1")  # a job of one task is no job of several hosts
    assert compat.detected_cluster(1) is None
