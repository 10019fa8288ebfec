"""Text: every token in its place, vocabularies that give the text back."""

import logging
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from redivider.data import DataError, Text, load
from redivider.data import vocabulary as module
from redivider.data.vocabulary import Bytes

POEM = "Die Rose ist ohn' Warum;\r\nsie blühet, weil sie blühet …\n\n\tshe sells sea shells\n" * 40


def make_text(num: int) -> Text:
    return Text("made", torch.arange(num), Bytes())


def load_text(folder, *, train: bool = True, **options) -> Any:
    return load("text", train=train, folder=folder, **options)


def equal(one, other) -> bool:
    return all(map(torch.equal, one, other))


@given(st.integers(2, 200), st.integers(1, 20), st.integers(1, 7))
def test_in_evaluation_every_token_is_a_target_once_and_in_order(num, context, batch_size):
    batches = make_text(num).batches(batch_size, context=context, train=False)
    steps = list(batches)
    assert len(steps) == len(batches)
    x, y = map(torch.cat, zip(*steps, strict=True))
    assert x.shape == y.shape and x.shape[1] == context and x.dtype == y.dtype == torch.int64
    real = y != -100
    assert y[real].tolist() == list(range(1, num))
    assert torch.equal(x[real], y[real] - 1)
    assert (x >= 0).all()
    assert int((~real).sum()) < context


@given(st.integers(40, 300), st.integers(1, 20), st.integers(0, 5), st.integers(0, 30))
def test_in_training_windows_do_not_overlap(num, context, seed, epoch):
    batches = make_text(num).batches(1, context=context, train=True, seed=seed)
    assert len(batches) == num // context - 1
    steps = [batches[epoch * len(batches) + i] for i in range(len(batches))]
    x, y = map(torch.cat, zip(*steps, strict=True))
    assert torch.equal(y, x + 1) and int(y.max()) < num
    assert len(x.unique()) == x.numel()
    starts = x[:, 0].sort().values
    assert (starts.diff() == context).all() and int(starts[0]) < context


def test_epochs_begin_at_other_places_in_other_orders():
    batches = make_text(400).batches(9, context=40, train=True)
    firsts = {int(batches[epoch][0][:, 0].min()) for epoch in range(30)}
    orders = {tuple((batches[epoch][0][:, 0] // 40).tolist()) for epoch in range(30)}
    assert len(firsts) > 10 and len(orders) == 30


def test_any_step_may_be_the_first():
    true = list(islice(make_text(400).batches(4, context=16, train=True, seed=2).since(0), 30))
    fresh = make_text(400).batches(4, context=16, train=True, seed=2)
    for step in (29, 3, 17, 0):
        assert equal(fresh[step], true[step])
    assert all(map(equal, islice(fresh.since(11), 19), true[11:]))


def test_train_and_valid(tmp_path):
    (tmp_path / "train.txt").write_bytes(POEM.encode())
    (tmp_path / "valid.txt").write_bytes(b"\xff\x00 any bytes")
    train, valid = (load_text(tmp_path, train=is_train) for is_train in (True, False))
    assert bytes(train.tokens.tolist()) == POEM.encode()
    assert bytes(valid.tokens.tolist()) == b"\xff\x00 any bytes"
    assert train.vocabulary.size == 256 and train.vocabulary.decode(train.tokens.tolist()) == POEM


@pytest.mark.parametrize("below", ["", "text"])
def test_one_input_is_cut_90_to_10_between_characters(below, tmp_path):
    (tmp_path / below).mkdir(exist_ok=True)
    for text in ("a" * 100, "ü" * 50 + "b", "…" * 33, "x" + "😀" * 9):
        (tmp_path / below / "input.txt").write_bytes(text.encode())
        train, valid = (
            bytes(load_text(tmp_path, train=is_train).tokens.tolist()) for is_train in (True, False)
        )
        assert (train + valid).decode() == text
        assert train.decode() and valid.decode()  # whole characters
        assert 0 <= len(train) - len(text.encode()) * 9 // 10 <= 3


def test_byte_pairs_give_the_text_back(tmp_path):
    (tmp_path / "train.txt").write_bytes(POEM.encode())
    (tmp_path / "valid.txt").write_bytes("other wörds: 日本語 \r\n\r  end".encode())
    for train in (True, False):
        text = load_text(tmp_path, train=train, tokens=290)
        content = (tmp_path / ("train.txt" if train else "valid.txt")).read_bytes()
        assert text.vocabulary.decode(text.tokens.tolist()).encode() == content
        assert text.vocabulary.size == 290 and int(text.tokens.max()) < 290
        assert len(text) < len(content)
    text = load_text(tmp_path, tokens=290)
    x, y = text.batches(2, train=True, context=8)[0]
    assert x.dtype == y.dtype == torch.int64


def test_a_vocabulary_is_learnt_once_for_each_text_and_size(tmp_path, monkeypatch):
    def names():
        return {path.name for path in tmp_path.iterdir() if path.name != "input.txt"}

    (tmp_path / "input.txt").write_bytes(POEM.encode())
    first = load_text(tmp_path, tokens=280)
    (kept,) = names()
    assert kept.startswith("bpe-280-") and kept.endswith(".json")
    written = (tmp_path / kept).read_bytes()
    with monkeypatch.context() as m:
        m.setattr(module, "atomic_write", None)  # would be called to write
        again = load_text(tmp_path, tokens=280)
    assert torch.equal(first.tokens, again.tokens)
    (tmp_path / kept).unlink()
    load_text(tmp_path, train=False, tokens=280)
    assert (tmp_path / kept).read_bytes() == written  # the same, learnt anew
    load_text(tmp_path, tokens=290)
    assert len(names()) == 2
    (tmp_path / "input.txt").write_bytes(POEM.replace("Rose", "Tulpe").encode())
    load_text(tmp_path, tokens=280)
    assert len(names()) == 3


def test_a_damaged_vocabulary(tmp_path):
    (tmp_path / "input.txt").write_bytes(POEM.encode())
    load_text(tmp_path, tokens=280)
    (kept,) = tmp_path.glob("bpe-*")
    whole = kept.read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"\xff", b"{}"):
        kept.write_bytes(content)
        refused(tmp_path, r"bpe-280-.*\.json is damaged .*delete it", tokens=280)
    kept.unlink()
    load_text(tmp_path, tokens=280)


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch, caplog):
    (tmp_path / "input.txt").write_bytes(POEM.encode())
    true = load_text(tmp_path, tokens=280)
    (kept,) = tmp_path.glob("bpe-*")
    kept.unlink()

    def read_only(path, *args, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.write_text", read_only)
    with caplog.at_level(logging.WARNING):
        text = load_text(tmp_path, tokens=280)
    assert torch.equal(text.tokens, true.tokens)
    assert "the vocabulary was not kept at" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["input.txt"]


def test_small_texts_have_small_vocabularies(tmp_path):
    (tmp_path / "input.txt").write_bytes(b"abc abc abc abc abc abc")
    text = load_text(tmp_path, tokens=10_000)
    assert 256 < text.vocabulary.size < 270


def test_bad_input(tmp_path):
    refused(tmp_path, "there is no text in .*put train.txt and valid.txt, or input.txt")
    (tmp_path / "train.txt").write_bytes(b"")
    refused(tmp_path, "train.txt is empty")
    (tmp_path / "train.txt").write_bytes(b"some \xff text")
    refused(tmp_path, r"cannot read .*valid\.txt .*put it there")
    (tmp_path / "valid.txt").write_bytes(b"more")
    refused(tmp_path, r'not UTF-8 text \(byte 5\).*tokens="bytes"', tokens=300)
    for tokens in ("words", 256, 0, True, 3.5, None):
        refused(tmp_path, 'tokens must be "bytes" or a vocabulary size above 256', tokens=tokens)
    text = load_text(tmp_path)
    for context in (6, 0, -1):
        with pytest.raises(DataError, match=f"too few for a context of {context}"):
            text.batches(1, context=context, train=True)
    with pytest.raises(DataError, match="too few for a batch of 2"):
        text.batches(2, context=5, train=True)


def refused(folder, message: str, **options) -> None:
    with pytest.raises(DataError) as caught:
        load("text", train=True, folder=folder, **options)
    assert "\n" not in str(caught.value)
    caught.match(message)
