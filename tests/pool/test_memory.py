"""What holds the pool's blocks: folders that are refused, memory that is not there, and what a kill leaves."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pool_programs as programs
import pytest
from needs import needs_mounts

from fef.config import ConfigError, PoolConfig
from fef.native import build
from fef.pool import errors
from fef.pool.pool import Pool
from fef.pool.table import ExpertTable
from fef.sharding import make_mesh

TABLE = ExpertTable(3, 2)
TESTS = pathlib.Path(__file__).parents[1]
TIMEOUT_S = 120


def in_folder(folder):
    config = PoolConfig()
    config.memory = f"file:{folder}"
    return config


def mapped_files(folder):
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in maps if f" {folder}/" in line]


@pytest.fixture(scope="module")
def mesh():
    build.build()
    return make_mesh(2)


def test_a_pool_of_files_computes_the_same_and_its_files_have_no_names(mesh, tmp_path):
    rng = np.random.default_rng(0)
    w, x_MD = programs.random_blocks(rng, 2, TABLE, (8,)), rng.normal(size=(2, 8)).astype(np.float32)
    ids_LMn = np.array([[[0, 2], [1, 2]], [[0, -1], [2, 1]]])
    results = []
    for config in (PoolConfig(), in_folder(tmp_path)):
        with Pool(mesh, config) as pool:
            handle = pool.table("test", 2, TABLE, ((8,),), jnp.float32)
            loss = jax.jit(
                jax.value_and_grad(lambda w, handle=handle: programs.get_loss(mesh, handle, w, x_MD, ids_LMn, 3))
            )
            results.append(jax.device_get(loss(w)))
            files = mapped_files(tmp_path)
            assert len(files) == (3 if config.memory != "memfd" else 0)  # slots of both members, and the stages
            assert all(name.endswith(" (deleted)") for name in files)
            assert list(tmp_path.iterdir()) == []
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert mapped_files(tmp_path) == []


def test_folders_that_cannot_hold_the_blocks_are_refused(mesh, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("/")
    faults = {
        "file:": "must be memfd or file:FOLDER",
        "shm": "must be memfd or file:FOLDER",
        f"file:{tmp_path}/none": f"there is no folder {tmp_path}/none; make it on every host",
        f"file:{tmp_path}/file": f"there is no folder {tmp_path}/file; make it on every host",
        f"file:{tmp_path}/link": f"{tmp_path}/link is a symbolic link; give the folder itself, /",
    }
    for memory, fault in faults.items():
        config = PoolConfig()
        config.memory = memory
        with pytest.raises(ConfigError) as caught:
            Pool(mesh, config)
        assert str(caught.value) == f"config.pool.memory={memory!r}: {fault}"


def on_tmpfs(folder, options):
    """What runs a command with a file system of its own in place of the folder."""
    mount = f'mount -t tmpfs -o {options} none {folder} && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", mount, "sh"]


@needs_mounts
def test_a_folder_that_is_not_writable_is_refused(tmp_path):
    code = f"from fef.pool.memory import segment_folder; segment_folder('file:{tmp_path}')"
    done = subprocess.run(
        [*on_tmpfs(tmp_path, "ro"), sys.executable, "-c", code], cwd=TESTS.parent, capture_output=True, text=True,
        timeout=TIMEOUT_S,
    )  # fmt: skip
    assert f"{tmp_path} is not writable; give a folder that is" in done.stderr


def test_a_folder_that_is_replaced_by_a_link_is_not_followed(mesh, tmp_path):
    """Between the pool's opening and its first table."""
    folder = tmp_path / "folder"
    folder.mkdir()
    with Pool(mesh, in_folder(folder)) as pool:
        folder.rmdir()
        folder.symlink_to(tmp_path)
        with pytest.raises(
            errors.PoolExhaustedError, match=rf"cannot be made in {folder}: (Not a directory|Too many lev)"
        ):
            pool.table("test", 1, TABLE, ((8,),), jnp.float32)


PROGRAM = """
    import os, sys
    from fef import startup
    startup.prepare(num_devices=2)
    import jax, jax.numpy as jnp, numpy as np
    import pool_programs as programs
    import fef
    from fef.config import PoolConfig
    from fef.pool.table import ExpertTable

    config, mesh = PoolConfig(), fef.make_mesh(2)
    config.memory = sys.argv[1]

    def table(pool, name, elems):
        return pool.table(name, 1, ExpertTable(2, 2), ((elems,),), jnp.float32)

    def step(handle, elems):
        w = jnp.full((1, 2, elems), 3.0)
        publish = lambda: programs.publish_all(mesh, handle, (w,))
        read = jax.jit(lambda: programs.get_all(mesh, publish(), 0, [[1], [0]], elems))
        assert (np.asarray(read()) == 3).all()
"""


def start(code, memory, prefix=(), **kwargs):
    text = textwrap.dedent(PROGRAM) + textwrap.dedent(code)
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", text, memory], cwd=TESTS, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{TESTS.parent}"}, **kwargs,
    )  # fmt: skip


def finish(process):
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err
    return out


TOO_LARGE = """
    with fef.Pool(mesh, config) as pool:
        try:
            table(pool, "large", 1 << 20)
        except fef.PoolError as error:
            print(type(error).__name__, error, flush=True)
        step(table(pool, "small", 1000), 1000)
        print("alive", flush=True)
"""


@needs_mounts
def test_a_segment_larger_than_its_file_system_is_refused(tmp_path):
    """Case P-03: not by a bus error at the first write."""
    out = finish(start(TOO_LARGE, f"file:{tmp_path}", on_tmpfs(tmp_path, "size=300k")))
    refusal, alive = out.splitlines()
    wanted = f"PoolExhaustedError segment fef-large-g0-r0 in {tmp_path}: taking 4202496 bytes failed, "
    assert refusal.startswith(wanted) and " are free: No space left on device; use a smaller model" in refusal
    assert 0 < int(refusal.removeprefix(wanted).split()[0]) <= 300 << 10
    assert alive == "alive"


LITTLE_ROOM = """
    import resource

    with fef.Pool(mesh, config) as pool:
        step(table(pool, "small", 1000), 1000)
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
        try:
            table(pool, "large", 1 << 28)
        except fef.PoolError as error:
            print(type(error).__name__, error, flush=True)
        step(table(pool, "small", 1000), 1000)
        print("alive", flush=True)
"""


def test_a_limit_of_addresses_too_small_for_a_segment():
    out = finish(start(LITTLE_ROOM, "memfd"))
    refusal, alive = out.splitlines()
    assert refusal == (
        "PoolExhaustedError segment fef-large-g0-r0 of 17179877376 bytes cannot be mapped: Cannot allocate memory; "
        "raise the limit of addresses (ulimit -v)"
    )
    assert alive == "alive"


UNTIL_KILLED = """
    in_memory = PoolConfig()
    with fef.Pool(mesh, in_memory) as one, fef.Pool(mesh, config) as other:
        handles = [table(pool, "blocks", 100_000) for pool in (one, other)]
        for handle in handles:
            step(handle, 100_000)
        print("open", flush=True)
        while True:
            step(handles[0], 100_000)
"""


def test_a_kill_leaves_nothing(tmp_path):
    """Case P-03: neither in /dev/shm nor in the folder of a pool of files, five times; each time it starts again."""

    def left():
        return sorted(pathlib.Path("/dev/shm").iterdir()), list(tmp_path.iterdir())

    before = left()
    for _ in range(5):
        process = start(UNTIL_KILLED, f"file:{tmp_path}")
        try:
            assert process.stdout.readline() == "open\n", process.stderr.read()
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        assert left() == before
