"""The command line: typed overrides, nearest keys, config files, users' modules, one line for every mistake."""

import ast
import csv
import dataclasses
import pathlib
import re
import subprocess
import sys

import pytest

import fef.config
from experiments import flags, train
from fef.config import ConfigError, Section, UserError, knob
from fef.dispatch import DISPATCHERS
from fef.registry import scan
from fef.routing import ROUTERS

ROOT = pathlib.Path(__file__).parent.parent
CASES = ROOT / "tests/cases/config/overrides.tsv"
REFUSED = object()

FIELDS = {
    "int": ("layers", int),
    "float": ("rate", float),
    "bool": ("balance", bool),
    "str": ("name", str),
    "tuple[int]": ("sizes", tuple[int, ...]),
    "optional float": ("limit", float | None),
    "unknown key": ("layers", int),
    "repeated flag": ("layers", int),
}
# Where the case leaves a choice, ours.
DECIDED = {
    "refuse or 2 (documented); never 2.0 as float": REFUSED,
    "refuse or 1000": REFUSED,
    "False, or refuse the stray word; never True": REFUSED,
    "refuse or the word, documented; must not become null by chance": "None",
}


@dataclasses.dataclass
class Nested(Section):
    b: int = knob(2, "run", "a nested integer")


def tree(kind, default):
    """A configuration with one field of the kind, and the key of that field."""
    if kind == "nested int a.b":
        base = [("a", Nested, dataclasses.field(default_factory=Nested))]
        return dataclasses.make_dataclass("Tree", base, bases=(Section,))(), "a.b"
    name, annotation = FIELDS[kind]
    value = 4 if default == "-" else ast.literal_eval(default)
    return dataclasses.make_dataclass(
        "Tree", [(name, annotation, knob(value, "run", "a knob"))], bases=(Section,)
    )(), name


def words_of(kind, key, text):
    """The command line of a case."""
    if text.startswith("(value after a space)"):
        return [f"--config.{key}", text.split()[-1]]
    if kind == "repeated flag":
        return [f"--config.{key}={value}" for value in text.split(" then ")]
    if kind.startswith(("nested", "unknown")):
        return [f"--config.{text}"]
    return [f"--config.{key}={'' if text == '(empty)' else text}"]


@pytest.mark.parametrize("row", list(csv.DictReader(CASES.open(), delimiter="\t", quoting=csv.QUOTE_NONE)), ids=str)
def test_override(row):
    config, key = tree(row["kind"], row["default"])
    outcome = row["right outcome"]
    words = words_of(row["kind"], key, row["override"])
    expected = DECIDED.get(outcome, REFUSED if outcome.startswith("refuse") else outcome)
    if expected is REFUSED:
        with pytest.raises(UserError) as caught:
            fef.config.check_fields(flags.override(config, words))
        assert "\n" not in str(caught.value)
        nearest = re.search(r"naming (\S+) as the nearest", outcome)
        assert (nearest[1] if nearest else key) in str(caught.value) or "False" in str(caught.value)
        return
    if outcome not in DECIDED:
        expected = ast.literal_eval(outcome.split(" (")[0])
    result = flags.override(config, words)
    fef.config.check_fields(result)
    value = fef.config.flatten(result)[key]
    assert value == expected and type(value) is type(expected)


def test_all_cases_are_there():
    assert len(CASES.read_text().splitlines()) == 1 + 26


def parse(*words, **options):
    return flags.parse(["program", *words], train.define, **options)


def test_parse_returns_a_valid_frozen_config_and_the_flags():
    words = ("--config.train.steps=7", "--config.optim.clip_norm=None", "--config.run.report", "--noconfig.run.malloc")
    config, values = parse(
        "--workdir=here", "--fresh", *words, "--config=configs/dense.py", "--config.mesh.devices", "2"
    )
    assert (config.train.steps, config.optim.clip_norm, config.mesh.devices) == (7, None, 2)
    assert config.run.report is True and config.run.malloc is False
    assert config.moe.every == 0 and config.model.d_ff == 512
    assert (values.workdir, values.fresh, values.config) == ("here", True, "configs/dense.py")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.steps = 8


def test_without_words_it_is_the_default_config():
    config, values = parse()
    assert fef.config.to_dict(config) == fef.config.to_dict(fef.config.Config())
    assert (values.config, values.workdir, values.fresh) == ("configs/tiny.py", None, False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config.train.stepps=3"], "unknown key config.train.stepps; nearest: config.train.steps"),
        (["--config.steps", "3"], "unknown key config.steps; nearest: config.train.steps"),
        (["--noconfig.run.reports"], "unknown key config.run.reports; nearest: config.run.report"),
        (["--config.optim=adamw"], "unknown key config.optim; nearest: config.optim"),
        (["--confg.train.steps=3"], "unknown flag --confg.train.steps; nearest: --config.train.steps"),
        (["--wrkdir=x"], "unknown flag --wrkdir; nearest: --workdir"),
        (["--config.train.steps=2.5"], "flag --config.train.steps=2.5: must be an integer"),
        (["--config.train.steps=2\n3"], "flag --config.train.steps=2 3: must be an integer"),
        (["--config.train.steps=0"], "config.train.steps=0: must be >= 1"),
        (["--config.optim.learning_rate=nan"], "must be a finite number"),
        (["--config.run.report=perhaps"], "flag --config.run.report=perhaps: must be True or False"),
        (["--config.run.report", "False"], "'False' belongs to no flag"),
        (["--fresh", "False"], "'False' belongs to no flag"),
        (["--fresh=perhaps"], "--fresh=perhaps"),
        (["train"], "'train' belongs to no flag"),
        (["--", "train"], "belongs to no flag"),
        (["--config.train.steps"], "Missing value for flag --config.train.steps"),
        (["--config.moe.router=topk"], "config.moe.router='topk': unknown router 'topk'; nearest: top_k"),
        (
            ["--config=nowhere.py"],
            r"--config=nowhere.py: no such file in .*; there are configs/dense.py, configs/small",
        ),
        (["--config.routing.module=nowhere.py"], "nowhere.py: no such file"),
        (["--config.dispatch.module=nowhere.py"], "nowhere.py: no such file"),
    ],
)
def test_a_mistake_is_one_line(words, message):
    with pytest.raises(UserError, match=message) as caught:
        parse(*words)
    assert "\n" not in str(caught.value)


GET_CONFIG = "from fef.config import Config\n\ndef get_config():\n    c = Config()\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "mine.py: has no function get_config"),
        ("def get_config():\n    return {}\n", r"mine.py: get_config\(\) returned dict, not a fef.config.Config"),
        ("import nothing_of_this_name\n", "mine.py:1: ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("def get_config(:\n", "mine.py:1: SyntaxError"),
        (GET_CONFIG + "    c.model.d_modl = 1\n", "mine.py:5: AttributeError: no field 'd_modl'; nearest: d_model"),
        (GET_CONFIG + "    c.train.steps = '9'\n    return c\n", "config.train.steps='9': must be an integer"),
    ],
)
def test_a_bad_config_file_is_one_line(tmp_path, text, message):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        parse(f"--config={tmp_path}/mine.py")
    assert "\n" not in flags._one_line(caught.value)


def test_a_config_file_is_found_from_the_current_directory_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse("--config=configs/dense.py")[0].moe.every == 0
    pathlib.Path("configs").mkdir()
    pathlib.Path("configs/dense.py").write_text(GET_CONFIG + "    c.train.steps = 3\n    return c\n")
    assert parse("--config=configs/dense.py")[0].train.steps == 3


ROUTER = '''"""Routes by the weather."""
import dataclasses
from fef.config import Section, knob
from fef.routing import ROUTERS

@dataclasses.dataclass
class Options(Section):
    rain: float = knob(0.5, "model", "chance of rain", ge=0, le=1)

@ROUTERS.register("weather")
@dataclasses.dataclass
class Weather:
    num_experts: int
    num_choices: int
    options: Options

    Options = Options
    causal = True
'''


@pytest.fixture
def registries(monkeypatch):
    """Forgets after the test what it has registered, and nothing else."""
    scan("fef.routing")
    scan("fef.dispatch")
    for registry in (ROUTERS, DISPATCHERS):
        monkeypatch.setattr(registry, "_table", dict(registry._table))


@pytest.fixture
def router_file(tmp_path, registries):
    (tmp_path / "weather.py").write_text(ROUTER)
    return f"{tmp_path}/weather.py"


def test_a_users_router_brings_its_options(router_file):
    module = f"--config.routing.module={router_file}"
    config, _ = parse("--config.routing.weather.rain=0.75", "--config.moe.router=weather", module)
    assert config.routing.weather.rain == 0.75 and config.routing.module == router_file
    with pytest.raises(
        UserError, match="unknown key config.routing.weather.rian; nearest: config.routing.weather.rain"
    ):
        parse(module, "--config.routing.weather.rian=1")
    with pytest.raises(ConfigError, match="config.routing.weather.rain=2.0: must be >= 0 and <= 1"):
        parse(module, "--config.routing.weather.rain=2")


def test_a_config_file_may_name_a_users_router(router_file, tmp_path):
    lines = f"    c.routing.module = {router_file!r}\n    c.moe.router = 'weather'\n    return c\n"
    (tmp_path / "mine.py").write_text(GET_CONFIG + lines)
    config, _ = parse(f"--config={tmp_path}/mine.py", "--config.routing.weather.rain=0.25")
    assert config.moe.router == "weather" and config.routing.weather.rain == 0.25


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ROUTER.replace("weather", "top_k"), "mine.py:10: ValueError: router 'top_k' is registered twice"),
        (ROUTER.replace("0.5", "1 / 0"), "mine.py:8: ZeroDivisionError: division by zero"),
        (ROUTER.replace('knob(0.5, "model", "chance of rain", ge=0, le=1)', "0.5"), "option 'rain' must be made by"),
    ],
)
def test_a_broken_users_router_is_one_line(tmp_path, registries, text, message):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        parse(f"--config.routing.module={tmp_path}/mine.py")
    assert "\n" not in flags._one_line(caught.value)


def test_lists(router_file, capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--list_routers", f"--config.routing.module={router_file}")
    lines = capsys.readouterr().out.splitlines()
    assert caught.value.code == 0
    assert "weather              Routes by the weather." in lines
    assert [line.split()[0] for line in lines] == ROUTERS.names()
    with pytest.raises(SystemExit):
        parse("--list_dispatchers")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == DISPATCHERS.names()
    assert all(len(line.split()) > 1 for line in lines)  # a name and what it does


def test_help_shows_every_key_with_default_scope_and_meaning(router_file, capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--help", f"--config.routing.module={router_file}", doc="What it does.")
    text = capsys.readouterr().out
    assert caught.value.code == 0 and text.startswith("What it does.\n")
    for key, field, value in fef.config.walk(fef.config.Config()):
        assert f"--config.{key}={value}  [{field.metadata['scope']}] {field.metadata['doc']}" in text
    assert "--config.routing.weather.rain=0.5  [model] chance of rain; >= 0 and <= 1" in text
    assert "--workdir=None" in text and "one of adamw, sgd" in text


def test_parse_flags_of_a_program_without_config(capsys):
    def define(values):
        flags.flags.DEFINE_string("json", None, "file for the rows", flag_values=values)

    assert flags.parse_flags(["program", "--json=x"], define).json == "x"
    with pytest.raises(UserError, match="unknown flag --jsn; nearest: --json"):
        flags.parse_flags(["program", "--jsn=x"], define)
    with pytest.raises(UserError, match="'x' belongs to no flag"):
        flags.parse_flags(["program", "x"], define)
    with pytest.raises(SystemExit):
        flags.parse_flags(["program", "--help"], define, doc="What it does.")
    assert "--json=None  file for the rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ConfigError("a.b", 1, "must\nbe 2"), 2, "error: config.a.b=1: must be 2\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (None, 0, ""),
    ],
)
def test_run_maps_errors_to_exit_status(error, status, line, capsys):
    def main(argv):
        if error:
            raise error

    with pytest.raises(SystemExit) as caught:
        flags.run(main)
    assert (caught.value.code or 0) == status
    assert capsys.readouterr().err == line


def test_a_bug_shows_its_traceback():
    def main(argv):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        flags.run(main)


def test_the_program_ends_with_2_and_one_line_from_any_directory(tmp_path):
    command = [sys.executable, "-m", "experiments.train", "--config.moe.dispacher=pooled"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: unknown key config.moe.dispacher; nearest: config.moe.dispatcher\n"
    assert list(tmp_path.iterdir()) == []
