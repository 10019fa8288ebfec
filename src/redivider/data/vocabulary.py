"""Vocabularies: text to numbers and back. Bytes, or byte pairs (BPE) learnt from the text.

Sennrich, Haddow and Birch 2016; over bytes as in GPT-2, so that any text can be written and comes
back as it was. Lines are taken one by one: no token reaches over a line's end.
"""

import hashlib
import logging
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redivider.data.errors import DataError, reason, require
from redivider.data.files import beside

LINES = 10_000  # encoded at a time: what the encoder says of a token takes far more than its number

_log = logging.getLogger(__name__)


class Vocabulary(ABC):
    """A way to write text as numbers below `size`."""

    size: int

    @abstractmethod
    def encode(self, content: bytes, *, where: Path) -> Tensor:
        """Text to numbers, one-dimensional; `where` it is from is for errors."""

    @abstractmethod
    def decode(self, tokens: Iterable[int]) -> str:
        """Numbers to text; broken characters become question marks."""


class Bytes(Vocabulary):
    """A token for each byte."""

    size = 256

    def encode(self, content: bytes, *, where: Path) -> Tensor:
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class BytePairs(Vocabulary):
    """A token for each byte, and for pairs of tokens that are often side by side."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.size = tokenizer.get_vocab_size()

    def encode(self, content: bytes, *, where: Path) -> Tensor:
        found = array("i")
        lines = _text(content, where).splitlines(keepends=True)
        for start in range(0, len(lines), LINES):
            for line in self._tokenizer.encode_batch_fast(lines[start : start + LINES]):
                found.extend(line.ids)
        return torch.frombuffer(found, dtype=torch.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text


def byte_pairs(size: int, content: bytes, *, where: Path) -> BytePairs:
    """The byte pairs of a text, from the file beside it if they were learnt before.

    Args:
        size: Tokens in the vocabulary, more than the 256 bytes; small texts have fewer.
        content: The text to learn from.
        where: Where the text is from; the vocabulary is kept in the same folder.
    """
    tokenizers = require("tokenizers", "a vocabulary of byte pairs")
    digest = hashlib.sha256(content).hexdigest()[:12]  # another text, another vocabulary
    path = where.with_name(f"bpe-{size}-{digest}.json")
    if path.exists():
        try:
            return BytePairs(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the package has no class of its own
            raise DataError(
                f"{path} is damaged ({reason(error)}); delete it and it is made again"
            ) from None
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_text(content, where).splitlines(keepends=True), trainer)
    try:
        with beside(path) as new:
            new.write_text(tokenizer.to_str(), encoding="utf-8")
    except OSError as error:  # the next run has to learn it again, and this one can go on
        _log.warning("the vocabulary was not kept at %s (%s)", path, reason(error))
    return BytePairs(tokenizer)


def _text(content: bytes, where: Path) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f'{where} is not UTF-8 text (byte {error.start:,}); convert it, or use tokens="bytes"'
        ) from None
