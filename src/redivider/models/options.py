"""Options that the families share, and their validation."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from operator import index

import torch
from torch import Tensor


class OptionError(ValueError):
    """Invalid name or options of a model."""


@dataclass(frozen=True, kw_only=True)
class Images:
    """Options of models that take square images and return a score per class."""

    num_classes: int = 1000
    image_size: int = 224
    in_channels: int = 3

    def __post_init__(self) -> None:
        verify_positive(self, "num_classes", "image_size", "in_channels")

    def example(self, batch: int = 8) -> Tensor:
        """Return a batch of noise."""
        return torch.randn(batch, self.in_channels, self.image_size, self.image_size)


@dataclass(frozen=True, kw_only=True)
class Drops(ABC):
    """Dropout rates of a transformer.

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
        """Number of layers in the whole network."""

    def drops_of(self, layer: int) -> dict[str, float]:
        """Return the dropout and drop-path rates of the residual functions of a layer."""
        rise = layer / max(1, self.num_layers - 1)
        return {"dropout": self.dropout, "drop_path": self.drop_path * rise}


@dataclass(frozen=True, kw_only=True)
class Layers(Drops):
    """Options of a transformer whose layers all have the same size."""

    width: int
    depth: int
    heads: int
    hidden: int | None = None
    """Hidden width of the MLP; 4 times `width` by default."""

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
        """Hidden width of the MLP."""
        return 4 * self.width if self.hidden is None else self.hidden


def verify_heads(width: int, heads: int) -> None:
    """Raise if the number of heads does not divide the width."""
    if width % heads:
        raise OptionError(
            f"width {width} cannot be divided among {heads} heads; "
            f"make it a multiple of {heads}, or change heads"
        )


def verify_depths(options: object, of: str) -> None:
    """Raise unless `depths` has 1 or more blocks for every group or stage; make it a tuple."""
    depths = options.depths  # type: ignore[attr-defined]
    is_list = isinstance(depths, tuple | list) and len(depths) > 0
    if not is_list or not all(map(is_count, depths)):
        raise OptionError(f"depths must be a tuple, 1 or more blocks for each {of}, got {depths!r}")
    object.__setattr__(options, "depths", tuple(map(index, depths)))


def verify_positive(options: object, *names: str) -> None:
    """Raise unless sizes are whole numbers, 1 or more; convert them to `int`.

    Integers of other libraries, such as numpy.int32, may overflow.
    """
    for name in names:
        value = getattr(options, name)
        if not is_count(value):
            raise OptionError(f"{name} must be a whole number, 1 or more, got {value!r}")
        object.__setattr__(options, name, index(value))


def verify_flag(options: object, *names: str) -> None:
    """Raise unless flags are True or False."""
    for name in names:
        if not isinstance(getattr(options, name), bool):
            raise OptionError(f"{name} must be True or False, got {getattr(options, name)!r}")


def is_count(value: object) -> bool:
    """Return True for a whole number, 1 or more, of any integer type."""
    try:
        return not isinstance(value, bool) and index(value) >= 1  # type: ignore[arg-type]
    except TypeError:
        return False
