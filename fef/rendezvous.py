"""Brings the hosts of a job together, before JAX does.

JAX waits for hosts too, but names nobody who is missing and aborts the process. So host 0 listens at the coordinator's
address first, the others tell it who they are, and all go on when all have come; then JAX's coordinator takes the same
address. A message is one line of JSON each way:

    host 1 -> host 0    {"job": "3f9a", "host": 1, "hosts": 2}
    host 0 -> host 1    {"error": null}, or what is wrong, said to every host that waits
"""

import contextlib
import dataclasses
import ipaddress
import json
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from fef.config import UserError

_HELLO_S = 5.0  # for a line that is on its way
_RETRY_S = 0.1
_MAX_LINE = 4096


@dataclasses.dataclass(frozen=True)
class Job:
    """Which of which hosts this process is.

    Attributes:
      coordinator: "address:port", of host 0.
      num_hosts: how many there are.
      host: number of this one.
      token: tells apart jobs that use one address; a launcher gives one, and holds the port for it.
      local_device_ids: accelerators that this process may use; None means all of its machine.
    """

    coordinator: str
    num_hosts: int
    host: int
    token: str = ""
    local_device_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.host < self.num_hosts:
            raise UserError(f"host {self.host} of {self.num_hosts}: hosts are numbered from 0 to {self.num_hosts - 1}")
        address, _, port = self.coordinator.rpartition(":")
        if not address or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UserError(f"coordinator {self.coordinator!r}: give address:port of host 0, such as 10.0.0.1:7711")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Job | None":
        """The job that `experiments.launch` started this process for, if it did."""
        if "FEF_COORDINATOR" not in environment:
            return None
        try:
            hosts, host = int(environment["FEF_NUM_PROCESSES"]), int(environment["FEF_PROCESS_ID"])
        except (KeyError, ValueError):
            raise UserError("FEF_COORDINATOR is set: set FEF_NUM_PROCESSES and FEF_PROCESS_ID to numbers too") from None
        return cls(environment["FEF_COORDINATOR"], hosts, host, environment.get("FEF_JOB", ""))

    @property
    def address(self) -> tuple[str, int]:
        """Address and port of the coordinator."""
        address, _, port = self.coordinator.rpartition(":")
        return address.strip("[]"), int(port)

    @property
    def bind_address(self) -> tuple[str, int]:
        """Where host 0 listens: on loopback only if the coordinator's address says so.

        A name is no reason to: on many machines their own name stands for loopback, where no other host can connect.
        """
        address, port = self.address
        if address == "localhost":
            return "127.0.0.1", port
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(address).is_loopback:
                return address, port
        return ("::" if ":" in address else "0.0.0.0"), port


def meet(job: Job, timeout_s: float) -> str:
    """Waits until all hosts of the job have come.

    Returns:
      this host's own IP address, as it is seen on the way to the others.

    Raises:
      UserError: after `timeout_s`, naming the hosts that are missing and the address; or a host that does not belong
        here, or an address that cannot be used.
    """
    return _gather(job, timeout_s) if job.host == 0 else _report(job, timeout_s)


def _gather(job: Job, timeout_s: float) -> str:
    """Host 0's side."""
    end = time.monotonic() + timeout_s
    come: set[int] = set()
    connections: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listen(job))
        try:
            while len(come) < job.num_hosts - 1:
                listener.settimeout(max(end - time.monotonic(), 0.001))
                try:
                    connection = stack.enter_context(listener.accept()[0])
                except TimeoutError:
                    missing = sorted(set(range(1, job.num_hosts)) - come)
                    raise UserError(
                        f"{_hosts(missing)} of {job.num_hosts} did not come to host 0 at {job.coordinator} within "
                        f"{timeout_s:g} s; look at what {_hosts(missing)} printed"
                    ) from None
                hello = _receive(connection, _HELLO_S)
                if hello is None:
                    continue  # not one of us: a port scan, a browser
                if hello.get("job") != job.token:
                    other = (
                        f"host 0 at {job.coordinator} belongs to job {job.token!r}, this host to {hello.get('job')!r}"
                    )
                    _send(connection, other + "; give each job a port of its own")
                    continue
                connections.append(connection)
                _check(job, hello, come)
                come.add(hello["host"])
        except UserError as error:
            for connection in connections:
                _send(connection, str(error))
            raise
        for connection in connections:
            _send(connection, None)
        return _own_address(connections[0])


def _report(job: Job, timeout_s: float) -> str:
    """The other hosts' side."""
    end = time.monotonic() + timeout_s
    connection = None
    while connection is None:
        try:
            connection = socket.create_connection(job.address, timeout=max(end - time.monotonic(), 0.001))
        except OSError as error:
            if time.monotonic() > end:
                raise UserError(
                    f"host 0 of {job.num_hosts} did not come: host {job.host} found nobody at {job.coordinator} within "
                    f"{timeout_s:g} s ({error.strerror or error}); look at what host 0 printed"
                ) from None
            time.sleep(_RETRY_S)
    with connection:
        hello = {"job": job.token, "host": job.host, "hosts": job.num_hosts}
        with contextlib.suppress(OSError):
            connection.sendall(json.dumps(hello).encode() + b"\n")
        # Host 0 may have started later than this one, and then waits longer for the others.
        answer = _receive(connection, timeout_s + _HELLO_S)
        if answer is None:
            raise UserError(
                f"host {job.host} had no answer from {job.coordinator}; has host 0 ended, or does another program "
                "listen there?"
            )
        if answer.get("error"):
            raise UserError(answer["error"])
        return _own_address(connection)


def _listen(job: Job) -> socket.socket:
    address, port = job.bind_address
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if job.token:  # the launcher holds the port, so that nobody else gets it
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((address, port))
        listener.listen(job.num_hosts)
    except OSError as error:
        listener.close()
        raise UserError(
            f"host 0 cannot listen at {address}:{port}: {error.strerror}; choose another port in --coordinator"
        ) from None
    return listener


def _check(job: Job, hello: dict[str, Any], come: set[int]) -> None:
    host, hosts = hello.get("host"), hello.get("hosts")
    if hosts != job.num_hosts:
        raise UserError(f"host {host} was started as one of {hosts} hosts, host 0 as one of {job.num_hosts}")
    if host in come or host == 0:
        raise UserError(f"two hosts came to {job.coordinator} as host {host}; give each its own --process_id")


def _receive(connection: socket.socket, timeout_s: float) -> dict[str, Any] | None:
    """One message, or None when there is none."""
    connection.settimeout(timeout_s)
    try:
        with connection.makefile("rb") as file:
            message = json.loads(file.readline(_MAX_LINE))
    except (OSError, ValueError):
        return None
    return message if isinstance(message, dict) else None


def _send(connection: socket.socket, error: str | None) -> None:
    with contextlib.suppress(OSError):  # it has gone, and JAX's own start will say so
        connection.sendall(json.dumps({"error": error}).encode() + b"\n")


def _own_address(connection: socket.socket) -> str:
    return connection.getsockname()[0].removeprefix("::ffff:")


def _hosts(numbers: list[int]) -> str:
    return f"host{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
