"""README.md is true: its examples run, its commands and keys exist, its numbers are those of results/."""

import contextlib
import functools
import importlib
import itertools
import math
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from result_rows import training_row, write

import fef
from experiments import bench_dispatch, flags, readme_tables, tables, train
from fef import sharding
from fef.config import Config, UserError, flatten
from fef.dispatch import DISPATCHERS
from fef.registry import load_file, scan
from fef.routing import ROUTERS
from fef.step import Stepper

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = dict(re.findall(r"<!-- example: ([\w.]+) -->\n```python\n(.*?)```", README, re.S))
COMMANDS = [
    command
    for block in re.findall(r"```sh\n(.*?)```", README, re.S)
    for line in block.replace("\\\n", "").splitlines()
    if (command := line.split("#")[0].strip())
]
SMALL = (
    "--config.model.d_model=16 --config.model.num_heads=2 --config.model.num_layers=1 --config.moe.num_experts=5 "
    "--config.moe.d_expert=8 --config.data.seq_len=8 --config.data.batch_size=8 --config.mesh.devices=4"
).split()

compiled = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)  # compiling is all it costs


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Writes an example to a file of its name in the current directory; forgets afterwards what it registers."""
    monkeypatch.chdir(tmp_path)
    scan("fef.routing")
    scan("fef.dispatch")
    for registry in (ROUTERS, DISPATCHERS):
        monkeypatch.setattr(registry, "_table", dict(registry._table))

    def write(name):
        pathlib.Path(name).write_text(EXAMPLES[name])
        return name

    return write


def train_one_step(words):
    """Loss of the first step, and whether all parameters moved."""
    config, _ = flags.parse(["train", *SMALL, *words], train.define)
    mesh = sharding.make_mesh(config.mesh.devices, config.mesh.data)
    stepper = Stepper(config, mesh)
    windows = np.random.default_rng(0).integers(0, 256, (config.data.batch_size, config.data.seq_len + 1))
    batch = {"inputs_BS": windows[:, :-1], "targets_BS": windows[:, 1:], "mask_BS": np.ones(windows[:, 1:].shape, bool)}
    batch = jax.device_put(batch, sharding.named(mesh, sharding.TOKENS))
    state = jax.device_put(stepper.init(), stepper.shardings())
    pool = fef.Pool(mesh) if config.moe.dispatcher == "pooled" else contextlib.nullcontext()
    with pool:
        new, metrics = compiled(stepper.train_step)(state, batch)
        moved = jax.tree.map(lambda a, b: bool((a != b).any()), state.params, new.params)
    return float(metrics["loss"]), all(jax.tree.leaves(moved))


def test_the_routing_scheme_keeps_the_rules_and_trains(example):
    example("my_router.py")
    exec(compile(EXAMPLES["check_my_router.py"], "check_my_router.py", "exec"), {})
    router = ROUTERS.get("my_sigmoid")(num_experts=4, num_choices=2)
    tiny = {"gate_DE": jnp.full((2, 4), -200.0)}
    mask_BS = jnp.ones((1, 3), bool)
    ctx = fef.RouterContext(mask_BS, mask_BS.astype(int), 0, 0, jax.random.key(0), True, {}, lambda tree: tree)
    assignment, _ = router(tiny, jnp.ones((1, 3, 2)), ctx)
    np.testing.assert_allclose(assignment.weight_N, 0.5)  # sigmoid(-400) is 0, and 0 / 0 no number
    loss, all_moved = train_one_step(
        ["--config.routing.module=my_router.py", "--config.moe.router=my_sigmoid", "--config.moe.dispatcher=all_gather"]
    )
    assert math.isfinite(loss) and all_moved


def test_the_dispatcher_equals_reference_and_trains(example):
    load_file(example("my_dispatcher.py"))
    mesh = fef.make_mesh(4)
    x_BSD = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8, 16)), jnp.float32)

    def value_and_grads(dispatcher):
        layer = fef.MoeLayer(16, 8, 5, 2, mesh=mesh, rngs=nnx.Rngs(0), dispatcher=dispatcher)
        graph, params, rest = nnx.split(layer, nnx.Param, ...)

        def loss(params, x_BSD):
            y_BSD, metrics = nnx.merge(graph, params, rest)(x_BSD)
            return (y_BSD * jnp.cos(x_BSD)).sum(), (y_BSD, metrics["moved_QP"])

        return compiled(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x_BSD)

    ((_, (y, moved_MQP)), grads), ((_, (y_reference, _)), grads_reference) = map(
        value_and_grads, ("my_dense", "reference")
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), (y, grads), (y_reference, grads_reference))
    assert moved_MQP[:, 0].sum() == 4 * 6  # weights: each of 4 members reads the 6 of 8 positions that others hold
    loss, all_moved = train_one_step(["--config.dispatch.module=my_dispatcher.py", "--config.moe.dispatcher=my_dense"])
    assert math.isfinite(loss) and all_moved


def test_a_model_of_ones_own(example):
    done = subprocess.run([sys.executable, example("own_model.py")], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    loss, accuracy = map(float, re.fullmatch(r"loss (\S+), accuracy on other data (\S+)\n", done.stdout).groups())
    assert loss < 0.6 and accuracy > 0.7


def test_every_example_is_tested():
    assert set(EXAMPLES) == {"my_router.py", "check_my_router.py", "my_dispatcher.py", "own_model.py"}
    assert README.count("```python") == len(EXAMPLES)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_exists_and_its_flags_parse(command, example):
    for name in ("my_router.py", "my_dispatcher.py"):
        example(name)
    pathlib.Path("imported").mkdir()  # the current folder is the test's own
    shutil.copy(ROOT / "configs/tiny.py", "imported/config.py")
    words = shlex.split(command)
    while re.match(r"[A-Z_]+=", words[0]):  # the environment
        words.pop(0)
    for place, word in enumerate(words):
        if word == "--":  # one command starts another
            check(words[:place])
            words = words[place + 1 :]
    check(words)


def check(words):
    if words[0] == "sbatch":
        assert (ROOT / "scripts/slurm.sh").is_file() and words[2] == "scripts/slurm.sh"
        program, words = train, words[3:]
    elif words[:2] == ["python", "-m"]:
        program, words = importlib.import_module(words[2]), words[3:]
    else:
        assert (ROOT / words[0]).is_file(), words
        if words[0] != "scripts/train.sh":
            assert all((ROOT / word).exists() for word in words[1:] if word.startswith("tests"))
            return
        program, words = train, words[1:]
    if program in WORDY:
        words = list(itertools.dropwhile(lambda word: not word.startswith("-"), words))
    parse = flags.parse_flags if program in PLAIN else flags.parse
    try:
        parse([program.__name__, *words], getattr(program, "define", lambda values: None), doc=program.__doc__)
    except SystemExit as stop:  # --help and the lists
        assert stop.code == 0


WORDY = [importlib.import_module(f"experiments.{name}") for name in ("convert", "tables", "reproduce")]  # words first
PLAIN = WORDY + [
    importlib.import_module(f"experiments.{name}")
    for name in ("bench_collectives", "bench_ffn", "bench_pool", "launch", "readme_tables", "render", "traffic")
]


def test_the_commands_are_found():
    assert COMMANDS[:2] == ["scripts/train.sh", "scripts/test.sh"] and len(COMMANDS) > 8
    with pytest.raises(UserError, match="unknown flag --jsn"):
        flags.parse(["bench_dispatch", "--jsn=x"], bench_dispatch.define)


def test_keys_files_and_links_exist():
    known = flatten(Config())
    for key in re.findall(r"\bconfig\.((?:[a-z_]+\.)+[a-z_]+)", README):
        is_section = any(other.startswith(key + ".") for other in known)
        assert key in known or is_section or key.startswith("routing.my_sigmoid."), key
    for path in re.findall(r"`((?:fef|experiments|configs|scripts|tests)/[\w./]*)`", README):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"`([\w]+\.(?:h|cc))`", README):
        assert (ROOT / "fef/native" / name).exists(), name
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
    headings = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in re.findall(r"^###? (.*)$", README, re.M)}
    assert set(re.findall(r"\]\(#([^)]+)\)", README)) <= headings


def test_numbers_are_those_of_the_results():
    parts = [(match["kind"], match["name"]) for match in readme_tables.PART.finditer(README)]
    assert parts == [
        ("output", "train_tiny"), ("table", "bench_dispatch"), ("table", "bench_pool"), ("grid", "headline"),
        ("grid", "large_batch"), ("grid", "skew"), ("grid", "crossover"), ("grid", "envelope"),
        ("grid", "baselines"), ("grid", "scaling"), ("grid", "leaves"), ("grid", "placement"),
        ("grid", "overlap"), ("grid", "real_compute"), ("grid", "dispatch_cost"), ("grid", "memory"),
        ("lines", "reading_order"), ("runs", "routing"), ("table", "bench_ffn"),
    ]  # fmt: skip
    wanted = readme_tables.rewrite(README, kinds=("table", "grid", "runs", "output"))
    assert wanted == README, "run python -m experiments.readme_tables"


def test_the_reading_order_has_about_as_many_lines_as_it_says():
    rows = re.findall(r"^\| `(\S+\.py)` \| (\d+) \|", README, re.M)
    assert [path for path, _ in rows] == list(readme_tables.READING_ORDER)
    for path, lines in rows:
        now = len((ROOT / path).read_text().splitlines())
        assert abs(now - int(lines)) <= max(10, 0.2 * now), f"{path}: {now}; run python -m experiments.readme_tables"


def test_a_missing_result_names_the_command_that_makes_it(monkeypatch, tmp_path):
    monkeypatch.setattr(readme_tables, "RESULTS", tmp_path)
    with pytest.raises(UserError, match="python -m experiments.reproduce bench_ffn"):
        readme_tables.rewrite("<!-- table: bench_ffn -->\n<!-- end -->")
    with pytest.raises(UserError, match="python -m experiments.reproduce leaves"):
        readme_tables.rewrite("<!-- grid: leaves -->\n<!-- end -->")
    with pytest.raises(UserError, match="python -m experiments.reproduce routing"):
        readme_tables.rewrite("<!-- runs: routing -->\n<!-- end -->")
    (tmp_path / "x.txt").write_text("a\x1bb\n```\n")
    assert readme_tables.rewrite("<!-- output: x -->\nold\n<!-- end -->").splitlines() == [
        "<!-- output: x -->", "````text", "a\N{REPLACEMENT CHARACTER}b", "```", "````", "<!-- end -->"
    ]  # fmt: skip


def test_runs_of_training_become_tables(monkeypatch, tmp_path):
    monkeypatch.setattr(readme_tables, "RESULTS", tmp_path)
    runs = tables.load_table("routing").runs()
    write(tmp_path / "routing.jsonl", [training_row(run, 2.5) for run in runs if run["moe.router"] == "hash"])
    text = readme_tables.rewrite("before\n<!-- runs: routing -->\nold\n<!-- end -->\nafter")
    assert text.startswith("before\n<!-- runs: routing -->\n8 steps, 3 seeds") and "old" not in text
    assert "**Capacity**" in text and "| `hash` | 2.500 ± 0.000 | 0.50 | 25.0% | 1.0 | 2.50 |" in text
