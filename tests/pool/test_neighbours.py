"""What hosts say of their UCX, and that hosts whose UCX differs are refused."""

import os
import re
import subprocess
import sys

import pytest
from needs import UCX_EMULATED

from fef.config import ConfigError, UserError
from fef.native import build
from fef.pool import neighbours

LOAD = """
import ctypes, re
from fef.pool import native, neighbours
assert re.fullmatch(r"\\d+\\.\\d+\\.\\d+, UCX_TLS=[\\w,]+", neighbours.ucx()), neighbours.ucx()
error = ctypes.create_string_buffer(200)
library = native.ucx_library()
opened = library.fef_ucx_open(error, 200)
assert opened, error.value
library.fef_ucx_close(opened)
assert "/libfef.so" not in open("/proc/self/maps").read()
"""


def run(program: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.ucx
def test_ucx_is_found_loaded_and_opened():
    build.build(part=build.UCX)
    done = run(LOAD, **UCX_EMULATED)
    assert done.returncode == 0, done.stderr


@pytest.mark.ucx
def test_ucx_that_cannot_be_opened_says_why():
    build.build(part=build.UCX)
    done = run("from fef.pool import native; native.open_one_sided()", UCX_TLS="nonsense")
    text = r"NativeError: FEF_TRANSPORT=rma: rma: opening UCX: .*; UCX_TLS=nonsense"
    assert re.search(text, done.stderr), done.stderr


def test_where_there_is_no_ucx_it_says_what_to_do(tmp_path):
    done = run("from fef.pool import native; native.ucx_library()", FEF_UCX_DIR=str(tmp_path))
    assert f"NativeError: FEF_TRANSPORT=rma: FEF_UCX_DIR={tmp_path}: has no lib/libucp.so.0; give" in done.stderr


def test_another_ucx_is_refused_with_both_values():
    record = {"name": "a", "build": "", "transport": "rma", "remote": "", "relay": "auto", "job": ""}
    records = [
        record | {"host": host, "ucx": ucx} for host, ucx in enumerate(("1.22.0, UCX_TLS=all", "1.13.1, UCX_TLS=all"))
    ]
    with pytest.raises(
        UserError, match=r"ucx '1.22.0, .*' on host 0 \(a\), '1.13.1, .*' on host 1 \(a\); give all hosts"
    ):
        neighbours.check(records)
    neighbours.check(records[:1] * 2)


def test_which_hosts_are_mapped(monkeypatch):
    monkeypatch.delenv("FEF_FORCE_REMOTE", raising=False)
    here = {"kernel": "k", "network": "n", "name": "a"}
    records = [here | {"host": 0}, here | {"host": 1}, here | {"host": 2, "kernel": "another", "name": "b"}]

    def mapped(transport):
        return neighbours.mapped_hosts(records, 0, transport)

    assert mapped("auto") == [True, True, False]
    assert mapped("tcp") == mapped("rma") == [False] * 3
    with pytest.raises(ConfigError, match=r"host 2 \(b\) shares no memory; use auto or tcp"):
        mapped("mmap")
    monkeypatch.setenv("FEF_FORCE_REMOTE", "1")
    assert mapped("auto") == [False] * 3
