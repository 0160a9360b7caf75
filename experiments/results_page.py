"""results.html: all tables of results, with their figures, on one page that needs nothing from elsewhere.

The script sorts tables and folds away where lines come from. Without it the page is complete, and long.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from experiments import figures
from experiments.sheet import Cell, Head, Line, Sheet, provenance
from fef.charts import escape
from fef.charts import figure as card
from fef.report_style import STYLE


class Part(NamedTuple):
    """What the page shows of one file of rows.

    Attributes:
      name: of the file.
      question: what it answers, one line.
      caption: what its rows share.
      summary: the tables.
      every_row: the table of all that was measured; folded away. None where the others have it all.
      panels: the figures.
    """

    name: str
    question: str
    caption: str
    summary: Sequence[Sheet]
    every_row: Sheet | None
    panels: Sequence[figures.Panel]


def page(parts: Sequence[Part]) -> str:
    """The whole file."""
    links = "".join(f'<li><a href="#{part.name}">{part.name}</a> {escape(part.question)}</li>' for part in parts)
    body = (
        '<h1>Results</h1><p class="soft">A click on a head sorts by it, another one turns the order. The arrow before '
        "a line shows the command that measured it, and on what.</p>"
        f'<ul class="contents">{links}</ul>{"".join(map(_part, parts))}'
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'  # else a browser asks the server for one
        f"<title>fef results</title><style>{STYLE}{_STYLE}</style></head>"
        f"<body><main>{body}</main><script>{_SCRIPT}</script></body></html>\n"
    )


def _part(part: Part) -> str:
    every_row = ""
    if part.every_row:
        every_row = f"<details><summary>{escape(part.every_row.title)}</summary>{_table(part.every_row)}</details>"
    return (
        f'<section id="{part.name}"><h2>{part.name}</h2><p>{escape(part.question)}</p>'
        f'<p class="note">{escape(part.caption)}</p>{_figures(part)}'
        f"{''.join(map(_titled, part.summary))}{every_row}</section>"
    )


def _figures(part: Part) -> str:
    if not part.panels:
        return ""
    series = figures.legend(part.panels)
    keys = "".join(_key(one) for one in series) if len(series) > 1 else ""
    cards = "".join(card(panel.title, _labelled(panel)) for panel in part.panels)
    return f'<div class="legend">{keys}</div><div class="charts">{cards}</div>'


def _key(series: figures.Series) -> str:
    style = f"color: var(--{series.colour})"
    css = "bar" if not series.line else "dotted" if series.line == ":" else "dashed"
    return f'<span class="key"><i class="{css}" style="{style}"></i>{_wrapped(series.name)}</span>'


def _labelled(panel: figures.Panel) -> str:
    return figures.panel_svg(panel).replace("<svg", f'<svg role="img" aria-label="{escape(panel.title)}"', 1)


def _titled(sheet: Sheet) -> str:
    return f"<h3>{escape(sheet.title)}</h3>{_table(sheet)}"


def _table(sheet: Sheet) -> str:
    same = _same(sheet)
    shown = [index for index in range(len(sheet.heads)) if index not in same]
    heads = "".join(_head(sheet.heads[index]) for index in shown)
    lines = "".join(_line(line, sheet.heads, shown) for line in sheet.lines)
    told = "; ".join(f"{sheet.heads[i].text} {sheet.lines[0].cells[i].text}" for i in same)
    notes = [*([f"In all lines: {told}."] if told else []), *sheet.notes]
    return (
        f'<div class="table" role="region" tabindex="0" aria-label="{escape(sheet.title)}"><table class="sortable">'
        f'<thead><tr><th><span class="unseen">Where from</span></th>{heads}</tr></thead>{lines}</table></div>'
        + "".join(f'<p class="note">{_markdown(note)}</p>' for note in notes)
    )


def _same(sheet: Sheet) -> list[int]:
    """Columns of words that say the same in all lines: on a small screen there is no room for them."""
    words = [index for index, head in enumerate(sheet.heads) if not head.is_number]
    of_column = {index: {line.cells[index].text for line in sheet.lines} for index in words}
    return [index for index, texts in of_column.items() if len(texts) == 1 and len(sheet.lines) > 1]


def _head(head: Head) -> str:
    css = ' class="number"' if head.is_number else ""
    return f'<th scope="col" aria-sort="none"{css}><button type="button">{_wrapped(head.text)}</button></th>'


def _line(line: Line, heads: Sequence[Head], shown: Sequence[int]) -> str:
    cells = "".join(_cell(line.cells[index], heads[index].is_number) for index in shown)
    open_button = '<td><button type="button" class="open" aria-expanded="true" aria-label="Where from"></button></td>'
    said = provenance(line.rows)
    commands = "".join(
        f'<div class="command"><pre>{_words(text)}</pre><button type="button" class="copy">copy</button></div>'
        for text in said.pop("command")
    )
    names = {"code": "digest of the sources", "when": "measured"}
    texts = "".join(
        f"<dt>{escape(names.get(key, key))}</dt><dd>{escape('; '.join(of_rows))}</dd>"
        for key, of_rows in said.items()
        if of_rows
    )
    return (
        f"<tbody><tr>{open_button}{cells}</tr>"
        f'<tr class="from"><td colspan="{len(shown) + 1}"><div>{commands}<dl>{texts}</dl></div></td></tr></tbody>'
    )


def _words(command: str) -> str:
    """A command that goes on in the next line between its words only, not behind the hyphens of a flag."""
    return " ".join(f"<span>{escape(word)}</span>" for word in command.split(" "))


def _cell(cell: Cell, is_number: bool) -> str:
    value = "" if cell.value is None else cell.value
    text = f"<code>{_wrapped(cell.text)}</code>" if cell.is_code else escape(cell.text)
    css = ' class="number"' if is_number else ""
    return f'<td{css} data-value="{escape(value)}">{f"<b>{text}</b>" if cell.is_strong else text}</td>'


def _wrapped(text: str) -> str:
    """A name that may go on in the next line behind its colons."""
    return escape(text).replace(":", ":<wbr>")


def _markdown(text: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))


_STYLE = """
.table { position: relative; }
h3 { font-size: 15px; margin: 22px 0 8px; }
.contents { padding-left: 20px; }
.charts { grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); margin-bottom: 14px; }
.legend { margin: 12px 0 8px; }
.key i.dotted { height: 0; background: none; border-top: 3px dotted; }
.key i.dashed { height: 0; background: none; border-top: 2px dashed; }
svg text { font-size: inherit; }
.sortable th { padding: 0; white-space: nowrap; }
.sortable tbody:last-child td { border-bottom: 0; }
.sortable tr:last-child td { border-bottom: 1px solid var(--line); }
.sortable td:nth-child(n) { overflow-wrap: normal; white-space: nowrap; }
.sortable td code { white-space: normal; }
.sortable .from > td:nth-child(n) { white-space: normal; }
th button { font: inherit; color: inherit; background: none; border: 0; cursor: pointer; padding: 8px 12px;
  width: 100%; min-height: 40px; text-align: inherit; max-width: 190px; white-space: normal; }
th button:hover, .open:hover { color: var(--ink); }
th[aria-sort=ascending] button::after { content: "\\A0\\25B2"; }
th[aria-sort=descending] button::after { content: "\\A0\\25BC"; }
button:focus-visible, .table:focus-visible, summary:focus-visible {
  outline: 2px solid var(--c1); outline-offset: -2px; }
.open { font: inherit; color: var(--soft); background: none; border: 0; cursor: pointer; padding: 2px 6px;
  min-width: 28px; }
.sortable td:first-child { padding: 3px 0 3px 4px; width: 32px; }
.sortable th:first-child { width: 32px; }
.open::before { content: "\\25BE"; }
.open[aria-expanded=false]::before { content: "\\25B8"; }
.from > td { background: var(--page); padding: 0; }
.from > td > div { position: sticky; left: 0; width: min(1100px, 100vw - 44px); padding: 10px 12px; }
.command { display: flex; gap: 8px; align-items: start; margin-bottom: 6px; }
pre { flex: 1; margin: 0; padding: 8px; font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; background: var(--card); border: 1px solid var(--line); border-radius: 4px;
  user-select: all; }
pre span { display: inline-block; max-width: 100%; word-break: break-all; }
.copy { font: inherit; font-size: 13px; color: var(--ink); background: var(--card); border: 1px solid var(--line);
  border-radius: 4px; padding: 6px 10px; cursor: pointer; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 12px; margin: 0; font-size: 13px; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
a { color: var(--c1); }
.unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
@media (max-width: 760px) {
  .sortable th { padding: 0; }
  th button { padding: 8px; max-width: 140px; }
  dl { grid-template-columns: 1fr; }
  dd { margin-bottom: 4px; }
  .command { flex-direction: column; align-items: stretch; }
}
"""

_SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells].filter(head => head.querySelector("button"));
  heads.forEach(head => head.querySelector("button").addEventListener("click", () => {
    const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    heads.forEach(other => other.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
    const isNumber = head.classList.contains("number");
    const lines = [...table.tBodies].map(line => [line.rows[0].cells[head.cellIndex].dataset.value, line]);
    lines.sort(([a], [b]) => {
      if (a === "" || b === "") return (a === "") - (b === "");  // what has no value stays behind
      return sign * (isNumber ? a - b : a.localeCompare(b, "en", {numeric: true}));
    });
    table.append(...lines.map(([, line]) => line));
  }));
}
for (const button of document.querySelectorAll("button.open")) {
  const from = button.closest("tbody").rows[1];
  const show = isOpen => { from.hidden = !isOpen; button.setAttribute("aria-expanded", isOpen); };
  button.addEventListener("click", () => show(from.hidden));
  show(false);
}
for (const button of document.querySelectorAll("button.copy")) {
  button.addEventListener("click", async () => {
    const text = button.previousElementSibling;
    getSelection().selectAllChildren(text);  // where a page may not write to the clipboard, the user can
    try {
      await navigator.clipboard.writeText(text.textContent);
      button.textContent = "copied";
    } catch { button.textContent = "selected"; }
  });
}
"""
