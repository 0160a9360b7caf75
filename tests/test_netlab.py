"""The lab network of scripts/netlab.sh: real namespaces, so root only; what it refuses, everyone can see."""

import json
import os
import pathlib
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time

import pytest
from needs import needs_lab

ROOT = pathlib.Path(__file__).parent.parent
NETLAB = ROOT / "scripts/netlab.sh"
PAYLOAD = 1_000_000


class Lab:
    def __init__(self, **settings):
        self.prefix = f"t{secrets.token_hex(3)}"
        self.environment = os.environ | {"P": self.prefix, "N": "4", "NIC": "100"} | settings

    def __call__(self, *words):
        return subprocess.run(
            [NETLAB, *words], env=self.environment, capture_output=True, text=True, timeout=60, check=True
        ).stdout

    def left(self):
        """What there is of it."""
        names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=60).stdout.split()
        names += [str(path) for path in pathlib.Path("/etc/netns").glob("*")]
        return [name for name in names if self.prefix in name]


@pytest.fixture(params=["leaf", "alternating"])
def lab(request):
    lab = Lab(ORDER=request.param)
    lab("up")
    yield lab
    lab("down")
    assert not lab.left()


def send(lab, source, target):
    """PAYLOAD bytes from host to host."""
    address = f"10.77.0.{target + 1}"
    receive = """
import socket
server = socket.create_server(("", 9099))
server.settimeout(20)
print("up", flush=True)
connection, _ = server.accept()
count = 0
while data := connection.recv(1 << 18):
    count += len(data)
print(count)
"""
    receiver = subprocess.Popen(
        [NETLAB, "exec", str(target), sys.executable, "-c", receive],
        env=lab.environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert receiver.stdout.readline() == "up\n"
        code = f"import socket; socket.create_connection(('{address}', 9099), 20).sendall(bytes({PAYLOAD}))"
        lab("exec", str(source), sys.executable, "-c", code)
        assert int(receiver.communicate(timeout=60)[0]) == PAYLOAD
    finally:
        receiver.kill()
        receiver.wait()


def counters(lab):
    rows = re.findall(r"^(\w+) in (\d+) out (\d+)$", lab("bytes"), re.MULTILINE)
    return {port: (int(received), int(sent)) for port, received, sent in rows}


@needs_lab
def test_hosts_talk_over_leaf_and_spine_and_every_frame_is_counted(lab):
    assert lab("exec", "2", "hostname") == f"{lab.prefix}-h2\n"
    routes = lab("exec", "2", "ip", "route").splitlines()
    assert len(routes) == 1 and routes[0].startswith("10.77.0.0/24 dev eth0 ")  # no way out
    before = counters(lab)
    assert set(before) == {"h0", "h1", "h2", "h3", "up0", "up1"}
    same_leaf = 1 if lab.environment["ORDER"] == "leaf" else 2
    send(lab, 0, same_leaf)
    middle = counters(lab)
    other_leaf = 3
    send(lab, 0, other_leaf)
    after = counters(lab)
    # A frame holds at most 1448 bytes of payload behind 66 of headers; larger segments would bring fewer headers.
    least = PAYLOAD * (1448 + 66) // 1448
    for old, new, target in ((before, middle, same_leaf), (middle, after, other_leaf)):
        assert least <= new["h0"][0] - old["h0"][0] <= 1.1 * least
        assert least <= new[f"h{target}"][1] - old[f"h{target}"][1] <= 1.1 * least
    assert middle["up0"][1] - before["up0"][1] < PAYLOAD / 10
    assert after["up0"][1] - middle["up0"][1] >= least


@needs_lab
def test_down_ends_what_runs_there_and_both_may_be_repeated():
    lab = Lab(N="2", LEAVES="1")
    try:
        lab("up")
        process = subprocess.Popen([NETLAB, "exec", "1", "sleep", "600"], env=lab.environment)
        while pathlib.Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n":
            time.sleep(0.01)
        lab("up")
        assert process.wait(timeout=60) == -signal.SIGKILL
        assert set(counters(lab)) == {"h0", "h1"}
    finally:
        lab("down")
        lab("down")
    assert not lab.left()


@needs_lab
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_launch_counts_the_labs_bytes_and_takes_it_down_however_it_ends(number, tmp_path):
    command = [sys.executable, "-m", "experiments.launch", "--hosts=2", "--lab=leaves=1,nic=100mbit"]
    if number == signal.SIGINT:
        talk = """
import os, socket
print(os.environ.get("P", "no"), socket.gethostname())
if os.environ["FEF_PROCESS_ID"] == "0":
    sender = socket.socket(type=socket.SOCK_DGRAM)
    for _ in range(100):
        sender.sendto(bytes(1000), ("h1", 9))
"""
        done = subprocess.run(
            [*command, f"--json={tmp_path}/bytes.json", "--", sys.executable, "-c", talk],
            cwd=ROOT, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        (job,) = re.findall(r"job (\w+): 2 hosts, coordinator 10.77.0.1:", done.stderr)
        assert f"h1| no fef-{job}-h1\n" in done.stdout
        rows = json.loads((tmp_path / "bytes.json").read_text())
        assert [row["host"] for row in rows] == [0, 1]
        assert rows[0]["sent_bytes"] >= 100 * 1042 <= rows[1]["received_bytes"]  # 42: Ethernet, IP and UDP
        assert rows[1]["sent_bytes"] < 50_000 > rows[0]["received_bytes"]

    process = subprocess.Popen(
        [*command, "--", "sh", "-c", "echo ready; sleep 600"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    (job,) = re.findall(r"job (\w+):", process.stderr.readline())
    lab = Lab()
    lab.prefix = f"fef-{job}"
    assert process.stdout.readline().endswith("| ready\n")
    assert len(lab.left()) == 5  # two hosts and the switches, two folders
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    end = time.monotonic() + 60
    while lab.left() and time.monotonic() < end:
        time.sleep(0.02)
    assert not lab.left()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"N": "0"}, "netlab: N=0: must be 1 to 250\n"),
        ({"LEAVES": "5"}, "netlab: LEAVES=5: must be 1 to N=4\n"),
        ({"NIC": "fast"}, "netlab: NIC=fast: must be a whole number\n"),
        ({"ORDER": "random"}, "netlab: ORDER=random: must be leaf or alternating\n"),
        ({"P": "x; ls"}, "netlab: P=x; ls: must be of small letters, digits and -\n"),
    ],
)
def test_what_cannot_be_is_one_line(settings, message):
    done = subprocess.run([NETLAB, "up"], env=Lab().environment | settings, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


def test_without_root_or_its_programs_it_says_what_to_do(tmp_path):
    as_user = ["setpriv", "--reuid=65534", "--clear-groups"] if os.geteuid() == 0 else []
    bash = shutil.which("bash")
    with open(NETLAB) as script:  # the checkout may be closed to other users
        done = subprocess.run(
            [*as_user, bash, "-s", "up"], stdin=script, cwd="/", capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 2
    assert done.stderr == "netlab: needs root, to make network namespaces; try again with sudo\n"
    if as_user:
        done = subprocess.run(
            [bash, NETLAB, "up"], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 2
        assert done.stderr.startswith("netlab: needs the program ip and finds none; ") and done.stderr.count("\n") == 1
