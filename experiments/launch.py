"""Starts a command on several hosts: processes of this machine, on its loopback or on a lab network of its own.

    python -m experiments.launch --hosts=2 -- python -m experiments.train --config=configs/tiny.py
    python -m experiments.launch --hosts=4 --lab=leaves=2,nic=100mbit,oversub=4,order=leaf --json=bytes.json -- COMMAND

Every host runs the same command, and its lines get its name in front ("h0| "); of progress bars only that of host 0 is
shown, on a terminal. They find each other through FEF_COORDINATOR, FEF_NUM_PROCESSES, FEF_PROCESS_ID and FEF_JOB in
their environment, which `fef.startup.prepare` reads; they divide config.mesh.devices among them. The coordinator is
JAX's, which has no public way to run outside of host 0. Each launch takes a free port and a token of its own.

--lab gives every host a network namespace behind shaped links (scripts/netlab.sh; needs root). leaves=1 or oversub=0 is
one switch for all; else each leaf has an uplink of its hosts' rates divided by oversub. order=alternating deals the
hosts out to the leaves in turn. The lab counts bytes and is taken down at the end. Its hosts know their
leaf, by FEF_LEAF; --leaves=N tells hosts on loopback of leaves that are not there.

When a host fails, the others are ended; the exit status is that of the host, 128 + n if signal n ended it. Ctrl-C and
SIGTERM end all hosts. Neither they nor the lab survive this program, however it ends.
"""

import contextlib
import ctypes
import json
import os
import pathlib
import re
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import IO, Any

from absl import flags

from experiments.flags import parse_flags, run
from experiments.lab import Lab
from fef.config import UserError

GRACE_S = 2.0  # between SIGTERM and SIGKILL
DRAIN_S = 2.0  # for output that is still on its way when a host has ended
# What Gloo prints of each connection, from several threads at once, piece by piece; no setting turns it off.
_GLOO = re.compile(rb"\[Gloo\] Rank | is connected to | peer ranks\. |Expected number of connected peer ranks is : ")
_PR_SET_PDEATHSIG = 1


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_integer("hosts", None, "how many processes to start", flag_values=values, lower_bound=1)
    flags.DEFINE_string("lab", None, "leaves=N,nic=Nmbit,oversub=N,order=leaf|alternating", flag_values=values)
    flags.DEFINE_integer("leaves", None, "without a lab: leaves, as hosts see them", flag_values=values, lower_bound=1)
    flags.DEFINE_string("json", None, "write the lab's bytes of each host and uplink to this file", flag_values=values)


def main(argv: list[str]) -> int:
    end = argv.index("--") if "--" in argv else len(argv)
    values = parse_flags(argv[:end], define, doc=__doc__ or "")
    command = argv[end + 1 :]
    if values.hosts is None:
        raise UserError("--hosts is missing: say how many processes to start, such as --hosts=2")
    if not command:
        raise UserError("no command: write it after --, such as -- python -m experiments.train")
    if values.json and values.lab is None:
        raise UserError(f"--json={values.json}: only a lab counts bytes; give --lab too")
    if values.leaves and values.lab is not None:
        raise UserError(f"--leaves={values.leaves}: a lab has its own, --lab=leaves={values.leaves}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    job = secrets.token_hex(4)
    try:
        with contextlib.ExitStack() as stack:
            lab = stack.enter_context(Lab(f"fef-{job}", values.hosts, values.lab)) if values.lab is not None else None
            coordinator = lab.coordinator if lab else stack.enter_context(reserved_port())
            _say(f"job {job}: {values.hosts} hosts, coordinator {coordinator}")
            before = lab.bytes() if lab else []
            status = Hosts(command, values.hosts, coordinator, job, lab, values.leaves).wait()
            if lab:
                _report_bytes(before, lab.bytes(), values.json)
            return status
    except _Interrupted as error:
        _say(f"ended by {error}")
        return 128 + error.number


class _Interrupted(BaseException):
    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


def _interrupt(number: int, frame: Any) -> None:
    raise _Interrupted(number)


@contextlib.contextmanager
def reserved_port() -> Iterator[str]:
    """A free port on loopback, which nobody but the coordinator of this job gets as long as this one is held."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{holder.getsockname()[1]}"


class Hosts:
    """The processes: starts them, passes their output on and ends them."""

    def __init__(self, command: list[str], count: int, coordinator: str, job: str, lab: Lab | None, leaves: int | None):
        self.started = time.monotonic()
        self.selector = selectors.DefaultSelector()
        self.processes: list[subprocess.Popen] = []
        for host in range(count):
            environment = (lab.environment if lab else os.environ) | {
                "FEF_COORDINATOR": coordinator, "FEF_NUM_PROCESSES": str(count), "FEF_PROCESS_ID": str(host),
                "FEF_JOB": job, "PYTHONUNBUFFERED": "1",
            }  # fmt: skip
            if lab:
                environment["FEF_LEAF"] = lab.leaf(host)
            elif leaves:
                environment["FEF_LEAF"] = f"leaf{host * leaves // count}"
            words = lab.command(host, command) if lab else command
            self._start(host, words, environment)

    def wait(self) -> int:
        """Passes output on until all hosts have ended; the status of the first that failed, or 0."""
        try:
            return self._wait()
        finally:
            self._end()

    def _start(self, host: int, words: list[str], environment: dict[str, str]) -> None:
        try:
            process = subprocess.Popen(
                words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for this program, which then ends them
                preexec_fn=_die_with_parent,
            )  # fmt: skip
        except OSError as error:
            self._end()
            raise UserError(f"host {host} cannot be started: {words[0]}: {error.strerror}") from None
        self.processes.append(process)
        for pipe, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self.selector.register(pipe, selectors.EVENT_READ, Tagger(host, out))
        self.selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, host)

    def _wait(self) -> int:
        running = set(range(len(self.processes)))
        while running:
            for key, _ in self.selector.select():
                if isinstance(key.data, Tagger):
                    self._read(key)
                    continue
                self.selector.unregister(key.fileobj)
                os.close(key.fd)
                running.remove(key.data)
                process = self.processes[key.data]
                os.killpg(process.pid, signal.SIGKILL)  # what it has left behind
                status = process.wait()
                if status:
                    self._drain()
                    others = "; ending the others" if running else ""
                    _say(f"{self._describe(key.data, status)}{others}")
                    return status if status > 0 else 128 - status
        self._drain()
        return 0

    def _describe(self, host: int, status: int) -> str:
        how = f"exit status {status}" if status > 0 else signal.Signals(-status).name
        return (
            f"host {host} (pid {self.processes[host].pid}) ended by {how} after {time.monotonic() - self.started:.1f} s"
        )

    def _read(self, key: selectors.SelectorKey) -> bool:
        """Whether there was something."""
        data = os.read(key.fd, 1 << 16)
        key.data.feed(data)
        if not data:
            self.selector.unregister(key.fileobj)
        return bool(data)

    def _drain(self) -> None:
        """Reads what is there, but waits for no descendant that keeps a pipe open."""
        end = time.monotonic() + DRAIN_S
        while time.monotonic() < end:
            ready = [key for key, _ in self.selector.select(0) if isinstance(key.data, Tagger)]
            if not ready:
                return
            for key in ready:
                self._read(key)

    def _end(self) -> None:
        """Ends what still runs, with all that it has started."""
        left = [process for process in self.processes if process.returncode is None]
        for process in left:
            os.killpg(process.pid, signal.SIGTERM)
        end = time.monotonic() + GRACE_S
        while not all(map(_has_ended, left)) and time.monotonic() < end:
            self._drain()
            time.sleep(0.02)
        for process in left:
            os.killpg(process.pid, signal.SIGKILL)
        for process in left:
            process.wait()
        self._drain()


def _has_ended(process: subprocess.Popen) -> bool:
    """Without taking its status: as long as that is there, its number is that of no other process."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


class Tagger:
    """Writes the lines of one host with its name in front.

    A carriage return begins a progress bar's line anew. Bars are shown on a terminal, those of host 0.
    """

    def __init__(self, host: int, out: IO[str]):
        self.host, self.out, self.rest, self.is_after_noise = host, out, b"", False

    def feed(self, data: bytes) -> None:
        """Takes what the host has written, b"" at its end."""
        *lines, self.rest = re.split(rb"(?<=[\r\n])", self.rest + data)
        if not data and self.rest:
            lines, self.rest = [*lines, self.rest + b"\n"], b""
        for line in lines:
            self._write(line)

    def _write(self, line: bytes) -> None:
        text = line.rstrip(b"\r\n").decode(errors="replace")
        is_bar = line.endswith(b"\r")
        is_hidden_bar = is_bar and (self.host > 0 or not self.out.isatty() or not text.strip())
        self.is_after_noise = _is_noise(line, self.is_after_noise)
        if is_hidden_bar or self.is_after_noise:
            return
        erase = "\r\x1b[K" if self.out.isatty() else ""
        self.out.write(f"{erase}h{self.host}| {text}" + ("" if is_bar else "\n"))
        self.out.flush()


def _is_noise(line: bytes, is_after_noise: bool) -> bool:
    """Whether it is Gloo's; a number alone is, if it comes right after it."""
    rest, pieces = _GLOO.subn(b"", line)
    return (pieces > 0 or (is_after_noise and bool(rest.strip()))) and not rest.strip(b"0123456789 \r\n")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _report_bytes(before: list[dict[str, int]], after: list[dict[str, int]], path: str | None) -> None:
    counts = ("sent_bytes", "received_bytes")
    rows = [new | {key: new[key] - old[key] for key in counts} for old, new in zip(before, after, strict=True)]
    for row in rows:
        who = f"host {row['host']}" if "host" in row else f"leaf {row['leaf']}"
        _say(f"{who} sent {row['sent_bytes']:,} bytes and received {row['received_bytes']:,}")
    if path:
        try:
            pathlib.Path(path).write_text(json.dumps(rows, indent=1) + "\n")
        except OSError as error:
            raise UserError(f"--json={path}: cannot be written: {error.strerror}") from None


def _say(line: str) -> None:
    print(f"launch: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run(main)
