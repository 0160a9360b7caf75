import json
import pathlib

import pytest
from flax import nnx

from fef.config import Config
from fef.ffn import FFNS
from fef.flops import matmul_params_active, train_flops_per_token
from fef.model import Decoder
from fef.sharding import make_mesh

CASE = json.loads((pathlib.Path(__file__).parent / "cases/metrics/flops.json").read_text())


@pytest.fixture
def config():
    config = Config()
    model, moe = config.model, config.moe
    model.num_layers, model.d_model, model.vocab_size = CASE["L"], CASE["D"], CASE["V"]
    model.num_heads = model.num_kv_heads = CASE["heads"]
    model.head_dim, config.data.seq_len = CASE["head_dim"], CASE["S"]
    moe.num_experts, moe.num_choices, moe.d_expert = CASE["E"], CASE["K"], CASE["F"]
    return config


def test_flops_count_active_experts_only(config):
    assert matmul_params_active(config) == CASE["active_matmul_params"]
    causal, full = train_flops_per_token(config), train_flops_per_token(config, causal=False)
    assert causal.matmul == full.matmul == CASE["train_flops_per_token_matmul"]
    assert causal.attention == CASE["plus_attention_causal"]
    assert full.attention == CASE["plus_attention_full"]
    assert causal.total == causal.matmul + causal.attention


def test_more_experts_add_only_the_router(config):
    before = train_flops_per_token(config)
    config.moe.num_experts *= 2
    after = train_flops_per_token(config)
    assert after.total - before.total == CASE["if_E_becomes_16_matmul_flops_grow_by_only"]


def test_all_experts_count_when_all_are_chosen(config):
    config.moe.num_choices = config.moe.num_experts
    assert train_flops_per_token(config).matmul == CASE["wrong_all_experts"]


def test_what_does_not_change_the_work_of_a_token(config):
    expected = train_flops_per_token(config)
    config.model.tie_embeddings = False
    config.train.microbatches, config.data.batch_size, config.model.remat = 4, 64, "full"
    assert train_flops_per_token(config) == expected


@pytest.mark.parametrize(
    ("change", "grows_by"),
    [
        ({"model.num_kv_heads": 2}, -2 * 2 * 64 * 2 * 16),  # keys and values of two heads fewer, two layers
        ({"moe.num_shared": 1}, 2 * 3 * 64 * 128),
        ({"moe.leading_dense": 1, "model.d_ff": 100}, 3 * 64 * 100 - 2 * 3 * 64 * 128 - 64 * 8),
        ({"moe.every": 2, "model.d_ff": 100}, 3 * 64 * 100 - 2 * 3 * 64 * 128 - 64 * 8),
        ({"moe.every": 0, "model.d_ff": 256}, -2 * 64 * 8),  # a dense model of equal active parameters
        ({"model.ffn": "relu"}, -2 * 2 * 64 * 128),  # in each layer two experts with one matrix fewer
        ({"model.ffn": "gelu", "moe.leading_dense": 1, "model.d_ff": 100}, 2 * 64 * 100 - 8 * 64 * 128 - 64 * 8),
        ({"model.ffn": "clamped_swiglu"}, 0),  # biases are no matmuls
    ],
)
def test_each_part_of_the_model_counts(config, change, grows_by):
    before = matmul_params_active(config)
    for key, value in change.items():
        section, name = key.split(".")
        setattr(getattr(config, section), name, value)
    assert matmul_params_active(config) - before == grows_by


@pytest.mark.parametrize("ffn", FFNS.names())
@pytest.mark.parametrize("tied", [True, False])
def test_the_count_is_that_of_the_model_itself(config, tied, ffn):
    """With every expert chosen, all matrices are active; an untied embedding is the only one that is not."""
    config.model.tie_embeddings, config.model.num_kv_heads = tied, 2
    config.moe.num_choices, config.moe.num_shared, config.moe.leading_dense = 8, 1, 1
    config.moe.dispatcher, config.model.ffn = "reference", ffn
    model = nnx.eval_shape(lambda: Decoder(config, make_mesh(1, 1), nnx.Rngs(0)))
    params = nnx.to_flat_state(nnx.state(model, nnx.Param))
    sizes = [leaf.size for path, leaf in params if leaf.ndim >= 2 and not str(path[-1]).startswith("b_")]
    embedding = 0 if tied else CASE["V"] * CASE["D"]
    assert sum(sizes) - embedding == matmul_params_active(config)
