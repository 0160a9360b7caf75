"""One host of a pool over several processes, as tests/pool/test_hosts.py starts it: SCENARIO DEVICES DEADLINE_S."""

import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
scenario, devices, deadline_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])

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
from fef.ops.read_ledger import read_ledger
from fef.ops.release import release
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

        self.publish = jax.jit(publish)
        self.get = jax.jit(lambda published: programs.get_all(mesh, published, 1, ids, ELEMS))

    def step(self, number):
        blocks = self.get(self.publish(jnp.float32(number)))
        for shard in blocks.addressable_shards:
            assert (np.asarray(shard.data) == number).all(), "another step's block"


def read_for_ever(mesh, pool):
    blocks = Blocks(mesh, pool)
    for number in range(1, 100_000):
        blocks.step(number)
        if number >= 3:
            say("step", number)


def read_what_was_not_fetched_ahead(mesh, pool):
    """Reads without any collective, when it is told to: only the pool can notice what became of the others."""
    blocks = Blocks(mesh, pool)

    def let_go(version_M4):
        return release(version_M4[0], jnp.float32(0))[None]

    for number in (1, 2):  # nobody reads them, so the next is not fetched ahead
        version_M4, _ = blocks.publish(jnp.float32(number))
        time.sleep(0.3)
        jax.block_until_ready(jax.jit(island(mesh, let_go, (TOKENS,), TOKENS))(version_M4))
    published = blocks.publish(jnp.float32(3))
    jax.block_until_ready(published)
    get = blocks.get.lower(published).compile()  # now: a host that has died is not waited for while this compiles
    hosts.barrier("have published")
    say("published")
    sys.stdin.readline()
    jax.block_until_ready(get(published))
    say("read")


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
    mesh = fef.make_mesh(devices)
    with fef.Pool(mesh, config) as pool:
        say("open", pool.transport, *np.unique(process_allgather(np.int32(os.getpid()))))
        globals()[scenario](mesh, pool)


run(main)
