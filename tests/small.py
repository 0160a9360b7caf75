"""A model that compiles in seconds, and steps of it that tests share. No test file: tests import it.

XLA spends most of a small test's time on generating code, so the code here is generated with little optimisation, and
programs compiled before are taken from a folder. Both change speed only. (More of it: conftest.py.)
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from fef import sharding
from fef.checkpoint import to_logical, to_physical
from fef.config import Config, assign, freeze, scopes
from fef.dispatch import DISPATCHERS
from fef.pool.pool import Pool
from fef.step import Stepper, TrainState, is_expert
from fef.validation import validate

ROOT = pathlib.Path(__file__).parent.parent
COMPILING = {
    "jax_disable_most_optimizations": True,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}

# SGD rather than Adam: its steps show a wrong scale of the gradient. Without the balance loss, which is a mean over
# microbatches, the loss is the same function however a batch is split.
SMALL = {
    "model.d_model": 16,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.d_ff": 32,
    "moe.num_experts": 6,
    "moe.num_choices": 2,
    "moe.d_expert": 32,
    "moe.dispatcher": "reference",
    "routing.top_k.balance_coef": 0.0,
    "data.path": str(ROOT / "fef/corpus/topics.jsonl.gz"),
    "data.seq_len": 16,
    "data.batch_size": 8,
    "optim.name": "sgd",
    "optim.learning_rate": 0.3,
    "optim.warmup_steps": 0,
    "optim.decay_steps": 1000,
    "optim.weight_decay": 0.0,
    "optim.clip_norm": None,
}


@pytest.fixture(scope="module", autouse=True)
def fast_compilation(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "compiled_programs"
    folder.mkdir(exist_ok=True)
    settings = COMPILING | {"jax_compilation_cache_dir": str(folder)}
    before = {name: jax.config.values[name] for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def quick_environment(tmp_path_factory) -> dict[str, str]:
    """The environment of a program that a test starts, with the same folder of programs and as little optimisation."""
    compiling = {name.upper(): str(value) for name, value in COMPILING.items()}
    folder = tmp_path_factory.getbasetemp() / "compiled_programs"
    return os.environ | compiling | {"JAX_COMPILATION_CACHE_DIR": str(folder), "JAX_PLATFORMS": "cpu"}


def small_config(changes: dict[str, Any] | None = None) -> Config:
    """The small configuration with changes, {"model.d_model": 32, ...}; validated and frozen."""
    config = Config()
    for key, value in (SMALL | (changes or {})).items():
        assign(config, key, value)
    validate(config)
    freeze(config)
    return config


@dataclasses.dataclass
class Steps:
    """What some training steps gave, in NumPy arrays.

    Attributes:
      rows: the metrics of each step.
      before, after: the state, experts in logical order.
      stepper, step: what was run; `step(state, batch)` runs it again on any state, unless the dispatcher is pooled.
    """

    stepper: Stepper
    step: Callable[[TrainState, dict], tuple[TrainState, dict]]
    rows: list[dict[str, Any]]
    before: TrainState
    after: TrainState

    def curve(self, name: str = "loss") -> np.ndarray:
        return np.array([row[name] for row in self.rows])


def take_steps(changes: dict[str, Any] | None = None, num_steps: int = 3) -> Steps:
    """Trains the small configuration on fixed random batches, whose masks have different lengths."""
    return _take_steps(tuple(sorted((changes or {}).items())), num_steps)


@functools.cache
def _take_steps(changes: tuple, num_steps: int) -> Steps:
    config = small_config(dict(changes))
    mesh = sharding.make_mesh(config.mesh.devices, config.mesh.data)
    stepper = Stepper(config, mesh)
    shardings = stepper.shardings()
    program = jax.jit(stepper.train_step, out_shardings=(shardings, None))

    def step(state: TrainState, batch: dict) -> tuple[TrainState, dict]:
        """Takes and gives NumPy arrays, experts in logical order."""
        table, axis = stepper.table, stepper.expert_axis
        state = jax.device_put(to_physical(state, is_expert, table.position_E, table.num_positions, axis), shardings)
        state, metrics = program(state, jax.device_put(batch, sharding.named(mesh, sharding.TOKENS)))
        state, metrics = jax.device_get((state, metrics))
        assert_empty_positions_are_zero(stepper, state)
        return jax.device_get(to_logical(state, is_expert, table.position_E, axis)), metrics

    scope = scopes(config)
    before = _initial_state(tuple((key, value) for key, value in changes if scope[key] == "model"))
    state, rows = before, []
    with Pool(mesh) if DISPATCHERS.get(config.moe.dispatcher).uses_pool else contextlib.nullcontext():
        for number in range(num_steps):
            state, metrics = step(state, batch(number))
            rows.append(metrics)
    return Steps(stepper, step, rows, before, state)


@functools.cache
def _initial_state(changes: tuple) -> TrainState:
    """The state before the first step, experts in logical order; that the mesh does not matter is a test of its own."""
    config = small_config(dict(changes))
    stepper = Stepper(config, sharding.make_mesh(config.mesh.devices))
    return jax.device_get(to_logical(stepper.init(), is_expert, stepper.table.position_E, stepper.expert_axis))


def assert_empty_positions_are_zero(stepper: Stepper, state: TrainState) -> None:
    empty = np.setdiff1d(np.arange(stepper.table.num_positions), stepper.table.position_E)
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        if is_expert(path):
            assert not np.take(leaf, empty, axis=stepper.expert_axis).any(), jax.tree_util.keystr(path)


def batch(number: int) -> dict[str, np.ndarray]:
    """Random sequences, always the same; some are full and others padded to different lengths, which change."""
    tokens = np.random.default_rng(0).integers(0, 256, (8, 17)).astype(np.int32)
    lengths_B = np.roll([16, 1, 5, 16, 9, 3, 16, 12], number)
    return {
        "inputs_BS": tokens[:, :-1],
        "targets_BS": tokens[:, 1:],
        "mask_BS": np.arange(16)[None, :] < lengths_B[:, None],
    }


def leaves(tree: Any) -> dict[str, np.ndarray]:
    """{path: array}"""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in flat}


def assert_equal(tree: Any, expected: Any) -> None:
    """The same leaves, bit for bit."""
    tree, expected = leaves(tree), leaves(expected)
    assert tree.keys() == expected.keys()
    for path, leaf in tree.items():
        np.testing.assert_array_equal(leaf, expected[path], err_msg=path)


def assert_close(tree: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """The same leaves within `tolerance`, absolute and relative to the largest element of the leaf."""
    tree, expected = leaves(tree), leaves(expected)
    assert tree.keys() == expected.keys()
    for path, leaf in tree.items():
        scale = max(1.0, float(np.abs(expected[path]).max(initial=0)))
        np.testing.assert_allclose(leaf, expected[path], rtol=0, atol=tolerance * scale, err_msg=path)


def echo(state: TrainState) -> TrainState:
    """Parameters of a dense model that repeats the last token: with blocks that add nothing, the logits are the
    products of the last token's embedding with all others."""

    def change(path: tuple, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path)
        if "embedding" in name:
            return leaf / jnp.linalg.norm(leaf, axis=-1, keepdims=True) * 100
        return leaf if "norm" in name else leaf * 0

    return jax.tree_util.tree_map_with_path(change, state)
