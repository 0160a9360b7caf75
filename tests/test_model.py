"""The decoder and its parts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small import fast_compilation, small_config, take_steps  # noqa: F401

from configs import dense, tiny
from fef import sharding
from fef.attention import causal_attention, rms_norm
from fef.config import YarnConfig
from fef.flops import matmul_params_active
from fef.layers import make_router
from fef.model import Decoder
from fef.registry import scan
from fef.rope import rotate
from fef.routing import ROUTERS
from fef.step import Stepper, count_params


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


# Parts.


def test_rms_norm():
    x, scale = normal(0, 2, 3, 8), normal(1, 8)
    expected = x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + 1e-6) * np.asarray(scale)[None, None]
    np.testing.assert_allclose(rms_norm(x, scale, 1e-6), expected, rtol=1e-5)
    np.testing.assert_array_equal(rms_norm(jnp.zeros((2, 8)), scale, 1e-6), np.zeros((2, 8)))
    # Computed in float32: squares of bfloat16 are sums of too few digits.
    low = rms_norm(x.astype(jnp.bfloat16), scale, 1e-6)
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(low.astype(jnp.float32), expected, rtol=0.02, atol=1e-3)


def test_rotary_positions_are_relative():
    """The product of a query at i and a key at j depends on i - j alone; a position keeps the length of a vector."""
    q_A, k_A = normal(0, 6), normal(1, 6)
    q_SA, k_SA = (rotate(jnp.tile(x, (1, 10, 1, 1)), 100.0, YarnConfig())[0, :, 0] for x in (q_A, k_A))
    products_SS = np.asarray(q_SA @ k_SA.T)
    for distance in range(-9, 10):
        diagonal = np.diagonal(products_SS, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)
    assert np.ptp(products_SS[0]) > 0.1
    np.testing.assert_allclose(np.linalg.norm(q_SA, axis=-1), np.linalg.norm(q_A), rtol=1e-5)
    np.testing.assert_array_equal(q_SA[0], q_A)
    # Dimension i turns with i + A/2, the first pair by one radian a position.
    np.testing.assert_allclose(q_SA[1, 0], q_A[0] * np.cos(1) - q_A[3] * np.sin(1), rtol=1e-5)


def test_attention_is_that_of_the_formula():
    """Grouped queries: heads 0, 1 use key/value head 0, heads 2, 3 use 1. Later and masked positions have no part."""
    q, k, v = normal(0, 2, 5, 4, 6), normal(1, 2, 5, 2, 6), normal(2, 2, 5, 2, 6)
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 1, 0]], bool)
    out = causal_attention(q, k, v, jnp.asarray(mask))
    for b, s, h in np.ndindex(2, 5, 4):
        seen = [t for t in range(s + 1) if mask[b, t]]
        scores = np.array([q[b, s, h] @ k[b, t, h // 2] for t in seen]) / np.sqrt(6)
        weights = np.exp(scores - scores.max())
        expected = sum(w * v[b, t, h // 2] for w, t in zip(weights / weights.sum(), seen, strict=True))
        np.testing.assert_allclose(out[b, s, h], expected, rtol=1e-4, atol=1e-5)
    repeated = causal_attention(q, jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2), jnp.asarray(mask))
    np.testing.assert_allclose(out, repeated, rtol=1e-5, atol=1e-6)
    nothing = causal_attention(q, k, v, jnp.zeros((2, 5), bool))
    assert np.isfinite(nothing).all()  # what padding sees is not used, but must not be NaN


# Structure.


def structure(changes):
    config = small_config(changes)
    return nnx.eval_shape(lambda: Decoder(config, sharding.make_mesh(1), nnx.Rngs(0)))


def test_which_layers_have_experts():
    model = structure({"model.num_layers": 5, "moe.every": 2, "moe.leading_dense": 1})
    assert [hasattr(run, "moe") for run in model.runs] == [False, False, True, False, True]
    assert not structure({"model.num_layers": 2, "moe.every": 0}).moe_runs
    scanned = structure({"model.num_layers": 5, "moe.leading_dense": 2, "model.scan_layers": True})
    assert scanned.run_lengths == (2, 3)
    assert [run.attention_norm.shape for run in scanned.runs] == [(2, 16), (3, 16)]


VARIETY = {"model.num_layers": 3, "moe.leading_dense": 1, "moe.num_shared": 1, "model.tie_embeddings": False}


@pytest.mark.parametrize("changes", [{}, VARIETY, {"moe.every": 0}, VARIETY | {"model.scan_layers": True}])
def test_parameter_counts_leave_empty_positions_out(changes):
    config = small_config(changes)  # 6 experts on 4 members have 8 positions
    stepper = Stepper(config, sharding.make_mesh(4))
    total, active = count_params(jax.eval_shape(stepper.init), config)
    model = structure(changes | {"mesh.devices": 1})
    assert total == sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    per_expert = 3 * 16 * 32
    num_moe = 0 if not config.moe.every else config.model.num_layers - config.moe.leading_dense
    assert total - active == num_moe * (6 - 2) * per_expert
    norms = (2 * config.model.num_layers + 1) * 16
    look_up = 0 if config.model.tie_embeddings else 256 * 16
    assert active == matmul_params_active(config) + norms + look_up


def test_the_dense_config_has_the_active_parameters_of_the_tiny_one():
    active = []
    for config in (tiny.get_config(), dense.get_config()):
        stepper = Stepper(config, sharding.make_mesh(4))
        active.append(count_params(jax.eval_shape(stepper.init), config)[1])
    gates = tiny.get_config().model.num_layers * 128 * tiny.get_config().moe.num_experts
    assert active[0] - active[1] == gates < 0.02 * active[0]


# The whole function.


@functools.cache
def program(changes):
    """The forward pass of a model of fixed parameters, in training, on one device."""
    config = small_config(dict(changes) | {"mesh.devices": 1})
    graph, state = nnx.split(Decoder(config, sharding.make_mesh(1), nnx.Rngs(0)))
    return jax.jit(lambda tokens_BS, mask_BS: nnx.merge(graph, state)(tokens_BS, mask_BS, train=True))


def forward(changes, tokens_BS, mask_BS=None):
    mask_BS = np.ones(tokens_BS.shape, bool) if mask_BS is None else mask_BS
    return jax.device_get(program(tuple(sorted(changes.items())))(tokens_BS, mask_BS))


def tokens(seed):
    return np.random.default_rng(seed).integers(0, 256, (8, 16)).astype(np.int32)


def test_scanned_layers_compute_the_same():
    expected, aux_loss, metrics = forward(VARIETY, tokens(0))
    logits, scanned_aux_loss, scanned_metrics = forward(VARIETY | {"model.scan_layers": True}, tokens(0))
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(scanned_aux_loss, aux_loss, rtol=1e-5)
    np.testing.assert_array_equal(scanned_metrics["load_E"], metrics["load_E"])
    assert metrics["load_E"].shape == (2, 1, 6) and logits.dtype == np.float32


def test_a_shared_expert_is_an_ffn_for_every_token():
    """Without its output matrix it adds nothing, with it its FFN of the same input."""
    config = small_config({"mesh.devices": 1, "moe.num_shared": 2})
    graph, state = nnx.split(Decoder(config, sharding.make_mesh(1), nnx.Rngs(0)).runs[0])
    x_BSD, mask_BS = normal(0, 1, 4, 16), jnp.ones((1, 4), bool)

    @jax.jit
    def outputs(state):
        block = nnx.merge(graph, state)
        with_shared, _ = block(x_BSD, mask_BS)
        attended = x_BSD + block.attention(rms_norm(x_BSD, block.attention_norm[...], 1e-6), mask_BS)
        added = block.shared(rms_norm(attended, block.ffn_norm[...], 1e-6))
        block.shared.down.w.set_value(jnp.zeros((2 * 32, 16)))
        return with_shared, block(x_BSD, mask_BS)[0], added

    with_shared, without, added = outputs(state)
    np.testing.assert_allclose(with_shared - without, added, rtol=1e-4, atol=1e-5)
    assert np.abs(added).max() > 0.01


def test_a_dense_model_learns():
    steps = take_steps({"moe.every": 0})
    assert steps.curve()[-1] < steps.curve()[0] - 0.3
    assert not steps.curve("aux_loss").any()
    assert set(steps.rows[0]) == {"loss", "aux_loss", "grad_norm", "learning_rate", "skipped_updates", "tokens"}


# G-01: what comes later, and what is padding, has no part in what comes before.


def routers():
    """Every registered scheme with its defaults, and with a tight capacity where it has one."""
    made = []
    scan("fef.routing")
    for name in ROUTERS:
        router = ROUTERS.get(name)
        changes = {"moe.router": name, "routing.allow_noncausal": True}
        if name in ("base", "switch"):
            changes["moe.num_choices"] = 1
        options = [field.name for field in dataclasses.fields(router.Options)]
        is_causal = make_router(small_config(changes)).causal
        made.append(pytest.param(is_causal, changes, id=name))
        if is_causal and "capacity_factor" in options:
            changes = changes | {f"routing.{name}.capacity_factor": 1.0}
            made.append(pytest.param(is_causal, changes, id=f"{name}, capacity"))
    return made


@pytest.mark.parametrize(("is_causal", "changes"), routers())
def test_the_last_token_changes_no_earlier_logits(is_causal, changes):
    original, changed = tokens(0), tokens(0)
    changed[:, -1] = (changed[:, -1] + 101) % 256
    (logits, _, metrics), (others, _, _) = forward(changes, original), forward(changes, changed)
    assert np.abs(logits[:, -1] - others[:, -1]).max() > 0.01
    difference = np.abs(logits[:, :-1] - others[:, :-1]).max()
    assert difference == 0 if is_causal else difference > 0
    if changes.get(f"routing.{changes['moe.router']}.capacity_factor"):
        assert metrics["kept_E"].sum() < metrics["load_E"].sum()  # the capacity was felt


@pytest.mark.parametrize(("is_causal", "changes"), routers())
def test_padding_has_no_part(is_causal, changes):
    mask_BS = np.arange(16)[None, :] < np.array([16, 3, 9, 1, 12, 16, 5, 8])[:, None]
    original, changed = tokens(0), np.where(mask_BS, tokens(0), tokens(1))
    (logits, aux_loss, metrics), others = forward(changes, original, mask_BS), forward(changes, changed, mask_BS)
    np.testing.assert_array_equal(logits[mask_BS], others[0][mask_BS])
    np.testing.assert_array_equal(aux_loss, others[1])
    for name in ("load_E", "kept_E", "tokens", "entropy_sum"):
        np.testing.assert_array_equal(metrics[name], others[2][name], err_msg=name)
    assert metrics["tokens"].sum() == mask_BS.sum()
