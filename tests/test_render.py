"""render: rows made by hand give the files worked out by hand; what cannot be read is named, and nothing written."""

import csv
import html
import io
import json
import math
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree

import pytest
from result_rows import grid_row, training_row, write
from small import ROOT

from experiments import figures, render, tables
from fef.config import UserError


def grid():
    return [
        grid_row(name, ms * tokens / 512, tokens)
        for tokens in (512, 1024)
        for name, ms in (("pooled", 200.0), ("fluid", 210.0))
    ]


@pytest.fixture
def results(tmp_path):
    write(tmp_path / "mine.jsonl", grid())
    return tmp_path


def test_the_program_writes_all_files(results):
    output = results / "new" / "folder"
    done = subprocess.run(
        [sys.executable, "-m", "experiments.render", f"--results={results}", f"--output={output}"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{output / 'results.html'} and 4 files beside it\n"
    written = {path.name: path.read_bytes() for path in output.iterdir()}
    assert set(written) == {"results.html", "mine.md", "mine.csv", "mine.svg", "mine.png"}
    assert written["mine.png"].startswith(b"\x89PNG") and [
        path.name for path in results.iterdir() if path.is_file()
    ] == ["mine.jsonl"]
    assert xml.etree.ElementTree.fromstring(written["mine.svg"]).tag.endswith("svg")
    assert render.render(results) == written  # equal rows, equal files


def test_markdown_has_tables_figure_and_commands(results):
    text = render.render(results)["mine.md"].decode()
    assert text.startswith("# mine\n\n4 hosts with one member each") and "](mine.svg)" in text
    assert "\n| leaves=1 | auto | 100 | balanced | 512 | 90 | 503 | **200** | 210 | 1.05 | 1.50 | – |\n" in text
    of_fluid = "`fluid` | 420 | 21.4% | 90 | 4.67 | 1,007 | – | 1.0 | – | 0.0% |"
    assert f"\n| leaves=1 | auto | 100 | balanced | 1,024 | {of_fluid}\n" in text
    assert text.endswith(
        "## Commands\n\n```sh\npython -m experiments.launch --T=512\npython -m experiments.launch --T=1024\n```\n"
    )


def test_csv_has_a_line_for_each_row(results):
    lines = list(csv.DictReader(io.StringIO(render.render(results)["mine.csv"].decode())))
    assert [(line["T"], line["dispatcher"], line["step ms"]) for line in lines] == [
        ("512", "pooled", "200.0"), ("512", "fluid", "210.0"), ("1024", "pooled", "400.0"), ("1024", "fluid", "420.0")
    ]  # fmt: skip
    assert lines[0]["command"] == "python -m experiments.launch --T=512" and lines[0]["commit"] == "c0ffee"
    assert float(lines[0]["utilisation"]) == pytest.approx(90 / 200) and lines[0]["wait ms"] == ""


def test_the_page_has_each_rows_command_and_where_it_is_from(results):
    page = render.render(results)["results.html"].decode()
    lines = re.findall(r"<tbody>.*?</tbody>", page, re.S)
    assert len(lines) == 2 + 4  # cells, rows
    for line in lines:
        shown = html.unescape(re.sub(r"<[^>]*>", "", line))
        tokens = re.search(r'data-value="(512|1024)"', line)[1]
        assert f"python -m experiments.launch --T={tokens}copy" in shown
        for text in ("c0ffee", "0123456789abcdef", "jax==1", "2026-01-02T03:04:05+00:00", "an abacus"):
            assert text in shown
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//|@import|url\((?!#)""", page)  # nothing from elsewhere
    assert page.count("<svg") == 1 and "#2a78d6" in page.partition("</style>")[0]
    assert "#2a78d6" not in page.partition("</style>")[2] and "var(--c1)" in page  # figures have the page's colours


def test_text_of_rows_is_no_markup(results):
    write(results / "mine.jsonl", [row | {"command": "x <script>alert(1)</script> & y"} for row in grid()])
    page = render.render(results)["results.html"].decode()
    assert page.count("<script>") == 1 and "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_a_row_without_optional_fields(results):
    rows = grid()
    for name in ("steps_ms", "when", "machine"):
        rows[0].pop(name)
    rows[0]["cell"].pop("relay")
    write(results / "mine.jsonl", rows[:1])
    files = render.render(results)
    assert "| leaves=1 | – | 100 | balanced | 512 | 90 | 503 | **200** | – | – | – |" in files["mine.md"].decode()
    assert len(files) == 5


def test_training_runs(tmp_path):
    table = tables.load_table("routing")
    rows = [training_row(run, 2.0 + run["train.seed"] / 10) for run in table.runs() if run["moe.router"] == "hash"]
    write(tmp_path / "routing.jsonl", rows)
    files = render.render(tmp_path)
    text = files["routing.md"].decode()
    assert "# routing\n\nWhich routing scheme learns best" in text
    assert "| `hash` | 2.100 ± 0.100 | 0.50 | 25.0% | 1.0 | 2.50 |" in text and "| `top_k` | – |" in text
    lines = list(csv.DictReader(io.StringIO(files["routing.csv"].decode())))
    assert [(line["variant"], line["seed"], line["held-out loss"]) for line in lines] == [
        ("hash", "0", "2.0"), ("hash", "1", "2.1"), ("hash", "2", "2.2")
    ]  # fmt: skip
    assert b"held-out loss" in files["routing.svg"] and files["results.html"].count(b"<svg") == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nothing", "line 2: is no row of results; take it out"),
        ('{"code": "0123', "line 2: is no row of results; take it out"),
        ("[1]", "line 2: is no row of results; take it out"),
        (
            json.dumps(grid_row("fluid", 1.0) | {"step_ms": None}),
            "line 2: has no step_ms; measure it again, or take the line out",
        ),
        (json.dumps(grid_row("fluid", 1.0) | {"flags": {}}), "line 2: has no flags.members; measure it again"),
        (json.dumps(grid_row("fluid", 1.0, code="other")), "line 2: is of sources other, line 1 of 0123456789abcdef"),
    ],
)
def test_a_broken_line_is_named_and_nothing_written(results, line, said):
    path = results / "zz.jsonl"
    write(path, grid()[:1])
    path.write_text(path.read_text() + line + "\n")
    output = results / "output"
    with pytest.raises(UserError) as error:
        render.main(["render", f"--results={results}", f"--output={output}"])
    assert str(error.value).startswith(f"{path}, {said}") and "\n" not in str(error.value)
    assert not output.exists()


def test_bytes_that_are_no_text_are_named(results):
    (results / "mine.jsonl").write_bytes(b'{"code": "\xff\xfe"}\n')
    with pytest.raises(UserError, match="line 1: is no row of results"):
        render.render(results)


def test_a_folder_without_rows_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no .*jsonl; experiments.compare and experiments.tables write them"):
        render.render(tmp_path)
    (tmp_path / "mine.jsonl").touch()
    with pytest.raises(UserError, match="mine.jsonl: is empty; take it away"):
        render.render(tmp_path)


def test_all_rows_of_this_repository_are_shown(tmp_path):
    names = {path.stem for path in (ROOT / "results").glob("*.jsonl")}
    for name in names:
        shutil.copy(ROOT / "results" / f"{name}.jsonl", tmp_path)
    kinds = {name: ("md", "csv", "svg", "png") for name in names}
    kinds |= {name: ("md", "csv") for name in ("memory", "dispatch_cost")}  # no step time is in question
    wanted = {f"{name}.{kind}" for name, of_name in kinds.items() for kind in of_name}
    assert len(names) >= 4 and render.render(tmp_path).keys() == wanted | {"traffic.md", "results.html"}


def test_a_dispatcher_has_its_colour_in_all_figures():
    first = figures.of_grid([grid_row(name, 1.0) for name in ("mine", "pooled", "fluid:cost=bytes:room=8")])
    second = figures.of_grid([grid_row(name, 1.0) for name in ("fluid:cost=bytes", "fluid", "other", "pooled")])
    looks = [
        {one.name: (one.colour, one.mark) for one in panels[0].series if not one.line} for panels in (first, second)
    ]
    assert looks[0]["pooled"] == looks[1]["pooled"]
    assert looks[0]["fluid:cost=bytes:room=8"] == looks[1]["fluid:cost=bytes"]
    assert all(len(set(look.values())) == len(look) for look in looks)


def test_panels_over_tokens_share_their_scale():
    def times_ten(row):
        return dict(
            row, cell=row["cell"] | {"nic": 10}, flags=row["flags"] | {"nic": 10.0}, step_ms=row["step_ms"] * 10
        )

    panels = figures.of_grid(grid() + [times_ten(row) for row in grid()])
    assert [panel.title for panel in panels] == ["100 Mbit/s", "10 Mbit/s"]
    assert [panel.places for panel in panels] == [[512, 1024]] * 2 and panels[0].span == panels[1].span
    low, high = panels[0].span
    assert low < 90 and high > 10_066  # the floor; an overlapped all_to_all at a tenth of the rate


def test_limits_stand_beside_what_was_measured():
    (panel,) = figures.of_grid(grid())
    drawn = {one.name: [round(y) for y in one.y] for one in panel.series}
    assert drawn == {
        "pooled": [200, 400], "fluid": [210, 420], "floor": [90, 90], "overlapped all_to_all": [503, 1007]
    }  # fmt: skip
    svg = figures.panel_svg(panel)
    assert all(f">{text}<" in svg for text in ("512", "1,024", "tokens of a member (T)", "200", "500"))


def test_each_number_of_tokens_may_have_a_device_and_a_network_its_order():
    def of(network, tokens, us):
        row = grid_row("pooled", 400.0, tokens, layer_s=tokens * us * 1e-6)
        return row | {"cell": row["cell"] | {"network": network, "us_per_token": us}}

    networks = ("leaves=2,oversub=4", "leaves=2,oversub=4,order=alternating")
    rows = [of(network, tokens, us) for network in networks for tokens, us in ((512, 400.0), (1024, 100.0))]
    together, apart = figures.of_grid(rows)
    assert apart.title == "100 Mbit/s, leaves=2, oversub=4, order=alternating" != together.title
    (floor,) = (one.y for one in apart.series if one.name == "floor")
    assert floor == pytest.approx([2 * 204.8, 2 * 102.4])  # two layers, as each cell's device takes


def test_few_tokens_are_drawn_by_routing():
    hot = grid_row("pooled", 300.0) | {"flags": grid_row("", 1.0)["flags"] | {"workload": "hot_experts"}}
    (panel,) = figures.of_grid([*grid()[:2], hot])
    assert (panel.title, panel.kind, panel.places) == ("100 Mbit/s, T = 512", "bars", ["balanced", "hot_experts"])
    assert panel.series[0].y == [200.0, 300.0] and math.isnan(panel.series[1].y[1])  # fluid was not measured
    assert ">hot_experts<" in figures.panel_svg(panel)


def test_long_names_beside_bars_are_cut_where_they_can_be():
    def of(network):
        row = grid_row("pooled", 300.0)
        return row | {"cell": row["cell"] | {"network": network}}

    (panel,) = figures.of_grid([of("leaves=2"), of("leaves=2,oversub=4,order=alternating")])
    assert panel.places == ["leaves=2", "leaves=2, oversub=4,\norder=alternating"]


def test_without_matplotlib_the_remedy_is_named(results, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(UserError, match=r"figures need matplotlib: pip install 'fef\[figures\]'"):
        render.render(results)


def test_collectives_and_traffic_have_their_parts(results):
    row = {
        "collective": "psum", "sent_bytes": 6e6, "ms": 500.0, "times_ms": [500.0], "busy_ms": 450.0,
        "busy_link": "host", "leaves": [0, 0], "nic": 100.0, "uplink": None, "bytes": 1 << 22,
        "versions": {"jax": "1"}, "commit": "c0ffee",
    }  # fmt: skip
    (results / "bench_collectives.json").write_text(json.dumps([row]))
    setting = {"members": 4, "experts": 8, "choices": 2, "layers": 2, "d_model": 256, "d_expert": 341, "nic": 100.0}
    of_step = {"bytes_by_purpose": {"weights": 50_282_496, "gradients": 50_282_496}}
    pair = [grid_row(name, 100.0, **of_step) for name in ("pooled", "fluid:mode=tokens")]
    write(results / "crossover.jsonl", [row | {"flags": row["flags"] | setting} for row in pair])
    files = render.render(results)
    assert "| psum | 6.0 | 500 | host, 90% |" in files["bench_collectives.md"].decode()
    assert "| 512 | `pooled` | 100.6 | 100.6 | 1.00 |" in files["traffic.md"].decode()
    page = files["results.html"].decode()
    assert '<section id="bench_collectives">' in page and '<section id="traffic">' in page
    assert not {"bench_collectives.csv", "traffic.csv"} & set(files)
