"""experiments.bench_dispatch: its formulas by hand, its configurations, its table. No training."""

import numpy as np
import pytest

from experiments import bench_dispatch as bench
from fef.config import ConfigError, UserError
from fef.pool.ledger import Units

UNITS = Units(block_bytes=1000, gradient_bytes=2000, row_bytes=10)
# 2 devices with 2 sequences of 2 tokens each, 2 experts: device 0 is home of expert 0, device 1 of expert 1.
WORDS = ["bench"] + (
    "--config.mesh.devices=2 --config.data.batch_size=4 --config.data.seq_len=2 --config.moe.num_experts=2 "
    "--config.moe.num_choices=1"
).split()
# One layer. Device 0 sends 1 row to expert 0 and 2 to expert 1, one place is unused; device 1 has 4 rows for expert 1.
TRACE = {
    "expert_N": np.array([[0, 1, 1, 0, 1, 1, 1, 1]]),
    "valid_N": np.array([[True, True, True, False, True, True, True, True]]),
}


def config(name="all_to_all", *words):
    return bench._config([*WORDS, *words], name, steps=3)


def test_rows_by_member():
    counts_LIME, num_rows = bench.rows_by_member(config(), TRACE)
    assert counts_LIME.tolist() == [[[[1, 2], [0, 4]]]] and num_rows == 4
    halves_LIME, num_rows = bench.rows_by_member(config("all_to_all", "--config.train.microbatches=2"), TRACE)
    assert halves_LIME.tolist() == [[[[1, 1], [0, 1]], [[0, 2], [0, 2]]]] and num_rows == 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("all_to_all", 4 * 2 * 4 * 10),  # four times, one remote position of each device, C = 4 rows
        ("all_gather", 2 * (1000 + 2000)),  # each device gathers one block
        ("pooled", 1 * (2 * 1000 + 2000)),  # device 0 alone uses a remote expert
        ("reference", None),
    ],
)
def test_closed_form(name, expected):
    assert bench.closed_form_bytes(config(name), *bench.rows_by_member(config(name), TRACE), UNITS) == expected


def test_least_bytes_takes_the_cheaper_way():
    counts_LIME, _ = bench.rows_by_member(config(), TRACE)
    assert bench.least_bytes(config(), counts_LIME, UNITS) == 4 * 2 * 10
    assert bench.least_bytes(config(), counts_LIME * 1000, UNITS) == 1000 + 2000


def test_a_dispatcher_may_have_options():
    assert config("all_to_all:form=shifted").dispatch.all_to_all.form == "shifted"
    assert config().train.steps == 3
    with pytest.raises(UserError, match="config.dispatch.all_to_all.fom; nearest: config.dispatch.all_to_all.form"):
        config("all_to_all:fom=shifted")
    with pytest.raises(ConfigError, match="unknown dispatcher 'all_to_al'; nearest: all_to_all"):
        config("all_to_al")


def test_a_dense_model_is_refused():
    with pytest.raises(ConfigError, match="config.moe.every=0: a dense model has no dispatcher"):
        bench.main(["bench", "--config=configs/dense.py"])


def test_table():
    setting = bench._setting(config(), ["--config=x.py"])
    row = {
        "dispatcher": "pooled", **setting, "loss": 5.5, "max_loss_difference": 2e-7, "step_ms": 12.5, "ratio": 1.25,
        "timed_steps": 1, "bytes": 4000, "closed_form_bytes": 4000, "dropped_fraction": 0.0,
        "bytes_by_purpose": {"weights": 1000, "refetch": 1000, "gradients": 2000, "tokens": 0, "metadata": 0},
    }  # fmt: skip
    text = bench.table([dict(row, dispatcher="reference"), row, {"dispatcher": "least", **setting, "bytes": 80}])
    cells = "5.500000 | 2.0e-07 | 12.5 | 1.25"
    assert f"| `reference` | {cells} | – | – | – | – | – | – | 0 % |" in text
    assert f"| `pooled` | {cells} | 4.00 kB | 1.00 kB | 1.00 kB | 2.00 kB | 0 B | 4.00 kB | 0 % |" in text
    assert "| least | – | – | – | – | 80 B |" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert widths == {13}
