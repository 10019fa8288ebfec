"""Hierarchical transformers: stages that halve the side of the map and double the width."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from redivider.junction import Fuse
from redivider.models.options import (
    Drops,
    Images,
    OptionError,
    verify_depths,
    verify_heads,
    verify_positive,
)
from redivider.models.parts import Linear, named

STD = 0.02  # of the initial weights


@dataclass(frozen=True)
class Stage:
    """Consecutive layers that work on maps of the same size."""

    number: int
    """Index of the stage, from 0."""
    width: int
    heads: int
    side: int
    """Side of the square map, in tokens."""
    layers: range
    """Indices of its layers in the whole network."""


@dataclass(frozen=True, kw_only=True)
class Hierarchy(Images, Drops):
    """Options of hierarchical transformers; `width` and `heads` are those of the first stage."""

    width: int
    depths: tuple[int, ...]
    """Number of layers of each stage."""
    heads: int
    patch_size: int = 4

    def __post_init__(self) -> None:
        Images.__post_init__(self)
        Drops.__post_init__(self)
        verify_positive(self, "width", "heads", "patch_size")
        verify_depths(self, "stage")
        verify_heads(self.width, self.heads)
        smallest = self.patch_size << (len(self.depths) - 1)
        if self.image_size % smallest:
            raise OptionError(
                f"image_size {self.image_size} is not divisible by {smallest}: patches of "
                f"{self.patch_size}, halved {len(self.depths) - 1} times; change image_size, "
                "patch_size or depths"
            )

    @property
    def num_layers(self) -> int:
        return sum(self.depths)

    @property
    def width_out(self) -> int:
        """Width of the last stage."""
        return self.width << (len(self.depths) - 1)

    def stages(self) -> Iterator[Stage]:
        """Yield the stages in order."""
        first = 0
        for number, depth in enumerate(self.depths):
            factor = 2**number
            yield Stage(
                number,
                self.width * factor,
                self.heads * factor,
                self.image_size // self.patch_size // factor,
                range(first, first + depth),
            )
            first += depth


def fusion(width: int) -> nn.Sequential:
    """Build an MLP that fuses two streams into one, as in the published code of Rev-Swin."""
    return named(
        both=Fuse("concat"),
        mix=Linear(2 * width, 2 * width, std=STD),
        activation=nn.GELU(),
        shrink=Linear(2 * width, width, std=STD),
    )
