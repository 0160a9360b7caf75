"""A tokenizer file in place of bytes: the same windows and split, other tokens; and what is refused."""

import functools
import hashlib
import json

import numpy as np
import pytest
import tokenizers
from small import echo, fast_compilation, small_config  # noqa: F401
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from fef import sharding
from fef.config import ConfigError, DataConfig
from fef.corpus import TOPICS, user_documents
from fef.data import heldout_batches, load_corpus, make_loader
from fef.sample import sample
from fef.step import Stepper
from fef.tokenizer import ByteTokenizer, load_tokenizer

VOCAB = 400


@functools.cache
def documents():
    return user_documents(str(TOPICS), "text")[0]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A byte-pair tokenizer trained on the embedded documentation, with settings that must not change the tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([document.decode() for document in documents()], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(7)
    tokenizer.enable_padding(length=5)
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(file))
    return str(file)


def load(tokenizer, **fields):
    return load_corpus(DataConfig(**(dict(path=str(TOPICS), tokenizer=tokenizer, seq_len=16) | fields)))


def test_a_whole_document_is_encoded_and_decoded(path):
    tokenizer = load_tokenizer(path)
    assert tokenizer.vocab_size == VOCAB
    assert tokenizer.sha256 == hashlib.sha256(open(path, "rb").read()).hexdigest()
    encoded, notices = tokenizer.encode(documents())
    assert not notices and len(encoded) == len(documents())
    for tokens, document in zip(encoded, documents(), strict=True):
        assert tokens.dtype == np.uint16 and tokenizer.decode(tokens) == document.decode()
        assert 5 < len(tokens) < len(document) / 1.3 and 0 not in tokens  # merged, not cut, nothing added


def test_documents_of_many_chunks_stay_in_order(path, monkeypatch):
    encoded, _ = load_tokenizer(path).encode(documents())
    monkeypatch.setattr("fef.tokenizer._CHUNK_BYTES", 1)
    again, _ = load_tokenizer(path).encode(documents())
    for ours, other in zip(encoded, again, strict=True):
        np.testing.assert_array_equal(ours, other)
    assert load_tokenizer(path).encode([]) == ([], [])


def test_the_split_is_that_of_bytes(path):
    of_bytes, of_tokens = load(""), load(path)
    decode = of_tokens.tokenizer.decode
    for part in ("train", "heldout"):
        assert decode(getattr(of_tokens, part)).encode() == getattr(of_bytes, part).tobytes()
    for name in ("num_documents", "num_bytes", "sha256"):
        assert getattr(of_tokens, name) == getattr(of_bytes, name)
    assert of_bytes.tokenizer.sha256 == "" and len(of_tokens.train) < len(of_bytes.train) / 1.3


def test_windows_and_masks(path):
    corpus = load(path)
    loader = make_loader(corpus.train, 16, 4, seed=0)
    batch = next(loader)
    loader.close()
    assert batch["inputs_BS"].dtype == np.int32 and batch["mask_BS"].all()
    assert batch["inputs_BS"].max() > 255  # not squeezed into bytes
    np.testing.assert_array_equal(batch["inputs_BS"][:, 1:], batch["targets_BS"][:, :-1])
    starts = [
        np.flatnonzero((np.lib.stride_tricks.sliding_window_view(corpus.train, 16) == row).all(1))
        for row in batch["inputs_BS"]
    ]
    assert all(len(start) for start in starts)
    [first, *_] = heldout_batches(corpus.heldout, 16, 1000, 1)
    np.testing.assert_array_equal(first["inputs_BS"][0], corpus.heldout[:16])
    assert first["inputs_BS"].max() > 255
    assert first["mask_BS"].sum() == 16 * min(1000, (len(corpus.heldout) - 1) // 16)


def test_lengths_are_counted_in_tokens(path, tmp_path):
    (tmp_path / "one.txt").write_text("the the the the the the the the")
    tokens = len(load(path, path=str(tmp_path), seq_len=1, heldout_fraction=0.0).train)
    assert tokens < 31
    with pytest.raises(ConfigError, match=rf"{tokens} tokens of text; one window needs .* = {tokens + 1};"):
        load(path, path=str(tmp_path), seq_len=tokens)
    corpus = load(path, path=str(tmp_path), seq_len=1, heldout_fraction=0.4)
    held_out = round(0.4 * tokens)
    assert len(corpus.heldout) == held_out and len(corpus.train) == tokens - held_out
    assert f"one document only: its last {held_out} tokens are held out" in corpus.notices


def test_bytes_that_are_no_text_are_replaced_and_counted(path, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "b.txt").write_text("caf\u00e9 au lait")
    corpus = load(path, path=str(tmp_path), seq_len=4, heldout_fraction=0.0)
    assert corpus.tokenizer.decode(corpus.train) == "caf\ufffd au lait" + "caf\u00e9 au lait"
    assert "documents that are no UTF-8, with bytes replaced for the tokenizer: 1" in corpus.notices


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read (No such file or directory); give a tokenizers JSON file"),
        (b"", "is no tokenizers JSON file ("),
        (b'{"version": "1.0"}', "is no tokenizers JSON file ("),
        (b"\xff\x00", "is no tokenizers JSON file ("),
    ],
)
def test_a_missing_or_broken_file_is_refused_in_one_line(content, words, tmp_path):
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(str(file))
    assert f"config.data.tokenizer={str(file)!r}: {words}" in str(caught.value) and "\n" not in str(caught.value)


def test_a_cut_file_is_refused(path, tmp_path):
    whole = open(path, "rb").read()
    (tmp_path / "cut.json").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="cut.json': is no tokenizers JSON file"):
        load(str(tmp_path / "cut.json"))


def test_a_model_with_too_few_ids_is_refused_before_the_text_is_read(path):
    config = DataConfig(path="/nowhere", tokenizer=path)
    with pytest.raises(ConfigError) as caught:
        load_corpus(config, VOCAB - 1)
    message = str(caught.value)
    assert message.startswith(f"config.model.vocab_size={VOCAB - 1}: ") and f"has {VOCAB} token ids; set" in message
    assert load_corpus(DataConfig(path=str(TOPICS), tokenizer=path), VOCAB).train.max() < VOCAB


def test_ids_with_gaps_count_up_to_the_largest(tmp_path):
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 70_000}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "gaps.json"))
    tokenizer = load_tokenizer(str(tmp_path / "gaps.json"))
    [tokens], _ = tokenizer.encode([b"a b b"])
    assert tokenizer.vocab_size == 70_001 and tokens.tolist() == [0, 70_000, 70_000]


def test_sampling_draws_tokens_and_gives_text(path):
    stepper = Stepper(small_config({"moe.every": 0, "mesh.devices": 1, "model.vocab_size": 512}), sharding.make_mesh(1))
    state, tokenizer = stepper.init(), load_tokenizer(path)
    vocabulary = json.load(open(path))["model"]["vocab"]
    [prompt], _ = tokenizer.encode([b" the"])
    assert prompt.tolist() == [vocabulary["\u0120the"]] and prompt > 255  # a space is written so in the file
    assert sample(stepper, echo(state), 3, b" the", tokenizer) == " the the the"
    text = sample(stepper, state, 40, tokenizer=tokenizer)  # ids beyond the tokenizer's have no text; bytes would be 40
    assert text == sample(stepper, state, 40, tokenizer=tokenizer) and len(text) > 40
    assert sample(stepper, echo(state), 2, b"", tokenizer) == "<s><s>"  # no token in the prompt


def test_bytes_are_what_they_were():
    tokenizer = load_tokenizer("")
    assert isinstance(tokenizer, ByteTokenizer) and tokenizer.vocab_size == 256
    [tokens], notices = tokenizer.encode([b"a\xff\x00"])
    assert tokens.tolist() == [97, 255, 0] and not notices
    assert tokenizer.decode(tokens) == "a\ufffd\x00"
