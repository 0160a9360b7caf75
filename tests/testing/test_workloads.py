import re

import jax
import numpy as np
import pytest

from fef.config import UserError
from fef.pool.table import ExpertTable
from fef.testing.traces import TraceHeader, TraceWriter
from fef.testing.workloads import BURST_EVERY, HOT, OF_EXPERTS, WORKLOADS, popularity_by_step, workload

SHAPES = [(4, 64, 8, 2), (1, 32, 4, 1), (4, 16, 3, 3), (8, 24, 5, 2), (2, 16, 1, 1)]  # R, T, E, K


@pytest.mark.parametrize("name", [*WORKLOADS, "zipf:1.2", "zipf:10"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_workload_is_a_sound_assignment(name, shape):
    num_members, num_tokens, num_experts, num_choices = shape
    assignment = workload(name, *shape, step=3)
    places = num_tokens * num_choices
    assert assignment.num_choices == num_choices
    for r in range(num_members):
        own = jax.tree.map(lambda leaf, r=r: leaf[r], assignment)
        assert own.token_N.dtype == own.expert_N.dtype == np.int32
        assert own.weight_N.dtype == np.float32 and own.valid_N.dtype == np.bool_
        np.testing.assert_array_equal(own.token_N, np.repeat(np.arange(num_tokens), num_choices))
        assert own.expert_N.shape == (places,) and own.expert_N.min() >= 0 and own.expert_N.max() < num_experts
        chosen = np.sort(own.expert_N.reshape(num_tokens, num_choices), axis=1)
        assert (np.diff(chosen, axis=1) > 0).all(), "a token has an expert twice"
        weights = own.weight_N.reshape(num_tokens, num_choices).sum(1)
        np.testing.assert_allclose(weights, own.valid_N[::num_choices], rtol=1e-6)
        assert (own.weight_N[own.valid_N] > 0).all()
        load = np.bincount(own.expert_N[own.valid_N], minlength=num_experts)
        np.testing.assert_array_equal(own.metrics["load_E"], load)
        np.testing.assert_array_equal(own.metrics["kept_E"], load)
        assert own.metrics["tokens"] * num_choices == load.sum()


@pytest.mark.parametrize("name", [*WORKLOADS, "zipf:0.6"])
def test_a_workload_is_reproducible(name):
    first, second = workload(name, 2, 16, 8, 2, step=5, seed=1), workload(name, 2, 16, 8, 2, step=5, seed=1)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    other = workload(name, 2, 16, 8, 2, step=5, seed=2)
    assert (first.expert_N != other.expert_N).any()


def load(name, **kwargs):
    return workload(name, 4, 256, 8, 2, **kwargs).metrics["load_E"].sum(0)


def hot_set(name, **kwargs):
    loads = load(name, **kwargs)
    return set(np.flatnonzero(loads > 1.5 * loads.mean()).tolist())


def test_balanced_is_exact_for_every_member():
    assert (workload("balanced", 4, 64, 8, 2).metrics["load_E"] == 16).all()


def test_hot_experts_stay_hot():
    hot = hot_set("hot_experts")
    assert len(hot) == 2 and all(hot_set("hot_experts", step=step) == hot for step in range(1, 4))
    loads = load("hot_experts")
    assert loads[list(hot)].min() > 0.3 * HOT * np.median(loads)


def test_hot_rank_loads_the_experts_of_one_member():
    for num_experts, num_members in [(8, 4), (6, 4)]:
        loads = workload("hot_rank", num_members, 512, num_experts, 1).metrics["load_E"].sum(0)
        home = ExpertTable(num_experts, num_members).home_E
        by_rank = np.bincount(home, weights=loads, minlength=num_members)
        rank = int(by_rank.argmax())
        assert loads[home == rank].min() > 5 * loads[home != rank].max()


def test_spread_hot_loads_one_expert_of_each_member():
    home = ExpertTable(8, 4).home_E
    assert [home[e] for e in sorted(hot_set("spread_hot"))] == [0, 1, 2, 3]


def test_ragged_sources_include_a_full_and_an_empty_member():
    tokens = workload("ragged_sources", 4, 60, 8, 2).metrics["tokens"]
    assert tokens.tolist() == [60, 40, 20, 0]
    assert workload("ragged_sources", 1, 60, 8, 2).metrics["tokens"].tolist() == [30]


def test_zero_load_leaves_experts_and_members_without_tokens():
    assignment = workload("zero_load", 4, 64, 8, 2)
    assert assignment.metrics["tokens"].tolist() == [64, 0, 64, 0]
    assert assignment.metrics["load_E"].sum(0).tolist() == [64, 64, 64, 64, 0, 0, 0, 0]


def test_rotating_hotspot_moves_on_with_the_step():
    hot = [hot_set("rotating_hotspot", step=step) for step in range(5)]
    assert hot[:4] == [{0, 1}, {2, 3}, {4, 5}, {6, 7}] and hot[4] == hot[0]


def test_burst_is_skewed_one_step_in_four():
    skewed = [bool(hot_set("burst", step=step)) for step in range(2 * BURST_EVERY)]
    assert skewed == [False, False, False, True] * 2


def test_unknown_names_and_too_many_choices_are_refused():
    with pytest.raises(ValueError, match="unknown workload 'hot_expert'; nearest: hot_experts"):
        workload("hot_expert", 2, 8, 4, 1)
    with pytest.raises(ValueError, match="num_choices=5 must be between 1 and num_experts=4"):
        workload("balanced", 2, 8, 4, 5)


@pytest.mark.parametrize(("num_experts", "num_choices", "share"), [(8, 2, 0.4), (16, 1, 0.4), (16, 4, 0.95 / 4)])
def test_one_hot_expert_has_its_share(num_experts, num_choices, share):
    load_E = workload("one_hot_expert", 4, 4096, num_experts, num_choices, seed=3).metrics["load_E"].sum(0)
    assert load_E.argmax() == 3 and load_E[3] / load_E.sum() == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("exponent", [0.6, 1.2])
def test_zipf_has_the_loads_of_its_law(exponent):
    # With one choice a draw follows the popularity: of 65,536 of them the share of each rank is known within 1 %.
    load_E = workload(f"zipf:{exponent}", 4, 16384, 8, 1, seed=3).metrics["load_E"].sum(0)
    law = np.arange(1, 9.0) ** -exponent
    np.testing.assert_allclose(np.sort(load_E)[::-1] / load_E.sum(), law / law.sum(), atol=0.01)
    of_other_step = workload(f"zipf:{exponent}", 4, 16384, 8, 1, seed=3, step=5).metrics["load_E"].sum(0)
    assert load_E.argmax() == of_other_step.argmax()


def test_zipf_without_an_exponent_is_balanced():
    first, second = (workload(name, 4, 64, 8, 2, step=2) for name in ("zipf:0", "balanced"))
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("name", ["zipf", "zipf:", "zipf:x", "zipf:-1", "zipf:nan", "zipf:11", "zipf:1:2"])
def test_what_is_no_exponent_is_no_workload(name):
    with pytest.raises(ValueError, match=f"unknown workload '{name}'"):
        workload(name, 2, 8, 4, 1)


@pytest.mark.parametrize("name", WORKLOADS)
def test_some_workloads_are_a_popularity_of_experts_that_comes_again(name):
    """Alike for all numbers of members and tokens, and periodic; the others do depend on the members."""
    members = ((1, 1), (2, 16), (4, 64))
    given = [[WORKLOADS[name](*shape, 6, 2, step, 3) for shape in members] for step in range(13)]
    is_alike = all(
        np.array_equal(popularity_E, of_step[0][0]) and (num_tokens_R == num_tokens).all()
        for of_step in given
        for (popularity_E, num_tokens_R), (_, num_tokens) in zip(of_step, members, strict=True)
    )
    assert is_alike == (name in OF_EXPERTS)
    if is_alike:
        popularity_PE = popularity_by_step(name, 6, 2, seed=3)
        for step, of_step in enumerate(given):
            np.testing.assert_array_equal(popularity_PE[step % len(popularity_PE)], of_step[0][0])


def recording(path, valid=True):
    """Two sequences of 4 tokens with 2 of 4 experts each, in the second of two steps and the first of two layers."""
    expert_LN = np.array([[0, 1, 2, 3, 0, 2, 1, 3, 3, 0, 1, 2, 2, 3, 0, 1], [0, 1] * 8])
    arrays = {
        "token_N": np.tile(np.repeat(np.arange(8), 2), (2, 1)), "expert_N": expert_LN,
        "weight_N": np.tile([0.75, 0.25], (2, 8)), "valid_N": np.full((2, 16), True),
    }  # fmt: skip
    arrays["valid_N"][0, 5] = valid
    with TraceWriter(path, TraceHeader("top_k", 2, 2, 4, 4, 2)) as writer:
        writer.append(6, arrays | {"expert_N": np.tile([0, 1], (2, 8))})
        writer.append(7, arrays)
    return f"trace:{path}"


def test_a_trace_is_what_a_router_chose(tmp_path):
    of_two = workload(recording(tmp_path / "a.npz"), 2, 3, 4, 2)
    np.testing.assert_array_equal(of_two.expert_N, [[0, 1, 2, 3, 0, 2], [1, 3, 3, 0, 1, 2]])
    np.testing.assert_array_equal(of_two.token_N, [[0, 0, 1, 1, 2, 2]] * 2)
    np.testing.assert_allclose(of_two.weight_N, [[0.75, 0.25] * 3] * 2)
    np.testing.assert_array_equal(of_two.metrics["load_E"], [[2, 1, 2, 1], [1, 2, 1, 2]])
    assert of_two.valid_N.all() and of_two.num_choices == 2


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 5, 4, 2), "a.npz: has 8 tokens, 2 members of 5 need 10; record more"),
        ((2, 4, 8, 2), "a.npz: recorded with 4 experts and 2 choices, asked for 8 and 2; record a run"),
    ],
)
def test_a_trace_that_does_not_fit(tmp_path, shape, message):
    with pytest.raises(UserError, match=re.escape(message)):
        workload(recording(tmp_path / "a.npz"), *shape)


def test_a_trace_with_dropped_choices(tmp_path):
    with pytest.raises(UserError, match="a.npz: has not all choices of every token; record a router that drops"):
        workload(recording(tmp_path / "a.npz", valid=False), 2, 4, 4, 2)


def test_a_trace_that_is_none(tmp_path):
    np.savez(tmp_path / "a.npz", header=np.array('{"router": "top_k"}'))
    with pytest.raises(UserError, match="a.npz: not a file of recorded assignments"):
        workload(f"trace:{tmp_path / 'a.npz'}", 2, 4, 4, 2)
    with pytest.raises(UserError, match="none.npz: not a file of recorded assignments, or damaged"):
        workload(f"trace:{tmp_path / 'none.npz'}", 2, 4, 4, 2)
