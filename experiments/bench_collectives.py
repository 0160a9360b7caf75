"""Why is the all-reduce benchmark of a cluster perfect, and the expert model on it slow?

Command:  python -m experiments.launch --hosts=8 --lab=leaves=2,nic=100mbit,oversub=4 -- \\
              python -m experiments.bench_collectives --nic=100 --uplink=100
Hardware: CPU, one device per host; meant for a machine that does nothing else. The lab needs root.
Time:     about a minute for each network.

Each of XLA's collectives moves --bytes a rank: what a rank gives (psum, psum_scatter, all_to_all), or what it has in
the end (all_gather). They take turns, and each waits until all hosts are there. A time is that of the slowest host, a
figure the median of --repeats; every result is looked at once, word by word.

`busiest link` is the time that the link with the most bytes needs for them, by closed form and without headers; what it
is of the measured time is that link's utilisation. Links are those of hosts, and of leaves at --uplink Mbit/s, each in
both directions. The bytes from host to host follow from the algorithm, as XLA:CPU has it from Gloo:

    psum, all_gather    a ring in the order of hosts: it crosses a leaf's uplink once if neighbours share a leaf, and
                        with every one of its hops if hosts alternate between leaves
    psum_scatter        halving by partners at distance 1, 2, 4 ..., then each block goes to its rank
    all_to_all          every host to every other: most of it crosses, wherever the hosts stand
    shifted             the same bytes as permutes by 1, 2, ... hosts (--config.dispatch.all_to_all.form=shifted)

Run it in several networks with --json=FILE --append to have them in one table.
"""

import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh

from experiments.flags import parse_flags, run
from experiments.sheet import DASH, Head, Line, Sheet, number, word
from fef import hosts, provenance, sharding, startup
from fef.config import UserError
from fef.dispatch.all_to_all import shifted_all_to_all
from fef.pool.neighbours import leaf_numbers
from fef.sharding import island, named

_PROGRAM = "python -m experiments.bench_collectives --append"
COMMANDS = (  # that experiments.reproduce runs
    f"python -m experiments.launch --hosts=8 --lab=leaves=1,nic=100mbit -- {_PROGRAM} --nic=100",
    f"python -m experiments.launch --hosts=8 --lab=leaves=2,nic=100mbit,oversub=4 -- {_PROGRAM} --nic=100 --uplink=100",
    "python -m experiments.launch --hosts=8 --lab=leaves=2,nic=100mbit,oversub=4,order=alternating -- "
    f"{_PROGRAM} --nic=100 --uplink=100",
)
QUICK = (
    f"python -m experiments.launch --hosts=2 --lab=leaves=1,nic=400mbit -- {_PROGRAM} --nic=400 --repeats=2",
    "python -m experiments.launch --hosts=2 --lab=leaves=2,nic=400mbit,oversub=4 -- "
    f"{_PROGRAM} --nic=400 --uplink=100 --repeats=2",
)
AXIS = "expert"
ITEM_BYTES = 4
PRIME = 8191  # words of a buffer repeat after as many, which falls together with no block


def _native(x_N: jax.Array) -> jax.Array:
    members = jax.lax.axis_size(AXIS)
    return jax.lax.all_to_all(x_N.reshape(members, -1), AXIS, split_axis=0, concat_axis=0).reshape(-1)


def _shifted(x_N: jax.Array) -> jax.Array:
    return shifted_all_to_all(x_N.reshape(jax.lax.axis_size(AXIS), -1), AXIS).reshape(-1)


COLLECTIVES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "psum": lambda x_N: jax.lax.psum(x_N, AXIS),
    "all_gather": lambda x_N: jax.lax.all_gather(x_N, AXIS, tiled=True),
    "psum_scatter": lambda x_N: jax.lax.psum_scatter(x_N, AXIS, tiled=True),
    "all_to_all": _native,
    "all_to_all, shifted": _shifted,
}


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_integer("bytes", 4 << 20, "of a rank's whole buffer", lower_bound=4, flag_values=values)
    flags.DEFINE_float("nic", 100.0, "rate of a host's link, Mbit/s", lower_bound=1, flag_values=values)
    flags.DEFINE_float("uplink", None, "rate of a leaf's uplink, Mbit/s", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("repeats", 5, "of each, after one more", lower_bound=1, flag_values=values)
    flags.DEFINE_string("json", "", "write the rows to this file, as a JSON list", flag_values=values)
    flags.DEFINE_bool("append", False, "keep the rows that --json has, of other networks", flag_values=values)


def main(argv: list[str]) -> None:
    values = parse_flags(argv, define, doc=__doc__ or "")
    jax.config.update("jax_platforms", "cpu")
    startup.prepare()
    members = jax.process_count()
    if members == 1:
        raise UserError("one host has nothing to send; start several with python -m experiments.launch --hosts=4 --")
    if values.bytes % (ITEM_BYTES * members):
        raise UserError(f"--bytes={values.bytes}: must be a multiple of {ITEM_BYTES} bytes times {members} hosts")
    records = hosts.gather("its leaf", {"leaf": os.environ.get("FEF_LEAF", "")})
    leaf_H = leaf_numbers(records) or [0] * members
    if len(set(leaf_H)) > 1 and values.uplink is None:
        raise UserError("the hosts stand on several leaves: give the rate of a leaf's uplink, such as --uplink=100")
    rows = measure(sharding.make_mesh(members), values.bytes, values.repeats)
    network = {"nic": values.nic, "uplink": values.uplink, "leaves": leaf_H}
    setting = network | {"bytes": values.bytes, "commit": provenance.commit(), "versions": provenance.versions()}
    rows = [setting | row | busiest_link(traffic(row["collective"], members, values.bytes), **network) for row in rows]
    if not hosts.is_main():
        return
    path = pathlib.Path(values.json)
    if values.append and values.json and path.exists():
        rows = joined(json.loads(path.read_text()), rows)
    print(table(rows))
    if values.json:
        path.write_text(json.dumps(rows, indent=1) + "\n")


def joined(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of several networks; new ones take the place of those of their own network.

    Raises:
      UserError: they are of another size or number of hosts, so that no line could compare them.
    """
    for row in old:
        if (row["bytes"], len(row["leaves"])) != (new[0]["bytes"], len(new[0]["leaves"])):
            raise UserError(
                f"--append: the file has rows of {row['bytes']} bytes and {len(row['leaves'])} hosts, these are of "
                f"{new[0]['bytes']} and {len(new[0]['leaves'])}; name another file by --json"
            )
    return [row for row in old if network_name(row) != network_name(new[0])] + new


# What is run.


def measure(mesh: Mesh, num_bytes: int, repeats: int) -> list[dict[str, Any]]:
    """A row for each collective, with the times of the slowest host in ms."""
    members = sharding.num_members(mesh)
    programs = {name: _program(mesh, name, num_bytes // ITEM_BYTES) for name in COLLECTIVES}
    for name, program in programs.items():
        for shard in program().addressable_shards:
            rank = shard.index[0].start or 0
            if not np.array_equal(shard.data[0], expected(name, rank, members, num_bytes // ITEM_BYTES)):
                raise RuntimeError(f"{name} has given rank {rank} wrong values")
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repeats):
        for name, program in programs.items():
            hosts.barrier(f"are ready for {name}")
            begin = time.perf_counter()
            program().block_until_ready()
            times[name].append((time.perf_counter() - begin) * 1e3)
    of_hosts = hosts.gather("its times", times)
    rows = []
    for name in programs:
        slowest = [max(of_repeat) for of_repeat in zip(*(of_host[name] for of_host in of_hosts), strict=True)]
        rows.append({"collective": name, "ms": statistics.median(slowest), "times_ms": slowest})
    return rows


def buffer(rank: int, elems: int) -> np.ndarray:
    """What a rank begins with: every word says where it is, and whose."""
    return (np.arange(elems) % PRIME + (PRIME + 1) * rank).astype(np.float32)


def _program(mesh: Mesh, name: str, elems: int) -> Callable[[], jax.Array]:
    members = sharding.num_members(mesh)
    own = elems // members if name == "all_gather" else elems
    spec = named(mesh, sharding.TOKENS)
    x_RN = sharding.place(np.stack([buffer(rank, own) for rank in range(members)]), spec)
    body = COLLECTIVES[name]
    run_it = jax.jit(island(mesh, lambda x_1N: body(x_1N[0])[None], (sharding.TOKENS,), sharding.TOKENS))
    compiled = run_it.lower(x_RN).compile()
    return lambda: compiled(x_RN)


def expected(name: str, rank: int, members: int, elems: int) -> np.ndarray:
    """What a rank ends with; elems are those of the whole buffer."""
    block = elems // members
    own = slice(rank * block, (rank + 1) * block)
    if name == "all_gather":
        return np.concatenate([buffer(other, block) for other in range(members)])
    given = np.stack([buffer(other, elems) for other in range(members)])
    return {"psum": given.sum(0), "psum_scatter": given.sum(0)[own]}.get(name, given[:, own].reshape(-1))


# The closed form.


def traffic(name: str, members: int, num_bytes: float) -> np.ndarray | None:
    """(H, H): payload that each host sends to each other one; None where the algorithm has no such simple form."""
    sent_HH, ranks = np.zeros((members, members)), np.arange(members)
    if name in ("psum", "all_gather"):
        rounds = 2 if name == "psum" else 1
        sent_HH[ranks, (ranks + 1) % members] = rounds * (members - 1) / members * num_bytes
    elif name == "psum_scatter":
        bits = members.bit_length() - 1
        if members != 1 << bits:
            return None
        for bit in range(bits):
            sent_HH[ranks, ranks ^ (1 << bit)] += num_bytes / 2 ** (bit + 1)
        # Halving has left each rank the block of the rank whose number has the same bits, backwards.
        owner_H = [sum((rank >> bit & 1) << (bits - 1 - bit) for bit in range(bits)) for rank in range(members)]
        sent_HH[ranks, owner_H] += num_bytes / members
    else:
        sent_HH += num_bytes / members
    np.fill_diagonal(sent_HH, 0)
    return sent_HH


def busiest_link(
    sent_HH: np.ndarray | None, *, nic: float, uplink: float | None, leaves: Sequence[int]
) -> dict[str, Any]:
    """What a host sends at most, and the link that takes longest for its bytes.

    Args:
      sent_HH: payload from host to host; None gives no numbers.
      nic, uplink: rates of the links of hosts and leaves, Mbit/s.
      leaves: the leaf of each host.
    """
    if sent_HH is None:
        return {"sent_bytes": None, "busy_link": None, "busy_ms": None}
    leaf_H = np.array(leaves)
    busy_ms = {"host": max(sent_HH.sum(1).max(), sent_HH.sum(0).max()) * 8 / (nic * 1e3)}
    if uplink is not None and len(set(leaves)) > 1:
        crossing_HH = sent_HH * (leaf_H[:, None] != leaf_H)
        of_leaves = [leaf_H == leaf for leaf in set(leaves)]
        crossing = [max(crossing_HH[own].sum(), crossing_HH[:, own].sum()) for own in of_leaves]  # out and in
        busy_ms["uplink"] = max(crossing) * 8 / (uplink * 1e3)
    link = max(busy_ms, key=lambda name: busy_ms[name])
    return {"sent_bytes": float(sent_HH.sum(1).max()), "busy_link": link, "busy_ms": float(busy_ms[link])}


# What is shown.


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: what was run, and `sheet`."""
    return f"{caption(rows)}\n\n{sheet(rows).markdown()}"


def caption(rows: list[dict[str, Any]]) -> str:
    """What all rows share, one line."""
    first = rows[0]
    return (
        f"{len(first['leaves'])} hosts with one device each, {first['bytes'] / 2**20:g} MiB a rank, XLA:CPU over Gloo; "
        f"median of {len(first['times_ms'])}; jax {first['versions']['jax']}, commit {first['commit']}."
    )


def sheet(rows: list[dict[str, Any]]) -> Sheet:
    """A line for each collective with a pair of columns for each network."""
    networks = list(dict.fromkeys(map(network_name, rows)))
    times = {(row["collective"], network_name(row)): row for row in rows}
    heads = [Head("collective"), Head("MB sent", is_number=True)]
    for name in networks:
        heads += [Head(f"{name}, ms", is_number=True), Head("busiest link")]
    lines = []
    for collective in dict.fromkeys(row["collective"] for row in rows):
        sent = next(row["sent_bytes"] for row in rows if row["collective"] == collective)
        cells = [word(collective), number(None if sent is None else sent / 1e6, "{:.1f}")]
        for name in networks:
            row = times.get((collective, name))
            cells += [number(None), word(DASH)] if row is None else [number(row["ms"]), word(_busy(row))]
        lines.append(Line(cells, []))
    note = (
        "`MB sent`: by the host that sends most. `busiest link`: the part of the time in which the link with the most "
        "bytes would be busy with them, by closed form and without headers, of a host or a leaf's uplink."
    )
    return Sheet("Collectives", heads, lines, [note])


def _busy(row: dict[str, Any]) -> str:
    return DASH if row["busy_ms"] is None else f"{row['busy_link']}, {row['busy_ms'] / row['ms']:.0%}"


def network_name(row: dict[str, Any]) -> str:
    """Such as "100 Mbit/s flat" or "100 Mbit/s, uplinks of 100, neighbours apart"."""
    leaves = row["leaves"]
    if len(set(leaves)) == 1:
        return f"{row['nic']:g} Mbit/s flat"
    place = "neighbours together" if leaves == sorted(leaves) else "neighbours apart"
    return f"{row['nic']:g} Mbit/s, uplinks of {row['uplink']:g}, {place}"


if __name__ == "__main__":
    run(main)
