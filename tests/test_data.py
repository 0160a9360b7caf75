"""fef.corpus and fef.data: reading, splitting, windows, the loader."""

import gzip
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest

import fef.corpus
from fef.config import ConfigError, DataConfig
from fef.data import Corpus, heldout_batches, load_corpus, make_loader, num_windows
from fef.tokenizer import decode, encode

CASES = pathlib.Path(__file__).parent / "cases" / "data"
MANIFEST = json.loads((CASES / "manifest.json").read_text())
READABLE = sorted(name for name, case in MANIFEST.items() if case["byte_tokens"])
DAMAGED = sorted(name for name, case in MANIFEST.items() if case["byte_tokens"] is None)


def load(path, **fields) -> Corpus:
    fields = {"seq_len": 4, "heldout_fraction": 0.0} | fields
    return load_corpus(DataConfig(path=str(path), **fields))


def refusal(path, **fields) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, **fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write(folder: pathlib.Path, files: dict[str, bytes]) -> pathlib.Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def position_tokens(num_tokens: int) -> np.ndarray:
    """Each token is its own position, so a window's first input is its start."""
    assert num_tokens <= 256
    return np.arange(num_tokens).astype(np.uint8)


def take(loader, count: int) -> list[dict[str, np.ndarray]]:
    return [next(loader) for _ in range(count)]


def digests(batches) -> list[str]:
    return [hashlib.sha256(b"".join(batch[name].tobytes() for name in sorted(batch))).hexdigest() for batch in batches]


# Bytes stay bytes (T-01).


@pytest.mark.parametrize("name", READABLE)
def test_every_byte_of_a_file_is_a_token(name):
    case = MANIFEST[name]
    corpus = load(CASES / name)
    assert (CASES / name).stat().st_size == case["file_bytes"]
    assert len(corpus.train) == corpus.num_bytes == case["byte_tokens"]
    sha256 = case.get("decoded_sha256", case["sha256"])
    assert hashlib.sha256(decode(corpus.train)).hexdigest() == corpus.sha256 == sha256
    assert corpus.num_documents == 1


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("among_others", [False, True])
def test_damaged_gzip_is_refused_by_name(tmp_path, name, among_others):
    write(tmp_path, {name: (CASES / name).read_bytes(), "good.txt": b"good text"})
    message = refusal(tmp_path if among_others else tmp_path / name)
    assert "config.data.path=" in message and f"{name} is damaged or not gzip" in message


def test_gzip_cut_anywhere_is_refused(tmp_path):
    whole = (CASES / "two_members.txt.gz").read_bytes()
    second_member = whole.index(b"\x1f\x8b", 2)
    for length in set(range(1, len(whole))) - {second_member}:  # cut there, it is a whole file of one member
        write(tmp_path, {"cut.txt.gz": whole[:length]})
        assert "cut.txt.gz is damaged or not gzip" in refusal(tmp_path), length


def test_tokenizer_round_trip():
    everything = bytes(range(256)) * 2
    assert decode(encode(everything)) == everything
    assert decode(encode("aé\u2028\r\n")) == "aé\u2028\r\n".encode()
    assert encode(everything).dtype == np.uint8
    assert decode([]) == b"" and decode(np.array([104, 105], np.int32)) == b"hi"


@pytest.mark.parametrize("tokens", [[1, 256], [-1, 5]])
def test_decode_refuses_what_is_no_byte(tokens):
    with pytest.raises(ValueError, match="is no byte"):
        decode(tokens)


# Lengths around one window, empty parts (T-02).


def test_shorter_than_a_window_is_refused():
    assert "no usable text (empty files: 1 skipped, first " in refusal(CASES / "empty.txt", seq_len=16)
    message = refusal(CASES / "len16.txt", seq_len=16)
    assert "config.data.path=" in message and "16 bytes" in message and "= 17" in message


@pytest.mark.parametrize("heldout_fraction", [0.0, 0.05, 0.5])
def test_exactly_one_window(heldout_fraction):
    corpus = load(CASES / "len17.txt", seq_len=16, heldout_fraction=heldout_fraction)
    text = (CASES / "len17.txt").read_bytes()
    assert num_windows(len(corpus.train), 16) == 1
    loader = make_loader(corpus.train, seq_len=16, batch_size=2, seed=3)
    for batch in take(loader, 3):
        for row in range(2):
            assert decode(batch["inputs_BS"][row]) == text[:16]
            assert decode(batch["targets_BS"][row]) == text[1:]
    loader.close()


def test_an_empty_heldout_part_is_said_at_once(tmp_path):
    write(tmp_path, {"a.txt": bytes(range(200))})
    corpus = load(tmp_path, seq_len=16, heldout_fraction=0.01)
    assert any("no held-out evaluation" in notice and "2 bytes" in notice for notice in corpus.notices)
    assert len(corpus.train) == 200 and heldout_batches(corpus.heldout, 16, 4, 3) == []
    assert load(tmp_path, seq_len=16).notices == ["no held-out evaluation: config.data.heldout_fraction=0"]


def test_a_split_that_leaves_nothing_to_train_on_is_refused(tmp_path):
    write(tmp_path, {"a.txt": b"x" * 30})
    message = refusal(tmp_path, seq_len=16, heldout_fraction=0.9)
    assert "config.data.heldout_fraction=0.9: leaves 3 of 30 bytes" in message


@pytest.mark.parametrize("num_tokens", [17, 24, 25, 26, 33, 50])
def test_every_start_is_reached_and_none_beyond(num_tokens):
    seq_len, epoch = 8, num_windows(num_tokens, 8)
    assert epoch == (num_tokens - 1) // 8
    loader = make_loader(position_tokens(num_tokens), seq_len, batch_size=epoch, seed=1)
    starts = set()
    for batch in take(loader, seq_len):
        in_epoch = batch["inputs_BS"][:, 0].tolist()
        assert len(set(in_epoch)) == epoch
        starts |= set(in_epoch)
        assert (batch["inputs_BS"] == batch["inputs_BS"][:, :1] + np.arange(seq_len)).all()
        assert (batch["targets_BS"] == batch["inputs_BS"] + 1).all()
        assert batch["mask_BS"].all()
    loader.close()
    assert starts == set(range(num_tokens - seq_len))


def test_too_few_tokens_for_a_loader():
    with pytest.raises(ValueError, match="16 tokens are fewer than one window of seq_len \\+ 1 = 17"):
        make_loader(position_tokens(16), 16, 1, seed=0)


# The loader: determinism, hosts, resume (T-03).


def test_batches_are_a_function_of_the_seed():
    tokens = position_tokens(161)
    first, again, other = (make_loader(tokens, 4, 8, seed) for seed in (0, 0, 1))
    assert digests(take(first, 12)) == digests(take(again, 12)) != digests(take(other, 12))
    batch = next(first)
    assert {name: (array.shape, array.dtype.name) for name, array in batch.items()} == {
        "inputs_BS": ((8, 4), "int32"),
        "targets_BS": ((8, 4), "int32"),
        "mask_BS": ((8, 4), "bool"),
    }
    for loader in (first, again, other):
        loader.close()


def test_the_order_of_windows_depends_on_the_seed():
    loaders = [make_loader(position_tokens(41), 1, batch_size=40, seed=seed) for seed in (0, 1)]  # only one offset
    first, other = [next(loader)["inputs_BS"][:, 0].tolist() for loader in loaders]
    assert first != other and sorted(first) == sorted(other) == list(range(40))
    for loader in loaders:
        loader.close()


def test_each_epoch_has_an_order_of_its_own():
    loader = make_loader(position_tokens(161), 4, batch_size=40, seed=0)
    orders = [tuple(batch["inputs_BS"][:, 0] // 4) for batch in take(loader, 4)]
    loader.close()
    assert len(set(orders)) == 4
    assert all(order != tuple(sorted(order)) for order in orders)


@pytest.mark.parametrize("num_hosts", [2, 4])
def test_hosts_share_the_rows_of_the_same_global_batches(num_hosts):
    tokens = position_tokens(161)
    whole = make_loader(tokens, 4, 8, seed=5)
    hosts = [make_loader(tokens, 4, 8, seed=5, host_index=h, num_hosts=num_hosts) for h in range(num_hosts)]
    for batch in take(whole, 25):
        parts = [next(host) for host in hosts]
        assert all(len(part["inputs_BS"]) == 8 // num_hosts for part in parts)
        for name in batch:
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), batch[name])
    for loader in [whole, *hosts]:
        loader.close()


def test_bad_loader_arguments_name_their_key():
    with pytest.raises(ConfigError, match="config.data.batch_size=6: must be a multiple of the number of hosts, 4"):
        make_loader(position_tokens(100), 4, 6, seed=0, num_hosts=4)
    with pytest.raises(ConfigError, match="config.data.seed=4294967296: must be < 2"):
        make_loader(position_tokens(100), 4, 6, seed=2**32)


RESUME = """
import hashlib, json, sys
import numpy as np
from fef.data import make_loader

for line in sys.stdin:
    job = json.loads(line)
    tokens, num_hosts = np.arange(161).astype(np.uint8), job["num_hosts"]
    loaders = [make_loader(tokens, 4, 4, 7, host, num_hosts) for host in range(num_hosts)]
    for loader in loaders:
        loader.set_state(job["state"])
    digests = []
    for _ in range(job["count"]):
        parts = [next(loader) for loader in loaders]
        batch = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        digests.append(hashlib.sha256(b"".join(batch[name].tobytes() for name in sorted(batch))).hexdigest())
    for loader in loaders:
        loader.close()
    print(json.dumps(digests))
"""


def test_a_fresh_process_continues_byte_for_byte():
    tokens, total = position_tokens(161), 25
    assert num_windows(len(tokens), 4) == 40  # an epoch is 10 batches of 4
    loader = make_loader(tokens, 4, 4, seed=7)
    expected = digests(take(loader, total))
    assert len(set(expected)) == total
    stops = [0, 1, 5, 9, 10, 11]
    jobs = []
    for stop in stops:
        loader.set_state({"next_index": 0})
        take(loader, stop)
        state = json.loads(json.dumps(loader.get_state()))
        assert state == {"next_index": stop}
        jobs += [{"state": state, "count": total - stop, "num_hosts": hosts} for hosts in (1, 2)]
    loader.close()
    done = subprocess.run(
        [sys.executable, "-c", RESUME],
        input="\n".join(map(json.dumps, jobs)),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=pathlib.Path(__file__).parent.parent,
    )
    assert done.returncode == 0, done.stderr
    for job, line in zip(jobs, done.stdout.splitlines(), strict=True):
        assert json.loads(line) == expected[job["state"]["next_index"] :], job


def test_close_ends_the_prefetch_thread():
    before = set(threading.enumerate())
    loader = make_loader(position_tokens(161), 4, 4, seed=0)
    next(loader)
    started = set(threading.enumerate()) - before
    assert started
    loader.close()
    for thread in started:
        thread.join(timeout=30)
        assert not thread.is_alive()


# The held-out part.


def distinct_documents(folder: pathlib.Path, count: int) -> pathlib.Path:
    return write(folder, {f"{i:03}.txt": f"<{i:03}>".encode() * 4 for i in range(count)})


def names_in(tokens: np.ndarray) -> set[bytes]:
    return set(decode(tokens)[1:-1].split(b"><"))


def test_split_is_by_document_and_by_seed(tmp_path):
    distinct_documents(tmp_path, 100)
    corpus, again, other = (load(tmp_path, heldout_fraction=0.1, seed=seed) for seed in (0, 0, 1))
    heldout, train = names_in(corpus.heldout), names_in(corpus.train)
    assert len(heldout) == 10 and len(train) == 90 and not heldout & train
    assert corpus.num_documents == 100 and len(corpus.train) + len(corpus.heldout) == corpus.num_bytes == 2000
    assert decode(corpus.heldout) == decode(again.heldout) and decode(corpus.train) == decode(again.train)
    assert names_in(other.heldout) != heldout and other.sha256 == corpus.sha256
    assert corpus.notices == []


def test_equal_documents_stay_on_one_side(tmp_path):
    distinct_documents(tmp_path / "a", 20)
    distinct_documents(tmp_path / "b", 20)
    for seed in range(5):
        corpus = load(tmp_path, heldout_fraction=0.3, seed=seed)
        assert not names_in(corpus.heldout) & names_in(corpus.train)
        assert len(corpus.heldout) == 12 * 20


def test_one_document_gives_its_tail(tmp_path):
    text = bytes(range(250))
    write(tmp_path, {"a.md": text})
    corpus = load(tmp_path, heldout_fraction=0.2)
    assert decode(corpus.train) == text[:200] and decode(corpus.heldout) == text[200:]
    assert corpus.notices == ["one document only: its last 50 bytes are held out"]


def test_a_share_far_from_the_wish_is_said(tmp_path):
    write(tmp_path, {"a.txt": b"a" * 100, "b.txt": b"b" * 100})
    corpus = load(tmp_path, heldout_fraction=0.05)
    assert len(corpus.heldout) == 100
    assert corpus.notices == ["the held-out documents are 50.0% of the bytes, asked for: 5.0%"]


def test_heldout_batches_are_padded_and_masked():
    batches = heldout_batches(position_tokens(30), seq_len=4, batch_size=3, num_batches=16)
    starts = [batch["inputs_BS"][batch["mask_BS"].all(axis=1), 0].tolist() for batch in batches]
    assert starts == [[0, 4, 8], [12, 16, 20], [24]]
    assert all(batch["inputs_BS"].shape == (3, 4) and batch["inputs_BS"].dtype == np.int32 for batch in batches)
    assert batches[2]["mask_BS"].sum() == 4
    assert (batches[1]["targets_BS"] == batches[1]["inputs_BS"] + 1).all()


def test_heldout_batches_spread_over_the_part_and_over_hosts():
    tokens = position_tokens(161)
    whole = heldout_batches(tokens, 4, batch_size=4, num_batches=2)
    assert [batch["inputs_BS"][:, 0].tolist() for batch in whole] == [[0, 20, 40, 60], [80, 100, 120, 140]]
    parts = [heldout_batches(tokens, 4, 4, 2, host_index=h, num_hosts=2) for h in range(2)]
    for number, batch in enumerate(whole):
        for name in batch:
            np.testing.assert_array_equal(np.concatenate([part[number][name] for part in parts]), batch[name])


# A user's files.


def test_a_folder_is_read_in_order_and_the_rest_is_counted(tmp_path):
    write(
        tmp_path,
        {
            "b.txt": b"B",
            "a/z.MD": b"Z\r\n",
            "a/y.py.gz": gzip.compress(b"Y"),
            "c.jsonl": b'{"text": "C1"}\n{"text": "C2"}',
            "d.bin": b"no",
            "e": b"no",
            "f.txt": b"",
            "g.md.gz": gzip.compress(b""),
            ".hidden/h.txt": b"no",
            ".i.txt": b"no",
        },
    )
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    documents, notices = fef.corpus.user_documents(str(tmp_path), "text")
    assert documents == [b"Y", b"Z\r\n", b"B", b"C1", b"C2"]
    assert notices == [
        f"not .txt .md .py .jsonl (also .gz) files: 4 skipped, first {tmp_path}/d.bin",
        f"empty files: 2 skipped, first {tmp_path}/f.txt",
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("missing.txt", "not an existing file or folder"),
        ("nothing", "no usable text (the folder is empty)"),
        ("unusable", "no usable text (not .txt .md .py .jsonl (also .gz) files: 2 skipped, first "),
        ("unusable/a.png", "no usable text (not .txt .md .py .jsonl (also .gz) files: 1 skipped, first "),
        ("pipe.txt", "not an existing file or folder"),
        ("empty.txt.gz", "no usable text (empty files: 1 skipped, first "),
        ("x" * 300, "cannot read"),
    ],
)
def test_unusable_paths_are_refused(tmp_path, name, text):
    write(tmp_path, {"unusable/a.png": b"a", "unusable/b.gz": b"b", "empty.txt.gz": gzip.compress(b"")})
    (tmp_path / "nothing").mkdir()
    os.mkfifo(tmp_path / "pipe.txt")
    message = refusal(tmp_path / name)
    assert message.startswith(f"config.data.path={str(tmp_path / name)!r}: ") and text in message


def test_an_unreadable_file_is_refused_by_name(tmp_path, monkeypatch):
    write(tmp_path, {"a.txt": b"good", "b.txt": b"locked"})
    read_bytes = pathlib.Path.read_bytes

    def locked(path):  # the tests may run as root, whom file modes do not stop
        if path.name == "b.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return read_bytes(path)

    monkeypatch.setattr(pathlib.Path, "read_bytes", locked)
    assert f"cannot read {tmp_path}/b.txt: Permission denied" in refusal(tmp_path)


def test_jsonl_lines_are_documents_and_bad_ones_are_counted(tmp_path):
    lines = [
        b'\xef\xbb\xbf{"text": "first"}\r',
        b'{"text": "a\\u2028b\xe2\x80\xa8c"}',
        b"",
        b"not json",
        b'{"other": "x"}',
        b'{"text": 5}',
        b'{"text": ""}',
        b'["text"]',
        b'{"text": "\\ud800"}',
        b'{"text": "\xff"}',
        b"[" * 100_000,
        b'{"text":\r"last"}',
        b"",
    ]
    write(tmp_path, {"a.jsonl": b"\n".join(lines)})
    documents, notices = fef.corpus.user_documents(str(tmp_path / "a.jsonl"), "text")
    assert documents == [b"first", "a\u2028b\u2028c".encode(), b"last"]
    assert notices == [f"lines without a text under config.data.text_key='text': 8 skipped, first {tmp_path}/a.jsonl:4"]


def test_jsonl_text_key(tmp_path):
    write(tmp_path, {"a.jsonl": b'{"text": "no", "body": "yes yes"}\n'})
    assert decode(load(tmp_path, text_key="body").train) == b"yes yes"
    message = refusal(tmp_path, text_key="boddy")
    assert f"lines without a text under config.data.text_key='boddy': 1 skipped, first {tmp_path}/a.jsonl:1" in message


# The embedded corpus.


def test_vendored_slice_is_fixed():
    corpus = load(fef.corpus.TOPICS, heldout_fraction=0.05)
    assert (corpus.num_documents, corpus.num_bytes) == (79, 466_117)
    assert corpus.sha256 == "37d06970fc926e60c16dff401e441b84752446a36b6b64516c229fdec77e992c"
    assert len(corpus.heldout) == 17_949
    assert b"Python Software Foundation" in fef.corpus.TOPICS.with_name("NOTICE.txt").read_bytes()


def test_embedded_corpus_is_sources_and_slice():
    corpus = load("", heldout_fraction=0.05, seq_len=128)
    whole = decode(corpus.train) + decode(corpus.heldout)
    assert len(whole) == corpus.num_bytes > 5_000_000
    assert corpus.num_documents > 400 and corpus.notices == []
    for text in (pathlib.Path(json.__file__).read_bytes(), pathlib.Path(os.__file__).read_bytes()):
        assert text in whole
    documents, _ = fef.corpus.embedded_documents()
    assert hashlib.sha256(b"".join(documents)).hexdigest() == corpus.sha256


def test_stdlib_documents_do_not_depend_on_where_it_is_installed(tmp_path):
    files = {
        "os.py": b"os",
        "json/__init__.py": b"json",
        "json/tool.py": b"\xff\r\n",
        "abc.py": b"abc",
        "test/test_os.py": b"no",
        "unittest/test/x.py": b"no",
        "lib2to3/tests/x.py": b"no",
        "encodings/utf_8.py": b"no",
        "pydoc_data/topics.py": b"no",
        "idlelib/run.py": b"no",
        "site-packages/numpy/__init__.py": b"no",
        "_sysconfigdata__linux.py": b"no",
        "config-3.11/python-config.py": b"no",
        "LICENSE.txt": b"no",
    }
    for root in (tmp_path / "usr" / "lib", tmp_path / "test" / ".pyenv"):
        write(root, files)
        assert fef.corpus.stdlib_documents(root) == [b"abc", b"json", b"\xff\r\n", b"os"]


def test_no_sources_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(fef.corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    documents, notices = fef.corpus.embedded_documents()
    assert len(documents) == 79
    assert notices == [f"no standard-library sources in {tmp_path}: the embedded corpus is the topics alone"]
