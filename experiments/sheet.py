"""A table of results, written as Markdown, CSV or whatever a page makes of it; what the cells say stands here once."""

import csv
import dataclasses
import io
import shlex
from collections.abc import Sequence
from typing import Any

DASH = "\N{EN DASH}"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One value.

    Attributes:
      value: to sort by and for CSV, unrounded; None is none.
      text: for people, without markup.
      is_code: whether it is a name that a command takes.
      is_strong: whether it stands out among its neighbours.
    """

    value: float | str | bool | None
    text: str
    is_code: bool = False
    is_strong: bool = False

    @property
    def markdown(self) -> str:
        text = f"`{self.text}`" if self.is_code else self.text
        return f"**{text}**" if self.is_strong else text


def number(value: float | None, form: str = "{:,.0f}") -> Cell:
    """A cell of a number, a dash where there is none."""
    return Cell(value, DASH if value is None else form.format(value))


def word(value: str, is_code: bool = False) -> Cell:
    """A cell of a text."""
    return Cell(value, value, is_code)


@dataclasses.dataclass(frozen=True)
class Head:
    """What a column is called, with its unit; numbers stand to the right."""

    text: str
    is_number: bool = False
    is_code: bool = False

    @property
    def markdown(self) -> str:
        return f"`{self.text}`" if self.is_code else self.text


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a table and the result rows that it is made of."""

    cells: Sequence[Cell]
    rows: Sequence[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Sheet:
    """A table.

    Attributes:
      title: a few words; empty when there is one table only.
      heads: its columns.
      lines: in the order in which they were measured.
      notes: Markdown, a paragraph each: what the columns mean.
    """

    title: str
    heads: Sequence[Head]
    lines: Sequence[Line]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """The table and its notes, without the title."""
        lines = [
            _joined(head.markdown for head in self.heads),
            _joined("---:" if head.is_number else "---" for head in self.heads),
            *(_joined(cell.markdown for cell in line.cells) for line in self.lines),
        ]
        return "\n".join(lines + [text for note in self.notes for text in ("", note)])

    def csv(self) -> str:
        """Unrounded values, then where they come from: a line for each of the table's."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([*(head.text for head in self.heads), *PROVENANCE])
        for line in self.lines:
            values = ["" if cell.value is None else cell.value for cell in line.cells]
            writer.writerow(values + ["; ".join(of_rows) for of_rows in provenance(line.rows).values()])
        return out.getvalue()


def _joined(texts: Any) -> str:
    return "| " + " | ".join(texts) + " |"


PROVENANCE = ("command", "commit", "code", "versions", "when", "machine")


def provenance(rows: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Where a line comes from: of each of PROVENANCE what its rows say, equal texts once."""
    said: dict[str, list[str]] = {key: [] for key in PROVENANCE}
    for row in rows:
        versions = row.get("versions", {})
        texts = {
            **{key: row.get(key, "") for key in PROVENANCE},
            "command": command(row),
            "versions": " ".join(f"{name}=={version}" for name, version in versions.items()),
        }
        for key, text in texts.items():
            if text and text not in said[key]:
                said[key].append(text)
    return said


def command(row: dict[str, Any]) -> str:
    """What a row was measured with, with the part of the environment that changes it."""
    flags = row.get("xla_flags", "")
    return f"XLA_FLAGS={shlex.quote(flags)} {row['command']}" if flags else row["command"]
