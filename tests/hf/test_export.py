"""What fef writes is what transformers wrote, and a run goes out, comes back and trains on."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from hf_harness import GOLDEN
from safetensors import safe_open
from small import fast_compilation, small_config  # noqa: F401

from experiments import convert as program
from experiments import flags
from fef import train
from fef.config import Config, ConfigError, UserError, assign, flatten
from fef.hf import FAMILIES, convert, get_family
from fef.registry import scan

scan("fef.hf")


def tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("shard_gb", [1.0, 2e-5])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_round_trip(tmp_path, name, shard_gb):
    """import, then export: the same tensors bit for bit, and a config.json that reads as the same configuration."""
    program.main(["convert", "import", str(GOLDEN / name), str(tmp_path / "in")])
    program.main(
        ["convert", "export", str(tmp_path / "in"), str(tmp_path / "out"), f"--family={name}", f"--shard_gb={shard_gb}"]
    )
    before, after = tensors(GOLDEN / name), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for tensor, value in before.items():
        np.testing.assert_array_equal(after[tensor], value)
    assert (tmp_path / "out/model.safetensors.index.json").exists() == (shard_gb < 1)
    first, second = (flatten(convert.read(folder)[0]) for folder in (GOLDEN / name, tmp_path / "out"))
    head_dim = {"model.head_dim": None}  # which an export always says
    assert {k: v if not isinstance(v, float) else pytest.approx(v) for k, v in first.items()} | head_dim == (
        second | head_dim
    )
    fields = json.loads((tmp_path / "out/config.json").read_text())
    assert fields["architectures"] == json.loads((GOLDEN / name / "config.json").read_text())["architectures"]


def test_bfloat16_and_names_of_shards(tmp_path):
    config, arrays, family = convert.read(GOLDEN / "olmoe")
    files = convert.export_checkpoint(config, arrays, family, tmp_path / "out", "bfloat16", 8_000)
    assert files[:2] == ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"]
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    saved = tensors(tmp_path / "out")
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in saved.values())
    assert {value.dtype.name for value in saved.values()} == {"bfloat16"}
    again = convert.read(tmp_path / "out")[1]
    np.testing.assert_allclose(again["dense.embedding_VD.value"], arrays["dense.embedding_VD.value"], rtol=2**-8)


@pytest.mark.parametrize(
    "key, value, family, lost",
    [
        ("model.attention.sinks", True, "mixtral", "config.model.attention.sinks=True"),
        ("moe.num_shared", 1, "qwen3_moe", "config.moe.num_shared=1"),
        ("moe.leading_dense", 1, "mixtral", "layers with experts="),
        ("routing.top_k.renormalise", False, "mixtral", "config.routing.top_k.renormalise=False"),
        ("model.ffn", "gelu", "olmoe", "config.model.ffn='gelu'"),
        ("model.head_dim", 6, "olmoe", "config.model.head_dim=6"),
        ("moe.router", "switch", "mixtral", "config.moe.router='switch': mixtral has top_k"),
    ],
)
def test_what_a_family_cannot_say_is_refused(tmp_path, key, value, family, lost):
    config = Config()
    assign(config, key, value)
    with pytest.raises(UserError) as error:
        convert.export_checkpoint(config, {}, get_family(family), tmp_path / "out", "float32", 10**9)
    assert lost in str(error.value)
    assert not (tmp_path / "out").exists()


def test_what_does_not_change_the_function_is_no_obstacle():
    config = Config()
    for key, value in (("model.init_scale", 2.0), ("routing.top_k.z_coef", 0.1), ("model.d_ff", 7)):
        assign(config, key, value)
    fields = convert.fields_of(get_family("mixtral"), config)
    assert fields["router_aux_loss_coef"] == config.routing.top_k.balance_coef


@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_run_goes_out_and_comes_back_and_trains_on(tmp_path, scan_layers):
    """A training that starts from the import finds the run's held-out loss when its step is too small to matter."""
    settings = {
        "model.num_layers": 2, "mesh.devices": 2, "train.steps": 2, "train.eval_batches": 2, "moe.num_experts": 5,
        "run.tensorboard": False, "run.report": False, "train.sample_bytes": 0, "routing.top_k.z_coef": 0.0,
    }  # fmt: skip
    run = tmp_path / "run"
    summary = train.run(small_config(settings | {"model.scan_layers": scan_layers}), str(run))
    program.main(["convert", "export", str(run), str(tmp_path / "hf"), "--family=mixtral"])
    program.main(["convert", "import", str(tmp_path / "hf"), str(tmp_path / "in")])

    imported = flatten(flags.load_config(str(tmp_path / "in/config.py")))
    init_from = {"train.init_from": imported["train.init_from"]}
    config = small_config(settings | init_from | {"optim.learning_rate": 1e-30, "train.steps": 1})
    unlike = {
        key for key, value in flatten(config).items() if key.startswith(("model.", "moe.")) and value != imported[key]
    }
    assert unlike == {"model.head_dim", "model.d_ff", "moe.dispatcher"}  # said in full, without a use, of the run
    again = train.run(config, str(tmp_path / "again"))
    assert again["heldout_loss"] == pytest.approx(summary["heldout_loss"], rel=1e-6)
    drawn = train.run(
        small_config(settings | {"train.steps": 1, "optim.learning_rate": 1e-30}), str(tmp_path / "drawn")
    )
    assert abs(drawn["heldout_loss"] - summary["heldout_loss"]) > 0.01


def test_the_tokenizer_goes_along(tmp_path):
    source = shutil.copytree(GOLDEN / "mixtral", tmp_path / "hf")
    (source / "tokenizer.json").write_text('{"any": "file"}')
    program.main(["convert", "import", str(source), str(tmp_path / "in")])
    config = flags.load_config(str(tmp_path / "in/config.py"))
    assert config.data.tokenizer == str(tmp_path / "in/tokenizer.json")
    program.main(["convert", "export", str(tmp_path / "in"), str(tmp_path / "out"), "--family=mixtral"])
    assert (tmp_path / "out/tokenizer.json").read_text() == '{"any": "file"}'
    (tmp_path / "in/tokenizer.json").unlink()
    with pytest.raises(UserError, match="config.data.tokenizer=.*no such file any more"):
        program.main(["convert", "export", str(tmp_path / "in"), str(tmp_path / "again"), "--family=mixtral"])
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("source, words", [("nowhere", "no such folder"), ("", "holds no complete checkpoint")])
def test_init_from_nothing(tmp_path, source, words):
    config = small_config({"train.init_from": str(tmp_path / source)})
    with pytest.raises(ConfigError, match=f"config.train.init_from=.*{words}"):
        train.run(config, str(tmp_path / "run"))


def test_init_from_another_model(tmp_path):
    program.main(["convert", "import", str(GOLDEN / "mixtral"), str(tmp_path / "in")])
    config = small_config({"train.init_from": str(tmp_path / "in/checkpoints")})
    with pytest.raises(UserError, match="does not fit this model.*embedding_VD.*48,16.*there, expected .*256,16"):
        train.run(config, str(tmp_path / "run"))


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "say import HF_FOLDER IMPORTED or export RUN HF_FOLDER --family=NAME, not nothing"),
        (["export", "a", "b"], "export needs --family, one of deepseek_v3"),
        (["export", "a", "b", "--family=mixtrol"], "unknown family 'mixtrol'; nearest: mixtral"),
        (["export", "a", "b", "--family=mixtral"], "a: has neither config.py nor a readable config.json"),
        (["import", str(GOLDEN / "mixtral"), str(GOLDEN)], "is there already"),
    ],
)
def test_command_line(words, message):
    with pytest.raises(UserError) as error:
        program.main(["convert", *words])
    assert message in str(error.value)
