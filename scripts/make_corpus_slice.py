"""Writes fef/corpus/topics.jsonl.gz, the fixed part of the embedded corpus: `python3.11 scripts/make_corpus_slice.py`.

The text is `pydoc_data.topics` of CPython 3.11.7 (English), one topic a line, sorted by name. Another version has
other texts, and published curves were made with this one, so the script refuses to run elsewhere.
"""

import gzip
import json
import pathlib
import platform
from pydoc_data.topics import topics

VERSION = "3.11.7"
TARGET = pathlib.Path(__file__).resolve().parent.parent / "fef" / "corpus" / "topics.jsonl.gz"


def main() -> None:
    if platform.python_version() != VERSION:
        raise SystemExit(f"this is Python {platform.python_version()}; the slice is made from {VERSION}")
    lines = [json.dumps({"topic": name, "text": text}, ensure_ascii=False) for name, text in sorted(topics.items())]
    data = "".join(line + "\n" for line in lines).encode()
    TARGET.write_bytes(gzip.compress(data, 9, mtime=0))
    print(f"{TARGET}: {len(lines)} topics, {sum(len(text.encode()) for text in topics.values())} bytes of text")


if __name__ == "__main__":
    main()
