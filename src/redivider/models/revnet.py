"""RevNet: ResNet in two streams, one coupling per residual block, as in PETRA.

Rivaud et al. 2024 (PETRA), after Gomez et al. 2017. All widths are doubled and split into two
streams, each as wide as a ResNet. A block acts on one of them, so it has the parameters of a ResNet
block. Only the stem, the blocks that change the shape, and the head differ.

Paper and code differ where a basic block halves the image. With c = BN(conv(a)), the new second
stream is c in the paper and ReLU(c) in the published code, whose in-place ReLU changes the aliased
tensor. Here it is ReLU(c), because the published accuracies were measured with that.
"""

from torch import Tensor, nn

from redivider.coupling import Coupling, Streams
from redivider.junction import Split
from redivider.models.parts import Mean, Units, conv_norm, named
from redivider.models.resnet import Block, Options, stem


class BasicTransition(nn.Module):
    """(a, b) -> (R(c) + Q(b), c) with c = ReLU(BN(conv(a))): both streams share the shrunk a."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        out, stride, bias = block.out, block.stride, block.bias
        self.shrink = conv_norm(block.channels, out, 3, stride=stride, bias=bias)
        self.f = conv_norm(out, out, 3, bias=bias)
        self.shortcut = block.projection()

    def forward(self, streams: Streams) -> Streams:
        a, b = streams
        c: Tensor = self.shrink(a)
        return self.f(c) + self.shortcut(b), c


class BottleneckTransition(nn.Module):
    """(a, b) -> (R(a) + Q(b), P(a)): each stream has its own projection."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.f = block.function(bottleneck=True, relu=True)
        self.shortcut_a = block.projection()
        self.shortcut_b = block.projection()

    def forward(self, streams: Streams) -> Streams:
        a, b = streams
        return self.f(a) + self.shortcut_b(b), self.shortcut_a(a)


def revnet(options: Options) -> Units:
    """Build the units of a RevNet: stem, one per block, head; each is one stage in PETRA."""
    first = stem(options, 2 * options.width)
    if not options.is_small:
        first.append(nn.MaxPool2d(2))
    first.append(Split(dim=1))
    transition = BottleneckTransition if options.bottleneck else BasicTransition
    blocks = {
        name: Coupling(block.function(bottleneck=options.bottleneck, relu=True))
        if block.keeps_shape
        else transition(block)
        for name, block in options.blocks()
    }
    head = named(pool=Mean(2, 3), classes=nn.Linear(2 * options.width_out, options.num_classes))
    return {"stem": first, **blocks, "head": head}
