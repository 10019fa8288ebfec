"""ViT and Rev-ViT: images as sequences of patches.

ViT is that of Dosovitskiy et al. 2021 in timm's form, with pre-norm and a class token. Rev-ViT is
that of Mangalam et al. 2022. The stem feeds both streams, F (attention) and G (MLP) have no skip
connection inside, and the head reads the means of both streams, concatenated. A layer is two units,
attention and MLP.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from redivider.coupling import Coupling
from redivider.junction import Duplicate
from redivider.models.options import Images, Layers, OptionError, verify_positive
from redivider.models.parts import (
    ClassToken,
    First,
    Linear,
    Mean,
    Norm,
    Positions,
    Residual,
    Units,
    named,
    transformer_layers,
)
from redivider.models.patches import Patches

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"width": 192, "depth": 12, "heads": 3},
    "small": {"width": 384, "depth": 12, "heads": 6},
    "base": {"width": 768, "depth": 12, "heads": 12},
    "large": {"width": 1024, "depth": 24, "heads": 16},
    "huge": {"width": 1280, "depth": 32, "heads": 16, "patch_size": 14},
    "giant": {"width": 1408, "depth": 40, "heads": 16, "patch_size": 14, "hidden": 6144},
}


@dataclass(frozen=True, kw_only=True)
class Options(Images, Layers):
    """Options of ViT and Rev-ViT."""

    patch_size: int = 16

    def __post_init__(self) -> None:
        Images.__post_init__(self)
        Layers.__post_init__(self)
        verify_positive(self, "patch_size")
        if self.image_size % self.patch_size:
            raise OptionError(
                f"image_size {self.image_size} is not divisible by patch_size {self.patch_size}: "
                "patches must cover the image"
            )

    @property
    def num_patches(self) -> int:
        """Number of patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    def functions(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the residual functions in order, with the names of their units."""
        return transformer_layers(self, Norm, mlp_dropout=self.dropout)


def vit(options: Options) -> Units:
    """Build the units of a ViT: stem, two per layer, head."""
    stem = named(
        patches=Patches(options),
        token=ClassToken(options.width),
        positions=Positions(options.num_patches + 1, options.width),
        dropout=nn.Dropout(options.dropout),
    )
    layers = {name: Residual(f) for name, f in options.functions()}
    head = named(
        norm=Norm(options.width),
        pool=First(),
        classes=Linear(options.width, options.num_classes, std=0.02),
    )
    return {"stem": stem, **layers, "head": head}


def rev_vit(options: Options) -> Units:
    """Build the units of a Rev-ViT: stem, two per layer, head."""
    stem = named(
        patches=Patches(options),
        positions=Positions(options.num_patches, options.width),
        dropout=nn.Dropout(options.dropout),
        streams=Duplicate(),
    )
    layers = {name: Coupling(f) for name, f in options.functions()}
    head = named(
        pool=Mean(1),
        norm=Norm(2 * options.width),
        classes=Linear(2 * options.width, options.num_classes, std=0.02),
    )
    return {"stem": stem, **layers, "head": head}
