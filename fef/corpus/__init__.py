"""Where the training text comes from: the embedded corpus, or a user's files. A document is a `bytes` object.

Bytes stay bytes: files are read in binary mode, so a byte-order mark, CR, NUL and invalid UTF-8 are kept as they are.

The embedded corpus needs no download. It is the standard library's sources of the Python that runs (about 9 MB, other
bytes on another Python version) followed by a vendored slice of the Python documentation (0.47 MB, NOTICE.txt). For
numbers that must not depend on the Python version, train on the slice alone: `--config.data.path` set to
fef/corpus/topics.jsonl.gz in a checkout, or to the value of `fef.corpus.TOPICS`.
"""

import gzip
import json
import os
import pathlib
import sysconfig
import zlib
from collections.abc import Iterator

from fef.config import ConfigError

TOPICS = pathlib.Path(__file__).with_name("topics.jsonl.gz")
SUFFIXES = (".txt", ".md", ".py", ".jsonl")

# Tests and tables of constants read unlike other code; the rest is not the standard library or is made by the build,
# with paths of the machine in it.
_EXCLUDED_FOLDERS = frozenset({
    "test", "tests", "idle_test", "encodings", "pydoc_data", "idlelib",
    "site-packages", "dist-packages", "lib-dynload", "__pycache__",
})  # fmt: skip
_EXCLUDED_PREFIXES = ("_sysconfigdata", "config-", "sitecustomize")


class Skips:
    """Counts what was left out, by reason, and remembers where it happened first."""

    def __init__(self) -> None:
        self._count: dict[str, int] = {}
        self._first: dict[str, str] = {}

    def add(self, reason: str, where: str) -> None:
        self._count[reason] = self._count.get(reason, 0) + 1
        self._first.setdefault(reason, where)

    def notices(self) -> list[str]:
        return [f"{reason}: {n} skipped, first {self._first[reason]}" for reason, n in self._count.items()]


def embedded_documents() -> tuple[list[bytes], list[str]]:
    """Returns the documents of the embedded corpus, in an order that every installation shares, and notices."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    sources = stdlib_documents(root)
    notices = [] if sources else [f"no standard-library sources in {root}: the embedded corpus is the topics alone"]
    return sources + _json_texts(TOPICS, gzip.decompress(TOPICS.read_bytes()), "text", Skips()), notices


def stdlib_documents(root: pathlib.Path) -> list[bytes]:
    """Returns the sources under `root`, sorted by their path below it: no tests, encodings, pydoc_data or idlelib."""
    return [path.read_bytes() for path in _walk(root, _EXCLUDED_FOLDERS) if _is_stdlib_source(path.relative_to(root))]


def _is_stdlib_source(path: pathlib.Path) -> bool:
    return path.suffix == ".py" and not path.parts[0].startswith(_EXCLUDED_PREFIXES)


def user_documents(path: str, text_key: str) -> tuple[list[bytes], list[str]]:
    """Reads a user's file, or every usable file of a folder and its sub-folders, sorted by path.

    Args:
      path: a .txt, .md or .py file (one document), a .jsonl file (a document per line), a .gz of one of these, or a
        folder. In a folder, hidden files and folders are ignored; empty files, other types and linked folders are
        skipped and counted.
      text_key: the key under which a .jsonl line holds its text. Lines that hold none are skipped and counted.

    Returns:
      The documents, none of them empty, and one notice per kind of skip.

    Raises:
      ConfigError: the path is missing or cannot be read, holds no usable text, or a .gz file in it is damaged.
    """
    root = pathlib.Path(path).expanduser()
    skips = Skips()
    documents: list[bytes] = []
    try:
        if not root.is_file() and not root.is_dir():
            raise ConfigError("data.path", path, "not an existing file or folder; '' is the embedded corpus")
        for file in [root] if root.is_file() else _walk(root):
            documents += _read_documents(file, text_key, skips)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError("data.path", path, f"{file} is damaged or not gzip ({error}); replace or remove it") from None
    except OSError as error:
        raise ConfigError("data.path", path, f"cannot read {error.filename}: {error.strerror}") from None
    if not documents:
        skipped = "; ".join(skips.notices()) or "the folder is empty"
        raise ConfigError("data.path", path, f"no usable text ({skipped}); give {_names()} files or a folder of them")
    return documents, skips.notices()


def _names() -> str:
    return f"{' '.join(SUFFIXES)} (also .gz)"


def _walk(root: pathlib.Path, excluded: frozenset[str] = frozenset()) -> Iterator[pathlib.Path]:
    """Yields what lies under `root`, sorted by path; linked folders are yielded like files and not entered."""
    found: list[pathlib.Path] = []

    def fail(error: OSError) -> None:
        raise error

    for folder, subfolders, files in os.walk(root, onerror=fail):
        links = [name for name in subfolders if os.path.islink(os.path.join(folder, name))]
        subfolders[:] = [name for name in subfolders if name not in excluded and not name.startswith(".")]
        found += [pathlib.Path(folder, name) for name in files + links if not name.startswith(".")]
    return iter(sorted(found, key=lambda path: path.relative_to(root).as_posix()))


def _read_documents(file: pathlib.Path, text_key: str, skips: Skips) -> list[bytes]:
    name = file.name.lower()
    suffix = os.path.splitext(name.removesuffix(".gz"))[1]
    if suffix not in SUFFIXES or not file.is_file():  # a pipe or a device would block for ever
        skips.add(f"not {_names()} files", str(file))
        return []
    data = file.read_bytes()
    if name.endswith(".gz"):
        data = gzip.decompress(data)
    if not data:
        skips.add("empty files", str(file))
        return []
    return _json_texts(file, data, text_key, skips) if suffix == ".jsonl" else [data]


def _json_texts(file: pathlib.Path, data: bytes, text_key: str, skips: Skips) -> list[bytes]:
    texts = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[text_key].encode()
        # Not JSON, no object, no such key, no string, a lone surrogate, nested beyond the parser's depth.
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            text = b""
        if text:
            texts.append(text)
        else:
            skips.add(f"lines without a text under config.data.text_key={text_key!r}", f"{file}:{number}")
    return texts
