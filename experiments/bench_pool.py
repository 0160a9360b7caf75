"""What does reading a block of another host cost, by each transport, and which carries the exchange of all pairs best?

Command:  python -m experiments.bench_pool [--json=FILE] [--plot=FILE.svg] [--parts=get,torn,jit,shaped,exchange]
Hardware: CPU; meant for a machine that does nothing else. `shaped` and `exchange` need root, for the lab network.
Time:     about 5 minutes on two cores.

get       Two processes of this machine. mmap: a lease on the other's memory and a copy; tcp: the pool's own sockets,
          requests that the owner checks; rma: one-sided reads through UCX, emulated over TCP where there is no RDMA.
          Beside them memcpy from memory of the same kind, plain blocking sockets, and ucx, ucp_get_nbx on a thread that
          spins. All in the same run, alternating; a figure is the median over the repeats of the median of a repeat,
          a ratio the median of the repeats' ratios. rma and ucx are left out where UCX or its headers are not found.
torn      Blocks are published as fast as possible while another process reads them, and every word is looked at. A
          read of a version that is gone is refused (stale), which is right; torn would be a block of two versions.
jit       A get inside of a jitted program, less the same program without it, against the read alone in C++.
shaped    As get, between two hosts of the lab with links of 500 Mbit/s.
exchange  Every host reads 1 MiB from every other at once: four hosts of the lab, 100 Mbit/s, one switch. Payload as a
          share of the link, which headers and acknowledgements hold under 93.5 % (where data flows both ways on one
          connection, acknowledgements ride on it, and 95.6 % is the end).
"""

import contextlib
import json
import math
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments.flags import parse_flags, run
from experiments.lab import Lab
from fef import provenance, startup
from fef.config import PoolConfig, UserError
from fef.native import build, programs, ucx_files
from fef.ops.get import get
from fef.ops.publish import publish
from fef.pool.pool import Pool
from fef.pool.table import ExpertTable
from fef.sharding import EXPERTS, REPLICATED, TOKENS, island, make_mesh
from fef.summary import number_text

COMMANDS = ("python -m experiments.bench_pool --plot=results/bench_pool.svg",)  # that experiments.reproduce runs
QUICK = ("python -m experiments.bench_pool --parts=get,torn --repeats=2 --largest=65536",)
PARTS = ("get", "torn", "jit", "shaped", "exchange")
KIB, MIB = 1 << 10, 1 << 20
SIZES = (8, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
SHAPED_SIZES = (8, 64 * KIB, MIB, 16 * MIB)
SHAPED_MBIT, EXCHANGE_MBIT, EXCHANGE_HOSTS = 500, 100, 4
PAYLOAD_CEILING = 1448 / 1514  # of a full frame
TORN_BYTES, TORN_PAIRS = 64 * KIB, 10_000
JIT_SIZES = (4 * KIB, 64 * KIB, MIB)
WAYS = ("memcpy", "mmap", "sockets", "tcp", "ucx", "rma")
COMPARED = {"mmap": "memcpy", "tcp": "sockets", "rma": "ucx"}
UCX_WINDOWS = ((16 * KIB, 32 * KIB), (MIB, MIB))  # chunk and window of an exchange over UCX
COLOURS = dict(zip(WAYS, ("#888888", "#1b7837", "#d95f02", "#2166ac", "#e7298a", "#7570b3"), strict=True))


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("json", "", "write the rows to this file, as a JSON list", flag_values=values)
    flags.DEFINE_string("plot", "", "draw time over block size to this file, as SVG", flag_values=values)
    flags.DEFINE_list("parts", list(PARTS), f"what is measured, of {', '.join(PARTS)}", flag_values=values)
    flags.DEFINE_integer("repeats", 7, "of each figure, after one more", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("largest", SIZES[-1], "largest block of get, bytes", lower_bound=8, flag_values=values)


def main(argv: list[str]) -> None:
    values = parse_flags(argv, define, doc=__doc__ or "")
    for part in values.parts:
        if part not in PARTS:
            raise UserError(f"--parts={part}: choose of {', '.join(PARTS)}")
    jax.config.update("jax_platforms", "cpu")
    startup.prepare(num_devices=1)
    setting = {
        "repeats": values.repeats, "commit": provenance.commit(), "versions": provenance.versions(),
        "ucx": _ucx_version(), "window_bytes": PoolConfig().window_bytes,
        "cores": os.cpu_count(), "load": os.getloadavg()[0],
    }  # fmt: skip
    sizes = [size for size in SIZES if size <= values.largest]
    measure: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "get": lambda: _get(sizes, values.repeats),
        "torn": _torn,
        "jit": lambda: _jit(values.repeats),
        "shaped": lambda: _shaped(values.repeats),
        "exchange": lambda: _exchange(values.repeats),
    }
    try:
        rows = [{"part": part} | setting | row for part in PARTS if part in values.parts for row in measure[part]()]
    except (build.BuildError, ucx_files.UcxError) as error:
        raise UserError(str(error)) from None
    print(table(rows))
    if values.json:
        pathlib.Path(values.json).write_text(json.dumps(rows, indent=1) + "\n")
    if values.plot:
        pathlib.Path(values.plot).write_text(plot([row for row in rows if row["part"] == "get"]))


# The processes


def _core(*names: str) -> list[pathlib.Path]:
    return [build.FOLDER / name for name in names]


def _ucx() -> ucx_files.Ucx | None:
    ucx = ucx_files.find()
    return ucx if ucx is not None and ucx.include is not None else None


def _ucx_version() -> str | None:
    ucx = _ucx()
    return None if ucx is None else ucx.version


def _ucx_environment(device: str) -> dict[str, str]:
    return ucx_files.settings() | {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": device}


def _lab(hosts: int, mbit: int) -> Lab:
    """Hosts behind one switch, from `with` to its end, or to that of this program."""
    return Lab(f"fef-bench{os.getpid()}", hosts, f"leaves=1,oversub=0,nic={mbit}mbit")


def _start(host: int, command: Sequence[object], environment: dict[str, str], lab: Lab | None) -> programs.Program:
    """A program as one of two or more hosts: of the lab, or of this machine."""
    words = list(map(str, command))
    if lab is not None:
        words, environment = lab.command(host, words), environment | lab.settings
    return programs.Program(f"host {host}", words, environment)


def _tell(hosts: Sequence[programs.Program], *words: object, answer: str, timeout_s: float = 60) -> list[list[str]]:
    """Gives all hosts the same line, and returns their answers."""
    for host in hosts:
        host.say(*words)
    return [host.hear(answer, timeout_s) for host in hosts]


@contextlib.contextmanager
def _pair(sizes: Sequence[int], lab: Lab | None = None) -> Iterator[dict[str, list[programs.Program]]]:
    """Owner and reader, connected and with a version published: under "pool", and with UCX under "rma"."""
    with contextlib.ExitStack() as stack:

        def start(host: int, words: Sequence[object], environment: dict[str, str]) -> programs.Program:
            return stack.enter_context(_start(host, words, environment, lab))

        program = programs.make(programs.BENCH / "pool_host.cc", _core(*programs.CORE))
        token, window = f"bench{os.getpid()}", PoolConfig().window_bytes
        address = lab.address if lab is not None else lambda host: "127.0.0.1"
        pool = [start(host, [program, host, address(host), token, window, *sizes], {}) for host in range(2)]
        places = [word for host in pool for word in host.hear("at")]
        _tell(pool, "connect", "tcp" if lab is not None else "mmap", *places, answer="connected")
        _tell(pool[:1], "publish", answer="published")
        pairs = {"pool": pool}
        if ucx := _ucx():
            sources = _core("ucx/rma.cc", "memory_segment.cc", "socket.cc")
            program = programs.make(programs.BENCH / "rma_host.cc", sources, ucx)
            environment = _ucx_environment("lo" if lab is None else "eth0")
            rma = [start(host, [program, host, *sizes], environment) for host in range(2)]
            place = [host.hear("at") for host in rma][0]
            _tell(rma[1:], "connect", *place, answer="connected")
            pairs["rma"] = rma
        yield pairs


def _time(
    pairs: dict[str, list[programs.Program]], sizes: Sequence[int], ways: Sequence[str], repeats: int, budget: int
) -> list[dict[str, Any]]:
    """Rows of the times of one read; all ways take turns."""
    ways = [way for way in ways if way not in ("ucx", "rma") or "rma" in pairs]
    seconds: dict[tuple[int, str], list[float]] = {(size, way): [] for size in sizes for way in ways}
    for repeat in range(repeats + 1):
        for index, size in enumerate(sizes):
            for way in ways if repeat % 2 else reversed(ways):  # who comes after whom must not matter
                reader = pairs["rma" if way in ("ucx", "rma") else "pool"][1]
                reads = max(3, min(500, budget // size))
                figure = float(_tell([reader], "time", way, index, reads, answer="took", timeout_s=300)[0][0])
                if repeat > 0:  # before the first, connections are slow and blocks are fetched ahead
                    seconds[size, way].append(figure)
    rows = []
    for (size, way), took in seconds.items():
        row: dict[str, Any] = {"way": way, "block_bytes": size}
        row |= {"seconds": statistics.median(took), "least_seconds": min(took)}
        if other := seconds.get((size, COMPARED.get(way, ""))):
            row["ratio"] = statistics.median(mine / theirs for mine, theirs in zip(took, other, strict=True))
        rows.append(row)
    return rows


# The parts


def _get(sizes: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    with _pair(sizes) as pairs:
        return _time(pairs, sizes, WAYS, repeats, budget=16 * MIB)


def _shaped(repeats: int) -> list[dict[str, Any]]:
    with _lab(2, SHAPED_MBIT) as lab, _pair(SHAPED_SIZES, lab) as pairs:
        time.sleep(1)  # what the published version brings with it is fetched ahead
        rows = _time(pairs, SHAPED_SIZES, ("sockets", "tcp", "ucx", "rma"), repeats, budget=4 * MIB)
    for row in rows:
        rate = row["block_bytes"] * 8 / row["seconds"]
        row |= {"mbit": SHAPED_MBIT, "share_of_ceiling": rate / (SHAPED_MBIT * 1e6 * PAYLOAD_CEILING)}
    return rows


def _torn() -> list[dict[str, Any]]:
    """Reads until there were as many versions and as many whole or torn blocks as asked for."""
    rows: list[dict[str, Any]] = []
    with _pair([TORN_BYTES]) as pairs:
        owner, reader = pairs["pool"]
        for way in ("mmap", "tcp"):
            row = dict.fromkeys(("whole", "stale", "torn", "publishes"), 0)
            while min(row["whole"] + row["torn"], row["publishes"]) < TORN_PAIRS:
                _tell([owner], "start", way, 0, answer="started")
                counts = _tell([reader], "check", way, 0, TORN_PAIRS, answer="read", timeout_s=300)[0]
                publishes = _tell([owner], "stop", answer="stopped")[0][0]
                for name, count in zip(row, [*counts, publishes], strict=True):
                    row[name] += int(count)
            rows.append({"way": way, "block_bytes": TORN_BYTES} | row)
    return rows


def _jit(repeats: int) -> list[dict[str, Any]]:
    rows = []
    mesh = make_mesh(1)
    with Pool(mesh) as pool, _pair(JIT_SIZES) as pairs:
        for index, size in enumerate(JIT_SIZES):
            with_get, without = _jitted(mesh, pool, size // 4)
            taken = []
            for _ in range(repeats + 1):
                read = float(_tell(pairs["pool"][1:], "time", "mmap", index, 300, answer="took")[0][0])
                taken.append((_median_call(with_get), _median_call(without), read))
            taken_R3 = np.array(taken[1:])
            added = float(np.median(taken_R3 @ [1, -1, -1]))
            names = ("call_seconds", "empty_seconds", "read_seconds")
            medians = dict(zip(names, np.median(taken_R3, axis=0).tolist(), strict=True))
            rows.append({"block_bytes": size, "added_seconds": added} | medians)
    return rows


def _jitted(mesh: Any, pool: Pool, elems: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A program that gets a block of the one member there is, and one that does not."""
    table = ExpertTable(num_experts=1, num_members=1)
    handle_2 = pool.table(f"bench{elems}", 1, table, ((elems,),), jnp.float32)

    def publish_body(handle_2, w_LPX):
        version_4, chain = publish(handle_2, (w_LPX,), 1, jnp.float32)
        return version_4[None], chain[None]

    def get_body(version_M4, chain_M, ids_n):
        return get(version_M4[0], chain_M[0], jnp.int32(0), ids_n, elems, jnp.float32)[None]

    layers_first = jax.sharding.PartitionSpec(None, *EXPERTS)
    run_publish = jax.jit(island(mesh, publish_body, (REPLICATED, layers_first), (TOKENS, TOKENS)))
    version_M4, chain_M = run_publish(jnp.asarray(handle_2), jnp.ones((1, 1, elems), jnp.float32))
    ids_n = jnp.zeros(1, jnp.int32)
    run_get = jax.jit(island(mesh, get_body, (TOKENS, TOKENS, REPLICATED), TOKENS))
    run_empty = jax.jit(island(mesh, lambda v_M4, c_M, ids_n: c_M + ids_n, (TOKENS, TOKENS, REPLICATED), TOKENS))
    if not bool((run_get(version_M4, chain_M, ids_n) == 1).all()):
        raise RuntimeError("get has not returned what was published")
    return lambda: run_get(version_M4, chain_M, ids_n), lambda: run_empty(version_M4, chain_M, ids_n)


def _median_call(call: Callable[[], Any], count: int = 300) -> float:
    took = []
    for _ in range(count):
        begin = time.perf_counter()
        call().block_until_ready()
        took.append(time.perf_counter() - begin)
    return float(np.median(took[1:]))


def _exchange(repeats: int) -> list[dict[str, Any]]:
    hosts, windows = range(EXCHANGE_HOSTS), (PoolConfig().window_bytes, PoolConfig().total_window_bytes)
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(_lab(EXCHANGE_HOSTS, EXCHANGE_MBIT))
        sources = _core("client.cc", "fabric.cc", "one_sided_reads.cc", "server.cc", "socket.cc")
        program = programs.make(programs.BENCH / "exchange_sockets.cc", sources)
        own = [
            stack.enter_context(_start(h, [program, h, len(hosts), lab.address(h), MIB, *windows, "bench"], {}, lab))
            for h in hosts
        ]
        ports = [host.hear("at")[0] for host in own]
        _tell(own, "connect", *(f"{lab.address(h)}:{port}" for h, port in enumerate(ports)), answer="connected")
        carriers: list[tuple[dict[str, Any], list[programs.Program], tuple]] = [
            ({"carrier": "fef's sockets", "chunk_bytes": 32 * KIB, "window_bytes": windows[0]}, own, ())
        ]
        if ucx := _ucx():
            program = programs.make(programs.BENCH / "exchange_ucx.cc", ucx=ucx)
            over_ucx = [
                stack.enter_context(_start(h, [program, h, len(hosts), MIB], _ucx_environment("eth0"), lab))
                for h in hosts
            ]
            places = [host.hear("at")[0] for host in over_ucx]
            _tell(over_ucx, "connect", *places, answer="connected")
            for chunk, ahead in UCX_WINDOWS:
                name = {"carrier": "UCX active messages", "chunk_bytes": chunk, "window_bytes": ahead}
                carriers.append((name, over_ucx, (chunk, ahead)))
        shares: list[list[float]] = [[] for _ in carriers]
        for repeat in range(repeats + 1):
            for share, (_, group, words) in zip(shares, carriers, strict=True):
                _tell(group, "prepare", repeat * len(carriers) + len(shares), answer="ready")
                took = _tell(group, "go", f"{time.monotonic() + 0.05:.6f}", *words, answer="took")
                if any(wrong != "0" for _, _, wrong in took):
                    raise RuntimeError(f"an exchange has brought wrong bytes: {took}")
                seconds = max(float(end) for _, end, _ in took) - min(float(begin) for begin, _, _ in took)
                if repeat > 0:
                    share.append((len(hosts) - 1) * MIB * 8 / seconds / (EXCHANGE_MBIT * 1e6))
    return [
        name | {"share": statistics.median(share), "least": min(share), "most": max(share)}
        for (name, _, _), share in zip(carriers, shares, strict=True)
    ]


# What is shown


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: what was measured, part by part, and each target beside its figure."""
    of = {part: [row for row in rows if row["part"] == part] for part in PARTS}
    shown = [_head(rows[0])]
    if of["get"]:
        shown.append(_get_table("Two processes on one host", of["get"]))
    if of["shaped"]:
        shown.append(_get_table(f"A link of {SHAPED_MBIT} Mbit/s", of["shaped"]))
    if of["exchange"]:
        lines = ["| exchange of all pairs over | chunk KiB | window KiB | share of the link | least | most |"]
        lines.append("| --- | ---: | ---: | ---: | ---: | ---: |")
        for row in of["exchange"]:
            cells = [row["carrier"], row["chunk_bytes"] // KIB, row["window_bytes"] // KIB]
            shares = (f"{100 * row[name]:.1f} %" for name in ("share", "least", "most"))
            lines.append("| " + " | ".join([*map(str, cells), *shares]) + " |")
        shown.append("\n".join(lines))
    if lines := _targets(of):
        shown.append("\n".join(["| target | wanted | measured |", "| --- | ---: | ---: |", *lines]))
    return "\n\n".join(shown)


def _head(row: dict[str, Any]) -> str:
    ucx = f"UCX {row['ucx']} over TCP, there being no RDMA here" if row["ucx"] else "no UCX"
    return (
        f"{row['cores']} cores, load average {row['load']:.1f} before, window {row['window_bytes'] // KIB} KiB, {ucx}; "
        f"median of {row['repeats']} repeats; "
        f"jax {row['versions']['jax']}, commit {row['commit']}."
    )


def _get_table(title: str, rows: list[dict[str, Any]]) -> str:
    ways = list(dict.fromkeys(row["way"] for row in rows))
    lines = [f"| {title}: block | " + " | ".join(ways) + " |", "| --- |" + " ---: |" * len(ways)]
    for size in dict.fromkeys(row["block_bytes"] for row in rows):
        cells = [_cell(row) for row in rows if row["block_bytes"] == size]
        lines.append(f"| {_size_text(size)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    """Short reads by their time, long ones by their rate."""
    if row["block_bytes"] < 64 * KIB:
        return f"{number_text(row['seconds'] * 1e6)} µs"
    return f"{number_text(row['block_bytes'] / row['seconds'] / 1e9)} GB/s"


def _size_text(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB" if size >= KIB else f"{size} B"


def _targets(of: dict[str, list[dict[str, Any]]]) -> list[str]:
    lines = []
    if large := [row for row in of["get"] if row["way"] == "mmap" and row["block_bytes"] >= 256 * KIB]:
        worst = max(large, key=lambda row: row["ratio"])
        what = f"mmap / memcpy, rate, the lowest of blocks >= 256 KiB ({_size_text(worst['block_bytes'])})"
        lines.append(f"| {what} | >= 0.95 | {1 / worst['ratio']:.2f} |")
    for part, where in (("get", "one host"), ("shaped", "shaped link")):
        for row in of[part]:
            if row["way"] == "tcp" and row["block_bytes"] == 8:
                lines.append(f"| tcp / sockets, time of 8 B, {where} | <= 1.3 | {row['ratio']:.2f} |")
    for row in of["shaped"]:
        if row["way"] == "tcp" and row["block_bytes"] >= MIB:
            what = f"tcp, shaped link, {_size_text(row['block_bytes'])}: share of the payload ceiling"
            lines.append(f"| {what} | >= 0.97 | {row['share_of_ceiling']:.2f} |")
    for row in of["jit"]:
        what = f"what a get of {_size_text(row['block_bytes'])} adds to a jitted program, beside the read"
        lines.append(f"| {what} | <= 15 µs | {row['added_seconds'] * 1e6:.1f} µs |")
    for row in of["torn"]:
        what = (
            f"torn blocks, {row['way']}, of {row['whole'] + row['torn']:,} reads under {row['publishes']:,} publishes"
        )
        lines.append(f"| {what} ({row['stale']:,} refused) | 0 | {row['torn']} |")
    return lines


def plot(rows: list[dict[str, Any]]) -> str:
    """Time of a read over the size of the block, both logarithmic, as an SVG that stands by itself."""
    width, height, left, right, top, bottom = 720, 420, 70, 90, 20, 50
    x_span = [math.log2(f([row["block_bytes"] for row in rows])) for f in (min, max)]
    y_span = [math.floor(math.log10(min(row["seconds"] for row in rows))), 0]
    y_span[1] = math.ceil(math.log10(max(row["seconds"] for row in rows)))

    def x_of(size: float) -> float:
        return left + (math.log2(size) - x_span[0]) / (x_span[1] - x_span[0]) * (width - left - right)

    def y_of(seconds: float) -> float:
        return top + (y_span[1] - math.log10(seconds)) / (y_span[1] - y_span[0]) * (height - top - bottom)

    parts = [f'<rect width="{width}" height="{height}" fill="white"/>']
    for power in range(y_span[0], y_span[1] + 1):
        y = y_of(10.0**power)
        parts.append(f'<path d="M{left} {y:.1f}H{width - right}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**power * 1e6:g} µs</text>')
    for size in dict.fromkeys(row["block_bytes"] for row in rows):
        text = _size_text(size)
        parts.append(f'<text x="{x_of(size):.1f}" y="{height - bottom + 20}" text-anchor="middle">{text}</text>')
    ends = []
    for way in dict.fromkeys(row["way"] for row in rows):
        points = [(x_of(row["block_bytes"]), y_of(row["seconds"])) for row in rows if row["way"] == way]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{COLOURS[way]}" stroke-width="2"/>')
        ends.append((points[-1][1], way))
    y_text = 0.0
    for y, way in sorted(ends):  # names that would lie over each other move down
        y_text = max(y, y_text + 13)
        parts.append(f'<text x="{width - right + 8}" y="{y_text + 4:.1f}" fill="{COLOURS[way]}">{way}</text>')
    body = "".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="12">{body}</svg>\n'


if __name__ == "__main__":
    run(main)
