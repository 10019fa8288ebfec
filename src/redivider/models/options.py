"""What a model is made for, and how errors say that it cannot be made so."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from operator import index

import torch
from torch import Tensor


class OptionError(ValueError):
    """Options that no model can have."""


@dataclass(frozen=True, kw_only=True)
class Images:
    """Square images in, a score per class out."""

    num_classes: int = 1000
    image_size: int = 224
    in_channels: int = 3

    def __post_init__(self) -> None:
        verify_positive(self, "num_classes", "image_size", "in_channels")

    def example(self, batch: int = 8) -> Tensor:
        """A batch of noise."""
        return torch.randn(batch, self.in_channels, self.image_size, self.image_size)


@dataclass(frozen=True, kw_only=True)
class Drops(ABC):
    """What a transformer drops in training.

    Drop-path rises over the layers, from 0 in the first to `drop_path` in the last.
    """

    dropout: float = 0.0
    attention_dropout: float = 0.0
    drop_path: float = 0.0

    def __post_init__(self) -> None:
        for name in ("dropout", "attention_dropout", "drop_path"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value < 1:
                raise OptionError(f"{name} must be a number in [0, 1), got {value!r}")

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Layers of the whole network."""

    def drops_of(self, layer: int) -> dict[str, float]:
        """Dropout and drop-path of what one layer adds to its stream."""
        rise = layer / max(1, self.num_layers - 1)
        return {"dropout": self.dropout, "drop_path": self.drop_path * rise}


@dataclass(frozen=True, kw_only=True)
class Layers(Drops):
    """The size of a transformer whose layers are alike, and its dropout."""

    width: int
    depth: int
    heads: int
    hidden: int | None = None
    """Width of the MLP's middle; 4 times the width unless set."""

    def __post_init__(self) -> None:
        verify_positive(self, "width", "depth", "heads")
        if self.hidden is not None:
            verify_positive(self, "hidden")
        verify_heads(self.width, self.heads)
        super().__post_init__()

    @property
    def num_layers(self) -> int:
        return self.depth

    @property
    def middle(self) -> int:
        """Width of the MLP's middle."""
        return 4 * self.width if self.hidden is None else self.hidden


def verify_heads(width: int, heads: int) -> None:
    """Refuse heads that cannot share the width."""
    if width % heads:
        raise OptionError(
            f"width {width} cannot be shared out among {heads} heads; "
            f"make it a multiple of {heads}, or change heads"
        )


def verify_depths(options: object, of: str) -> None:
    """Refuse `depths` that are not 1 or more blocks for each of several parts."""
    depths = options.depths  # type: ignore[attr-defined]
    is_list = isinstance(depths, tuple | list) and len(depths) > 0
    if not is_list or not all(map(is_count, depths)):
        raise OptionError(f"depths must be a tuple, 1 or more blocks for each {of}, got {depths!r}")
    object.__setattr__(options, "depths", tuple(map(index, depths)))


def verify_positive(options: object, *names: str) -> None:
    """Refuse sizes below 1; those of other libraries become Python's, which do not overflow."""
    for name in names:
        value = getattr(options, name)
        if not is_count(value):
            raise OptionError(f"{name} must be a whole number, 1 or more, got {value!r}")
        object.__setattr__(options, name, index(value))


def verify_flag(options: object, *names: str) -> None:
    """Refuse what is neither True nor False."""
    for name in names:
        if not isinstance(getattr(options, name), bool):
            raise OptionError(f"{name} must be True or False, got {getattr(options, name)!r}")


def is_count(value: object) -> bool:
    """Whether it is a whole number, 1 or more, of any integer type."""
    try:
        return not isinstance(value, bool) and index(value) >= 1  # type: ignore[arg-type]
    except TypeError:
        return False
