"""Every routing scheme on every dispatcher: one training step of a small decoder on 4 members equals `reference`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dispatch_harness import COMPILER_OPTIONS, variants_on_cpu
from flax import nnx

from fef import sharding
from fef.config import Config, ConfigError
from fef.model import Decoder
from fef.native import build
from fef.pool.pool import Pool
from fef.registry import scan
from fef.routing import ROUTERS
from fef.validation import validate

scan("fef.routing")
BATCH, SEQ_LEN, VOCAB = 4, 16, 256
DISPATCHERS = [variant.dispatcher for variant in variants_on_cpu()]


@pytest.fixture(scope="module", autouse=True)
def built_library():
    build.build()


def small_config(router: str, dispatcher: str) -> Config:
    """3 experts, so that one of the 4 members is home to none."""
    config = Config()
    config.model.num_layers, config.model.num_heads, config.model.num_kv_heads = 1, 2, 1
    config.model.d_model = config.moe.d_expert = 16
    config.moe.router, config.moe.dispatcher = router, dispatcher
    config.moe.num_experts, config.moe.num_choices = 3, 2
    config.routing.allow_noncausal = True
    config.data.batch_size, config.data.seq_len = BATCH, SEQ_LEN
    try:
        validate(config)
    except ConfigError:  # a scheme of one choice
        config.moe.num_choices = 1
        validate(config)
    return config


@functools.cache
def first_step(router: str, dispatcher: str, members: int) -> tuple[float, dict[str, np.ndarray], float]:
    """Loss, gradients by name, and their norm, on the same global batch for any number of members."""
    config = small_config(router, dispatcher)
    mesh = sharding.make_mesh(members)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (BATCH, SEQ_LEN + 1))
    inputs_BS, targets_BS = tokens[:, :-1], tokens[:, 1:]
    mask_BS = np.arange(SEQ_LEN) < np.array([SEQ_LEN, SEQ_LEN, 5, 0])[:, None]  # member 3 has no token at R = 4
    with Pool(mesh):
        graph, params, rest = nnx.split(Decoder(config, mesh, nnx.Rngs(0)), nnx.Param, ...)

        def loss(params: Any) -> jax.Array:
            logits_BSV, aux_loss, _ = nnx.merge(graph, params, rest)(inputs_BS, mask_BS)
            loss_BS = optax.softmax_cross_entropy_with_integer_labels(logits_BSV, targets_BS)
            return jnp.where(mask_BS, loss_BS, 0).sum() / mask_BS.sum() + aux_loss

        def step(params: Any) -> tuple:
            value, grads = jax.value_and_grad(loss)(params)
            return value, grads, optax.tree.norm(grads)

        value, grads, norm = jax.block_until_ready(jax.jit(step, compiler_options=COMPILER_OPTIONS)(params))
        named = {jax.tree_util.keystr(k): np.asarray(v) for k, v in jax.tree_util.tree_leaves_with_path(grads)}
    return float(value), named, float(norm)


@pytest.mark.parametrize("dispatcher", [name for name in DISPATCHERS if name != "reference"])
@pytest.mark.parametrize("router", ROUTERS.names())
def test_loss_and_gradients_equal_those_of_reference(router, dispatcher):
    loss, grads, _ = first_step(router, dispatcher, members=4)
    wanted_loss, wanted, _ = first_step(router, "reference", members=4)
    assert np.isfinite(loss)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    assert grads.keys() == wanted.keys()
    for name, grad in grads.items():
        assert np.isfinite(grad).all(), name
        assert np.abs(wanted[name]).max() > 0, f"{name}: nothing is learned, so nothing is tested"
        error = np.abs(grad - wanted[name]).max() / np.abs(wanted[name]).max()
        assert error <= 1e-5, f"{name} is off by {error}"


@pytest.mark.parametrize("members", [1, 2])
def test_gradient_norm_is_the_same_for_every_number_of_members(members):
    """cases D-04, one real step: no factor R anywhere."""
    loss, _, norm = first_step("top_k", "pooled", members)
    wanted_loss, _, wanted_norm = first_step("top_k", "pooled", members=4)
    np.testing.assert_allclose([loss, norm], [wanted_loss, wanted_norm], rtol=1e-5)
