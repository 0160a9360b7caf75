"""The build of the native library, on a folder of its own with a tiny source, and what loading it does."""

import concurrent.futures
import ctypes
import pathlib
import re
import subprocess
import sys

import pytest
import scipy_openblas32

from fef.native import build
from fef.pool import native

SOURCE = '#include "cblas.h"\nextern "C" const char fef_source_hash[] = "fef_source_hash=" FEF_SOURCE_HASH;\n'


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    (tmp_path / "library.cc").write_text(SOURCE)
    (tmp_path / "other.cc").write_text('#include "other.h"\nint Other() { return kOther; }\n')
    (tmp_path / "other.h").write_text("const int kOther = 1;\n")
    return tmp_path


@pytest.fixture
def no_compiler(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("PATH", str(tmp_path_factory.mktemp("empty")))
    monkeypatch.delenv("CXX", raising=False)


def test_builds_once_and_again_when_something_changed(folder, capsys):
    assert build.main([]) == 0
    assert build.built_hash() == build.source_hash()
    assert capsys.readouterr().out == f"{folder}/lib/libfef.so: built\n"
    assert build.main([]) == 0
    assert capsys.readouterr().out == f"{folder}/lib/libfef.so: already current\n"
    (folder / "other.h").write_text("const int kOther = 2;\n")
    assert build.built_hash() != build.source_hash()
    assert build.build()
    assert build.built_hash() == build.source_hash()
    assert sorted(path.name for path in (folder / "lib").iterdir()) == [".lock", "libfef.so"]


def test_hash_covers_flags_and_versions(monkeypatch):
    before = build.source_hash()
    assert build.source_hash("address") != before
    monkeypatch.setattr(build.importlib.metadata, "version", lambda package: "0.0")
    assert build.source_hash() != before


def test_missing_package_is_one_line(monkeypatch, folder, capsys):
    def missing(package):
        raise build.importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(build.importlib.metadata, "version", missing)
    assert build.main([]) == 1
    assert capsys.readouterr().err == (
        "fef.native.build: the Python package jaxlib is missing; install fef with its dependencies\n"
    )


def test_sanitized_library_has_its_own_file(folder):
    assert build.main(["--sanitize=address"]) == 0
    assert build.built_hash("address") == build.source_hash("address")
    assert build.built_hash() is None
    with pytest.raises(SystemExit) as exit_info:
        build.main(["--sanitize=memory"])
    assert exit_info.value.code == 2
    with pytest.raises(build.BuildError, match="--sanitize=memory: choose one of address, thread"):
        build.build("memory")


def test_no_compiler(folder, no_compiler, capsys):
    assert build.main([]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(r"no C\+\+ compiler found \(tried g\+\+, clang\+\+, c\+\+\).*apt-get install g\+\+", error)


def test_chosen_compiler_that_is_not_there(folder, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    assert build.main([]) == 1
    assert "CXX='no-such-compiler -m64' is not on the PATH" in capsys.readouterr().err


def test_current_library_needs_no_compiler(folder, request):
    assert build.build()
    request.getfixturevalue("no_compiler")
    assert build.main([]) == 0


def test_compile_error_names_the_file_and_keeps_the_old_library(folder, capsys):
    build.build()
    old = build.built_hash()
    (folder / "other.cc").write_text("int Other() { int unused; return 1; }\n")  # a warning is an error
    assert build.main([]) == 1
    error = capsys.readouterr().err
    assert error.startswith("fef.native.build: other.cc: ") and "unused" in error
    assert build.built_hash() == old
    assert sorted(path.name for path in (folder / "lib").iterdir()) == [".lock", "libfef.so"]


def test_of_two_builds_at_once_one_compiles(folder):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(lambda _: build.build(), range(2))) == [False, True]


def test_importing_loads_no_native_code_and_starts_no_backend():
    program = """
import fef.ops.grouped_matmul, fef.ops.permute, fef.pool.native
assert "libfef" not in open("/proc/self/maps").read()
from jax._src import xla_bridge
assert not xla_bridge._backends
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_blas_has_one_thread_inside_of_the_library():
    build.build()
    native.library()
    assert "/libfef.so" in pathlib.Path("/proc/self/maps").read_text()
    blas = ctypes.CDLL(f"{scipy_openblas32.get_lib_dir()}/{scipy_openblas32.get_library(fullname=True)}")
    assert blas.scipy_openblas_get_num_threads() == 1
