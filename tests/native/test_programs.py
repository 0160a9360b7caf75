"""Programs beside the library are built once and again when something changed, and what goes wrong names them."""

import sys

import pytest

from fef.config import UserError
from fef.native import build, programs

SOURCE = '#include <cstdio>\n#include "word.h"\nint main() { std::puts(kWord); std::fflush(stdout); std::getchar(); }\n'


def test_a_program_is_built_once_and_spoken_to(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    source = tmp_path / "echo.cc"
    source.write_text(SOURCE)
    (tmp_path / "word.h").write_text('const char kWord[] = "hello you";\n')
    program = programs.make(source)
    made = program.stat().st_mtime_ns
    assert programs.make(source) == program and program.stat().st_mtime_ns == made
    with programs.Program("echo", [program]) as running:
        assert running.hear("hello") == ["you"]
    (tmp_path / "word.h").write_text('const char kWord[] = "bye";\n')
    other = programs.make(source)
    assert other != program and not program.exists()
    with (
        programs.Program("echo", [other]) as running,
        pytest.raises(UserError, match="echo: says 'bye', where 'hello'"),
    ):
        running.hear("hello")


def python(program: str) -> programs.Program:
    return programs.Program("it", [sys.executable, "-c", program])


def test_a_program_that_ends_is_told_with_its_own_words():
    with python("import sys; sys.exit('no such thing')") as running:
        with pytest.raises(UserError, match="it: ended with status 1: no such thing"):
            running.hear("ready")
    with python("pass") as running:
        with pytest.raises(UserError, match="it: ended with status 0: without a word"):
            running.hear("ready")


def test_a_silent_program_is_not_waited_for_for_ever():
    with python("import time; time.sleep(600)") as running:
        with pytest.raises(UserError, match="it: says nothing within 0 s, where 'ready' should come"):
            running.hear("ready", timeout_s=0.1)
