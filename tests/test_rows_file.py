"""rows_file: what is not of these sources, or no row, is refused; nothing that was written is lost."""

import pytest

from experiments import rows_file
from fef.config import UserError


def test_rows_of_other_sources_are_not_added_to(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert rows_file.read(path, "a") == []
    path.write_text('{"code": "a"}\n{"code": "b", "commit": "c0ffee"}\n')
    before = path.read_text()
    with pytest.raises(UserError, match="line 2: is of sources b .commit c0ffee., these are a"):
        rows_file.read(path, "a")
    path.write_text('{"code": "a"}\nnothing\n')
    with pytest.raises(UserError, match="line 2: is no row of results"):
        rows_file.read(path, "a")
    path.write_text(before)
    with pytest.raises(UserError, match="line 1: is of sources a"):
        rows_file.read(path, "b")
    assert path.read_text() == before


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    path = tmp_path / "folder" / "rows.jsonl"
    rows_file.append(path, [{"code": "a", "n": 1}, {"code": "a", "n": 2}])
    whole = path.read_text()
    path.write_text(whole + whole[:9])
    assert [row["n"] for row in rows_file.read(path, "a")] == [1, 2] and path.read_text() == whole
