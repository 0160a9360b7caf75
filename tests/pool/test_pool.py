"""The pool's lifetime: tables, memory, what the end of a block and of a process does to work that is pending."""

import pathlib
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pool_programs as programs
import pytest

from fef.config import ConfigError, PoolConfig
from fef.native import build
from fef.pool import errors
from fef.pool import pool as pools
from fef.pool.pool import Pool
from fef.pool.table import ExpertTable
from fef.sharding import make_mesh

TABLE = ExpertTable(3, 2)
W = np.arange(2 * 4 * 8, dtype=np.float32).reshape(2, 4, 8)


@pytest.fixture(scope="module")
def mesh():
    build.build()
    return make_mesh(2)


def segments():
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return sorted(line.split(maxsplit=5)[5] for line in maps if "memfd:fef-" in line)


def table(pool, name="test", elems=8, layers=2):
    return pool.table(name, layers, TABLE, ((elems,),), jnp.float32)


def test_memory_is_mapped_for_a_table_and_freed_at_the_end(mesh):
    before = segments(), sorted(pathlib.Path("/dev/shm").iterdir())
    with Pool(mesh) as pool:
        handle = table(pool)
        parts = ("r0", "r1", "stages")
        assert segments() == [*before[0], *(f"/memfd:fef-test-g0-{part} (deleted)" for part in parts)]
        jax.block_until_ready(programs.publish_all(mesh, handle, (W,)))
        assert sorted(pathlib.Path("/dev/shm").iterdir()) == before[1]
    assert segments() == before[0]
    pool.close()  # a second time


def test_a_segment_for_each_member_and_group():
    with Pool(make_mesh(8, data=2)) as pool:
        pool.table("moe", 1, ExpertTable(3, 4), ((8,),), jnp.float32)
        parts = ("r0", "r1", "r2", "r3", "stages")  # of each member its slots, of the host the gradients on their way
        assert segments() == [f"/memfd:fef-moe-g{group}-{part} (deleted)" for group in range(2) for part in parts]


def test_tables_are_made_once(mesh):
    with Pool(mesh) as pool:
        first = table(pool)
        assert first.dtype == np.int32 and first.tolist() == [0, pool.incarnation]
        assert table(pool).tolist() == first.tolist()
        others = [table(pool, name="b"), table(pool, elems=9), table(pool, layers=3)]
        others.append(pool.table("test", 2, TABLE, ((8,),), jnp.bfloat16))
        assert [handle[0] for handle in others] == [1, 2, 3, 4]


def test_experts_of_another_mesh(mesh):
    with Pool(mesh) as pool, pytest.raises(ValueError, match="have 4 members as homes, the pool's mesh has 2"):
        pool.table("test", 1, ExpertTable(4, 4), ((8,),), jnp.float32)


def test_memory_that_is_not_there(mesh):
    """A terabyte is refused at once, before any of it is filled, and leaves nothing behind."""
    with Pool(mesh) as pool:
        with pytest.raises(errors.PoolExhaustedError) as caught:
            table(pool, name="huge", elems=2**38 // (2 * 2), layers=2)
        text = str(caught.value)
        assert text.startswith("segment fef-huge-g0-r0: taking 10995116")
        assert " are free: Cannot allocate memory; use a smaller model or release() versions" in text
        assert segments() == []
        assert table(pool).tolist() == [0, pool.incarnation]


def test_table_of_a_closed_pool(mesh):
    with Pool(mesh) as pool:
        pass
    with pytest.raises(errors.PoolClosedError, match="table test: the pool was closed"):
        table(pool)


def test_current_is_the_innermost(mesh):
    with pytest.raises(errors.PoolClosedError, match="run this inside `with fef.Pool.mesh. as pool:`"):
        pools.current()
    with Pool(mesh) as outer:
        with Pool(mesh) as inner:
            assert pools.current() is inner and inner.incarnation != outer.incarnation
        assert pools.current() is outer
    with pytest.raises(errors.PoolClosedError):
        pools.current()


def test_the_end_of_the_block_waits_for_programs(mesh, monkeypatch):
    """Results may be looked at afterwards."""
    monkeypatch.setenv("FEF_CHAOS", "1")
    x_MD, ids_LMn, scales = W[0, :2], np.zeros((2, 2, 1), np.int32), (1e-3, 2e-3, 3e-3)
    grad = jax.jit(jax.grad(lambda w, handle: programs.get_loss(mesh, handle, w, x_MD, ids_LMn)))
    with Pool(mesh) as pool:
        grads = [grad(W * scale, table(pool)) for scale in scales]
    wanted = jax.jit(jax.grad(lambda w: programs.reference_get_loss(TABLE, w, x_MD, ids_LMn)))
    for scale, got in zip(scales, grads, strict=True):
        programs.assert_close(got, wanted(W * scale))


@pytest.mark.parametrize("wait", ["array", "tree"])
def test_errors_leave_the_block_typed(mesh, wait):
    config = PoolConfig()
    config.deadline_s = 0.1
    with pytest.raises(errors.PoolTimeoutError, match="get: table test, version .*,77.: rank 0,1 has not published it"):
        with Pool(mesh, config) as pool:
            version_M4, chain_M = programs.publish_all(mesh, table(pool), (W,))
            blocks = programs.get_all(mesh, (version_M4.at[:, 2].set(77), chain_M), 0, [[0], [0]], 8)
            jax.block_until_ready({"blocks": blocks}) if wait == "tree" else blocks.block_until_ready()


def test_other_errors_leave_the_block_as_they_are(mesh):
    with pytest.raises(KeyError, match="mine"), Pool(mesh):
        raise KeyError("mine")
    assert segments() == []


@pytest.mark.parametrize(
    ("variable", "value"), [("FEF_TRANSPORT", "pigeon"), ("FEF_CHAOS", "often"), ("FEF_CHAOS", "-3")]
)
def test_bad_environment(mesh, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=value) as caught:
        Pool(mesh)
    assert len(str(caught.value).splitlines()) == 1
    if variable == "FEF_TRANSPORT":
        assert isinstance(caught.value, ConfigError) and "must be one of auto, local, mmap, tcp" in str(caught.value)


def test_relay_between_hosts_of_one_process(mesh, monkeypatch):
    config = PoolConfig()
    config.relay = "on"
    with pytest.raises(
        ConfigError, match=r"config.pool.relay='on': relays between hosts, and the job is one process; use"
    ):
        Pool(mesh, config)
    config.relay = "auto"
    monkeypatch.setenv("FEF_LEAF", "a")
    with Pool(mesh, config) as pool:
        assert (pool.relay, pool.leaf_of_host) == (False, [])


def test_transport_is_recorded(mesh, monkeypatch):
    for name in ("auto", "local"):
        monkeypatch.setenv("FEF_TRANSPORT", name)
        with Pool(mesh) as pool:
            assert pool.transport == "local"


EXIT = """
    from fef import startup
    startup.prepare(num_devices=2)
    import jax, jax.numpy as jnp, numpy as np
    import pool_programs as programs
    from fef.config import PoolConfig
    from fef.pool.pool import Pool
    from fef.pool.table import ExpertTable
    from fef.sharding import make_mesh

    config, mesh = PoolConfig(), make_mesh(2)
    config.deadline_s = 60.0
    pool = Pool(mesh, config)
    table, incarnation = pool.table("test", 1, ExpertTable(2, 2), ((8,),), jnp.float32)
    version_M4 = np.array([[table, incarnation, 5, 0]] * 2, np.int32)
    read = jax.jit(lambda chain_M: programs.get_all(mesh, (version_M4, chain_M), 0, [[0], [1]], 8))
    blocks = read(jnp.zeros(2))
    behind = jax.jit(lambda: programs.publish_all(mesh, [table, incarnation], (np.zeros((1, 2, 8), np.float32),)))()
    assert not blocks.is_ready() and not behind[0].is_ready()
    print("pending", flush=True)
"""


def test_exit_with_work_pending():
    """Case P-02's second half: a wait for a version that nobody publishes does not keep the interpreter.

    Behind it waits a program that publishes. Such programs are waited for, but not for long.
    """
    tests = pathlib.Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(EXIT)], cwd=tests, capture_output=True, text=True, timeout=50
    )
    assert (done.returncode, done.stdout) == (0, "pending\n"), done.stderr


HANDLED = """
    from fef import startup
    startup.prepare(num_devices=2)
    import jax, numpy as np
    import pool_programs as programs
    import fef

    mesh = fef.make_mesh(2)
    try:
        with fef.Pool(mesh) as pool:
            handle = [1234, pool.incarnation]
            jax.block_until_ready(jax.jit(lambda: programs.publish_all(mesh, handle, (np.zeros((1, 2, 8), "f"),)))())
    except fef.PoolError:
        print("handled", flush=True)
"""


def test_an_error_that_was_handled_is_not_told_again_at_exit():
    tests = pathlib.Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(HANDLED)], cwd=tests, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "handled\n", "")
