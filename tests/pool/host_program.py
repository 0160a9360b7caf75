"""One host of a pool over several processes, as tests/pool/test_hosts.py starts it: SCENARIO DEVICES DEADLINE_S WORD.

The word is for some scenarios, which say what it is.
"""

import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
scenario, devices, deadline_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
word = sys.argv[4] if len(sys.argv) > 4 else ""

from fef import startup

startup.prepare(devices, deadline_s=deadline_s)

import jax
import jax.numpy as jnp
import numpy as np
import pool_programs as programs
from jax.experimental.multihost_utils import process_allgather

import fef
from experiments.flags import run
from fef import hosts
from fef.config import PoolConfig
from fef.ffn import SWIGLU
from fef.ops.fluid_ffn import Settings, fluid_ffn
from fef.ops.prefetch import prefetch
from fef.ops.read_ledger import read_ledger
from fef.ops.release import release
from fef.pool import errors
from fef.pool.table import ExpertTable
from fef.sharding import AXES, REPLICATED, TOKENS, island, named

ELEMS, LAYERS = 5000, 2


def say(*words):
    print(*words, flush=True)


class Blocks:
    """A table of one expert for each member, whose blocks hold the number of the step that published them."""

    def __init__(self, mesh, pool):
        members = mesh.shape["expert"]
        table = ExpertTable(members, members)
        handle = pool.table("blocks", LAYERS, table, ((ELEMS,),), jnp.float32)
        ids = jnp.tile(jnp.arange(members, dtype=jnp.int32), (mesh.size, 1))

        def publish(step):
            shape = (LAYERS, table.num_positions, ELEMS)
            return programs.publish_all(mesh, handle, (jnp.full(shape, step, jnp.float32),))

        def let_go(version_M4):
            return release(version_M4[0], jnp.float32(0))[None]

        self.publish = jax.jit(publish)
        self.release = jax.jit(island(mesh, let_go, (TOKENS,), TOKENS))
        self.get = jax.jit(lambda published: programs.get_all(mesh, published, 1, ids, ELEMS))

    def step(self, number):
        blocks = self.get(self.publish(jnp.float32(number)))
        for shard in blocks.addressable_shards:
            assert (np.asarray(shard.data) == number).all(), "another step's block"

    def publish_unread(self, number):
        """Publishes a version that nobody reads, so that the next one is not fetched ahead."""
        version_M4, chain_M = self.publish(jnp.float32(number))
        jax.block_until_ready(version_M4)
        hosts.barrier("have published what is not read")
        jax.block_until_ready(self.release(version_M4))
        hosts.barrier("have released it")
        return version_M4, chain_M

    def publish_what_is_not_fetched_ahead(self):
        """A version, the third, and the compiled program that reads it without any collective."""
        for number in (1, 2):
            self.publish_unread(number)
        published = self.publish(jnp.float32(3))
        jax.block_until_ready(published)
        get = self.get.lower(published).compile()  # now: a host that has died is not waited for while this compiles
        hosts.barrier("have published")
        return published, get


def read_for_ever(mesh, pool):
    blocks = Blocks(mesh, pool)
    for number in range(1, 100_000):
        blocks.step(number)
        if number >= 3:
            say("step", number)


def abort(mesh, pool):
    """Host 1 dies of a fault of its own, while the others need it."""
    if jax.process_index() == 1:
        os.abort()
    read_for_ever(mesh, pool)


def read_what_was_not_fetched_ahead(mesh, pool):
    """Reads without any collective, when it is told to: only the pool can notice what became of the others."""
    published, get = Blocks(mesh, pool).publish_what_is_not_fetched_ahead()
    say("published")
    sys.stdin.readline()
    jax.block_until_ready(get(published))
    say("read")


def send_rows(mesh, pool):
    """Two rows to each other member's expert, without any collective, when it is told to."""
    members, width = mesh.size, 16
    shapes, rows = ((width, 1), (width, 1), (1, width)), 2 * (members - 1)
    handle = pool.table("experts", 1, ExpertTable(members, members), shapes, jnp.float32)

    def send(version_M4, chain_M):
        is_sent_E = jnp.arange(members) != jax.lax.axis_index("expert")
        operands = jnp.ones((rows, width)), jnp.arange(rows, dtype=jnp.int32), jnp.ones(rows)
        counts = 2 * is_sent_E.astype(jnp.int32), is_sent_E.astype(jnp.int32)
        return fluid_ffn(version_M4[0], chain_M[0], jnp.int32(0), *operands, *counts, Settings(SWIGLU, 1, room=rows))

    arrays = tuple(np.ones((1, members, *shape), np.float32) for shape in shapes)
    published = jax.jit(lambda: programs.publish_all(mesh, handle, arrays, num_parts=3))()
    send = jax.jit(island(mesh, send, (TOKENS, TOKENS), TOKENS)).lower(*published).compile()
    jax.block_until_ready(published)
    hosts.barrier("have published")
    say("published")
    sys.stdin.readline()
    jax.block_until_ready(send(*published))
    say("sent")


def read_over_a_broken_link(mesh, pool):
    """In a lab: host 1's cable is pulled, then host 0 reads, then, if the word ends in "back", the cable comes back.

    The word is the path of a file, by whose neighbours the hosts know what has happened: they cannot speak.
    """
    published, get = Blocks(mesh, pool).publish_what_is_not_fetched_ahead()
    is_down, is_read = pathlib.Path(f"{word}.down"), pathlib.Path(f"{word}.read")
    if hosts.is_main():
        wait_for(is_down)
        threading.Timer(0.5, is_read.touch).start()
        jax.block_until_ready(get(published))
        say("read", "after" if is_read.exists() else "before", "the cable came back")
    else:
        set_cable("down")
        is_down.touch()
        wait_for(is_read)
        if not word.endswith("back"):
            time.sleep(600)
        set_cable("up")
    hosts.barrier("have read")


def wait_for(path):
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.01)


def set_cable(state):
    """Of this host, at its switch."""
    lab, number = re.fullmatch(r"(.*)-h(\d+)", socket.gethostname()).groups()
    subprocess.run(["ip", "-n", f"{lab}-fab", "link", "set", f"h{number}", state], check=True, timeout=10)


def read_an_old_version(mesh, pool):
    """Host 0 reads host 1's block under a version whose slot has been refilled, and under the last version."""
    blocks = Blocks(mesh, pool)
    versions = [blocks.publish_unread(number) for number in range(1, 9)]
    ids = np.ones((mesh.size, 1), np.int32)
    get = jax.jit(lambda published: programs.get_all(mesh, published, 1, ids, ELEMS)).lower(versions[0]).compile()
    before = pool.refused  # the other host may read as soon as it has passed the barrier
    hosts.barrier("have compiled")
    if hosts.is_main():
        try:
            jax.block_until_ready(get(versions[2]))
        except Exception as error:
            typed = errors.as_pool_error(error)
            say("error", type(typed).__name__, typed)
        (read,) = (np.asarray(shard.data) for shard in get(versions[-1]).addressable_shards)
        say("read", *np.unique(read))
    hosts.barrier("have read")
    say("refused", before, pool.refused)


def steps_of_a_job(mesh, pool):
    """The word is the job's number; its blocks hold nothing else than that number and the step's."""
    blocks = Blocks(mesh, pool)
    for number in range(1, 41):
        blocks.step(1000 * int(word) + number)
    say("done with job", word, "refused", pool.refused)


def prefetch_for_ever(mesh, pool):
    """5,000 hints under 50 versions of 4 MB of another host's blocks, which nobody reads; then a read."""
    members, elems = mesh.size, 1 << 19
    handle = pool.table("large", LAYERS, ExpertTable(members, members), ((elems,),), jnp.float32)
    ids_n = np.arange(members, dtype=np.int32)

    def hint(version_M4):
        def once(index, x):
            return prefetch(version_M4[0], index % LAYERS, jnp.asarray(ids_n), x)

        return release(version_M4[0], jax.lax.fori_loop(0, 100, once, jnp.float32(0)))[None]

    shape = (LAYERS, members, elems)
    publish = jax.jit(lambda number: programs.publish_all(mesh, handle, (jnp.full(shape, number),)))
    hint = jax.jit(island(mesh, hint, (TOKENS,), TOKENS))
    for number in range(50):
        version_M4, _ = publish(jnp.float32(number))
        jax.block_until_ready(hint(version_M4))
        if number == 9:
            start = resident_bytes()
    grown = resident_bytes() - start
    get = jax.jit(lambda published: programs.get_all(mesh, published, 1, np.tile(ids_n, (members, 1)), elems))
    read = get(publish(jnp.float32(7.5)))
    values = [np.unique(np.asarray(shard.data)).tolist() for shard in read.addressable_shards]
    hosts.barrier("have read")
    say("grown", grown, "read", values)


def resident_bytes():
    """Of this process alone, without what it maps of the pool."""
    return int(re.search(r"RssAnon:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) * 1024


def wait_in_a_collective(mesh, pool):
    """Host 0 waits in a collective that host 1 never enters."""
    Blocks(mesh, pool).step(1)
    everywhere = jax.jit(island(mesh, lambda: jax.lax.psum(jnp.ones(1), AXES), (), TOKENS))
    jax.block_until_ready(everywhere())
    say("waiting")
    if hosts.is_main():
        jax.block_until_ready(everywhere())
    time.sleep(600)


def leave_with_reads_pending(mesh, pool):
    """Nobody publishes the version that is read, and the program ends."""
    table = ExpertTable(mesh.size, mesh.size)
    number, incarnation = pool.table("blocks", 1, table, ((8,),), jnp.float32)
    version_M4 = jnp.tile(jnp.array([number, incarnation, 5, 0], jnp.int32), (mesh.size, 1))
    ids = jnp.tile(jnp.arange(mesh.size, dtype=jnp.int32), (mesh.size, 1))
    read = jax.jit(lambda version_M4: programs.get_all(mesh, (version_M4, jnp.zeros(mesh.size)), 0, ids, 8))(version_M4)
    assert not read.is_ready()
    say("pending")
    hosts.barrier("have left reads pending")
    sys.exit(0)


def count_bytes(mesh, pool):
    """Steps that move blocks of 1 MiB and gradients of the same size, and what the ledger says of this host."""
    elems, steps, members = 1 << 18, 20, mesh.size
    handle = pool.table("blocks", LAYERS, ExpertTable(members, members), ((elems,),), jnp.float32)
    ids = np.tile(np.arange(members, dtype=np.int32), (members, 1))

    def count(version_M4, after):
        return read_ledger(version_M4[0], after, LAYERS, members)[0][None]

    @jax.jit
    def step(w_LPD):
        def loss(w_LPD):
            published = programs.publish_all(mesh, handle, (w_LPD,))
            x_MD = jnp.ones((members, elems))
            for layer in range(LAYERS):
                x_MD = programs.get_layer(mesh, published, layer, x_MD, ids)
            return (x_MD**2).mean(), published[0]

        (_, version_M4), d_LPD = jax.value_and_grad(loss, has_aux=True)(w_LPD)
        after = jnp.sum(d_LPD)
        return island(mesh, count, (TOKENS, REPLICATED), TOKENS)(version_M4, after)

    w_LPD = jax.jit(lambda: jnp.ones((LAYERS, members, elems)), out_shardings=named(mesh, programs.LAYERS_FIRST))()
    moved_Q = sum(step(w_LPD).addressable_data(0)[0].sum((0, 2)) for _ in range(steps))
    hosts.barrier("have moved all")
    say("moved", *moved_Q)


def main(argv):
    config = PoolConfig()
    config.deadline_s = deadline_s
    config.slots = 2 if scenario == "read_an_old_version" else config.slots
    mesh = fef.make_mesh(devices)
    with fef.Pool(mesh, config) as pool:
        say("open", pool.transport, *np.unique(process_allgather(np.int32(os.getpid()))))
        globals()[scenario](mesh, pool)


run(main)
