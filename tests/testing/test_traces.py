import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fef.config import UserError
from fef.routing import Assignment, RouterContext
from fef.routing.expert_choice import ExpertChoice
from fef.routing.top_k import TopK
from fef.testing.traces import ARRAYS, Trace, TraceHeader, TraceWriter, replay_assignment

B, S, E, K, L = 4, 6, 5, 2, 3
HEADER = TraceHeader(router="top_k", num_layers=L, batch_size=B, seq_len=S, num_experts=E, num_choices=K)
MASK = np.arange(S) < np.array([[6], [3], [0], [5]])


X_BSD = np.random.default_rng(0).normal(size=(B, S, 8)).astype(np.float32)


def gate(seed):
    return {"gate_DE": np.random.default_rng([1, seed]).normal(size=(8, E)).astype(np.float32)}


def route_with(params, router, x_BSD, mask_BS):
    zero = jnp.int32(0)
    ctx = RouterContext(mask_BS, zero, zero, zero, jax.random.key(0), True, {}, lambda tree: tree)
    return router(params, x_BSD, ctx)[0]


_compiled = jax.jit(route_with, static_argnums=1)


def route(router, seed, rows=slice(None)):
    """The router's assignment of some rows of a fixed batch, with parameters drawn from the seed."""
    return _compiled(gate(seed), router, X_BSD[rows], MASK[rows])


def arrays(assignments):
    """Stacked (L, N) arrays of one assignment per layer."""
    return {name: np.stack([getattr(a, name) for a in assignments]) for name in ARRAYS}


def record(path, steps=3, header=HEADER, first_step=0, shift=0):
    with TraceWriter(path, header, first_step) as writer:
        for step in range(first_step, steps):
            writer.append(step, synthetic(step + shift))


def synthetic(step):
    random = np.random.default_rng(step)
    return {
        "token_N": np.tile(np.repeat(np.arange(B * S), K), (L, 1)),
        "expert_N": random.integers(0, E, (L, B * S * K)),
        "weight_N": random.random((L, B * S * K), np.float32),
        "valid_N": random.random((L, B * S * K)) < 0.8,
    }


def assert_steps(path, expected):
    trace = Trace(path, HEADER)
    assert trace.steps == sorted(expected)
    for step, seed in expected.items():
        jax.tree.map(np.testing.assert_array_equal, trace.step(step), synthetic(seed))


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "runs" / "trace.npz"
    record(path)
    assert_steps(path, {0: 0, 1: 1, 2: 2})
    assert [file.name for file in path.parent.iterdir()] == ["trace.npz"]
    with np.load(path) as file:
        assert file["00000001/expert_N"].shape == (L, B * S * K)


@pytest.mark.parametrize("router", [TopK(E, K), ExpertChoice(E, K)])
@pytest.mark.parametrize("num_members", [1, 2, 4])
def test_a_trace_does_not_depend_on_the_members(tmp_path, router, num_members):
    """Members count their own tokens; the file counts those of the batch."""
    rows = np.split(np.arange(B), num_members)
    parts = [route(router, seed=0, rows=row) for row in rows]
    joined = jax.tree.map(lambda *leaves: np.concatenate([np.atleast_1d(leaf) for leaf in leaves]), *parts)
    header = dataclasses.replace(HEADER, num_layers=1)
    with TraceWriter(tmp_path / "trace.npz", header) as writer:
        writer.append(0, arrays([joined]))
    whole = arrays([route(router, seed=0)])
    for name, array in Trace(tmp_path / "trace.npz", header).step(0).items():
        np.testing.assert_allclose(array, whole[name], rtol=1e-6)


def test_a_killed_run_goes_on(tmp_path):
    path = tmp_path / "trace.npz"
    killed = TraceWriter(path, HEADER)
    for step in range(3):
        killed.append(step, synthetic(step))
    assert not path.exists()
    record(path, first_step=2, steps=4, shift=10)  # steps 2 and 3 again, with other values
    assert_steps(path, {0: 0, 1: 1, 2: 12, 3: 13})


def test_a_run_that_raises_leaves_its_steps(tmp_path):
    path = tmp_path / "trace.npz"
    with pytest.raises(RuntimeError), TraceWriter(path, HEADER) as writer:
        writer.append(0, synthetic(0))
        raise RuntimeError
    record(path, first_step=1, steps=2)
    assert_steps(path, {0: 0, 1: 1})


def test_a_finished_run_with_more_steps_extends_its_file(tmp_path):
    path = tmp_path / "trace.npz"
    record(path, steps=3)
    record(path, first_step=2, steps=4, shift=10)
    assert_steps(path, {0: 0, 1: 1, 2: 12, 3: 13})


def test_a_fresh_run_starts_over_and_the_old_file_lives_until_the_end(tmp_path):
    path = tmp_path / "trace.npz"
    record(path, steps=3)
    writer = TraceWriter(path, dataclasses.replace(HEADER))
    writer.append(0, synthetic(7))
    assert_steps(path, {0: 0, 1: 1, 2: 2})
    writer.close()
    assert_steps(path, {0: 7})


@pytest.mark.parametrize(
    "field, value",
    [
        ("router", "switch"),
        ("num_layers", 1),
        ("batch_size", 8),
        ("seq_len", 3),
        ("num_experts", 9),
        ("num_choices", 1),
    ],
)
def test_another_run_is_refused_with_both_values(tmp_path, field, value):
    path = tmp_path / "trace.npz"
    record(path)
    ours = dataclasses.replace(HEADER, **{field: value})
    expected = rf"trace.npz: recorded with {field}={getattr(HEADER, field)!r}, but this run has {field}={value!r}"
    with pytest.raises(UserError, match=expected) as error:
        Trace(path, ours)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=expected):
        TraceWriter(path, ours, first_step=2)  # would mix two kinds of run in one file


def test_missing_steps_are_refused_before_the_run(tmp_path):
    path = tmp_path / "trace.npz"
    record(path, steps=3)
    Trace(path, HEADER, range(1, 3))
    with pytest.raises(UserError, match=r"has steps 0 to 2, but this run replays steps 1 to 5 and step 3 is missing"):
        Trace(path, HEADER, range(1, 6))


def test_bad_files_are_refused_by_name(tmp_path):
    path = tmp_path / "trace.npz"
    record(path)
    whole = path.read_bytes()
    for name, content in {
        "text": b"hello",
        "empty": b"",
        "cut": whole[: len(whole) // 2],
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{name}: not a file of recorded assignments, or damaged"):
            Trace(tmp_path / name, HEADER)
    np.savez(tmp_path / "other.npz", a=np.ones(3))
    with pytest.raises(UserError, match="other.npz: not a file of recorded assignments"):
        Trace(tmp_path / "other.npz", HEADER)
    with pytest.raises(UserError, match="nowhere: not a file of recorded assignments"):
        Trace(tmp_path / "nowhere", HEADER)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    path.write_bytes(flipped)
    trace = Trace(path, HEADER)
    with pytest.raises(UserError, match="is missing or damaged"):
        [trace.step(step) for step in trace.steps]


def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/trace.npz: cannot record assignments here: Not a directory"):
        TraceWriter(tmp_path / "file" / "trace.npz", HEADER)
    writer = TraceWriter(tmp_path / "trace.npz", HEADER)
    (tmp_path / "trace.npz.parts" / "00000000.npz.tmp").mkdir()
    with pytest.raises(
        UserError, match="00000000.npz: cannot be written: Is a directory; free its disk or name another"
    ):
        writer.append(0, synthetic(0))


def test_assignments_in_another_order_are_refused(tmp_path):
    writer = TraceWriter(tmp_path / "trace.npz", HEADER)
    wrong = synthetic(0)
    wrong["token_N"] = wrong["token_N"][:, ::2].repeat(2, 1).reshape(L, B, -1).swapaxes(1, 2).reshape(L, -1)
    with pytest.raises(ValueError, match="router 'top_k' does not order its assignments by sequence"):
        writer.append(0, wrong)
    with pytest.raises(ValueError, match="do not fit num_layers=3"):
        writer.append(0, {name: array[:2] for name, array in synthetic(0).items()})


def recorded_of(assignment: Assignment):
    return {name: getattr(assignment, name) for name in ARRAYS}


@pytest.mark.parametrize("router", [TopK(E, K, TopK.Options(capacity_factor=1.0)), ExpertChoice(E, K)])
def test_replaying_a_run_on_itself_changes_nothing(router):
    recorded = recorded_of(route(router, 0))
    factor_N = np.cos(np.arange(len(recorded["token_N"])))

    def loss(params, replayed):
        assignment = route_with(params, router, X_BSD, jnp.asarray(MASK))
        if replayed:
            assignment = replay_assignment(assignment, recorded, jnp.asarray(MASK))
        return jnp.sum(factor_N * assignment.weight_N) + assignment.aux_loss, assignment

    run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
        *(run(gate(0), replayed) for replayed in (True, False)),
    )


def test_replay_keeps_the_recorded_experts_and_trains_what_both_agree_on():
    router = TopK(E, K, TopK.Options(renormalise=False, balance_coef=0.0, z_coef=0.0))
    recorded = recorded_of(route(router, 0))
    live = route(router, 1)
    replayed = jax.jit(replay_assignment)(live, recorded, MASK)
    np.testing.assert_array_equal(replayed.expert_N, recorded["expert_N"])
    np.testing.assert_array_equal(replayed.valid_N, recorded["valid_N"])
    experts = np.asarray(recorded["expert_N"])
    np.testing.assert_array_equal(
        replayed.metrics["load_E"], np.bincount(experts[np.asarray(recorded["valid_N"])], minlength=E)
    )
    live_experts = np.asarray(live.expert_N).reshape(-1, K)
    agreed = (experts.reshape(-1, K, 1) == live_experts[:, None]).any(-1).reshape(-1) & recorded["valid_N"]
    assert agreed.any() and (~agreed & recorded["valid_N"]).any(), "the example must have both cases"
    for place in np.flatnonzero(recorded["valid_N"]):
        token, expert = place // K, experts[place]
        if agreed[place]:
            rank = int(np.flatnonzero(live_experts[token] == expert)[0])
            assert replayed.weight_N[place] == live.weight_N[token * K + rank]
        else:
            assert replayed.weight_N[place] == recorded["weight_N"][place]

    def weights(params):
        live = route_with(params, router, X_BSD, jnp.asarray(MASK))
        return replay_assignment(live, recorded, jnp.asarray(MASK)).weight_N

    jacobian = jax.jit(jax.jacrev(weights))(gate(1))["gate_DE"]
    np.testing.assert_array_equal(np.abs(jacobian).sum((1, 2)) > 0, agreed)


def test_replay_of_another_number_of_assignments_is_refused():
    recorded = {name: array[:-1] for name, array in recorded_of(route(TopK(E, K), 0)).items()}
    with pytest.raises(ValueError, match=r"replay of \(47,\) assignments, the router makes \(48,\)"):
        replay_assignment(route(TopK(E, K), 0), recorded, jnp.asarray(MASK))
