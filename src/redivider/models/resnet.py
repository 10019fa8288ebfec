"""ResNet: residual networks of convolutions.

He et al. 2015 in torchvision's form, with the stride in the 3x3 convolution of a bottleneck. By
default convolutions have biases, as in PETRA's code, so that its parameter counts can be compared.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import relu

from redivider.models.options import Images, verify_depths, verify_flag, verify_positive
from redivider.models.parts import Units, conv_norm, named

SIZES: dict[str, dict[str, Any]] = {
    "18": {"depths": (2, 2, 2, 2)},
    "34": {"depths": (3, 4, 6, 3)},
    "50": {"depths": (3, 4, 6, 3), "bottleneck": True},
    "101": {"depths": (3, 4, 23, 3), "bottleneck": True},
}


@dataclass(frozen=True, kw_only=True)
class Options(Images):
    """Options of ResNet and RevNet; images of up to 64 pixels get a stem without stride."""

    depths: tuple[int, ...]
    """Number of blocks of each group; the first block of a later group halves the image."""
    bottleneck: bool = False
    width: int = 64
    conv_bias: bool = True
    """Whether convolutions have biases, which the batch norm after them subtracts again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        verify_positive(self, "width")
        verify_flag(self, "bottleneck")
        verify_flag(self, "conv_bias")
        verify_depths(self, "group")

    @property
    def is_small(self) -> bool:
        """True if the stem keeps the size of the image."""
        return self.image_size <= 64

    @property
    def width_out(self) -> int:
        """Number of output channels of the last group."""
        *_, (_, last) = self.blocks()
        return last.out

    def blocks(self) -> Iterator[tuple[str, "Block"]]:
        """Yield name and shape of every block, in order."""
        channels = self.width
        for group, depth in enumerate(self.depths):
            middle = self.width * 2**group
            out = 4 * middle if self.bottleneck else middle
            for index in range(depth):
                stride = 2 if group and not index else 1
                block = Block(channels, middle, out, stride, self.conv_bias)
                yield f"block{group + 1}_{index + 1}", block
                channels = out


@dataclass(frozen=True)
class Block:
    """Shape of a residual block: its channels and its stride."""

    channels: int
    middle: int
    out: int
    stride: int
    bias: bool

    @property
    def keeps_shape(self) -> bool:
        """True if input and output have the same shape."""
        return self.stride == 1 and self.channels == self.out

    def function(self, *, bottleneck: bool, relu: bool) -> nn.Sequential:
        """Build the residual function: two 3x3 convolutions, or 1x1, 3x3 and 1x1."""
        make = partial(conv_norm, bias=self.bias)
        if not bottleneck:
            return nn.Sequential(
                make(self.channels, self.out, 3, stride=self.stride),
                make(self.out, self.out, 3, relu=relu),
            )
        return nn.Sequential(
            make(self.channels, self.middle, 1),
            make(self.middle, self.middle, 3, stride=self.stride),
            make(self.middle, self.out, 1, relu=relu),
        )

    def projection(self) -> nn.Sequential:
        """Build the projection of the input to the shape of the output."""
        stride, bias = self.stride, self.bias
        return conv_norm(self.channels, self.out, 1, stride=stride, relu=False, bias=bias)


def stem(options: Options, width: int) -> nn.Sequential:
    """Build the first convolution: 3x3, or 7x7 with stride 2 for large images."""
    kernel, stride = (3, 1) if options.is_small else (7, 2)
    return conv_norm(options.in_channels, width, kernel, stride=stride, bias=options.conv_bias)


class ResidualBlock(nn.Module):
    """x -> ReLU(x + f(x)), with a projection of x where the shape changes."""

    def __init__(self, block: Block, *, bottleneck: bool) -> None:
        super().__init__()
        self.f = block.function(bottleneck=bottleneck, relu=False)
        self.shortcut = nn.Identity() if block.keeps_shape else block.projection()

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.f(x) + self.shortcut(x))


def resnet(options: Options) -> Units:
    """Build the units of a ResNet: stem, one per block, head."""
    first = stem(options, options.width)
    if not options.is_small:
        first.append(nn.MaxPool2d(3, stride=2, padding=1))
    blocks = {
        name: ResidualBlock(block, bottleneck=options.bottleneck)
        for name, block in options.blocks()
    }
    head = named(
        pool=nn.AdaptiveAvgPool2d(1),
        flat=nn.Flatten(),
        classes=nn.Linear(options.width_out, options.num_classes),
    )
    return {"stem": first, **blocks, "head": head}
