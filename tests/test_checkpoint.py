"""Checkpoints: what is saved is what comes back, on any device count, or a refusal that names the culprit."""

import contextlib
import json
import pathlib
import random
import re
import resource
import shutil
import subprocess
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fef import digest
from fef.checkpoint import Checkpointer, logical_template, to_logical, to_physical
from fef.config import UserError

SMALL = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "count": 7}


def expert_mesh(num_members):
    return jax.sharding.Mesh(np.array(jax.devices()[:num_members]), ("expert",))


def is_expert(path):
    return "w_in_EDF" in jax.tree_util.keystr(path)


def optimizer():
    return optax.adamw(optax.linear_schedule(0.0, 1.0, 20))


def tagged_state(num_experts):
    """Expert e is filled with e, its first moment with 10e; the schedule has counted 7 steps."""
    tag_E11 = np.arange(num_experts, dtype=np.float32)[:, None, None]
    params = {
        "moe": {"w_in_EDF": jnp.asarray(np.broadcast_to(tag_E11, (num_experts, 4, 3))), "router": jnp.ones((4, 5))},
        "router_bias": jnp.linspace(0, 1, 5),
    }
    opt_state = optimizer().init(params)
    adam, decay, schedule = opt_state
    adam = adam._replace(count=adam.count + 7, mu=jax.tree.map(lambda p: jnp.asarray(10 * np.asarray(p)), params))
    opt_state = (adam, decay, schedule._replace(count=schedule.count + 7))
    return {"params": params, "opt_state": opt_state, "key": jax.random.key(5), "step": 7}


def placed(state, num_members, num_experts):
    """The state as a program on `num_members` devices holds it: experts padded to P positions and sharded over them."""
    mesh = expert_mesh(num_members)
    num_positions = num_members * -(-num_experts // num_members)
    state = to_physical(state, is_expert, np.arange(num_experts), num_positions)

    def place(path, leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        spec = jax.sharding.PartitionSpec("expert") if is_expert(path) else jax.sharding.PartitionSpec()
        return jax.device_put(leaf, jax.sharding.NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(place, state)


def abstract(tree):
    def template(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    return jax.tree.map(template, tree)


def host(leaf):
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def assert_same(actual, expected):
    def compare(path, a, b):
        np.testing.assert_array_equal(host(a), host(b), err_msg=jax.tree_util.keystr(path), strict=True)

    jax.tree_util.tree_map_with_path(compare, actual, expected)


@pytest.mark.parametrize("num_experts, members", [(8, (8, 4, 2, 1, 8)), (6, (4, 1, 2, 4))])
def test_experts_come_back_on_another_device_count(tmp_path, num_experts, members):
    table_E = np.arange(num_experts)
    state = tagged_state(num_experts)
    extra = {"data": {"batches": 7}, "config": {"model.d_model": 4, "optim.clip_norm": None}}
    with Checkpointer(tmp_path, keep=len(members), keep_best=0) as checkpointer:
        checkpointer.save(0, to_logical(placed(state, members[0], num_experts), is_expert, table_E), extra)
        for step, num_members in enumerate(members[1:]):
            target = placed(state, num_members, num_experts)
            template = logical_template(abstract(target), is_expert, num_experts)
            logical, read_extra = checkpointer.restore(step, template)
            num_positions = target["params"]["moe"]["w_in_EDF"].shape[0]
            restored = to_physical(logical, is_expert, table_E, num_positions)
            assert read_extra == extra
            assert_same(logical, state)
            assert_same(restored, target)
            for leaf in jax.tree.leaves(logical):
                assert not isinstance(leaf, jax.Array) or leaf.sharding.device_set <= set(jax.devices()[:num_members])
            checkpointer.save(step + 1, to_logical(restored, is_expert, table_E), extra)
    # The resumed schedule and moments give the update of an uninterrupted run.
    update = jax.jit(lambda params, opt_state: optimizer().update(params, opt_state, params)[0])
    original, resumed = (jax.tree.map(host, (tree["params"], tree["opt_state"])) for tree in (state, logical))
    assert_same(update(*resumed), update(*original))


def test_listing_needs_no_devices(tmp_path):
    with Checkpointer(tmp_path, keep=1, keep_best=0) as checkpointer:
        checkpointer.save(3, placed(tagged_state(8), 8, 8), {"note": "x"})
    listing = Checkpointer(tmp_path, keep=1, keep_best=0)
    assert listing.leaves(3)["opt_state.0.mu.moe.w_in_EDF"] == ((8, 4, 3), "float32")
    assert listing.leaves(3)["params.moe.w_in_EDF"] == ((8, 4, 3), "float32")
    assert listing.extra(3) == {"note": "x"}


def test_sharding_of_restored_experts_follows_the_template(tmp_path):
    target = placed(tagged_state(8), 4, 8)
    with Checkpointer(tmp_path, keep=1, keep_best=0) as checkpointer:
        checkpointer.save(1, target, {})
        restored, _ = checkpointer.restore(1, abstract(target))
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(target), strict=True):
        assert not isinstance(wanted, jax.Array) or leaf.sharding.is_equivalent_to(wanted.sharding, wanted.ndim)


@pytest.mark.parametrize("axis", [0, 1])
def test_shuffled_table_moves_weights_and_moments(axis):
    table_E = np.array([7, 0, 2, 5, 1, 4])
    leaf = np.moveaxis(np.arange(1, 13, dtype=np.float32).reshape(6, 2), 0, axis)
    tree = {"params": {"w_in_EDF": jnp.asarray(leaf)}, "mu": {"w_in_EDF": jnp.asarray(10 * leaf)}, "bias": jnp.ones(6)}
    physical = jax.jit(lambda tree: to_physical(tree, is_expert, table_E, 8, axis))(tree)
    for scale, part in ((1, "params"), (10, "mu")):
        positions = np.moveaxis(np.asarray(physical[part]["w_in_EDF"]), axis, 0)
        np.testing.assert_array_equal(positions[table_E], scale * np.moveaxis(leaf, axis, 0))
        assert positions.shape == (8, 2) and not positions[[3, 6]].any()
    np.testing.assert_array_equal(physical["bias"], tree["bias"])
    assert_same(jax.jit(lambda tree: to_logical(tree, is_expert, table_E, axis))(physical), tree)


def test_tables_that_do_not_fit_are_refused():
    tree = {"w_in_EDF": jnp.ones((6, 2))}
    with pytest.raises(ValueError, match="w_in_EDF has 6 positions; the table needs 8"):
        to_logical(tree, is_expert, np.arange(8))
    with pytest.raises(ValueError, match="w_in_EDF has 6 experts; the table has 8"):
        to_physical(tree, is_expert, np.arange(8), 8)


def test_every_kind_of_leaf_keeps_type_and_value(tmp_path):
    state = {
        "bfloat16": jnp.arange(3, dtype=jnp.bfloat16),
        "int8": jnp.arange(3, dtype=jnp.int8),
        "keys": jax.random.split(jax.random.key(1), 3),
        "rbg_key": jax.random.key(1, impl="rbg"),
        "raw_key": jax.random.PRNGKey(1),
        "numpy": np.arange(2**40, 2**40 + 3),
        "numpy_bfloat16": np.ones(2, jnp.bfloat16),
        "int": 2**40,
        "float": 0.1,
        "bool": True,
        "none": None,
    }
    with Checkpointer(tmp_path, keep=1, keep_best=0) as checkpointer:
        checkpointer.save(1, state, {})
        restored, _ = checkpointer.restore(1, abstract(state))
    assert_same(restored, state)
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert type(leaf) is type(wanted)


def test_a_leaf_that_is_no_array_is_refused_by_name(tmp_path):
    with Checkpointer(tmp_path, keep=1, keep_best=0) as checkpointer:
        with pytest.raises(TypeError, match=re.escape("leaf 'a.b' is a str")):
            checkpointer.save(1, {"a": {"b": "text"}}, {})


def test_donated_and_changed_arrays_are_saved_as_they_were(tmp_path):
    device, host_array = jnp.arange(1 << 18, dtype=jnp.float32), np.zeros(4)
    template = {"device": abstract(device), "host": host_array}
    expected = {"device": np.asarray(device).copy(), "host": host_array.copy()}
    with Checkpointer(tmp_path, keep=1, keep_best=0) as checkpointer:
        checkpointer.save(1, {"device": device, "host": host_array}, {})
        jax.jit(lambda x: -x, donate_argnums=0)(device).block_until_ready()
        host_array[:] = 9
        del device
        restored, _ = checkpointer.restore(1, template)
    assert_same(jax.tree.map(np.asarray, restored), expected)


@pytest.mark.parametrize(
    "template, message",
    [
        (
            {"w": jax.ShapeDtypeStruct((3, 4), jnp.bfloat16), "count": 0},
            "w is float32[3,4] there, expected bfloat16[3,4]",
        ),
        (
            {"w": jax.ShapeDtypeStruct((4, 3), jnp.float32), "count": 0},
            "w is float32[3,4] there, expected float32[4,3]",
        ),
        ({"w": SMALL["w"], "count": 0.5}, "count is int64[] there, expected float64[]"),
        ({"w": SMALL["w"], "count": 0, "bias": 0}, "bias is missing there"),
        ({"w": SMALL["w"]}, "count is there but not expected"),
    ],
)
def test_another_dtype_shape_or_tree_is_refused(tmp_path, template, message):
    with Checkpointer(tmp_path, keep=1, keep_best=0) as checkpointer:
        checkpointer.save(1, SMALL, {})
        with pytest.raises(UserError, match=re.escape(message)):
            checkpointer.restore(1, template)


def test_newest_and_best_are_kept(tmp_path):
    metrics = [3.0, 1.0, 2.0, None, float("nan"), 5.0, 1.0]
    left = []
    with Checkpointer(tmp_path, keep=2, keep_best=1) as checkpointer:
        for step, metric in enumerate(metrics):
            checkpointer.save(step, SMALL, {}, metric)
            checkpointer.close()
            left.append(checkpointer.steps())
    assert left == [[0], [0, 1], [1, 2], [1, 2, 3], [1, 3, 4], [1, 4, 5], [5, 6]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["5", "6"]


def test_keep_counts_are_checked(tmp_path):
    with pytest.raises(ValueError, match="keep=0"):
        Checkpointer(tmp_path, keep=0, keep_best=0)


def test_extra_must_be_strict_json(tmp_path):
    with Checkpointer(tmp_path, keep=1, keep_best=0) as checkpointer:
        with pytest.raises(ValueError, match="JSON"):
            checkpointer.save(1, SMALL, {"loss": float("nan")})


@pytest.fixture
def gate(monkeypatch):
    """Stops the background thread before it commits, until `opened` is set."""
    events = types.SimpleNamespace(reached=threading.Event(), opened=threading.Event())
    seal = digest.seal

    def wait_and_seal(folder):
        events.reached.set()
        events.opened.wait(60)
        seal(folder)

    monkeypatch.setattr(digest, "seal", wait_and_seal)
    yield events
    events.opened.set()


def test_saved_is_said_only_after_the_commit(tmp_path, gate):
    with Checkpointer(tmp_path, keep=2, keep_best=0) as checkpointer:
        checkpointer.save(1, SMALL, {})
        assert checkpointer.poll() == [] and checkpointer.steps() == [] and checkpointer.latest()[0] is None
        gate.opened.set()
        checkpointer.save(2, SMALL, {})  # waits for the first: one save in flight
        assert (tmp_path / "1").is_dir()
        assert checkpointer.close() == [1, 2]
        assert checkpointer.poll() == []


def test_a_save_that_hangs_is_named(tmp_path, gate):
    checkpointer = Checkpointer(tmp_path, keep=1, keep_best=0, deadline_s=0.2)
    checkpointer.save(1, SMALL, {})
    with pytest.raises(UserError, match=re.escape(f"{tmp_path / '1'} was not finished within 0.2 s")):
        checkpointer.close()


@pytest.mark.parametrize("call", ["poll", "save", "close"])
def test_a_background_failure_surfaces_once(tmp_path, monkeypatch, capfd, call):
    def broken(folder):
        raise ZeroDivisionError("bug")

    with Checkpointer(tmp_path, keep=2, keep_best=0) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(digest, "seal", broken)
            checkpointer.save(1, SMALL, {})
            with pytest.raises(RuntimeError, match=re.escape(f"checkpoint {tmp_path / '1'} was not saved: bug")):
                while call == "poll":
                    checkpointer.poll()
                checkpointer.save(2, SMALL, {}) if call == "save" else checkpointer.close()
        assert checkpointer.latest() == (
            None,
            [f"skipped {tmp_path}/1.orbax-checkpoint-tmp: not a complete checkpoint"],
        )
        checkpointer.save(1, SMALL, {})
    assert checkpointer.latest() == (1, [])
    assert capfd.readouterr() == ("", "")


def test_what_ended_the_program_comes_before_a_failed_save(tmp_path, monkeypatch):
    monkeypatch.setattr(digest, "seal", lambda folder: 1 / 0)
    with pytest.raises(KeyError) as caught, Checkpointer(tmp_path, keep=1, keep_best=0) as checkpointer:
        checkpointer.save(1, SMALL, {})
        raise KeyError("the cause")
    assert "was not saved" in caught.value.__notes__[0]


def test_unfinished_saves_are_skipped_named_and_replaced(tmp_path):
    with Checkpointer(tmp_path, keep=9, keep_best=0) as checkpointer:
        checkpointer.save(20, SMALL, {})
    (tmp_path / "30.orbax-checkpoint-tmp-0").mkdir()
    (tmp_path / "40").mkdir()
    (tmp_path / "50").mkdir()
    (tmp_path / "50" / "stray").write_text("x")
    (tmp_path / "60").write_text("a file")
    (tmp_path / "notes.txt").write_text("kept")
    with Checkpointer(tmp_path, keep=9, keep_best=0) as checkpointer:
        step, notices = checkpointer.latest()
        assert step == 20
        assert [notice.split("/")[-1] for notice in notices] == [
            f"{name}: not a complete checkpoint" for name in ("30.orbax-checkpoint-tmp-0", "40", "50", "60")
        ]
        for step in (30, 40, 50, 60):
            checkpointer.save(step, SMALL, {"step": step})
        checkpointer.close()
        assert checkpointer.latest() == (60, [])
        assert checkpointer.steps() == [20, 30, 40, 50, 60]
        assert_same(checkpointer.restore(40, SMALL)[0], SMALL)
    assert (tmp_path / "notes.txt").read_text() == "kept"


def test_a_complete_step_is_not_overwritten(tmp_path):
    with Checkpointer(tmp_path, keep=1, keep_best=0) as checkpointer:
        checkpointer.save(1, SMALL, {})
        with pytest.raises(ValueError, match="step 1 is already saved"):
            checkpointer.save(1, SMALL, {})


def test_steps_that_are_not_there(tmp_path):
    with Checkpointer(tmp_path, keep=1, keep_best=0) as checkpointer:
        assert checkpointer.latest() == (None, [])
        with pytest.raises(UserError, match=re.escape(f"{tmp_path / '5'} is not a complete checkpoint")):
            checkpointer.restore(5, SMALL)


KILL_LOOP = """
import os, pathlib, random, select, signal, sys, time, warnings
warnings.filterwarnings("ignore", message="os.fork")  # no JAX backend runs before the fork
import numpy as np
from fef.checkpoint import Checkpointer

def write_for_ever(directory, report):
    with Checkpointer(directory, keep=2, keep_best=0) as checkpointer:
        step, notices = checkpointer.latest()
        if step is not None:
            state, extra = checkpointer.restore(step, {"w": np.zeros(50_000), "step": 0})
            assert (state["w"] == step).all() and state["step"] == extra["step"] == step, (step, state, extra)
        os.write(report, f"start {step or 0} {len(notices)}\\n".encode())
        while True:
            step = (step or 0) + 1
            checkpointer.save(step, {"w": np.full(50_000, float(step)), "step": step}, {"step": step})
            for saved in checkpointer.poll():
                os.write(report, f"saved {saved}\\n".encode())

directory, rng, promised, interrupted = sys.argv[1], random.Random(0), 0, 0
for _ in range(10):
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            write_for_ever(directory, write_end)
        finally:
            os._exit(1)
    os.close(write_end)
    with os.fdopen(read_end) as report:
        assert select.select([report], [], [], 60)[0], "the writer does not start"
        word, step, unfinished = report.readline().split()
        assert word == "start" and int(step) >= promised, (word, step, promised)
        interrupted += int(unfinished)
        time.sleep(rng.uniform(0.0, 0.5))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        promised = max([promised, *(int(line.split()[1]) for line in report if line.endswith("\\n"))])

with Checkpointer(directory, keep=2, keep_best=0) as checkpointer:
    step, _ = checkpointer.latest()
    assert step >= promised, (step, promised)
    state, _ = checkpointer.restore(step, {"w": np.zeros(50_000), "step": 0})
    assert (state["w"] == step).all()
    checkpointer.save(step + 1, state, {})
    print(interrupted, step + 1)
"""


def test_killed_at_random_moments_and_ending_right_after_a_save(tmp_path):
    command = [sys.executable, "-c", KILL_LOOP, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    interrupted, last = map(int, done.stdout.split())
    assert interrupted >= 1 and last > 1
    assert Checkpointer(tmp_path, keep=2, keep_best=0).latest() == (last, [])


def test_a_file_instead_of_the_folder(tmp_path, gate):
    folder = tmp_path / "checkpoints"
    folder.write_text("")
    with pytest.raises(UserError, match=f"cannot create the folder {re.escape(str(folder))}: File exists"):
        Checkpointer(folder, keep=1, keep_best=0)
    folder.unlink()
    checkpointer = Checkpointer(folder, keep=1, keep_best=0)
    checkpointer.save(1, SMALL, {})
    assert gate.reached.wait(60)
    shutil.rmtree(folder)
    folder.write_text("")
    gate.opened.set()
    with pytest.raises(UserError, match=f"checkpoint {re.escape(str(folder / '1'))} was not saved: Not a directory"):
        checkpointer.close()  # the failing save is the last one
    with pytest.raises(UserError, match=f"{re.escape(str(folder))}.*Not a directory"):
        checkpointer.save(2, SMALL, {})


BIG = {"w": np.random.default_rng(0).standard_normal((400, 250))}


def assert_last_save_fails(folder, cause, capfd):
    checkpointer = Checkpointer(folder, keep=1, keep_best=0)
    with pytest.raises(UserError, match=f"checkpoint {re.escape(str(folder / '2'))} was not saved: {cause}") as caught:
        checkpointer.save(2, BIG, {})
        checkpointer.close()
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_file_that_may_not_grow(tmp_path, capfd):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        assert_last_save_fails(tmp_path, "File too large", capfd)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with Checkpointer(tmp_path, keep=1, keep_best=0) as checkpointer:
        checkpointer.save(2, BIG, {})
    assert checkpointer.steps() == [2]


@contextlib.contextmanager
def mounted_tmpfs(folder, options):
    mount = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(
    "options, cause", [("size=300k", "No space left on device"), ("size=300k,ro", "Read-only file system")]
)
def test_a_full_or_read_only_disk(tmp_path, capfd, options, cause):
    with mounted_tmpfs(tmp_path, options):
        assert_last_save_fails(tmp_path, cause, capfd)


def flip_bit(path: pathlib.Path, rng: random.Random):
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def test_one_flipped_bit_is_refused(tmp_path):
    state = {"w": jax.random.normal(jax.random.key(0), (64, 64))}
    rng = random.Random(0)
    with Checkpointer(tmp_path, keep=2, keep_best=0) as checkpointer:
        checkpointer.save(1, state, {"data": [1, 2, 3]})
        checkpointer.close()
        names = [line.split("  ")[1] for line in (tmp_path / "1" / digest.SUMS).read_text().splitlines()[1:]]
        largest = max(names, key=lambda name: (tmp_path / "1" / name).stat().st_size)
        assert (tmp_path / "1" / largest).stat().st_size >= 64 * 64 * 4 and "fef.json" in names
        for name in [largest] * 15 + [rng.choice(names) for _ in range(15)] + [digest.SUMS] * 15:
            path = tmp_path / "1" / name
            good = path.read_bytes()
            flip_bit(path, rng)
            named = re.escape(str(path)) if name != digest.SUMS else re.escape(str(tmp_path / "1"))
            with pytest.raises(UserError, match=f"damaged checkpoint: {named}.*delete .* to start over"):
                checkpointer.restore(1, state)
            path.write_bytes(good)
        assert_same(checkpointer.restore(1, state)[0], state)


def test_missing_and_cut_files_are_refused(tmp_path):
    with Checkpointer(tmp_path, keep=2, keep_best=0) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, SMALL, {})
        checkpointer.close()
        sums = tmp_path / "2" / digest.SUMS
        good = sums.read_text()
        sums.write_text("".join(good.splitlines(keepends=True)[:-1]))
        with pytest.raises(UserError, match="SHA256SUMS is not complete"):
            checkpointer.restore(2, SMALL)
        sums.write_text(good)
        (tmp_path / "2" / "fef.json").unlink()
        with pytest.raises(UserError, match="fef.json is missing; delete .* to go on from step 1"):
            checkpointer.restore(2, SMALL)
        assert_same(checkpointer.restore(1, SMALL)[0], SMALL)


def test_a_damaged_old_checkpoint_does_not_stop_the_run(tmp_path):
    with Checkpointer(tmp_path, keep=1, keep_best=1) as checkpointer:
        checkpointer.save(1, SMALL, {}, metric=1.0)
        checkpointer.close()
        (tmp_path / "1" / "fef.json").write_text("{")
        checkpointer.save(2, SMALL, {}, metric=2.0)
        checkpointer.close()
        assert checkpointer.steps() == [2]


def test_the_digests_are_those_of_sha256sum(tmp_path):
    with Checkpointer(tmp_path, keep=1, keep_best=0) as checkpointer:
        checkpointer.save(1, SMALL, {"a": 1}, metric=0.5)
    done = subprocess.run(["sha256sum", "--check", digest.SUMS], cwd=tmp_path / "1", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "1" / "fef.json").read_text())
    assert record["step"] == 1 and record["metric"] == 0.5 and record["extra"] == {"a": 1}
