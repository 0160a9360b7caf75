"""Configuration: defaults, validation, what may change on resume, options of variants."""

import dataclasses
import json
import pathlib
import re

import pytest

import fef.config
import fef.validation
from configs import dense, small, tiny
from fef.config import GONE, Config, ConfigError, Section, UserError, assign, knob
from fef.dispatch import DISPATCHERS
from fef.registry import Registry
from fef.routing import ROUTERS

ROOT = pathlib.Path(__file__).parent.parent


def changed(**values):
    """Config() with e.g. model__d_model=64."""
    config = Config()
    for key, value in values.items():
        assign(config, key.replace("__", "."), value)
    return config


def test_every_registered_config_is_valid_and_documented():
    files = sorted(ROOT.glob("configs/[!_]*.py"))
    modules = [dense, small, tiny]
    assert [file.stem for file in files] == [module.__name__.split(".")[1] for module in modules]
    for module in modules:
        fef.validation.validate(module.get_config())
        assert all(word in module.__doc__ for word in ("?", "Command:", "Hardware:", "Time:", "Expected:"))


def test_every_router_and_dispatcher_is_valid_with_defaults_only():
    Config()  # registers them
    assert "top_k" in ROUTERS.names() and "reference" in DISPATCHERS.names()
    for name in ROUTERS:
        values = {"moe__router": name, "routing__allow_noncausal": True}
        try:
            fef.validation.validate(changed(**values))
        except ConfigError as error:  # a scheme for one or two experts per token says so
            assert "config.moe.num_choices=4" in str(error)
            remedy = re.search(r"set config.moe.num_choices=(\d)", str(error))
            fef.validation.validate(changed(**values, moe__num_choices=int(remedy[1])))
    for name in DISPATCHERS:
        fef.validation.validate(changed(moe__dispatcher=name))


def test_options_decide_whether_a_scheme_looks_ahead():
    values = {"routing__top_k__overflow": "batch_priority"}
    fef.validation.validate(changed(**values))  # without a capacity there is nothing to go first for
    values["routing__top_k__capacity_factor"] = 1.0
    with pytest.raises(ConfigError, match="config.moe.router='top_k': looks at later tokens.*allow_noncausal=True"):
        fef.validation.validate(changed(**values))
    fef.validation.validate(changed(**values, routing__allow_noncausal=True))
    fef.validation.validate(changed(**values | {"routing__top_k__overflow": "next_best"}))


def test_every_choice_can_be_selected_and_another_word_cannot():
    fields = [(key, field) for key, field, _ in fef.config.walk(Config()) if field.metadata["choices"]]
    assert {"model.dtype", "optim.name"} <= {key for key, _ in fields}
    for key, field in fields:
        for choice in field.metadata["choices"]:
            config = Config()
            assign(config, key, choice)
            fef.config.check_fields(config)
        config = Config()
        assign(config, key, "nonsense")
        with pytest.raises(ConfigError, match=f"config.{key}='nonsense': must be one of .*{choice}"):
            fef.config.check_fields(config)


def test_every_number_has_a_range_or_a_reason():
    numbers = (int, float, int | None, float | None)
    sections = {f.name for f in dataclasses.fields(Config)} - {"routing", "dispatch"}
    for key, field, _ in fef.config.walk(Config()):
        if key.split(".")[0] in sections and field.type in numbers:
            assert field.metadata["bounds"], key


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model.d_model", 130, "config.model.d_model=130: must be a multiple of model.num_heads=4"),
        ("model.num_kv_heads", 3, "config.model.num_kv_heads=3: must divide model.num_heads=4"),
        ("model.head_dim", 33, "config.model.head_dim=33: rotary positions need an even"),
        ("model.dtype", "float16", "config.model.dtype='float16': must be one of float32, bfloat16"),
        ("model.vocab_size", 0, "config.model.vocab_size=0: must be >= 1"),
        ("moe.num_choices", 33, "config.moe.num_choices=33: must be <= moe.num_experts=32"),
        ("moe.leading_dense", 5, "config.moe.leading_dense=5: must be <= model.num_layers=4"),
        ("moe.router", "topk", "config.moe.router='topk': unknown router 'topk'; nearest: top_k"),
        ("moe.router", "switch", "config.moe.num_choices=4: switch sends each token to one expert"),
        ("moe.router", "expert_choice", "set config.routing.allow_noncausal=True"),
        ("moe.dispatcher", "poled", "config.moe.dispatcher='poled': unknown dispatcher 'poled'; nearest: pooled"),
        ("mesh.data", 3, "config.mesh.data=3: must divide mesh.devices=4"),
        ("data.batch_size", 18, "config.data.batch_size=18: .* = 4; nearest: 16"),
        ("data.heldout_fraction", 1.0, "config.data.heldout_fraction=1.0: must be >= 0 and < 1"),
        ("data.seed", 2**32, "config.data.seed=4294967296: must be >= 0 and < 4294967296"),
        ("optim.decay_steps", 50, "config.optim.decay_steps=50: must be > optim.warmup_steps=50"),
        ("optim.learning_rate", float("nan"), "config.optim.learning_rate=nan: must be a finite number"),
        ("optim.clip_norm", 0.0, r"config.optim.clip_norm=0.0: must be > 0 \(clip the global gradient norm"),
        ("train.steps", 0, "config.train.steps=0: must be >= 1"),
        ("train.steps", None, "config.train.steps=None: must be an integer"),
        ("train.steps", True, "config.train.steps=True: must be an integer"),
        ("train.steps", 10.0, "config.train.steps=10.0: must be an integer"),
        ("run.profile_steps", (-1,), r"config.run.profile_steps=\(-1,\): must be one step or first,last"),
        ("run.profile_steps", (0, 3), r"config.run.profile_steps=\(0, 3\): must be one step or first,last"),
        ("run.profile_steps", (6, 5), r"config.run.profile_steps=\(6, 5\): must be one step or first,last"),
        ("run.profile_steps", (5, 201), r"\(5, 201\): must be .* 1 <= first <= last <= train.steps=200"),
        ("run.profile_steps", (1, 2, 3), r"config.run.profile_steps=\(1, 2, 3\): must be one step or first,last"),
        ("run.report", 1, "config.run.report=1: must be True or False"),
        ("data.path", None, "config.data.path=None: must be text"),
        ("pool.slots", 1, "config.pool.slots=1: must be >= 2"),
        ("routing.replay", "/no/such/file", "config.routing.replay='/no/such/file': no such file"),
    ],
)
def test_a_bad_value_names_key_value_and_remedy(key, value, words):
    config = Config()
    assign(config, key, value)
    with pytest.raises(ConfigError, match=words) as caught:
        fef.validation.validate(config)
    assert "\n" not in str(caught.value)


def test_record_and_replay_exclude_each_other():
    with pytest.raises(ConfigError, match="routing.record='a.npz': cannot be used with routing.replay='b.npz'"):
        fef.validation.validate(changed(routing__record="a.npz", routing__replay="b.npz"))


def test_good_unusual_values():
    fef.validation.validate(changed(optim__learning_rate=1))
    fef.validation.validate(
        changed(optim__clip_norm=None, optim__decay_steps=51, model__head_dim=34, model__d_model=130)
    )
    fef.validation.validate(changed(moe__every=0, moe__router="any", moe__dispatcher="any"))


def test_unknown_field_and_frozen_config():
    config = Config()
    with pytest.raises(AttributeError, match="no field 'd_modl'; nearest: d_model"):
        config.model.d_modl = 1
    fef.config.freeze(config)
    for section, name in ((config, "model"), (config.model, "d_model"), (config.routing, "module")):
        with pytest.raises(dataclasses.FrozenInstanceError, match=f"cannot set '{name}'"):
            setattr(section, name, 1)


def test_equal_configs_compare_and_hash_equal():
    assert Config() == Config()
    assert fef.config.config_hash(Config()) == fef.config.config_hash(Config())
    assert fef.config.config_hash(Config()) != fef.config.config_hash(changed(train__steps=301))


def stored(config):
    return json.loads(json.dumps(fef.config.to_dict(config)))


def test_resume_lists_changed_run_fields():
    new = changed(train__steps=1000, moe__dispatcher="reference")
    changes = fef.config.resume_changes(stored(Config()), new)
    assert changes == [("moe.dispatcher", "pooled", "reference"), ("train.steps", 200, 1000)]
    assert fef.config.resume_changes(stored(new), new) == []


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model.d_model", 64, "config.model.d_model=64: .* has 128, and a model field .* set config.model.d_model=128"),
        ("data.seq_len", 64, "config.data.seq_len=64: .* has 128, and a data field .* --fresh"),
        ("moe.router", "switch", "config.moe.router='switch': .* has 'top_k'"),
    ],
)
def test_resume_refuses_changed_model_and_data_fields(key, value, words):
    new = Config()
    assign(new, key, value)
    with pytest.raises(ConfigError, match=words):
        fef.config.resume_changes(stored(Config()), new)


def test_resume_from_another_version():
    old = stored(Config())
    del old["train"]["steps"], old["model"]["d_ff"]
    old["model"]["bygone"] = [1, 2]
    assert fef.config.resume_changes(old, changed(train__steps=5)) == [
        ("train.steps", 200, 5),
        ("model.bygone", (1, 2), GONE),
    ]
    with pytest.raises(ConfigError, match="config.model.d_ff=8: .* has 256"):
        fef.config.resume_changes(old, changed(model__d_ff=8))


@pytest.fixture
def routers(monkeypatch):
    """The registry of routers, as it was again after the test."""
    monkeypatch.setattr(ROUTERS, "_table", dict(ROUTERS._table))
    return ROUTERS


def variant(**attributes):
    """A routing scheme."""

    class Scheme:
        causal = True

        def __init__(self, num_experts, num_choices, options):
            pass

    return type("Variant", (Scheme,), attributes)


@dataclasses.dataclass
class Options:
    heat: float = knob(1.0, "model", "temperature", gt=0)
    levels: "tuple[int, ...]" = knob((2, 4), "run", "an annotation that is a string")


def test_options_of_a_variant_are_checked_frozen_and_recorded_only_when_chosen(routers):
    before = fef.config.config_hash(Config())
    routers.register("scratch")(variant(Options=Options))
    config = Config()
    assert config.routing.scratch.heat == 1.0
    assert fef.config.scopes(config)["routing.scratch.heat"] == "model"
    assert fef.config.config_hash(config) == before

    config.routing.scratch.heat = 0.5
    assert fef.config.resume_changes(stored(Config()), config) == []
    config.moe.router = "scratch"
    with pytest.raises(ConfigError, match="config.routing.scratch.heat=0.5: .* has 1.0"):
        fef.config.resume_changes(stored(changed(moe__router="scratch")), config)
    assert fef.config.resume_changes(stored(config), config) == []

    config.routing.scratch.heat = 0.0
    with pytest.raises(ConfigError, match="config.routing.scratch.heat=0.0: must be > 0"):
        fef.validation.validate(config)
    with pytest.raises(AttributeError, match="no field 'heet'; nearest: heat"):
        config.routing.scratch.heet = 1.0
    fef.config.freeze(config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.routing.scratch.heat = 2.0


@dataclasses.dataclass
class PlainField:
    heat: float = 1.0


@dataclasses.dataclass
class WrongType:
    heat: list = knob((), "model", "a list")


@pytest.mark.parametrize(
    ("name", "attributes", "words"),
    [
        ("scratch", {"Options": None}, r"router 'scratch' \(module .*test_config\): needs a class attribute Options"),
        ("scratch", {"Options": PlainField}, "option 'heat' must be made by fef.config.knob"),
        ("scratch", {"Options": WrongType}, r"option 'heat' has type <class 'list'>; use bool, int, .*int \| None"),
        ("record", {"Options": Options}, "router 'record' .* choose another name"),
        ("top-2", {"Options": Options}, "router 'top-2' .* choose another name"),
    ],
)
def test_a_variant_without_proper_options_is_refused(routers, name, attributes, words):
    routers.register(name)(variant(**attributes))
    with pytest.raises(UserError, match=words):
        Config()


def test_sections_of_two_registries_do_not_mix():
    registry: Registry = Registry("thing")
    registry.register("x")(variant(Options=Options))

    @dataclasses.dataclass
    class Base(Section):
        plain: int = knob(1, "run", "a field of the section itself")

    section = fef.config._section_class(Base, registry, (("x", registry.get("x")),))()
    assert fef.config.flatten(section) == {"plain": 1, "x.heat": 1.0, "x.levels": (2, 4)}
