"""From documents to batches: tokens, the held-out split, windows, and the grain pipeline.

The documents of a part (training, held-out) are concatenated without a separator into one stream of N tokens; a token
is a byte, or what `config.data.tokenizer` makes of a document (see `fef.tokenizer`). A window is seq_len inputs plus
one more token, so that the targets are the inputs shifted by one. In each epoch (N - 1) // seq_len windows tile the
stream from an offset that changes with the epoch; windows may span documents and every place counts in the loss, so
`mask_BS` is False only in rows that pad a held-out batch.
"""

import dataclasses
import functools
import hashlib

import grain
import numpy as np

from fef.config import ConfigError, DataConfig
from fef.corpus import embedded_documents, user_documents
from fef.tokenizer import Tokenizer, load_tokenizer

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A corpus, split.

    Attributes:
      train, heldout: [N] tokens, uint8 if they are bytes; `heldout` is empty when there is no held-out text.
      num_documents, num_bytes: size of the whole corpus.
      sha256: hex digest of the whole corpus before the split. Record it and that of the tokenizer, and compare them on
        resume and between hosts.
      tokenizer: what made the tokens.
      notices: what the user should be told before step 1, one line each.
    """

    train: np.ndarray
    heldout: np.ndarray
    num_documents: int
    num_bytes: int
    sha256: str
    tokenizer: Tokenizer
    notices: list[str]


def load_corpus(config: DataConfig, vocab_size: int | None = None) -> Corpus:
    """Reads the embedded corpus (`path` empty) or the user's files, and splits off the held-out part.

    Args:
      config: where the text is and how it is cut.
      vocab_size: V of the model, which must have room for all tokens; None does not ask.

    Raises:
      ConfigError: no usable text (see `fef.corpus.user_documents`), less than one window to train on, no usable
        tokenizer, or one with more token ids than the model has.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        remedy = f"config.data.tokenizer={config.tokenizer!r} has {tokenizer.vocab_size} token ids"
        raise ConfigError("model.vocab_size", vocab_size, f"{remedy}; set config.model.vocab_size to that or more")
    if config.path:
        documents, notices = user_documents(config.path, config.text_key)
    else:
        documents, notices = embedded_documents()
    encoded, encoding_notices = tokenizer.encode(documents)
    num_tokens, window_tokens = sum(map(len, encoded)), config.seq_len + 1
    if num_tokens < window_tokens:
        remedy = f"{num_tokens} {_unit(config)} of text; one window needs config.data.seq_len + 1 = {window_tokens}"
        raise ConfigError("data.path", config.path, f"{remedy}; give more text or a smaller seq_len")
    train, heldout, split_notices = _split(documents, encoded, config)
    return Corpus(
        train=train,
        heldout=heldout,
        num_documents=len(documents),
        num_bytes=sum(map(len, documents)),
        sha256=hashlib.sha256(b"".join(documents)).hexdigest(),
        tokenizer=tokenizer,
        notices=notices + encoding_notices + split_notices,
    )


def _unit(config: DataConfig) -> str:
    return "tokens" if config.tokenizer else "bytes"


def _split(
    documents: list[bytes], encoded: list[np.ndarray], config: DataConfig
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Returns the training tokens, the held-out tokens and notices.

    A document's side is drawn from the seed and its content, so equal documents never end up on both sides.
    """
    fraction, window_tokens, unit = config.heldout_fraction, config.seq_len + 1, _unit(config)
    stream = np.concatenate(encoded)
    nothing = stream[:0]
    if fraction == 0:
        return stream, nothing, ["no held-out evaluation: config.data.heldout_fraction=0"]
    keys = [hashlib.sha256(b"%d:" % config.seed + document).digest() for document in documents]
    distinct = sorted(set(keys))
    if len(distinct) == 1:
        cut = len(stream) - round(len(stream) * fraction)
        train, heldout = stream[:cut], stream[cut:]
        notice = f"one document only: its last {len(heldout)} {unit} are held out"
    else:
        num_heldout = min(max(1, round(len(distinct) * fraction)), len(distinct) - 1)
        bound = distinct[num_heldout]
        train = np.concatenate([tokens for tokens, key in zip(encoded, keys, strict=True) if key >= bound])
        heldout = np.concatenate([tokens for tokens, key in zip(encoded, keys, strict=True) if key < bound])
        share = len(heldout) / len(stream)
        is_near = fraction / 3 <= share <= fraction * 3
        notice = "" if is_near else f"the held-out documents are {share:.1%} of the {unit}, asked for: {fraction:.1%}"
    if len(heldout) < window_tokens:
        needs = f"{len(heldout)} {unit}, one window needs {window_tokens}"
        return stream, nothing, [f"no held-out evaluation: the held-out part would be {needs}; all text is trained on"]
    if len(train) < window_tokens:
        remedy = f"leaves {len(train)} of {len(stream)} {unit} for training, one window needs {window_tokens}; lower it"
        raise ConfigError("data.heldout_fraction", fraction, remedy)
    return train, heldout, [notice] if notice else []


def num_windows(num_tokens: int, seq_len: int) -> int:
    """Windows in an epoch: as many as tile the stream, each but the last sharing only its last token with the next."""
    return max(0, (num_tokens - 1) // seq_len)


def make_loader(
    tokens: np.ndarray, seq_len: int, batch_size: int, seed: int, host_index: int = 0, num_hosts: int = 1
) -> grain.DatasetIterator:
    """Returns an endless iterator over this host's rows of the shuffled training batches.

    Global batch b and the order of its rows are a function of (tokens, seq_len, batch_size, seed, b) alone; host h
    yields rows [h * B, (h + 1) * B) of it, B = batch_size / num_hosts. Each epoch visits each of its windows once, in
    a new order, and over seq_len epochs every start 0..N-seq_len-1 comes up.

    `get_state()` is {"next_index": b}, the number of batches yielded; `set_state` continues there in another process
    and on another number of hosts. A thread prepares batches ahead; `close()` ends it.

    Args:
      tokens: integers [N].
      batch_size: rows of a global batch; a multiple of num_hosts.
      seed: 0 <= seed < 2**32.
      host_index, num_hosts: `jax.process_index()`, `jax.process_count()`.

    Yields:
      {"inputs_BS": int32, "targets_BS": int32, "mask_BS": bool}, each [B, seq_len], in host memory.

    Raises:
      ConfigError: the seed is too large, or num_hosts does not divide batch_size.
      ValueError: fewer tokens than one window.
    """
    if seed >= 2**32:
        raise ConfigError("data.seed", seed, "must be < 2**32")
    epoch_windows = num_windows(len(tokens), seq_len)
    if not epoch_windows:
        raise ValueError(f"{len(tokens)} tokens are fewer than one window of seq_len + 1 = {seq_len + 1}")
    rows = _rows_per_host(batch_size, num_hosts)
    last_start = len(tokens) - seq_len - 1

    def cut(index: int, window: int) -> np.ndarray:
        offset = _offset(index // epoch_windows, seq_len, seed)
        start = min(offset + window * seq_len, last_start)  # the last window is moved back to fit
        return tokens[start : start + seq_len + 1]

    blocks = grain.MapDataset.range(epoch_windows).shuffle(seed).repeat().map_with_index(cut).batch(rows).map(_shift)
    # Block b * num_hosts + h holds host h's rows of global batch b.
    mine = blocks[host_index::num_hosts]
    return iter(mine.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))


@functools.lru_cache(maxsize=8)  # the shuffle of a short range takes 0.1 ms, too much to repeat for every window
def _offset(epoch: int, seq_len: int, seed: int) -> int:
    """Where the first window of an epoch starts; runs over all of 0..seq_len-1 in seq_len epochs."""
    return grain.experimental.index_shuffle(epoch % seq_len, max_index=seq_len - 1, seed=seed, rounds=4)


def heldout_batches(
    tokens: np.ndarray, seq_len: int, batch_size: int, num_batches: int, host_index: int = 0, num_hosts: int = 1
) -> list[Batch]:
    """Returns this host's rows of at most `num_batches` held-out batches, always the same ones.

    The windows tile the stream from its start; when there are more than fit, evenly spaced ones are taken. The last
    batch is filled up to its full shape with rows of mask False. Shapes and dtypes as in `make_loader`; an empty list
    when `tokens` is shorter than one window.
    """
    rows = _rows_per_host(batch_size, num_hosts)
    available = num_windows(len(tokens), seq_len)
    wanted = min(available, num_batches * batch_size)
    starts = np.arange(wanted) * available // max(wanted, 1) * seq_len
    batches = []
    for first in range(0, wanted, batch_size):
        windows = np.zeros((batch_size, seq_len + 1), tokens.dtype)
        chosen = starts[first : first + batch_size]
        windows[: len(chosen)] = tokens[chosen[:, None] + np.arange(seq_len + 1)]
        batch = _shift(windows)
        batch["mask_BS"][len(chosen) :] = False
        batches.append({name: array[host_index * rows : (host_index + 1) * rows] for name, array in batch.items()})
    return batches


def _rows_per_host(batch_size: int, num_hosts: int) -> int:
    if batch_size % num_hosts:
        raise ConfigError("data.batch_size", batch_size, f"must be a multiple of the number of hosts, {num_hosts}")
    return batch_size // num_hosts


def _shift(windows: np.ndarray) -> Batch:
    tokens = windows.astype(np.int32)
    inputs, targets = np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])
    return {"inputs_BS": inputs, "targets_BS": targets, "mask_BS": np.ones(inputs.shape, bool)}
