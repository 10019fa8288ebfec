"""Vocabularies: bytes, or byte pairs (BPE) learnt from the text.

BPE is that of Sennrich, Haddow and Birch 2016, over bytes as in GPT-2, so that any text can be
encoded and decoded without loss. Lines are encoded separately: no token crosses the end of a line.
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
from redivider.files import atomic_write

LINES = 10_000  # encoded at a time: the encoder's record of a token is far larger than its number

_log = logging.getLogger(__name__)


class Vocabulary(ABC):
    """Encoding of text as tokens, which are numbers below `size`."""

    size: int

    @abstractmethod
    def encode(self, content: bytes, *, where: Path) -> Tensor:
        """Encode text to a one-dimensional tensor of tokens; `where` names its origin in errors."""

    @abstractmethod
    def decode(self, tokens: Iterable[int]) -> str:
        """Decode tokens to text; invalid UTF-8 becomes replacement characters."""


class Bytes(Vocabulary):
    """Vocabulary of single bytes."""

    size = 256

    def encode(self, content: bytes, *, where: Path) -> Tensor:
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class BytePairs(Vocabulary):
    """Vocabulary of bytes and of frequent pairs of tokens (BPE)."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.size = tokenizer.get_vocab_size()

    def encode(self, content: bytes, *, where: Path) -> Tensor:
        tokens = array("i")
        lines = _text(content, where).splitlines(keepends=True)
        for start in range(0, len(lines), LINES):
            for line in self._tokenizer.encode_batch_fast(lines[start : start + LINES]):
                tokens.extend(line.ids)
        return torch.frombuffer(tokens, dtype=torch.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text


def byte_pairs(size: int, content: bytes, *, where: Path) -> BytePairs:
    """Learn the byte pairs of a text, or load them from the file next to it.

    Args:
        size: Number of tokens in the vocabulary, above 256; small texts yield fewer.
        content: Text to learn from.
        where: Path of the text; the vocabulary is saved in the same folder.
    """
    tokenizers = require("tokenizers", "a vocabulary of byte pairs")
    digest = hashlib.sha256(content).hexdigest()[:12]  # another text, another vocabulary
    path = where.with_name(f"bpe-{size}-{digest}.json")
    if path.exists():
        try:
            return BytePairs(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the package raises plain exceptions
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
        with atomic_write(path) as partial:
            partial.write_text(tokenizer.to_str(), encoding="utf-8")
    except OSError as error:  # this run can continue; the next one has to learn it again
        _log.warning("the vocabulary was not kept at %s (%s)", path, reason(error))
    return BytePairs(tokenizer)


def _text(content: bytes, where: Path) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f'{where} is not UTF-8 text (byte {error.start:,}); convert it, or use tokens="bytes"'
        ) from None
