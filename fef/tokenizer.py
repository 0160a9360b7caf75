"""Text to token ids and back: a token is a byte, or what a Hugging Face `tokenizers` file says.

Both kinds have `vocab_size`, `sha256` ("" for bytes, which never change), `encode`, one array for each document, and
`decode`. Nothing is put between documents or around them: special tokens of the file are not added, and its settings
for truncation and padding are not used.
"""

import hashlib
import pathlib
from typing import Any

import numpy as np
from tqdm import tqdm

from fef import hosts
from fef.config import ConfigError

VOCAB_SIZE = 256
_CHUNK_BYTES = 2**20  # documents of about that many bytes are encoded in one call, on all cores


def encode(text: bytes | str) -> np.ndarray:
    """Returns one token per byte, uint8 [N] (a str as UTF-8). Read-only, shares the bytes' memory."""
    return np.frombuffer(text.encode() if isinstance(text, str) else text, np.uint8)


def decode(tokens: Any) -> bytes:
    """Returns the bytes of integer tokens [N]; the inverse of `encode`. ValueError when one is not in 0..255."""
    tokens = np.asarray(tokens)
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < VOCAB_SIZE:
        raise ValueError(f"token {tokens.min()} or {tokens.max()} is no byte; mask the logits beyond {VOCAB_SIZE - 1}")
    return tokens.astype(np.uint8).tobytes()


class ByteTokenizer:
    """A token is a byte."""

    vocab_size = VOCAB_SIZE
    sha256 = ""

    def encode(self, documents: list[bytes]) -> tuple[list[np.ndarray], list[str]]:
        return [encode(document) for document in documents], []

    def decode(self, tokens: Any) -> str:
        return decode(tokens).decode("utf-8", errors="replace")


class FileTokenizer:
    """The tokenizer of a JSON file, as `tokenizers.Tokenizer.save` writes it.

    Attributes:
      vocab_size: the largest token id, and one.
      sha256: hex digest of the file.

    Raises:
      ConfigError: the file is missing, cannot be read or is no such file.
    """

    def __init__(self, path: str):
        import tokenizers  # a shared library that runs on bytes have no use for

        try:
            data = pathlib.Path(path).expanduser().read_bytes()
        except OSError as error:
            remedy = f"cannot be read ({error.strerror}); give a tokenizers JSON file, or '' for bytes"
            raise ConfigError("data.tokenizer", path, remedy) from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises no narrower type
            cause = (str(error).splitlines() or [type(error).__name__])[0]
            remedy = f"is no tokenizers JSON file ({cause}); give one that Tokenizer.save has written, or '' for bytes"
            raise ConfigError("data.tokenizer", path, remedy) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self.sha256 = hashlib.sha256(data).hexdigest()
        self._dtype = np.uint16 if self.vocab_size <= 2**16 else np.int32

    def encode(self, documents: list[bytes]) -> tuple[list[np.ndarray], list[str]]:
        """Token ids of each document, uint16 or int32 [N], and notices; shows progress if it takes long.

        A tokenizer reads text: bytes that are no UTF-8 become the replacement character, and a notice says so.
        """
        texts = [document.decode("utf-8", errors="replace") for document in documents]
        replaced = sum(text.encode() != document for text, document in zip(texts, documents, strict=True))
        ids: list[np.ndarray] = []
        with tqdm(
            total=sum(map(len, documents)), unit="B", unit_scale=True, desc="encoding the text", delay=2,
            dynamic_ncols=True, disable=not hosts.is_main(),
        ) as bar:  # fmt: skip
            for first, end in _chunks(documents):
                encoded = self._tokenizer.encode_batch_fast(texts[first:end], add_special_tokens=False)
                ids += [np.array(one.ids, self._dtype) for one in encoded]
                bar.update(sum(map(len, documents[first:end])))
        notice = f"documents that are no UTF-8, with bytes replaced for the tokenizer: {replaced}"
        return ids, [notice] if replaced else []

    def decode(self, tokens: Any) -> str:
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)


Tokenizer = ByteTokenizer | FileTokenizer


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of `config.data.tokenizer`; an empty path is bytes. Raises ConfigError, see `FileTokenizer`."""
    return FileTokenizer(path) if path else ByteTokenizer()


def _chunks(documents: list[bytes]) -> list[tuple[int, int]]:
    """Ranges of consecutive documents of at least `_CHUNK_BYTES`, but for the last."""
    ranges, first, size = [], 0, 0
    for end, document in enumerate(documents, start=1):
        size += len(document)
        if size >= _CHUNK_BYTES or end == len(documents):
            ranges.append((first, end))
            first, size = end, 0
    return ranges
