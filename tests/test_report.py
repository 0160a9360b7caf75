import html.parser
import json
import math
import re

import numpy as np
import pytest

from fef.config import Config, to_dict
from fef.metrics import JsonlWriter, load_metrics, write_json_atomic
from fef.pool.ledger import PURPOSES
from fef.report import write_report

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(html.parser.HTMLParser):
    """The text of a page; fails when its tags do not balance."""

    def __init__(self, text):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("style", "script"):
            self.text += f"|{data}"


def make_row(step, num_layers=2, num_experts=4, **changes):
    load_LE = np.full((num_layers, num_experts), 100)
    if num_layers:
        load_LE[0] = [160, 120, 120, 0] + [100] * (num_experts - 4)
    row = {
        "step": step,
        "loss": 5.0 - step / 1000,
        "aux_loss": 0.01,
        "grad_norm": 0.5,
        "learning_rate": 1e-3,
        "step_ms": 200.0,
        "wait_ms": 30.0,
        "data_ms": 10.0,
        "tokens": 2048,
        "tokens_per_s": 10240.0,
        "bytes": 5_000_000,
        "bytes_by_purpose": {"weights": 3_000_000, "refetch": 0, "gradients": 2_000_000, "tokens": 0, "metadata": 0},
        "skipped_updates": 0,
    }
    return row | load_metrics(load_LE, load_LE) | changes


def make_run(workdir, rows, config=None, summary=None):
    workdir.mkdir(exist_ok=True)
    writer = JsonlWriter(workdir / "metrics.jsonl")
    for row in rows:
        writer.write(row)
    writer.close()
    if config is not None:
        write_json_atomic(workdir / "config.json", to_dict(config))
    if summary is not None:
        write_json_atomic(workdir / "summary.json", summary)
    return workdir


def read(workdir):
    """Writes the report; returns its text and its parsed form, after the checks that hold for every page."""
    path = write_report(workdir)
    assert path == workdir / "report.html"
    text = path.read_text()
    page = Page(text)
    assert not re.search(r"https?://|//[a-z]+\.[a-z]+/|@import|url\(", text), "refers to something outside"
    assert not [
        tag for tag, attributes in page.tags if {"src", "href"} & attributes.keys() or tag in ("link", "iframe")
    ]
    for _, attributes in page.tags:
        drawn = " ".join(attributes.get(name) or "" for name in ("d", "x", "y", "cx", "cy", "viewbox"))
        assert not re.search("nan|inf|none", drawn.lower()), drawn
        if "data-values" in attributes:
            json.loads(attributes["data-values"])
    return text, page


SUMMARY = {
    "heldout_loss": 2.0123,
    "train_loss": 1.8765,
    "tokens_per_s": 11321,
    "step_ms": 181.0,
    "wait_ms": 14.1,
    "data_ms": 2.0,
    "bytes_per_step": 48_100_000,
    "dropped_fraction": 0.0125,
    "max_vio": [0.25, 0.44],
    "steps": 30,
    "params_total": 3_456_789,
    "params_active": 1_234_567,
    "config_hash": "0123456789ab",
    "commit": "abcdef0",
    "versions": {"jax": "0.10.2"},
    "run_fields_changed": [["moe.dispatcher", "pooled", "all_to_all"]],
}


def test_a_finished_run_shows_its_figures(tmp_path):
    rows = [make_row(step) for step in range(1, 31)]
    rows[-1]["heldout_loss"] = 2.0123
    config = Config()
    config.train.steps = 30
    _, page = read(make_run(tmp_path, rows, config, SUMMARY))
    for figure in [
        "2.0123",
        "1.8765",
        "7.48",
        "11,321",
        "181 ms",
        "14.1 ms",
        "48.1 MB",
        "1.25 %",
        "0.440",
        "3.46 M",
        "1.23 M",
    ]:
        assert f"|{figure}|" in page.text, figure
    assert "30 of 30 steps; finished; 4 devices; 32 experts, 4 a token; router top_k; dispatcher pooled" in page.text
    for title in ["Loss", "Gradient norm", "Learning rate", "MaxVio", "MoE layer 0", "MoE layer 1", "Bytes moved"]:
        assert title in page.text
    for part in [
        "|compute|160 ms|80.0 %|",
        "|waiting for experts|30.0 ms|15.0 %|",
        "|waiting for data|10.0 ms|5.00 %|",
    ]:
        assert part in page.text
    assert "|weights|3.00 MB|90.0 MB|60.0 %|" in page.text
    assert "|gradients|2.00 MB|60.0 MB|40.0 %|" in page.text
    for provenance in ["|0123456789ab|", "|abcdef0|", "|0.10.2|", "|moe.dispatcher: 'pooled', then 'all_to_all'|"]:
        assert provenance in page.text


def test_the_load_heat_map_shows_load_over_mean_by_layer_and_expert(tmp_path):
    _, page = read(make_run(tmp_path, [make_row(step) for step in range(1, 11)]))
    cells = dict(re.findall(r"(layer \d, expert \d): ([\d.]+)", page.text))
    assert cells == {f"layer 1, expert {expert}": "1.00" for expert in range(4)} | {
        "layer 0, expert 0": "1.60",
        "layer 0, expert 1": "1.20",
        "layer 0, expert 2": "1.20",
        "layer 0, expert 3": "0",
    }
    assert "|0 (1.60)|" in page.text  # the hottest expert of layer 0
    colours = [
        attributes["class"].split()[0]
        for tag, attributes in page.tags
        if tag == "rect" and "cell" in attributes["class"]
    ]
    assert colours == ["h2", "h1", "h1", "none", "h0", "h0", "h0", "h0"]


def test_bytes_from_member_to_member(tmp_path):
    """Means over the rows, of each purpose and of all; a row of other members takes no part."""
    weights, gradients = [[0, 3_000_000], [1_000_000, 0]], [[0, 1_000_000], [3_000_000, 0]]
    rows = [make_row(1, bytes_received={"weights": [[7]]})]
    rows += [make_row(step, bytes_received={"weights": weights, "gradients": gradients}) for step in (2, 3)]
    rows.append(make_row(4, bytes_received={"weights": weights}))
    _, page = read(make_run(tmp_path, rows))
    titles = [part for part in page.text.split("|") if part in ("All purposes", "Weights", "Gradients")]
    assert titles == ["All purposes", "Weights", "Gradients"]
    cells = re.findall(r"member (\d) from rank (\d): ([\d.]+ k?M?B)", page.text)
    assert cells[4:8] == [("0", "0", "0 B"), ("0", "1", "3.00 MB"), ("1", "0", "1.00 MB"), ("1", "1", "0 B")]
    assert [cell[2] for cell in cells[8:]] == ["0 B", "500 kB", "1.50 MB", "0 B"]
    assert [cell[2] for cell in cells[:4]] == ["0 B", "3.50 MB", "2.50 MB", "0 B"]


def test_loads_over_time_show_when_an_expert_died(tmp_path):
    alive, dead = np.array([[10, 10]]), np.array([[20, 0]])
    rows = [make_row(step) | load_metrics(*[alive if step <= 50 else dead] * 2) for step in range(1, 101)]
    text, _ = read(make_run(tmp_path, rows))
    panel = text[text.index("MoE layer 0</figcaption>") :]
    runs = re.findall(r'<path class="(\w+) cell" d="(.*?)"', panel)[:3]
    assert {css: len(re.findall("M", path)) for css, path in runs} == {"h0": 2, "h2": 1, "none": 1}


def test_a_run_without_summary_shows_what_its_rows_say(tmp_path):
    rows = [make_row(step, **({"heldout_loss": 3.25} if step == 20 else {})) for step in range(1, 41)]
    _, page = read(make_run(tmp_path, rows, Config()))
    assert "40 of 200 steps; not finished: no summary.json" in page.text
    for figure in ["|3.2500|", "|4.9615|", "|10,240|", "|200 ms|", "|30.0 ms|", "|5.00 MB|", "|0.600|"]:
        assert figure in page.text, figure


def test_changed_values_are_marked_and_the_others_listed_with_default_and_scope(tmp_path):
    config = Config()
    config.optim.clip_norm, config.train.steps = None, 7
    _, page = read(make_run(tmp_path, [make_row(1)], config))
    assert f"2 of {len(_leaves(to_dict(config)))} values differ" in page.text
    assert "|optim.clip_norm|None|1.0|model|" in page.text
    assert "|train.steps|7|200|run|" in page.text
    assert "|data.seq_len|128|128|data|" in page.text
    assert [attributes for tag, attributes in page.tags if tag == "tr"].count({"class": "changed"}) == 2


def _leaves(tree):
    return [leaf for value in tree.values() for leaf in (_leaves(value) if isinstance(value, dict) else [value])]


def test_text_from_the_run_cannot_become_markup(tmp_path):
    evil = "</script><script>alert(1)</script>&\"'<b>"
    config = Config()
    config.data.path = evil
    summary = SUMMARY | {"commit": evil, "versions": {evil: evil}, "run_fields_changed": [evil]}
    row = make_row(1, loss=math.nan) | {"bytes_by_purpose": {"weights": 5, evil: 3}, "not_finite": [evil]}
    text, page = read(make_run(tmp_path / "a<script>b", [row], config, summary))
    assert "alert(1)</script>" not in text
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert page.text.count(evil) >= 4


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_run_of_a_few_rows(tmp_path, steps):
    _, page = read(make_run(tmp_path, [make_row(step, heldout_loss=4.5) for step in range(1, steps + 1)]))
    assert "|4.5000|" in page.text and "MoE layer 1" in page.text


def test_a_run_without_a_row_says_so(tmp_path):
    assert "no config.json" in read(tmp_path)[1].text  # an empty folder
    _, page = read(make_run(tmp_path, [], Config()))
    assert "No rows in metrics.jsonl" in page.text
    assert "0 of 200 steps; not finished" in page.text


def test_a_dense_run(tmp_path):
    config = Config()
    config.moe.every = 0
    nothing = {
        "bytes": 0,
        "bytes_by_purpose": dict.fromkeys(PURPOSES, 0),
    }
    _, page = read(make_run(tmp_path, [make_row(step, num_layers=0, **nothing) for step in (1, 2)], config, SUMMARY))
    assert "dense, no experts" in page.text
    assert "no expert load to show" in page.text and "No bytes were moved" in page.text


def test_losses_that_are_not_finite_leave_gaps_and_are_named(tmp_path):
    broken = (5, 6, 11)
    rows = [make_row(step, loss=math.nan if step in broken else 3.0, skipped_updates=3) for step in range(1, 121)]
    text, page = read(make_run(tmp_path, rows))
    assert "loss was not finite at 3 of 120 logged steps: 5, 6, 11" in page.text
    assert "3 updates were skipped" in page.text
    chart = text[text.index(">Loss<") : text.index(">Gradient norm")]
    assert len(re.findall("M", re.findall(r'class="c1 line" d="(.*?)"', chart)[0])) == 3
    assert re.findall(r'class="c4 flags" d="(.*?)"', chart)[0].count("M") == 3
    assert "|3.0000|" in page.text  # the train loss is the mean of the finite ones


def test_a_run_without_any_finite_value(tmp_path):
    nothing = {"loss": math.nan, "grad_norm": math.inf, "step_ms": math.nan, "max_vio": [math.nan] * 2}
    _, page = read(make_run(tmp_path, [make_row(step, **nothing) for step in (1, 2)]))
    assert "no finite values" in page.text


def test_no_load_at_all_in_a_layer(tmp_path):
    row = make_row(1) | load_metrics(np.zeros((2, 4), int), np.zeros((2, 4), int))
    assert "MoE layer 1" in read(make_run(tmp_path, [row]))[1].text


def test_a_file_cut_by_a_kill_gives_a_page_with_a_notice(tmp_path):
    make_run(tmp_path, [make_row(1), make_row(2)])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "lo')
    (tmp_path / "summary.json").write_text('{"steps": ')
    _, page = read(tmp_path)
    assert "metrics.jsonl:3: the line was cut off" in page.text
    assert "summary.json: not JSON" in page.text
    assert "2 steps; not finished" in page.text


def test_a_long_and_deep_run_stays_small(tmp_path):
    load_LE = np.random.default_rng(0).integers(1, 100, (24, 64)).tolist()
    row = json.dumps(make_row(1) | load_metrics(np.array(load_LE), np.array(load_LE)))
    lines = [row.replace('"step": 1', f'"step": {step}') for step in range(1, 1001)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    text, page = read(tmp_path)
    assert len(text) < 2_000_000
    assert "16 of 24 MoE layers" in page.text


def test_ten_thousand_rows(tmp_path):
    row = json.dumps(make_row(1, num_layers=1))
    lines = [row.replace('"step": 1', f'"step": {step}', 1) for step in range(1, 10_001)]
    lines[6_999] = lines[6_999].replace('"grad_norm": 0.5', '"grad_norm": 77.0')
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    text, page = read(tmp_path)
    assert len(text) < 300_000
    assert "10,000 steps" in page.text
    assert "L2 norm, logarithmic" in page.text  # the one peak of 10,000 is still drawn


def test_a_folder_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no such folder; give the workdir of a run"):
        write_report(tmp_path / "nothing")


def test_the_report_follows_the_colour_scheme_and_width_of_the_screen(tmp_path):
    text, page = read(make_run(tmp_path, [make_row(1)]))
    assert "prefers-color-scheme: dark" in text and "max-width: 760px" in text
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in [
        a for tag, a in page.tags if tag == "meta"
    ]
    used = set(re.findall(r"var\((--[\w-]+)\)", text))
    light, dark = text.split("prefers-color-scheme: dark")[:2]
    assert used == set(re.findall(r"(--[\w-]+):", light)) == set(re.findall(r"(--[\w-]+):", dark))
