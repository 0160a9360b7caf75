"""The variants of attention, each against its formula; against transformers: tests/hf/test_parity.py."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small import assert_close, fast_compilation, small_config, take_steps  # noqa: F401

from fef.attention import Attention, LatentAttention, RelativeAttention, causal_attention, distance_buckets, rms_norm
from fef.config import ConfigError, YarnConfig
from fef.rope import rotate
from fef.step import Stepper


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def softmax(scores):
    weights = np.exp(scores - np.max(scores))
    return weights / weights.sum()


MASK_BS = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 1, 0]], bool)


@pytest.mark.parametrize("window", [1, 2, 4, 9])
def test_a_window_is_counted_from_the_query(window):
    q, k, v = normal(0, 2, 5, 2, 4), normal(1, 2, 5, 2, 4), normal(2, 2, 5, 2, 3)
    out = causal_attention(q, k, v, jnp.asarray(MASK_BS), window=window)
    assert out.shape == (2, 5, 2, 3)
    for b, s, h in np.ndindex(2, 5, 2):
        seen = [t for t in range(max(0, s - window + 1), s + 1) if MASK_BS[b, t]]
        if not seen:
            continue  # padding, or padding alone in its window
        weights = softmax(np.array([q[b, s, h] @ k[b, t, h] for t in seen]) / 2)
        expected = sum(w * v[b, t, h] for w, t in zip(weights, seen, strict=True))
        np.testing.assert_allclose(out[b, s, h], expected, rtol=1e-4, atol=1e-5)


def test_sinks_take_a_share_and_give_nothing():
    """Two keys of score 0 and a sink of logit log 2: each key has 1/4."""
    q, k, v = jnp.zeros((1, 2, 2, 4)), normal(0, 1, 2, 1, 4), normal(1, 1, 2, 1, 4)
    sinks_H = jnp.array([math.log(2), -1e9])
    out = causal_attention(q, k, v, jnp.ones((1, 2), bool), sinks_H=sinks_H)
    np.testing.assert_allclose(out[0, 1, 0], (v[0, 0, 0] + v[0, 1, 0]) / 4, rtol=1e-6)
    np.testing.assert_allclose(out[0, 1, 1], (v[0, 0, 0] + v[0, 1, 0]) / 2, rtol=1e-6)  # no share for a sink of -inf
    np.testing.assert_allclose(out[0, 0, 0], v[0, 0, 0] / 3, rtol=1e-6)


@pytest.mark.parametrize("qk_norm", ["head", "projection"])
def test_norms_of_queries_and_keys(qk_norm):
    """Scaled queries and keys change nothing; the norm is over a head of 8 or over all that a token has."""
    config = small_config({"model.attention.qk_norm": qk_norm, "model.attention.bias": True, "model.norm_eps": 1e-30})
    layer = Attention(config.model, 0, nnx.Rngs(0))
    widths = {"head": (8, 8), "projection": (16, 8)}[qk_norm]
    assert (layer.query_norm[...].shape, layer.key_norm[...].shape) == tuple((width,) for width in widths)
    x_BSD, mask_BS = normal(0, 2, 5, 16), jnp.ones((2, 5), bool)
    before = layer(x_BSD, mask_BS)
    layer.query.w.set_value(layer.query.w[...] * 3)
    layer.key.w.set_value(layer.key.w[...] / 5)
    np.testing.assert_allclose(layer(x_BSD, mask_BS), before, rtol=1e-4, atol=1e-5)
    layer.out.bias.set_value(jnp.full(16, 2.0))
    np.testing.assert_allclose(layer(x_BSD, mask_BS), before + 2, rtol=1e-4, atol=1e-5)


def test_stretched_positions():
    """Width 16, theta 100, trained on 100 positions: a dimension i makes 100 / (2 pi 100^(i/8)) turns over them, 15.9
    for i = 0 and 0.28 for i = 7. Above 8 turns nothing changes, below 1 turn it is slower by the factor 4."""
    yarn = YarnConfig(factor=4.0, original_len=100, beta_fast=8.0, beta_slow=1.0, truncate=False)
    x = jnp.ones((1, 2, 1, 16))

    def angles(yarn):
        turned = np.asarray(rotate(x, 100.0, yarn))[0, 1, 0]
        return np.arctan2(turned[8:] - turned[:8], turned[8:] + turned[:8]), np.hypot(turned[8:], turned[:8])

    (plain, length), (stretched, longer) = angles(YarnConfig()), angles(yarn)
    np.testing.assert_allclose(plain, 100 ** -(np.arange(8) / 8), rtol=1e-4)
    turns = 100 * plain / (2 * math.pi)
    np.testing.assert_allclose(stretched[turns > 8], plain[turns > 8], rtol=1e-4)
    np.testing.assert_allclose(stretched[turns < 1], plain[turns < 1] / 4, rtol=1e-4)
    between = (turns < 8) & (turns > 1)
    # i(turns) = 8 ln(100 / (2 pi turns)) / ln 100: 1.198 for 8 turns and 4.810 for 1; dimension 3 is half-way (0.4987).
    assert list(np.flatnonzero(between)) == [2, 3, 4]
    np.testing.assert_allclose(stretched[3] / plain[3], 0.4989 / 4 + 0.5011, rtol=1e-3)
    np.testing.assert_allclose(longer / length, 0.1 * math.log(4) + 1, rtol=1e-5)


def test_latent_attention_is_attention_with_expanded_keys_and_values():
    settings = {"model.mla.kv_rank": 5, "model.mla.q_rank": 6, "model.mla.nope_dim": 3, "model.mla.rope_dim": 4}
    model = small_config(settings | {"model.mla.value_dim": 7}).model
    layer = LatentAttention(model, nnx.Rngs(0))
    x_BSD, mask_BS = normal(0, 2, 5, 16), jnp.asarray(MASK_BS)
    out = layer(x_BSD, mask_BS)

    plain = YarnConfig()
    q = (rms_norm(x_BSD @ layer.query_down.w[...], jnp.ones(6), 1e-6) @ layer.query.w[...]).reshape(2, 5, 2, 7)
    latent = x_BSD @ layer.latent.w[...]
    kv = (rms_norm(latent[..., :5], jnp.ones(5), 1e-6) @ layer.key_value.w[...]).reshape(2, 5, 2, 10)
    rope = rotate(latent[..., None, 5:], 1e4, plain)
    q = jnp.concatenate([q[..., :3], rotate(q[..., 3:], 1e4, plain)], -1)
    k = jnp.concatenate([kv[..., :3], jnp.concatenate([rope, rope], 2)], -1)
    expected = causal_attention(q, k, kv[..., 3:], mask_BS).reshape(2, 5, -1) @ layer.out.w[...]
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


def test_relative_attention():
    """Scores are not scaled, and a bias by distance is added; the memory may be longer than the queries."""
    model = small_config({"model.num_kv_heads": 2, "model.encoder.layers": 1}).model
    layer = RelativeAttention(model, False, nnx.Rngs(0))
    x, memory, mask = normal(0, 1, 3, 16), normal(1, 1, 4, 16), jnp.array([[True, True, True, False]])
    out, bias_HST = layer.attend(x, memory, mask, normal(2, 2, 3, 4)), normal(2, 2, 3, 4)
    q, k, v = (
        (a @ w.w[...]).reshape(-1, 2, 8) for a, w in ((x, layer.query), (memory, layer.key), (memory, layer.value))
    )
    heads = np.zeros((3, 2, 8), np.float32)
    for s, h in np.ndindex(3, 2):
        weights = softmax(np.array([q[s, h] @ k[t, h] + bias_HST[h, s, t] for t in range(3)]))
        heads[s, h] = sum(w * v[t, h] for t, w in enumerate(weights))
    np.testing.assert_allclose(out[0], heads.reshape(3, 16) @ layer.out.w[...], rtol=1e-4, atol=1e-5)

    causal = RelativeAttention(model, True, nnx.Rngs(0))
    bias_HSS, later = normal(3, 2, 3, 3), x.at[:, 2].set(9.0)
    first, second = (causal(a, jnp.ones((1, 3), bool), bias_HSS) for a in (x, later))
    np.testing.assert_array_equal(first[:, :2], second[:, :2])


def test_buckets_of_distances():
    """32 buckets to distance 128, as published: causal, 16 single distances, then 16, 18.2, 20.7, ... per bucket."""
    causal = distance_buckets(200, 32, 128, is_causal=True)[:, 0]  # key 0 seen from query s
    assert list(causal[:16]) == list(range(16))
    assert list(causal[16:30]) == [16] * 3 + [17] * 2 + [18] * 3 + [19] * 3 + [20] * 3
    assert causal[112] == 30 and causal[113] == 31 and (causal[128:] == 31).all()
    assert (distance_buckets(9, 32, 128, is_causal=True)[0] == 0).all()  # what comes later has no distance
    both = distance_buckets(9, 8, 20, is_causal=False)
    assert list(both[0]) == [0, 5, 6, 6, 6, 6, 6, 7, 7] and list(both[:, 0]) == [0, 1, 2, 2, 2, 2, 2, 3, 3]


VARIANTS = {
    "window": {"model.attention.window": 3, "model.attention.window_every": 2},
    "sinks and biases": {"model.attention.sinks": True, "model.attention.bias": True},
    "norms": {"model.attention.qk_norm": "head"},
    "latents": {"model.mla.kv_rank": 8, "model.mla.nope_dim": 4, "model.mla.rope_dim": 4, "model.mla.value_dim": 6},
    "stretched": {"model.yarn.factor": 4.0, "model.yarn.original_len": 8, "model.yarn.beta_fast": 2.0},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_train_alike_scanned_or_not(name):
    settings = VARIANTS[name] | {"model.num_layers": 2, "mesh.devices": 2}
    plain, scanned = (take_steps(settings | {"model.scan_layers": scan}) for scan in (False, True))
    assert plain.curve()[-1] < plain.curve()[0]
    np.testing.assert_allclose(plain.curve(), scanned.curve(), rtol=1e-5)
    runs = len(Stepper(small_config(settings | {"model.scan_layers": True}), scanned.stepper.mesh).init().dense["runs"])
    assert runs == (2 if name == "window" else 1)  # layers with and without a window are not equal


@pytest.mark.parametrize("key, word", [("sinks_H", "sinks"), ("bias", "bias"), ("query_norm", "norm")])
def test_no_weight_decay_but_of_matrices(key, word):
    """With a gradient of nothing, only what decays moves."""
    settings = (
        VARIANTS["sinks and biases"] | VARIANTS["norms"] | {"optim.weight_decay": 0.5, "optim.learning_rate": 0.1}
    )
    stepper = Stepper(small_config(settings | {"mesh.devices": 1}), take_steps({"mesh.devices": 1}).stepper.mesh)
    params = jax.tree.map(jnp.ones_like, stepper.init().params)
    updates, _ = stepper.optimizer.update(jax.tree.map(jnp.zeros_like, params), stepper.init().optimizer, params)
    flat, _ = jax.tree_util.tree_flatten_with_path(updates)
    moved = {jax.tree_util.keystr(path) for path, leaf in flat if np.asarray(leaf).any()}
    names = {jax.tree_util.keystr(path) for path, _ in flat}
    assert any(key in name for name in names) and not any(word in name for name in moved)
    assert any("query" in name and "'w'" in name for name in moved)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model.mla.kv_rank": 4, "model.mla.rope_dim": 3}, "config.model.mla.rope_dim=3: .* even"),
        (
            {"model.mla.kv_rank": 4, "model.attention.sinks": True},
            "config.model.attention.sinks=True: is not for latent",
        ),
        ({"model.attention.qk_norm": "both"}, "must be one of none, head, projection"),
        ({"model.yarn.factor": 0.5}, "config.model.yarn.factor=0.5: must be >= 1"),
    ],
)
def test_what_does_not_go_together(changes, message):
    with pytest.raises(ConfigError, match=message):
        small_config(changes)
