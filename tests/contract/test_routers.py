"""Every registered routing scheme through the same checks; a new scheme is found by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fef.config import ConfigError
from fef.registry import scan
from fef.routing import ROUTERS, RouterContext
from fef.routing.gshard import GShard
from fef.routing.sigmoid_bias import SigmoidBias
from fef.routing.switch import Switch
from fef.routing.top_k import TopK
from fef.routing.top_p import TopP
from fef.sharding import AXES, REPLICATED, TOKENS, island, make_mesh
from fef.testing import check_router
from fef.testing.traces import ARRAYS, Trace, TraceHeader, TraceWriter, replay_assignment

scan("fef.routing")


def default(name):
    """The scheme with its default options, and one choice if it refuses two."""
    router = ROUTERS.get(name)
    try:
        return router(4, 2, router.Options())
    except ConfigError:
        return router(4, 1, router.Options())


REGISTERED = {name: default(name) for name in ROUTERS}
WITH_OPTIONS = {
    "gshard without drops": GShard(4, 2, GShard.Options(second_policy="all", capacity_factor=0.0)),
    "gshard with the next best": GShard(4, 2, GShard.Options(second_policy="all", overflow="next_best")),
    "gshard by priority": GShard(4, 2, GShard.Options(second_policy="all", overflow="batch_priority")),
    "sigmoid_bias in groups": SigmoidBias(
        4, 2, SigmoidBias.Options(normalise=False, n_groups=2, topk_groups=1, sequence_coef=0.0)
    ),
    "switch by priority": Switch(4, 1, Switch.Options(capacity_factor=1.0, overflow="batch_priority")),
    "switch with an absolute capacity": Switch(4, 1, Switch.Options(capacity=2, capacity_at_eval=True)),
    "switch with jitter": Switch(4, 1, Switch.Options(jitter=0.01, overflow="next_best")),
    "top_k by priority": TopK(4, 2, TopK.Options(capacity_factor=1.0, overflow="batch_priority")),
    "top_k with drops": TopK(4, 3, TopK.Options(renormalise=False, capacity_factor=1.0)),
    "top_k with the next best": TopK(4, 2, TopK.Options(capacity_factor=1.0, overflow="next_best")),
    "top_k balanced in sequences": TopK(4, 2, TopK.Options(balance_scope="sequence")),
    "top_k balanced in steps": TopK(4, 2, TopK.Options(balance_scope="global")),
    "top_p of all experts": TopP(4, 4, TopP.Options(p=0.9, renormalise=True)),
}


@pytest.mark.parametrize("router", [*REGISTERED.values(), *WITH_OPTIONS.values()], ids=[*REGISTERED, *WITH_OPTIONS])
def test_invariants(router):
    check_router(router, seq_len=16)


@pytest.mark.parametrize("name", REGISTERED)
def test_members_of_a_mesh_add_up_to_one_member(name):
    """Under jax.shard_map on 2 x 2 devices: assignments, aux_loss, counts and the gate's gradient."""
    router = REGISTERED[name]  # as in evaluation, where no scheme draws noise
    random = np.random.default_rng(0)
    x_BSD = jnp.asarray(random.normal(size=(8, 6, 5)), jnp.float32)
    mask_BS = jnp.asarray(np.arange(6) < random.integers(0, 7, (8, 1)))
    factor_TE = jnp.asarray(random.normal(size=(48, 4)), jnp.float32)
    params = router.init(jax.random.key(0), 5)

    def routed(params, x_BSD, mask_BS, factor_TE, psum):
        ids = jnp.zeros(mask_BS.shape, jnp.int32)
        zero = jnp.int32(0)
        ctx = RouterContext(mask_BS, ids, zero, zero, jax.random.key(1), False, router.init_state(), psum)
        assignment, _ = router(params, x_BSD, ctx)
        weights = assignment.weight_N * factor_TE[assignment.token_N, assignment.expert_N]
        return weights.sum() + assignment.aux_loss, assignment

    def member(params, x_BSD, mask_BS, factor_TE):
        loss, assignment = routed(params, x_BSD, mask_BS, factor_TE, lambda tree: jax.lax.psum(tree, AXES))
        counts = jax.tree.map(lambda leaf: leaf[None], (loss, assignment.metrics))
        return counts, (assignment.expert_N, assignment.weight_N, assignment.valid_N)

    run = island(make_mesh(4, data=2), member, (REPLICATED, TOKENS, TOKENS, TOKENS), (TOKENS, TOKENS))

    def over_members(params):
        (losses, metrics), arrays = run(params, x_BSD, mask_BS, factor_TE)
        return losses.sum(), (jax.tree.map(lambda leaf: leaf.sum(0), metrics), arrays)

    def in_one(params):
        loss, assignment = routed(params, x_BSD, mask_BS, factor_TE, lambda tree: tree)
        return loss, (assignment.metrics, (assignment.expert_N, assignment.weight_N, assignment.valid_N))

    results = [jax.jit(jax.value_and_grad(f, has_aux=True))(params) for f in (over_members, in_one)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *results)


@pytest.mark.parametrize("name", REGISTERED)
def test_its_assignments_are_recorded_and_replayed(tmp_path, name):
    """Through a file, by one member and by two: what was recorded is carried out, whatever the live gate would do."""
    router, batch, seq_len = REGISTERED[name], 4, 6
    mask_BS = np.arange(seq_len) < np.array([[6], [6], [3], [0]])
    params = router.init(jax.random.key(0), 5)

    @jax.jit
    def routed(x_BSD, mask_BS, ids_BS, key):
        ctx = RouterContext(
            mask_BS, ids_BS, jnp.int32(0), jnp.int32(0), key, True, router.init_state(), lambda tree: tree
        )
        return router(params, x_BSD, ctx)[0]

    def route(seed, rows):
        random = np.random.default_rng(seed)
        x_BSD = random.normal(size=(batch, seq_len, 5)).astype(np.float32)
        ids_BS = random.integers(0, 99, (batch, seq_len)).astype(np.int32)
        return routed(x_BSD[rows], mask_BS[rows], ids_BS[rows], jax.random.key(seed))

    recorded = route(1, slice(None))
    header = TraceHeader(name, 1, batch, seq_len, router.num_experts, router.num_choices)
    with TraceWriter(tmp_path / "trace.npz", header) as writer:
        writer.append(0, {key: np.asarray(getattr(recorded, key))[None] for key in ARRAYS})
    arrays = {key: array[0] for key, array in Trace(tmp_path / "trace.npz", header, range(1)).step(0).items()}
    half = recorded.token_N.size // 2
    whole, first, second = (slice(None),) * 2, (slice(0, 2), slice(0, half)), (slice(2, 4), slice(half, None))
    for rows, places in (whole, first, second):
        cut = {key: array[places] for key, array in arrays.items()}
        for seed in (1, 2):
            replayed = replay_assignment(route(seed, rows), cut, jnp.asarray(mask_BS[rows]))
            np.testing.assert_array_equal(replayed.expert_N, recorded.expert_N[places])
            np.testing.assert_array_equal(replayed.valid_N, recorded.valid_N[places])
            np.testing.assert_array_equal(replayed.token_N % seq_len, recorded.token_N[places] % seq_len)
            assert (replayed.metrics["kept_E"] <= replayed.metrics["load_E"]).all()
            if seed == 1 and rows == slice(None):
                np.testing.assert_allclose(replayed.weight_N, recorded.weight_N, rtol=1e-6)
