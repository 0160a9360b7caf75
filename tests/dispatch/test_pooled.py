"""The pool's reads, rows and gradients under random delays of every handler (FEF_CHAOS), and without gradient."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dispatch_harness import (
    COMPILER_OPTIONS,
    Case,
    Inputs,
    Variant,
    make_inputs,
    member_assignment,
    relative_error,
)

from fef.config import PoolConfig
from fef.native import build
from fef.pool.errors import PoolClosedError
from fef.pool.pool import Pool
from fef.registry import scan
from fef.sharding import TOKENS, island
from fef.testing.workloads import workload

scan("fef.dispatch")
STEPS = 100
DEADLINE = PoolConfig(deadline_s=60)  # a step that hangs becomes a PoolTimeoutError
LAYERS = 2


@pytest.fixture(scope="module", autouse=True)
def built_library():
    build.build()


def network(case: Case, dispatcher: Any, experts: Any, inputs: Inputs) -> tuple:
    """Two layers with residuals: x + f(x), twice; with what `prepare` returned and the layers' ledger."""
    prepared = dispatcher.prepare([experts])
    x_TD, moved = inputs.x_TD, []
    for layer in range(LAYERS):
        own = jax.tree.map(lambda w, layer=layer: w[layer], prepared[0]) if isinstance(prepared, list) else prepared

        def member(x_TD, weight_N, ints, own, layer):
            y_TD, moved_QP = dispatcher(x_TD, member_assignment(case, weight_N, ints), own, layer[0])
            return x_TD + y_TD, moved_QP[None]

        specs = (TOKENS, TOKENS, TOKENS, dispatcher.experts_spec, jax.sharding.PartitionSpec())
        run = island(case.mesh, member, specs, TOKENS)
        x_TD, moved_MQP = run(x_TD, inputs.weight_N, inputs.ints, own, jnp.full(1, layer, jnp.int32))
        moved.append(moved_MQP)
    return x_TD, prepared, jnp.stack(moved, axis=1)


def step(case: Case, dispatcher: Any, inputs: Inputs, experts: Any) -> tuple:
    """The network's output, gradients in tokens and experts, and the ledger of a training step."""

    def loss(x_TD: jax.Array, experts: Any) -> tuple:
        out_TD, prepared, moved_MLQP = network(case, dispatcher, experts, inputs._replace(x_TD=x_TD))
        return jnp.sum(out_TD * inputs.target_TD), (out_TD, prepared, moved_MLQP)

    (_, (out_TD, prepared, moved_MLQP)), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(inputs.x_TD, experts)
    after = sum(jnp.sum(grad) for grad in jax.tree.leaves(grads))
    moved_MLQP, _ = dispatcher.finish(prepared, moved_MLQP, after, collected=True)
    return out_TD, grads, moved_MLQP


def stored(case: Case) -> tuple[Inputs, Any]:
    """Uneven tokens and the experts of both layers, stacked."""
    assignment = workload("ragged_sources", case.members, case.tokens, case.experts, case.choices)
    inputs, other = (make_inputs(case, assignment, seed) for seed in range(2))
    return inputs, jax.tree.map(lambda *layers: np.stack(layers), inputs.experts, other.experts)


def arrays(result: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(jax.block_until_ready(result))]


POOLED, BY_GET = Variant("pooled"), Variant("pooled", matmul="jax")
BY_BYTES, BY_TOKENS = (
    Variant("fluid", options=(option, ("room", 8.0))) for option in (("cost", "bytes"), ("mode", "tokens"))
)
UNDER_CHAOS = [(members, variant) for variant in (POOLED, BY_TOKENS) for members in (2, 4, 8)]
UNDER_CHAOS += [(4, BY_GET), (4, BY_BYTES)]


@pytest.mark.parametrize(("members", "variant"), UNDER_CHAOS, ids=lambda value: getattr(value, "label", value))
def test_every_step_under_chaos_gives_the_same_bits(members, variant, monkeypatch):
    monkeypatch.setenv("FEF_CHAOS", str(members))
    case = Case(members, experts=6, choices=2, tokens=8)
    inputs, experts = stored(case)
    pooled, reference = (
        jax.jit(functools.partial(step, case, each.make(case)), compiler_options=COMPILER_OPTIONS)
        for each in (variant, Variant("reference"))
    )
    with Pool(case.mesh, DEADLINE):
        first = arrays(pooled(inputs, experts))
        for number in range(1, STEPS):
            for leaf, again in zip(first, arrays(pooled(inputs, experts)), strict=True):
                np.testing.assert_array_equal(leaf, again, err_msg=f"step {number}")
    *wanted, _ = arrays(reference(inputs, experts))
    *got, moved_MLQP = first
    assert moved_MLQP.any()
    for leaf, want in zip(got, wanted, strict=True):
        assert relative_error(leaf, want) <= 1e-5


@pytest.mark.parametrize("variant", [POOLED, BY_TOKENS], ids=lambda variant: variant.label)
def test_passes_without_gradient_leave_no_slot_taken(variant):
    """More of them than a block has slots, then a step with gradients: each gives its version back."""
    case = Case(4, experts=6, choices=2, tokens=8)
    inputs, experts = stored(case)
    dispatcher = variant.make(case)

    def forward(inputs: Inputs, experts: Any) -> tuple:
        out_TD, prepared, moved_MLQP = network(case, dispatcher, experts, inputs)
        return out_TD, dispatcher.finish(prepared, moved_MLQP, jnp.sum(out_TD), collected=False)[0]

    run = jax.jit(forward, compiler_options=COMPILER_OPTIONS)
    train = jax.jit(functools.partial(step, case, dispatcher), compiler_options=COMPILER_OPTIONS)
    with Pool(case.mesh, PoolConfig(deadline_s=20, slots=2)):
        passes = [run(inputs, experts) for _ in range(5)]  # none is waited for, so the next ones are already queued
        trained = train(inputs, experts)
        passes = [arrays(result) for result in (*passes, run(inputs, experts))]
        trained_out_TD, *_ = arrays(trained)
    for out_TD, _ in passes:
        np.testing.assert_array_equal(out_TD, trained_out_TD)
    weights, refetch, gradients, tokens = passes[-1][1].sum((0, 1, 3))[:4]
    assert (tokens if variant == BY_TOKENS else weights) > 0
    assert refetch == gradients == 0


def test_needs_an_open_pool():
    case = Case(2, experts=4, choices=2, tokens=4)
    dispatcher = Variant("pooled").make(case)
    with pytest.raises(PoolClosedError, match=r"with fef\.Pool\(mesh\)"):
        dispatcher.prepare([stored(case)[0].experts])


def test_is_refused_where_no_handler_exists():
    dispatcher = Variant("pooled").make(Case(2, 4, 2, 4))
    with pytest.raises(ValueError, match="no handlers for cuda yet; use all_to_all"):
        dispatcher.check_platform("cuda")
    dispatcher.check_platform("cpu")
