"""Compiles rma_test.cc with the one-sided reads, without XLA, and runs it: two processes and UCX."""

import os
import pathlib
import shlex
import subprocess

import pytest
from needs import UCX_EMULATED

from fef.native import build, ucx_files

SOURCES = ("memory_segment.cc", "socket.cc", "ucx/rma.cc")


@pytest.mark.ucx
def test_rma(tmp_path):
    program, ucx = tmp_path / "rma_test", ucx_files.find()
    sources = [pathlib.Path(__file__).with_name("rma_test.cc"), *(build.FOLDER / name for name in SOURCES)]
    flags = [*build.compile_flags("address"), *build.include_flags(build.UCX), *build.link_flags(build.UCX)]
    command = [*shlex.split(build.find_compiler()), *map(str, sources), *flags, "-o", program]
    subprocess.run(command, check=True, timeout=300)
    places = {"LD_LIBRARY_PATH": str(ucx.lib)} if ucx.lib else {}
    done = subprocess.run(
        [program], env=os.environ | ucx_files.settings() | places | UCX_EMULATED,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "all passed\n"), done.stdout


def test_it_is_found_where_it_is_said_to_be(monkeypatch, tmp_path):
    monkeypatch.setenv("FEF_UCX_DIR", str(tmp_path))
    with pytest.raises(ucx_files.UcxError, match=f"FEF_UCX_DIR={tmp_path}: has no lib/libucp.so.0; give UCX's prefix"):
        ucx_files.find()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libucp.so.0").touch()
    found = ucx_files.find()
    assert (found.include, found.lib) == (None, tmp_path / "lib")
    assert build.parts() == [""]  # it can be run with, but not be built against
    (tmp_path / "include" / "ucp" / "api").mkdir(parents=True)
    (tmp_path / "include" / "ucp" / "api" / "ucp.h").touch()
    assert ucx_files.find().include == tmp_path / "include"
    assert build.parts() == ["", "ucx"]
