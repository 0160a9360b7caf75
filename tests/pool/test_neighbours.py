"""What hosts say of their UCX, and that hosts whose UCX differs are refused."""

import os
import re
import subprocess
import sys

import pytest
from needs import UCX_EMULATED

from fef.config import ConfigError, PoolConfig, UserError
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


def records_of(leaves, networks="abcdefgh", relay="auto"):
    """Of hosts on leaves, each a letter, "-" for none; hosts with the same network share memory."""
    return [
        {"host": host, "name": f"n{host}", "kernel": "k", "network": network, "leaf": leaf.strip("-"), "relay": relay}
        for host, (leaf, network) in enumerate(zip(leaves, networks, strict=False))
    ]


@pytest.mark.parametrize(
    ("transport", "leaves", "networks", "reason"),
    [
        ("tcp", "aabb", "nnnn", ""),
        ("auto", "abab", "abcd", ""),
        ("auto", "aaab", "aabb", ""),
        ("tcp", "----", "abcd", r"host 0 \(n0\) does not know its leaf; use auto, or give all hosts FEF_LEAF"),
        ("tcp", "aa-b", "abcd", r"host 2 \(n2\) does not know its leaf; use auto, or give all hosts FEF_LEAF"),
        ("tcp", "aaaa", "abcd", "all hosts are on leaf 'a'; use auto, or check their FEF_LEAF"),
        ("tcp", "abcd", "abcd", "no two hosts are on the same leaf; use auto, or check their FEF_LEAF"),
        ("auto", "aabb", "nnnn", "hosts on different leaves map each other's memory; use auto, or FEF_TRANSPORT=tcp"),
        ("mmap", "aabb", "nnnn", "hosts on different leaves map each other's memory; use auto, or FEF_TRANSPORT=tcp"),
        ("rma", "aabb", "abcd", "relays what is read by requests, not rma; use auto, or FEF_TRANSPORT=tcp"),
    ],
)
def test_where_a_relay_can_be(transport, leaves, networks, reason, monkeypatch):
    monkeypatch.delenv("FEF_FORCE_REMOTE", raising=False)
    assert neighbours.is_relayed(records_of(leaves, networks), transport) == (not reason)
    assert not neighbours.is_relayed(records_of(leaves, networks, relay="off"), transport)
    asked_for = records_of(leaves, networks, relay="on")
    if not reason:
        assert neighbours.is_relayed(asked_for, transport)
        return
    with pytest.raises(ConfigError, match=f"^config.pool.relay='on': {reason}$"):
        neighbours.is_relayed(asked_for, transport)


def test_what_a_host_says_of_its_leaf(monkeypatch):
    config = PoolConfig()
    config.leaf = "rack 7"
    for environment, leaf in ((None, "rack 7"), ("rack 8", "rack 8")):
        if environment:
            monkeypatch.setenv("FEF_LEAF", environment)
        else:
            monkeypatch.delenv("FEF_LEAF", raising=False)
        assert neighbours.introduction(1, "tcp", config)["leaf"] == leaf
    assert neighbours.leaf_numbers(records_of("babc")) == [0, 1, 0, 2]


@pytest.mark.parametrize(("key", "remedy"), [("relay", "config.pool.relay"), ("remote", "FEF_FORCE_REMOTE")])
def test_hosts_that_relay_differently_are_refused(key, remedy):
    record = {"name": "a", "build": "", "transport": "tcp", "remote": "", "relay": "auto", "ucx": "", "job": ""}
    with pytest.raises(
        UserError, match=f"pool: {key} .* on host 0 .*, 'x' on host 1 .*; give all hosts the same {remedy}"
    ):
        neighbours.check([record | {"host": 0}, record | {"host": 1, key: "x"}])
