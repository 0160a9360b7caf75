import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fef.config import ConfigError
from fef.routing.workload import Workload
from fef.testing import check_router
from fef.testing.workloads import BURST_EVERY, HOT, OF_EXPERTS, WORKLOADS

MASK_BS = np.ones((8, 64), bool)  # T = 512
NUM_EXPERTS = 8


def router(name, num_choices=2, **options):
    return Workload(NUM_EXPERTS, num_choices, Workload.Options(name=name, **options))


@pytest.fixture
def run(make_context):
    """Routes with a step and a key that are traced; each router is compiled once."""

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def routed(router, train, step, key, mask_BS):
        ctx = dataclasses.replace(make_context(mask_BS, train), step=step, key=key)
        return router({}, jnp.zeros((*mask_BS.shape, 4)), ctx)[0]

    def call(router, step=0, key=0, mask_BS=MASK_BS, train=True):
        return routed(router, train, jnp.int32(step), jax.random.key(key), jnp.asarray(mask_BS))

    return call


def test_even_experts_take_turns(run):
    # T = 512, K = 2: 1024 choices, 128 for each of 8 experts, whatever the key; another key, another order.
    first, other = (run(router("balanced"), key=key) for key in (0, 1))
    for assignment in (first, other):
        np.testing.assert_array_equal(assignment.metrics["load_E"], [128] * 8)
        np.testing.assert_array_equal(assignment.weight_N, [0.5] * 1024)
    assert (first.expert_N != other.expert_N).mean() > 0.5
    # K = 3: 1536 choices, 192 each, and 3 different experts for each token.
    assignment = run(router("balanced", 3))
    np.testing.assert_array_equal(assignment.metrics["load_E"], [192] * 8)
    assert (np.diff(np.sort(assignment.expert_N.reshape(-1, 3))) > 0).all()


def test_the_hotspot_rotates_with_the_step(run):
    # 2 of 8 experts are hot, 0 and 1 first, then 2 and 3; with K = 1 a hot one has HOT / (2 HOT + 6) = 16 / 38 of 512
    # choices, which is 215.6 (deviation 11.2), any other one 1 / 38 or 13.5 (deviation 3.6).
    for step, hot in ((0, [0, 1]), (1, [2, 3]), (4, [0, 1])):
        load_E = np.asarray(run(router("rotating_hotspot", 1), step=step, key=step).metrics["load_E"])
        np.testing.assert_allclose(load_E[hot], 512 * HOT / (2 * HOT + 6), atol=45)
        np.testing.assert_allclose(np.delete(load_E, hot), 512 / (2 * HOT + 6), atol=15)


def test_a_burst_is_skewed_in_its_step_only(run):
    loads = [run(router("burst"), step=step).metrics["load_E"] for step in range(2 * BURST_EVERY)]
    is_even = [bool((load_E == 128).all()) for load_E in loads]
    assert is_even == [True, True, True, False] * 2


def test_one_hot_expert_has_its_share(run):
    # 40 % of 1024 choices, by the expert that the seed names
    load_E = np.asarray(run(router("one_hot_expert", seed=3)).metrics["load_E"])
    assert load_E.argmax() == 3 and load_E[3] / 1024 == pytest.approx(0.4, abs=0.05)


def test_padding_takes_no_expert_and_an_evaluation_draws_no_noise(run):
    mask_BS = MASK_BS & (np.arange(64) < np.arange(8)[:, None])
    assignment = run(router("hot_experts"), mask_BS=mask_BS)
    np.testing.assert_array_equal(assignment.valid_N, np.repeat(mask_BS.reshape(-1), 2))
    assert assignment.metrics["load_E"].sum() == 2 * mask_BS.sum()
    first, other = (run(router("hot_experts"), key=key, train=False) for key in (0, 1))
    np.testing.assert_array_equal(first.expert_N, other.expert_N)
    of_sequences = np.asarray(first.expert_N).reshape(8, -1)
    assert (of_sequences == of_sequences[0]).all()


@pytest.mark.parametrize("name", ["hot_experts", "burst", "zipf:1.2"])
def test_the_rules_of_routers(name):
    check_router(Workload(4, 2, Workload.Options(name=name)), seq_len=16)


def test_what_is_no_workload_of_experts_is_refused():
    with pytest.raises(ConfigError, match=r"routing.workload.name='burts': unknown workload; nearest: burst"):
        router("burts")
    for name in set(WORKLOADS) - set(OF_EXPERTS):
        with pytest.raises(
            ConfigError, match=f"routing.workload.name='{name}': is uneven between members.*use balanced"
        ):
            router(name)
