"""Which hosts share a pool, whether they fit together, and who reaches whom how.

A host is one JAX process. Hosts that share a kernel and a network namespace map each other's memory (mmap); others
read over TCP (tcp). FEF_TRANSPORT, or config.pool.transport, forces one; FEF_FORCE_REMOTE=1 lets `auto` take every host
for a remote one.

`rma` reads every other host one-sided through UCX, also one whose memory could be mapped. `auto` never chooses it: that
a host has an RDMA device does not say that it reaches the others by it, and over anything else UCX emulates the reads,
in the homes' processes and with no look at the addresses.

A host may know on which leaf of the network it stands: FEF_LEAF, or config.pool.leaf, any name. With several leaves,
and hosts that read across by requests, config.pool.relay lets what crosses do so once for all hosts of a leaf.
"""

import os
import pathlib
import secrets
import socket
from typing import Any

import jax

from fef import hosts
from fef.config import ConfigError, PoolConfig, UserError
from fef.native import build
from fef.pool import native

TRANSPORTS = ("auto", "local", "mmap", "tcp", "rma")


def introduction(next_incarnation: int, transport: str, config: PoolConfig) -> dict[str, Any]:
    """What a process says of itself before any pool is open."""
    return {
        "host": jax.process_index(),
        "name": socket.gethostname(),
        "build": build.source_hash(),
        "transport": transport,
        "remote": os.environ.get("FEF_FORCE_REMOTE", ""),
        "leaf": os.environ.get("FEF_LEAF", config.leaf),
        "relay": config.relay,
        "ucx": ucx() if transport == "rma" else "",
        "kernel": pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "network": os.readlink("/proc/self/ns/net"),
        "job": os.environ.get("FEF_JOB", ""),
        "token": secrets.token_hex(8),
        "incarnation": next_incarnation,
    }


def ucx() -> str:
    """Version and transports of this host's UCX: those of other versions do not understand each other's messages."""
    return f"{native.ucx_library().fef_ucx_version().decode()}, UCX_TLS={os.environ.get('UCX_TLS', 'all')}"


def check(records: list[dict[str, Any]]) -> None:
    """Refuses hosts that cannot work together.

    Raises:
      UserError: another build, transport, relay, UCX or job; names both hosts and both values.
    """
    remedies = {
        "build": "install the same fef, jaxlib and compiler flags on all hosts",
        "transport": "give all hosts the same FEF_TRANSPORT and config.pool.transport",
        "remote": "give all hosts the same FEF_FORCE_REMOTE",
        "relay": "give all hosts the same config.pool.relay",
        "ucx": "give all hosts the same UCX (FEF_UCX_DIR) and UCX_TLS",
        "job": "two jobs have met; give each its own coordinator address",
    }
    for key, remedy in remedies.items():
        for record in records[1:]:
            if record[key] != records[0][key]:
                raise UserError(
                    f"pool: {key} {records[0][key]!r} on host 0 ({records[0]['name']}), {record[key]!r} on host "
                    f"{record['host']} ({record['name']}); {remedy}"
                )


def mapped_hosts(records: list[dict[str, Any]], me: int, transport: str) -> list[bool]:
    """Which hosts' memory this one maps; the others are read over TCP, or by rma.

    Raises:
      ConfigError: `mmap` is asked for, but a host is elsewhere; or `local` with several processes.
    """
    here = [all(record[key] == records[me][key] for key in ("kernel", "network")) for record in records]
    if transport == "local":
        raise ConfigError("pool.transport", transport, f"moves blocks within one process, the job has {len(records)}")
    if transport == "mmap" and not all(here):
        other = records[here.index(False)]
        raise ConfigError(
            "pool.transport", transport, f"host {other['host']} ({other['name']}) shares no memory; use auto or tcp"
        )
    is_remote = transport in ("tcp", "rma") or (transport == "auto" and os.environ.get("FEF_FORCE_REMOTE") == "1")
    return [not is_remote and is_here for is_here in here]


def leaf_numbers(records: list[dict[str, Any]]) -> list[int]:
    """Of each host its leaf, numbered in the order of their first hosts; [] if a host does not know its own."""
    names = [record["leaf"] for record in records]
    return [] if "" in names else [list(dict.fromkeys(names)).index(name) for name in names]


def is_relayed(records: list[dict[str, Any]], transport: str) -> bool:
    """Whether what crosses from leaf to leaf does so once for all hosts of a leaf.

    Raises:
      ConfigError: it is asked for where it cannot be.
    """
    relay, leaves = records[0]["relay"], leaf_numbers(records)
    if relay == "off":
        return False
    mapped = [mapped_hosts(records, host, transport) for host in range(len(records))]
    pairs = [(a, b) for a, leaf in enumerate(leaves) for b, other in enumerate(leaves) if leaf != other]
    reason = ""
    if transport == "rma":
        reason = "relays what is read by requests, not rma; use auto, or FEF_TRANSPORT=tcp"
    elif not leaves:
        host = next(record for record in records if not record["leaf"])
        reason = f"host {host['host']} ({host['name']}) does not know its leaf; use auto, or give all hosts FEF_LEAF"
    elif not pairs:
        reason = f"all hosts are on leaf {records[0]['leaf']!r}; use auto, or check their FEF_LEAF"
    elif len(set(leaves)) == len(leaves):
        reason = "no two hosts are on the same leaf; use auto, or check their FEF_LEAF"
    elif all(mapped[a][b] for a, b in pairs):
        reason = "hosts on different leaves map each other's memory; use auto, or FEF_TRANSPORT=tcp"
    if reason and relay == "on":
        raise ConfigError("pool.relay", relay, reason)
    return not reason


def own_address() -> str:
    """The IPv4 address at which the other hosts find this one: FEF_ADDRESS, or that by which the hosts have met.

    Raises:
      UserError: neither is known, since not fef has connected this process to its job.
    """
    address = os.environ.get("FEF_ADDRESS") or hosts.own_address
    if not address:
        raise UserError("pool: this host's address is not known; call fef.startup.prepare, or set FEF_ADDRESS")
    return address


def chosen_transport(config: PoolConfig) -> str:
    """FEF_TRANSPORT, or else config.pool.transport."""
    name = os.environ.get("FEF_TRANSPORT", config.transport)
    if name not in TRANSPORTS:
        raise ConfigError("pool.transport", name, f"must be one of {', '.join(TRANSPORTS)}")
    return name
