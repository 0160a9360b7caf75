"""Files of measured rows, JSON lines: an interrupted program goes on; rows of different sources never meet."""

import datetime
import hashlib
import json
import os
import pathlib
import platform
from typing import Any

from experiments.flags import ROOT
from fef.config import UserError

FEF = ("fef/**/*.py", "fef/**/*.h", "fef/**/*.cc")  # takes part in every row


def digest(patterns: tuple[str, ...]) -> str:
    """Of all sources that take part in a row, given as globs from the root of the repository."""
    of_files = hashlib.sha256()
    for path in sorted(path for pattern in patterns for path in ROOT.glob(pattern)):
        of_files.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return of_files.hexdigest()[:16]


def here_and_now() -> dict[str, str]:
    """When and on what a row was measured."""
    return {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
    }


def read(path: pathlib.Path, code: str) -> list[dict[str, Any]]:
    """The rows of a file. A line that was not written to its end is cut off.

    Raises:
      UserError: a line that is no row, or rows of other sources; names the file and the line.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        content = content[: content.rfind(b"\n") + 1]
        path.write_bytes(content)
    rows = parse(path, content)
    for number, row in enumerate(rows, 1):
        if row["code"] != code:
            raise UserError(
                f"{path}, line {number}: is of sources {row['code']} (commit {row.get('commit')}), these are {code}; "
                "move the file away or name another one by --results"
            )
    return rows


def parse(path: pathlib.Path, content: bytes) -> list[dict[str, Any]]:
    """The rows in the content of a file, of whatever sources.

    Raises:
      UserError: a line that is no row; names the file and the line.
    """
    rows = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            row = json.loads(line)
            row["code"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}, line {number}: is no row of results; take it out or name another file") from None
        rows.append(row)
    return rows


def append(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    """Adds rows, all at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
        file.flush()
        os.fsync(file.fileno())
