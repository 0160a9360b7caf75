"""What the tests of Hugging Face checkpoints share. No test file: tests import it."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fef import sharding
from fef.config import Config
from fef.hf import convert
from fef.model import Decoder
from fef.step import Stepper

TESTS = pathlib.Path(__file__).parent
GOLDEN = TESTS / "golden/hf"
CASES = TESTS / "cases/hf"


def build(config: Config, arrays: dict) -> Decoder:
    """The model of an import, on one device; fails when its arrays are not exactly the model's."""
    config.moe.dispatcher, config.mesh.devices = "reference", 1
    stepper = Stepper(config, sharding.make_mesh(1, 1))
    state = jax.eval_shape(stepper.init)
    parts = {name: getattr(state, name) for name in ("experts", "dense", "router")}
    flat, treedef = jax.tree_util.tree_flatten_with_path(parts)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in flat]
    assert set(names) == set(arrays)
    for name, (_, leaf) in zip(names, flat, strict=True):
        assert (leaf.shape, leaf.dtype) == (arrays[name].shape, arrays[name].dtype), name
    values = jax.tree.unflatten(treedef, [jnp.asarray(arrays[name]) for name in names])
    return nnx.merge(stepper.graph, values["experts"], values["dense"], values["router"])


def predict(model: Decoder, ids_BS: list, mask_BS: np.ndarray) -> tuple:
    """Logits, auxiliary loss and metrics of evaluation."""
    apply = jax.jit(lambda model, ids_BS, mask_BS: model(ids_BS, mask_BS, train=False))
    return apply(model, jnp.asarray(ids_BS, jnp.int32), jnp.asarray(mask_BS, bool))


def compare(folder: pathlib.Path) -> tuple:
    """(configuration, expected, largest difference of a logit at an unmasked place, auxiliary loss) of a decoder."""
    config, arrays, _ = convert.read(folder)
    expected = json.loads((folder / "expected.json").read_text())
    logits_BSV = np.array(expected["logits"])
    mask_BS = np.array(expected.get("attention_mask", np.ones(logits_BSV.shape[:2])), bool)
    found_BSV, aux_loss, _ = predict(build(config, arrays), expected["input_ids"], mask_BS)
    return config, expected, np.abs(np.asarray(found_BSV) - logits_BSV)[mask_BS].max(), float(aux_loss)
