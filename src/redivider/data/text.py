"""Text for language models: one sequence of tokens, and batches of windows of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redivider.data.batches import Batch, Batches, Span
from redivider.data.errors import DataError, reason
from redivider.data.files import VARIABLE, search_folders
from redivider.data.masking import IGNORED, Masking
from redivider.data.order import draw, permutation
from redivider.data.vocabulary import Bytes, Vocabulary, byte_pairs


def read_text(
    folder: str | Path | None = None, *, train: bool, tokens: str | int = "bytes"
) -> "Text":
    """Read text from `train.txt` and `valid.txt`, or the first 90 % and the rest of `input.txt`.

    Args:
        folder: Folder of the files, or of a folder `text` that has them.
        train: True for the training text, False for the validation text.
        tokens: "bytes", or the size of a vocabulary of byte pairs, learnt from the training text
            and saved next to it.
    """
    is_size = isinstance(tokens, int) and tokens > Bytes.size
    if tokens != "bytes" and not is_size:
        raise DataError(f'tokens must be "bytes" or a vocabulary size above 256, got {tokens!r}')
    path, training, validation = _read(folder)
    vocabulary: Vocabulary = Bytes()
    if isinstance(tokens, int):
        vocabulary = byte_pairs(tokens, training, where=path)
    content = training if train else validation
    return Text("text", vocabulary.encode(content, where=path), vocabulary)


@dataclass(frozen=True, eq=False)
class Text:
    """Text as tokens.

    text = load("text", train=True, folder="shakespeare")
    batches = text.batches(8, context=256, train=True, seed=0)
    """

    name: str
    tokens: Tensor
    """Tokens in one dimension, of any integer dtype."""
    vocabulary: Vocabulary

    def __len__(self) -> int:
        return len(self.tokens)

    def batches(
        self,
        batch_size: int,
        *,
        train: bool,
        context: int = 256,
        masked: float | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> "TextBatches":
        """Return batches of windows: tokens, and the next tokens as targets; int64 (N, context).

        With `masked=0.15` the targets are the masked tokens instead, and -100 for all others. The
        mask token is `vocabulary.size`, so the model needs a vocabulary of one more.

        Args:
            batch_size: Number of windows in a batch.
            train: Take windows in random order; every epoch starts the first one at another token,
                so that the text is not always cut at the same positions. Otherwise every token is
                in one window, in order; where the last window is not full, its targets are -100,
                which cross-entropy ignores. Masked models need the context of both sides, so their
                last window starts earlier instead, and its repeated tokens are no targets.
            context: Number of tokens in a window.
            masked: Fraction of the tokens to mask; other ones in every epoch, the same in every
                evaluation.
            seed: Seed of the order, the starts and, in training, the masking.
            device: Device of the text and of the batches.
        """
        masking = None
        if masked is not None:  # with a fixed seed, so that all runs evaluate on the same targets
            masking = Masking(masked, self.vocabulary.size, seed if train else 0)
        return TextBatches(
            self, context, masking, batch_size, train=train, seed=seed, device=device
        )


class TextBatches(Batches):
    """Batches of text, created by `Text.batches`."""

    def __init__(
        self,
        text: Text,
        context: int,
        masking: Masking | None,
        batch_size: int,
        *,
        train: bool,
        **options: Any,
    ) -> None:
        extra = 1 if masking is None else 0  # the target of the last token
        num, needed = len(text), 2 * context if train else 1 + extra
        if context < 1 or num < needed:
            raise DataError(
                f"{text.name} has {num} tokens, too few for a context of {context}; "
                "choose a smaller one, 1 or more, or provide more text"
            )
        # In training the first window starts at any of the first `context` tokens.
        num_windows = num // context - 1 if train else -(-(num - extra) // context)
        super().__init__(text.name, num_windows, batch_size, train=train, **options)
        self.context = context if masking is None else min(context, num)
        self._masking = masking
        self._offsets = torch.arange(self.context + extra, device=self.device)
        self._tokens = text.tokens.to(self.device)
        self._epoch: tuple[int, Tensor] | None = None

    def _take(self, span: Span) -> Batch:
        starts, num = self._starts(span)[:, None], len(self._tokens)
        if self._masking is not None:
            positions = starts.clamp(max=num - self.context) + self._offsets
            tokens = self._tokens[positions].long()
            return self._masking.hide(tokens, positions, positions >= starts, epoch=span.epoch)
        positions = starts + self._offsets
        tokens = self._tokens[positions.clamp(max=num - 1)].long()
        # Not in place: x of a single window is already contiguous, a view of the same tokens.
        x, y = tokens[:, :-1], tokens[:, 1:].masked_fill(positions[:, 1:] >= num, IGNORED)
        return x.contiguous(), y

    def _starts(self, span: Span) -> Tensor:
        if not self.train:
            return torch.arange(span.start, span.stop, device=self.device) * self.context
        if self._epoch is None or self._epoch[0] != span.epoch:
            key = {"seed": self.seed, "epoch": span.epoch}
            order = permutation(self.num_samples, device=self.device, **key)
            zero = torch.zeros(1, dtype=torch.int64, device=self.device)
            offset = draw(zero, purpose="beginning", **key) % self.context
            self._epoch = span.epoch, order * self.context + offset
        return self._epoch[1][span.start : span.stop]


def _read(folder: str | Path | None) -> tuple[Path, bytes, bytes]:
    """Return the path of the training text, the training text, and the validation text."""
    folders = search_folders(folder, "text")
    for parent in folders:
        if (parent / "train.txt").exists():
            train = parent / "train.txt"
            return train, _read_bytes(train), _read_bytes(parent / "valid.txt")
        if (parent / "input.txt").exists():
            content = _read_bytes(parent / "input.txt")
            cut = len(content) * 9 // 10
            while cut < len(content) and content[cut] & 0xC0 == 0x80:
                cut += 1  # not inside a character of UTF-8
            return parent / "input.txt", content[:cut], content[cut:]
    raise DataError(
        f"there is no text in {folders[0]}; put train.txt and valid.txt, or input.txt, there, "
        f"or set {VARIABLE} to a folder that has them"
    )


def _read_bytes(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path} ({reason(error)}); put it there") from None
    if not content:
        raise DataError(f"{path} is empty; put text into it")
    return content
