"""tables: measures by hand, the Markdown, one real run, and what is refused."""

import pytest
from result_rows import training_row
from small import ROOT, SMALL

from experiments import tables
from experiments.flags import override
from fef.config import Config, UserError
from fef.validation import validate


def step(**changes):
    return {
        "max_vio": [1.0, 3.0],
        "dropped_fraction": 0.0,
        "dead_experts": [0, 1],
        "gate_entropy": [2.0, 2.0],
    } | changes


def test_measures_are_of_the_last_quarter_and_all_layers():
    steps = [step(max_vio=[9.0, 9.0])] * 6 + [step(dropped_fraction=0.5), step(dead_experts=[2, 1])]
    measured = tables.measures({"heldout_loss": 1.5}, steps)
    assert measured == {
        "heldout_loss": 1.5, "max_vio": 2.0, "dropped_fraction": 0.25, "dead_experts": 1.0, "gate_entropy": 2.0
    }  # fmt: skip


def test_the_table_has_mean_and_deviation_over_seeds():
    sections = {"A": {"x": {"moe.router": "x"}, "y": {"moe.router": "y"}}, "B": {"x": {"moe.router": "x"}}}
    table = tables.Table({"train.steps": 8}, (0, 1), sections, {"y": "1.2, by others"})
    assert [run["moe.router"] + str(run["train.seed"]) for run in table.runs()] == ["x0", "y0", "x1", "y1"]
    rows = [training_row(run, 2.0 + run["train.seed"]) for run in table.runs() if run["moe.router"] == "x"]
    lines = tables.markdown(table, rows).splitlines()
    assert "| `x` | 2.500 ± 0.707 | 0.50 | 25.0% | 1.0 | 2.50 |  |" in lines
    assert "| `y` | – | – | – | – | – | 1.2, by others |" in lines
    assert "| `x` | 2.500 ± 0.707 | 0.50 | 25.0% | 1.0 | 2.50 |" in lines  # a section without published figures

    sheet = tables.every_run(table, [rows[0], training_row(rows[1]["settings"], 3.0) | {"max_vio": None}])
    assert [[cell.text for cell in line.cells][:5] for line in sheet.lines] == [
        ["A", "x", "0", "2.000", "0.50"], ["A", "x", "1", "3.000", "–"],
        ["B", "x", "0", "2.000", "0.50"], ["B", "x", "1", "3.000", "–"],
    ]  # fmt: skip


def test_a_run_gives_a_row():
    settings = SMALL | {"mesh.devices": 1, "train.steps": 2, "train.seed": 1, "run.report": False}
    row = tables.train(settings, timeout_s=500)
    assert row["settings"] == settings and row["steps"] == 2 and row["commit"]
    assert 3 < row["heldout_loss"] < 8 and row["max_vio"] > 0 and "--config.train.seed=1" in row["command"]


def test_a_run_that_fails_says_why():
    with pytest.raises(UserError, match="ended with status 2: error: .*moe.router='topk'.*top_k"):
        tables.train({"moe.router": "topk"}, timeout_s=300)


def test_an_unknown_table_is_refused_with_the_names():
    with pytest.raises(UserError, match="table 'rooting': there are .*routing"):
        tables.load_table("rooting")


def test_every_variant_of_every_table_is_a_configuration():
    for path in (ROOT / "configs" / "tables").glob("[!_]*.py"):
        for settings in tables.load_table(path.stem).runs():
            validate(override(Config(), [f"--config.{key}={value}" for key, value in settings.items()]))
