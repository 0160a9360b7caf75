import json
import math
import pathlib
import struct
import subprocess
import sys

import numpy as np
import pytest

from fef import metrics
from fef.metrics import JsonlWriter, TensorBoard, read_jsonl, weighted_mean, write_json_atomic

CASES = pathlib.Path(__file__).parent / "cases/metrics"


def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


def strict_lines(path):
    """Every line of a file, by a parser that knows no NaN and no Infinity."""
    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def write_all(path, rows):
    writer = JsonlWriter(path)
    for row in rows:
        writer.write(row)
    writer.close()
    return writer.notices


# --- metrics.jsonl (case M-01) ---


def test_rows_that_are_not_finite_are_strict_json_and_marked(tmp_path):
    def number(value):
        return float(value) if isinstance(value, str) else value

    rows = json.loads((CASES / "nan_rows.json").read_text())
    write_all(tmp_path / "m.jsonl", [{key: number(value) for key, value in row.items()} for row in rows])
    assert strict_lines(tmp_path / "m.jsonl") == [
        {"step": 1, "loss": 2.5, "grad_norm": 1.0},
        {"step": 2, "loss": None, "grad_norm": None, "not_finite": ["loss", "grad_norm"]},
        {"step": 3, "loss": 2.4, "grad_norm": None, "not_finite": ["grad_norm"]},
    ]


def test_numpy_values_and_nested_places_are_written_as_plain_json(tmp_path):
    row = {
        "step": np.int64(7),
        "loss": np.float32("inf"),
        "max_vio": [0.5, math.nan],
        "load": np.arange(4).reshape(2, 2),
        "bytes_by_purpose": {"weights": -math.inf, "tokens": 3},
    }
    write_all(tmp_path / "m.jsonl", [row])
    assert strict_lines(tmp_path / "m.jsonl") == [
        {
            "step": 7,
            "loss": None,
            "max_vio": [0.5, None],
            "load": [[0, 1], [2, 3]],
            "bytes_by_purpose": {"weights": None, "tokens": 3},
            "not_finite": ["loss", "max_vio.1", "bytes_by_purpose.weights"],
        }
    ]


def test_marks_survive_a_second_writing(tmp_path):
    write_all(tmp_path / "a.jsonl", [{"step": 1, "loss": math.nan}])
    (row,), _ = read_jsonl(tmp_path / "a.jsonl")
    write_all(tmp_path / "b.jsonl", [row | {"grad_norm": math.inf}])
    assert strict_lines(tmp_path / "b.jsonl")[0]["not_finite"] == ["loss", "grad_norm"]


def test_a_row_can_be_read_before_the_file_is_closed(tmp_path):
    writer = JsonlWriter(tmp_path / "m.jsonl")
    writer.write({"step": 1})
    assert read_jsonl(tmp_path / "m.jsonl") == ([{"step": 1}], [])
    writer.close()


def test_a_line_cut_by_a_kill_is_left_out_with_one_notice():
    rows, notices = read_jsonl(CASES / "killed_mid_line.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert len(notices) == 1
    assert "killed_mid_line.jsonl:4" in notices[0] and "cut off" in notices[0]


def test_a_row_appended_after_a_kill_starts_on_its_own_line(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes((CASES / "killed_mid_line.jsonl").read_bytes())
    notices = write_all(path, [{"step": 4, "loss": 2.6}])
    assert len(notices) == 1 and "cut off" in notices[0] and str(path) in notices[0]
    assert [row["step"] for row in strict_lines(path)] == [1, 2, 3, 4]


def test_a_file_cut_at_any_byte_keeps_its_whole_rows_and_can_be_continued(tmp_path):
    write_all(tmp_path / "whole.jsonl", [{"step": step, "loss": 2.5} for step in (1, 2, 3)])
    whole = (tmp_path / "whole.jsonl").read_bytes()
    for length in range(len(whole) + 1):
        path = tmp_path / "cut.jsonl"
        path.write_bytes(whole[:length])
        complete = whole[: length + 1].count(b"\n")  # a row that only lacks its line end is complete
        assert len(read_jsonl(path)[0]) == complete
        notices = write_all(path, [{"step": 9}])
        assert [row["step"] for row in strict_lines(path)] == [*range(1, complete + 1), 9]
        tail = whole[:length].rpartition(b"\n")[2]
        assert len(notices) == (tail != b"" and not tail.endswith(b"}"))


@pytest.mark.parametrize("tail", [b"\0\0\0", b'{"text": "\xc3', b"[1, 2]", b"17"])
def test_tails_of_any_kind_are_removed(tmp_path, tail):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n' + tail)
    assert len(read_jsonl(path)[1]) == 1
    assert len(write_all(path, [{"step": 2}])) == 1
    assert [row["step"] for row in strict_lines(path)] == [1, 2]


def test_a_broken_line_in_the_middle_is_named_and_the_rest_is_read(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, {"step": 3}\n\n{"step": 4}\n')
    rows, notices = read_jsonl(path)
    assert [row["step"] for row in rows] == [1, 4]
    assert len(notices) == 1 and "m.jsonl:2" in notices[0] and "no JSON object" in notices[0]


def test_a_resumed_run_drops_the_rows_it_will_write_again(tmp_path):
    path = tmp_path / "m.jsonl"
    rows = [{"step": step, "loss": 1 / step} for step in range(1, 8)]
    write_all(path, rows[:4])
    expected = path.read_bytes()
    write_all(path, rows[4:])
    writer = JsonlWriter(path)
    assert writer.truncate_after(4) == 3
    assert path.read_bytes() == expected
    writer.write({"step": 5, "loss": 0.0})
    assert writer.truncate_after(100) == 0
    writer.close()
    assert [(row["step"], row["loss"]) for row in strict_lines(path)][-2:] == [(4, 0.25), (5, 0.0)]


# --- summary.json ---


def test_summary_is_strict_and_leaves_no_other_file(tmp_path):
    write_json_atomic(tmp_path / "summary.json", {"heldout_loss": math.nan, "steps": np.int32(3)})
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)
    assert summary == {"heldout_loss": None, "steps": 3, "not_finite": ["heldout_loss"]}
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_a_summary_that_cannot_be_written_leaves_the_old_one(tmp_path):
    write_json_atomic(tmp_path / "summary.json", {"steps": 1})
    with pytest.raises(TypeError):
        write_json_atomic(tmp_path / "summary.json", {"steps": object()})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 1}


# --- means (case M-03) ---


def test_means_are_weighted_by_tokens():
    case = json.loads((CASES / "weighted_mean.json").read_text())
    losses = [part["mean_loss"] for part in case["microbatches"]]
    mean = weighted_mean(losses, [part["tokens"] for part in case["microbatches"]])
    assert mean == case["expected"]
    assert metrics.perplexity(mean) == pytest.approx(case["perplexity_expected"], abs=5e-5)


@pytest.mark.parametrize("sizes", [[8], [4, 4], [2, 2, 2, 2], [1, 2, 5]])
def test_the_mean_does_not_depend_on_how_sequences_are_split(sizes):
    rng = np.random.default_rng(0)
    loss_BS, mask_BS = rng.normal(size=(8, 16)), rng.random((8, 16)) < rng.random((8, 1))
    ends = np.cumsum(sizes)[:-1]
    parts = list(zip(np.split(loss_BS, ends), np.split(mask_BS, ends), strict=True))
    mean = weighted_mean([loss[mask].mean() for loss, mask in parts], [mask.sum() for _, mask in parts])
    assert mean == pytest.approx(loss_BS[mask_BS].mean(), abs=1e-12)


def test_an_empty_batch_takes_no_part_in_a_mean_and_nothing_has_no_mean():
    assert weighted_mean([math.nan, 3.0], [0, 2]) == 3.0
    assert math.isnan(weighted_mean([math.nan, 3.0], [1, 2]))
    assert math.isnan(weighted_mean([1.0], [0]))


def test_impossible_weights_are_refused():
    with pytest.raises(ValueError, match=r"\(2,\) values but \(1,\) weights"):
        weighted_mean([1.0, 2.0], [1])
    with pytest.raises(ValueError, match="negative weight -1"):
        weighted_mean([1.0, 2.0], [1, -1])


def test_perplexity_of_a_huge_loss_is_infinite_without_a_warning():
    assert metrics.perplexity(1e4) == math.inf
    assert math.isnan(metrics.perplexity(math.nan))


# --- expert load ---


def test_max_vio_of_published_loads():
    """The two layers of the example in the README of deepseek-ai/EPLB."""
    load_LE = np.array(
        [
            [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
            [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
        ]
    )
    np.testing.assert_allclose(metrics.max_vio(load_LE), [1.126, 1.045], atol=5e-4)


def test_load_metrics_at_the_ends_of_their_range():
    load_LE = np.array([[5, 5, 5, 5], [20, 0, 0, 0], [12, 4, 4, 0], [0, 0, 0, 0]])
    row = metrics.load_metrics(load_LE, np.minimum(load_LE, 8))
    assert row["max_vio"] == [0.0, 3.0, 1.4, 0.0]
    entropy = -(0.6 * math.log(0.6) + 2 * 0.2 * math.log(0.2))
    assert row["entropy"] == pytest.approx([math.log(4), 0.0, entropy, 0.0])
    assert row["dead_experts"] == [0, 3, 1, 4]
    assert row["dropped_fraction"] == pytest.approx(16 / 60)
    assert row["load"] == load_LE.tolist()
    assert json.loads(json.dumps(row)) == row


def test_load_metrics_without_load_and_without_experts():
    nothing = metrics.load_metrics(np.zeros((2, 3), int), np.zeros((2, 3), int))
    assert (nothing["max_vio"], nothing["entropy"], nothing["dropped_fraction"]) == ([0, 0], [0, 0], 0.0)
    dense = metrics.load_metrics(np.zeros((0, 8)), np.zeros((0, 8)))
    assert dense == {"load": [], "max_vio": [], "entropy": [], "dead_experts": [], "dropped_fraction": 0.0}


def test_large_counts_are_exact():
    load_LE = np.full((1, 2), 2**31 - 1, np.int32)
    assert metrics.load_metrics(load_LE, load_LE)["dropped_fraction"] == 0.0
    assert metrics.max_vio(load_LE) == [0.0]


# --- TensorBoard ---


def read_events(folder):
    from tensorboardX.proto.event_pb2 import Event

    events = []
    for path in sorted(folder.glob("events.out.*")):
        content, position = path.read_bytes(), 0
        while position < len(content):
            (length,) = struct.unpack_from("<Q", content, position)
            events.append(Event.FromString(content[position + 12 : position + 12 + length]))
            position += length + 16
    return events


def values(events, step):
    return {value.tag: value for event in events if event.step == step for value in event.summary.value}


def test_tensorboard_gets_scalars_and_the_load_every_few_steps(tmp_path, caplog):
    board = TensorBoard(tmp_path, load_every=2)
    row = {"loss": 2.5, "max_vio": [0.25, 0.5], "bytes_by_purpose": {"weights": 8}, "load": [[3, 1, 0], [0, 0, 4]]}
    board.write(row | {"step": 1})
    board.write(row | {"step": 2, "loss": None, "grad_norm": math.nan, "not_finite": ["loss"]})
    board.close()
    first, second = (values(read_events(tmp_path), step) for step in (1, 2))
    scalars = {tag: value.simple_value for tag, value in first.items()}
    assert scalars == {"loss": 2.5, "max_vio/layer_0": 0.25, "max_vio/layer_1": 0.5, "bytes/weights": 8.0}
    assert second.keys() - first.keys() == {"load/layer_0", "load/layer_1"}
    assert first.keys() - second.keys() == {"loss"}
    histogram = second["load/layer_0"].histo
    by_expert = dict(zip(histogram.bucket_limit, histogram.bucket, strict=True))
    assert [by_expert[expert + 1] for expert in range(3)] == [3, 1, 0]
    assert not caplog.records


def test_tensorboard_of_a_resumed_run_hides_what_comes_again(tmp_path):
    board = TensorBoard(tmp_path, resumed_after=40)
    board.write({"step": 41, "loss": 2.0})
    board.close()
    starts = [event.step for event in read_events(tmp_path) if event.HasField("session_log")]
    assert starts == [41]


def test_importing_metrics_loads_neither_tensorboard_nor_jax():
    code = "import sys, fef.metrics; print([m for m in ('tensorboardX', 'jax', 'flax') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
