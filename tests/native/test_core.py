"""Compiles core_test.cc with the C++ core, without XLA, and runs it under sanitizers."""

import pathlib
import shlex
import subprocess

import pytest

from fef.native import build

SOURCES = ("activation.cc", "gemm.cc", "library.cc", "parallel.cc")


@pytest.mark.parametrize("sanitize", build.SANITIZERS)
def test_core(sanitize, tmp_path):
    program = tmp_path / "core_test"
    sources = [pathlib.Path(__file__).with_name("core_test.cc"), *(build.FOLDER / name for name in SOURCES)]
    flags = [*build.compile_flags(sanitize), *build.include_flags(), f"-I{build.FOLDER}", '-DFEF_SOURCE_HASH=""']
    subprocess.run(
        [*shlex.split(build.find_compiler()), *flags, *sources, *build.link_flags(), "-o", program],
        check=True,
        timeout=300,
    )
    done = subprocess.run([program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "all passed\n")
