"""The kinds of FFN: numbers by hand, their parts, dense and expert layers of each, and training."""

import contextlib
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small import fast_compilation, small_config, take_steps  # noqa: F401

import fef.train
from fef.checkpoint import Checkpointer
from fef.config import ConfigError
from fef.dispatch.base import UnitSizes
from fef.experts import Experts, init_experts
from fef.ffn import CLAMPED_SWIGLU, FFNS, GELU, RELU, SWIGLU
from fef.layers import DenseFfn
from fef.metrics import read_jsonl
from fef.model import Decoder
from fef.moe import MoeLayer
from fef.ops.expert_ffn import expert_ffn
from fef.ops.grouped_matmul import Segments
from fef.pool.table import ExpertTable
from fef.sharding import make_mesh

every_kind = pytest.mark.parametrize("name", FFNS.names())


# Numbers by hand.


@pytest.mark.parametrize(
    ("kind", "args", "hidden"),
    [
        (SWIGLU, (1.0, 2.0), 2 * 0.7310586),  # sigmoid(1)
        (SWIGLU, (-2.0, 0.5), -2 * 0.1192029 * 0.5),  # sigmoid(-2)
        (GELU, (1.0,), 0.8411920),  # the exact one has 0.8413447
        (GELU, (-1.0,), -0.1588080),
        (RELU, (1.5,), 1.5),
        (RELU, (-1.5,), 0.0),
        (CLAMPED_SWIGLU, (1.0, 2.0), 3 * 0.8457958),  # sigmoid(1.702)
        (CLAMPED_SWIGLU, (1.0, 9.0), 8 * 0.8457958),
        (CLAMPED_SWIGLU, (1.0, -9.0), -6 * 0.8457958),
        (CLAMPED_SWIGLU, (9.0, 0.0), 7 * 0.9999933),  # sigmoid(11.914)
        (CLAMPED_SWIGLU, (-9.0, 0.0), -9 * 2.225753e-7),  # sigmoid(-15.318): below there is no limit
    ],
)
def test_the_activation_by_hand(kind, args, hidden):
    np.testing.assert_allclose(kind.hidden(*map(jnp.float32, args)), hidden, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "args", "is_free"),
    [
        (RELU, (0.0,), (False,)),
        (RELU, (1e-6,), (True,)),
        (CLAMPED_SWIGLU, (6.99, 6.99), (True, True)),
        (CLAMPED_SWIGLU, (7.0, -6.99), (False, True)),
        (CLAMPED_SWIGLU, (8.0, 7.0), (False, False)),
        (CLAMPED_SWIGLU, (-20.0, -7.0), (True, False)),
    ],
)
def test_there_is_no_gradient_from_the_limit_on(kind, args, is_free):
    slopes = jax.grad(kind.hidden, range(len(args)))(*map(jnp.float32, args))
    assert tuple(float(slope) != 0 for slope in slopes) == is_free


@every_kind
def test_an_ffn_of_width_one(name):
    """x = 2; W_gate, W_up, W_down 0.5, 1, 3; biases 1, -1, 10, where there are any."""
    kind = FFNS.get(name)
    numbers = {"w_gate": 0.5, "w_up": 1.0, "w_down": 3.0, "b_gate": 1.0, "b_up": -1.0, "b_down": 10.0}
    shapes = kind.shapes(1, 1)
    experts = Experts(kind, {part: jnp.full((1, *shape), numbers[part]) for part, shape in shapes.items()})
    wanted = {
        "swiglu": 3 * (2 * 0.7310586),  # g = 1, u = 2
        "gelu": 3 * 1.9545977,  # u = 2
        "relu": 3 * 2.0,
        "clamped_swiglu": 3 * (2 * 2 * 0.9678293) + 10,  # g = 2, u = 1, sigmoid(3.404)
    }[name]
    segments = Segments(*(jnp.array([i], jnp.int32) for i in (0, 1, 0)))
    for implementation in ("native", "jax"):
        y = expert_ffn(jnp.full((1, 1), 2.0), experts, segments, implementation)
        np.testing.assert_allclose(y, [[wanted]], rtol=1e-5, err_msg=implementation)


@pytest.mark.parametrize("implementation", ["native", "jax"])
def test_biases_are_those_of_the_rows_experts(implementation):
    """Rows 4 and 0-1 are expert 1's, row 2 is expert 0's; row 3 nobody's, and expert 2 has none. All weights are 0."""
    zeros = {part: jnp.zeros((3, *shape)) for part, shape in CLAMPED_SWIGLU.shapes(2, 3).items()}
    experts = Experts(CLAMPED_SWIGLU, zeros | {"b_down": jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])})
    segments = Segments(*(jnp.array(of_G, jnp.int32) for of_G in ((4, 2, 0), (1, 1, 2), (1, 0, 1))))

    def rows(experts):
        return expert_ffn(jnp.ones((5, 2)), experts, segments, implementation)

    y_ND, vjp = jax.vjp(rows, experts)
    np.testing.assert_array_equal(y_ND, [[3, 4], [3, 4], [1, 2], [0, 0], [3, 4]])
    (grads,) = vjp(jnp.array([[1.0, 10], [2, 20], [4, 40], [8, 80], [16, 160]]))
    np.testing.assert_array_equal(grads["b_down"], [[4, 40], [19, 190], [0, 0]])
    assert all(not np.asarray(grad[2]).any() for grad in jax.tree.leaves(grads))


# Parts.


def test_parts_and_their_sizes():
    assert SWIGLU.shapes(5, 7) == {"w_gate": (5, 7), "w_up": (5, 7), "w_down": (7, 5)}
    assert GELU.shapes(5, 7) == RELU.shapes(5, 7) == {"w_up": (5, 7), "w_down": (7, 5)}
    biases = {"b_gate": (7,), "b_up": (7,), "b_down": (5,)}
    assert CLAMPED_SWIGLU.shapes(5, 7) == SWIGLU.shapes(5, 7) | biases
    assert [*CLAMPED_SWIGLU.parts] == ["w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down"]  # as in a block
    sizes = {name: FFNS.get(name).num_elems(5, 7) for name in FFNS}
    assert sizes == {"swiglu": 105, "gelu": 70, "relu": 70, "clamped_swiglu": 105 + 19}
    flops = {name: FFNS.get(name).flops_per_row(5, 7) for name in FFNS}
    assert flops == {"swiglu": 210.0, "gelu": 140.0, "relu": 140.0, "clamped_swiglu": 210.0}


@every_kind
def test_the_ledgers_units(name):
    kind = FFNS.get(name)
    units = UnitSizes(weight_bytes=2, gradient_bytes=4).for_shapes(kind, 5, 7)
    elems = sum(np.prod(shape) for shape in kind.shapes(5, 7).values())
    assert (units.block_bytes, units.gradient_bytes, units.row_bytes) == (2 * elems, 4 * elems, 2 * 5)


@every_kind
def test_a_tree_of_experts_has_its_parts_in_order(name):
    kind = FFNS.get(name)
    experts = init_experts(jax.random.key(0), ExpertTable(3, 2), 5, 7, 1.0, kind)
    assert experts.widths == (5, 7)
    assert [leaf.shape for leaf in jax.tree.leaves(experts)] == [(4, *shape) for shape in kind.shapes(5, 7).values()]
    assert jax.tree.map(lambda w: w, experts).parts.keys() == kind.parts.keys()
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(experts.astype(jnp.bfloat16)))


@every_kind
def test_initial_experts(name):
    kind, table = FFNS.get(name), ExpertTable(3, 2)
    experts = init_experts(jax.random.key(1), table, 64, 32, 0.5, kind)
    for part, array in experts.parts.items():
        own = array[table.position_E]
        assert not array[3].any(), "an empty position"
        if part.startswith("b_"):
            assert not own.any()
        else:
            np.testing.assert_allclose(own.std(), 0.88 * 0.5 * own.shape[1] ** -0.5, rtol=0.05)


def test_initial_swiglu_experts_are_what_they_were():
    keys, table = jax.random.split(jax.random.key(1), 3), ExpertTable(2, 1)
    experts = init_experts(jax.random.key(1), table, 4, 6, 1.0)
    for part, key, shape in zip(experts.parts, keys, ((2, 4, 6), (2, 4, 6), (2, 6, 4)), strict=True):
        drawn = jax.random.truncated_normal(key, -2, 2, shape, jnp.float32) * shape[1] ** -0.5
        np.testing.assert_array_equal(experts[part], drawn, err_msg=part)


# Layers.


@every_kind
def test_a_dense_ffn_is_an_expert_that_every_token_visits(name):
    model, kind = small_config({"model.ffn": name}).model, FFNS.get(name)
    dense = DenseFfn(model, 24, nnx.Rngs(0))
    if kind.has_biases:
        for i, name in enumerate(kind.maps):
            bias = getattr(dense, name).bias
            assert not bias[...].any()
            bias.set_value(jax.random.normal(jax.random.key(i), bias.shape))
    parts = {part: getattr(getattr(dense, part[2:]), "bias" if part[0] == "b" else "w") for part in kind.parts}
    experts = Experts(kind, {part: param[...][None] for part, param in parts.items()})
    x_BSD = jax.random.normal(jax.random.key(9), (2, 3, model.d_model))
    segments = Segments(*(jnp.array([i], jnp.int32) for i in (0, 6, 0)))
    wanted = expert_ffn(x_BSD.reshape(6, -1), experts, segments, "jax").reshape(x_BSD.shape)
    np.testing.assert_allclose(dense(x_BSD), wanted, rtol=1e-5, atol=1e-6)
    assert dense(x_BSD.astype(jnp.bfloat16)).dtype == jnp.bfloat16


PARTS = {"moe.leading_dense": 1, "model.num_layers": 2, "moe.num_shared": 1}  # a model with all sorts of FFNs


@every_kind
def test_parameters_of_a_model(name):
    """Their names are those in checkpoints."""
    config = small_config(PARTS | {"model.ffn": name})
    state = nnx.state(nnx.eval_shape(lambda: Decoder(config, make_mesh(1), nnx.Rngs(0))), nnx.Param)
    found = {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(state)}
    found = {path: shape for path, shape in found.items() if ".ffn." in path or ".shared." in path or "_P" in path}
    gate = name in ("swiglu", "clamped_swiglu")
    wanted = {}
    for place in ("runs.0.ffn.", "runs.1.shared."):
        wanted |= {place + "up.w": (16, 32), place + "down.w": (32, 16)} | (
            {place + "gate.w": (16, 32)} if gate else {}
        )
        if name == "clamped_swiglu":
            wanted |= {place + "gate.bias": (32,), place + "up.bias": (32,), place + "down.bias": (16,)}
    moe = "runs.1.moe."
    wanted |= {moe + "w_up_PDF": (6, 16, 32), moe + "w_down_PFD": (6, 32, 16)}
    wanted |= {moe + "w_gate_PDF": (6, 16, 32)} if gate else {}
    if name == "clamped_swiglu":
        wanted |= {moe + "b_gate_PF": (6, 32), moe + "b_up_PF": (6, 32), moe + "b_down_PD": (6, 16)}
    assert found == wanted


def test_an_unknown_kind_is_refused():
    with pytest.raises(ConfigError, match=r"model.ffn='geglu': must be one of clamped_swiglu, gelu, relu, swiglu"):
        small_config({"model.ffn": "geglu"})
    with pytest.raises(ValueError, match="unknown FFN 'gleu'; nearest: gelu"):
        MoeLayer(8, 8, 2, 1, mesh=make_mesh(1), rngs=nnx.Rngs(0), ffn="gleu")


# Training.

RUN = PARTS | {
    "moe.dispatcher": "pooled", "mesh.devices": 2, "optim.name": "adamw", "optim.learning_rate": 0.01,
    "train.steps": 4, "train.eval_every": 4, "train.eval_batches": 1, "train.sample_bytes": 0, "checkpoint.every": 2,
    "run.report": False, "run.tensorboard": False,
}  # fmt: skip


def train(folder, changes):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        fef.train.run(small_config(RUN | changes), str(folder))
    rows, _ = read_jsonl(folder / "metrics.jsonl")
    return {key: [row[key] for row in rows] for key in ("loss", "grad_norm", "load")}, out.getvalue()


@pytest.mark.parametrize("dispatcher", ["pooled", "all_to_all"])
def test_stacked_layers_microbatches_and_recomputation_change_nothing(dispatcher):
    """Of biases too, which have a dimension fewer than matrices; 6 experts on 8 positions."""
    model = PARTS | {"model.ffn": "clamped_swiglu", "model.num_layers": 3}
    how = {"moe.dispatcher": dispatcher, "model.scan_layers": True, "train.microbatches": 2, "model.remat": "full"}
    expected, steps = take_steps(model | {"mesh.devices": 1}), take_steps(model | how | {"mesh.devices": 4})
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(steps.curve(name), expected.curve(name), rtol=2e-5, err_msg=name)


@every_kind
def test_a_run_of_each_kind_learns_and_goes_on_from_a_checkpoint(name, tmp_path):
    """Bit for bit with the dispatcher that it had, and closely with another one, which measures what it chooses by."""
    kind = {"model.ffn": name}
    whole, _ = train(tmp_path / "whole", kind)
    assert whole["loss"][-1] < whole["loss"][0]
    train(tmp_path / "part", kind | {"train.steps": 2})
    resumed, out = train(tmp_path / "part", kind)
    assert "continuing at step 2 of 4" in out
    assert resumed == whole
    train(tmp_path / "other", kind | {"train.steps": 2})
    other, _ = train(tmp_path / "other", kind | {"moe.dispatcher": "fluid"})
    np.testing.assert_allclose(other["loss"], whole["loss"], rtol=1e-5)
    assert other["loss"][:2] == whole["loss"][:2]
    with Checkpointer(tmp_path / "whole/checkpoints", keep=9, keep_best=0) as checkpointer:
        shapes = {leaf: np.zeros(shape, dtype) for leaf, (shape, dtype) in checkpointer.leaves(4).items()}
        biases = {
            leaf: array for leaf, array in checkpointer.restore(4, shapes)[0].items() if ".b_" in leaf or "bias" in leaf
        }
    assert len(biases) == 3 * 9 * FFNS.get(name).has_biases  # dense, shared and experts', each with two moments
    assert all(np.asarray(array).any() for array in biases.values())
