"""results.html in a browser: no complaint, tables sort by mouse and keyboard, all is seen on a phone and a desk."""

import browser
import pytest
from needs import needs_chromium
from result_rows import grid_row, training_row, write

from experiments import render, tables

pytestmark = needs_chromium

DISPATCHERS = ("all_to_all", "all_to_all:form=shifted", "all_gather", "pooled", "fluid:mode=tokens", "fluid",
               "fluid:cost=bytes:deduplicate=False:room=8")  # fmt: skip
SIZES = [(390, 844), (1280, 800)]
COLUMN = """
[...document.querySelectorAll("#mine table")[0].tBodies].map(
  line => line.rows[0].cells[%d].textContent)
"""
HEAD = """[...document.querySelectorAll("#mine table")[0].tHead.rows[0].cells]
  .find(head => head.textContent === "%s")"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    tokens = (1024, 256, 2048, 512)
    rows = [grid_row(name, 100.0 + 10 * i + t, t) for t in tokens for i, name in enumerate(DISPATCHERS)]
    # The last cell has no fluid.
    write(folder / "mine.jsonl", [row for row in rows if (row["tokens"], row["dispatcher"]) != (512, "fluid")])
    write(folder / "routing.jsonl", [training_row(run, 2.0) for run in tables.load_table("routing").runs()])
    path = folder / "results.html"
    path.write_bytes(render.render(folder)["results.html"])
    return path


@pytest.fixture(scope="module")
def tab():
    with browser.Browser() as tab:
        yield tab


def column(tab, name):
    return tab.run(COLUMN % tab.run(f"({HEAD % name}).cellIndex"))


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_all_is_seen(tab, page, width, height, dark):
    tab.open(page, width, height, dark)
    assert tab.run("innerWidth") == width and tab.run("document.documentElement.scrollWidth") <= width
    boxes = tab.run("""[...document.querySelectorAll("svg")].map(svg => {
        svg.scrollIntoView({block: "center"});
        const box = svg.getBoundingClientRect(), text = svg.querySelector("text").getBoundingClientRect();
        const seen = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
        return {left: box.left, right: box.right, height: box.height, letters: text.height, seen: svg.contains(seen)};
    })""")
    assert len(boxes) == 4  # one of the grid, three of the table
    for box in boxes:
        assert box["seen"] and 0 <= box["left"] < box["right"] <= width and box["height"] > 150
        assert box["letters"] >= 10
    paper, ink = tab.run("""(style => [style.backgroundColor, style.color])(getComputedStyle(document.body))""")
    lightness = [sum(map(int, colour[4:-1].split(","))) for colour in (paper, ink)]
    assert (lightness[0] < lightness[1]) == dark and abs(lightness[0] - lightness[1]) > 500
    ticks = tab.run('getComputedStyle(document.querySelector("svg text")).fill')
    assert abs(sum(map(int, ticks[4:-1].split(","))) - lightness[0]) > 250
    assert not tab.complaints


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_click_on_a_head_sorts(tab, page, width, height):
    tab.open(page, width, height)
    assert column(tab, "T") == ["1,024", "256", "2,048", "512"]
    tab.run(f"{HEAD % 'T'}.querySelector('button').click()")
    assert column(tab, "T") == ["256", "512", "1,024", "2,048"]
    assert tab.run(f"{HEAD % 'T'}.getAttribute('aria-sort')") == "ascending"
    tab.run(f"{HEAD % 'T'}.querySelector('button').click()")
    assert column(tab, "T") == ["2,048", "1,024", "512", "256"]
    tab.run(f"{HEAD % 'fluid'}.querySelector('button').click()")
    assert column(tab, "fluid") == ["406", "1,174", "2,198", "–"]  # what was not measured is last
    assert tab.run(f"{HEAD % 'T'}.getAttribute('aria-sort')") == "none"
    tab.run(f"{HEAD % 'fluid'}.querySelector('button').click()")
    assert column(tab, "fluid") == ["2,198", "1,174", "406", "–"]
    assert not tab.complaints


def test_words_sort_as_words(tab, page):
    tab.open(page, 1280, 800)
    tab.run("""[...document.querySelectorAll("#mine details th")].find(head => head.textContent === "dispatcher")
        .querySelector("button").click()""")
    names = tab.run("""[...document.querySelectorAll("#mine details tbody code")].map(code => code.textContent)""")
    assert names == sorted(names) and len(names) == 27


def test_the_keyboard_sorts_and_opens(tab, page):
    tab.open(page, 1280, 800)
    tab.run(f"{HEAD % 'T'}.querySelector('button').focus()")
    tab.press("Enter")
    assert column(tab, "T") == ["256", "512", "1,024", "2,048"]
    tab.run("""document.querySelector("#mine button.open").focus()""")
    shown = """(from => [getComputedStyle(from).display, from.textContent])(
        document.querySelector("#mine tbody").rows[1])"""
    assert tab.run(shown)[0] == "none"
    tab.press("Enter")
    display, text = tab.run(shown)
    assert display == "table-row" and "python -m experiments.launch --T=256" in text and "c0ffee" in text
    assert tab.run("document.activeElement.getAttribute('aria-expanded')") == "true"
    tab.press("Tab")
    assert tab.run("document.activeElement.className") == "copy"
    tab.press("Enter")
    assert tab.run("new Promise(done => setTimeout(() => done(document.activeElement.textContent), 300))") in (
        "copied", "selected"
    )  # fmt: skip
    assert tab.run("getSelection().toString().trim()") == "python -m experiments.launch --T=256"
    assert not tab.complaints


def test_a_complaint_would_be_heard(tab, page):
    tab.open(page, 390, 844)
    tab.run("console.error('no')")
    tab.run("setTimeout(() => { throw Error('never') })")
    tab.run("new Promise(done => setTimeout(done, 100))")
    assert len(tab.complaints) == 2
    tab.complaints.clear()
