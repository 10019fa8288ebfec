"""Text for language models: one row of tokens, and windows of it as batches."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from redivider.data.batches import Batch, Batches, Span
from redivider.data.errors import DataError, reason
from redivider.data.files import VARIABLE, places
from redivider.data.masking import IGNORED, Masking
from redivider.data.order import draw, permutation
from redivider.data.vocabulary import Bytes, Vocabulary, byte_pairs


def read_text(
    folder: str | Path | None = None, *, train: bool, tokens: str | int = "bytes"
) -> "Text":
    """Text from `train.txt` and `valid.txt`, or the first 90 % and the rest of `input.txt`.

    Args:
        folder: Where the files are, there or in `text/` there.
        train: The training text, or that of the validation.
        tokens: "bytes", or the size of a vocabulary of byte pairs, learnt from the training text
            and kept beside it.
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
    """A text as tokens.

    text = load("text", train=True, folder="shakespeare")
    batches = text.batches(8, context=256, train=True, seed=0)
    """

    name: str
    tokens: Tensor
    """One-dimensional, of any integer dtype."""
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
        """Batches of windows: tokens and, as targets, each one's next; both int64 (N, context).

        Or hidden tokens as targets, and -100 for all others: `masked=0.15`. The token of a hidden
        one is `vocabulary.size`, so a model needs a vocabulary of one more.

        Args:
            batch_size: Windows in a batch.
            train: Windows in random order; each epoch begins the first one elsewhere, so that text
                is not always cut at the same places. Otherwise every token is in one window, in
                order; where the last window is not full, its targets are -100, which
                cross-entropy leaves out. Hidden tokens are looked for from both sides, so there
                the last window begins earlier instead, and asks for nothing a second time.
            context: Tokens in a window.
            masked: The part of its tokens that is hidden; others in every epoch, the same in every
                evaluation.
            seed: Of order, beginnings and, in training, of what is hidden.
            device: Where the text is moved to, and batches are made.
        """
        hiding = None
        if masked is not None:  # all runs are asked the same in an evaluation
            hiding = Masking(masked, self.vocabulary.size, seed if train else 0)
        return TextBatches(
            self, batch_size, context=context, hiding=hiding, train=train, seed=seed, device=device
        )


class TextBatches(Batches):
    """Batches of text; made by `Text.batches`."""

    def __init__(
        self,
        text: Text,
        batch_size: int,
        *,
        context: int,
        hiding: Masking | None,
        train: bool,
        seed: int,
        device: torch.device | str,
    ) -> None:
        extra = 1 if hiding is None else 0  # the last token's next
        num, needed = len(text), 2 * context if train else 1 + extra
        if context < 1 or num < needed:
            raise DataError(
                f"{text.name} has {num} tokens, too few for a context of {context}; "
                "take a smaller one, 1 or more, or more text"
            )
        # In training the first window begins at any of the first `context` tokens.
        num_windows = num // context - 1 if train else -(-(num - extra) // context)
        super().__init__(text.name, num_windows, batch_size, train=train, seed=seed, device=device)
        self.context = context if hiding is None else min(context, num)
        self._hiding = hiding
        self._offsets = torch.arange(self.context + extra, device=self.device)
        self._tokens = text.tokens.to(self.device)
        self._epoch: tuple[int, Tensor] | None = None

    def _take(self, span: Span) -> Batch:
        starts, num = self._starts(span)[:, None], len(self._tokens)
        if self._hiding is not None:
            places = starts.clamp(max=num - self.context) + self._offsets
            tokens = self._tokens[places].long()
            return self._hiding.hide(tokens, places, places >= starts, epoch=span.epoch)
        places = starts + self._offsets
        tokens = self._tokens[places.clamp(max=num - 1)].long()
        # Not in place: of a single window, both are views of the same tokens.
        x, y = tokens[:, :-1], tokens[:, 1:].masked_fill(places[:, 1:] >= num, IGNORED)
        return x.contiguous(), y

    def _starts(self, span: Span) -> Tensor:
        if not self.train:
            return torch.arange(span.start, span.stop, device=self.device) * self.context
        if self._epoch is None or self._epoch[0] != span.epoch:
            where = {"seed": self.seed, "epoch": span.epoch}
            order = permutation(self.num_samples, device=self.device, **where)
            zero = torch.zeros(1, dtype=torch.int64, device=self.device)
            offset = draw(zero, purpose="beginning", **where) % self.context
            self._epoch = span.epoch, order * self.context + offset
        return self._epoch[1][span.start : span.stop]


def _read(folder: str | Path | None) -> tuple[Path, bytes, bytes]:
    """Where the training text is from, itself, and that of the validation."""
    homes = places(folder, "text")
    for home in homes:
        if (home / "train.txt").exists():
            train = home / "train.txt"
            return train, _content(train), _content(home / "valid.txt")
        if (home / "input.txt").exists():
            content = _content(home / "input.txt")
            cut = len(content) * 9 // 10
            while cut < len(content) and content[cut] & 0xC0 == 0x80:
                cut += 1  # not inside of a character of UTF-8
            return home / "input.txt", content[:cut], content[cut:]
    raise DataError(
        f"there is no text in {homes[0]}; put train.txt and valid.txt, or input.txt, there, "
        f"or set {VARIABLE} to a folder that has them"
    )


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path} ({reason(error)}); put it there") from None
    if not content:
        raise DataError(f"{path} is empty; put text into it")
    return content
