"""Compressed: blocks as one unit of a chain, whose inputs are kept in a few bits."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from redivider.convert.reversible import make_reversible


class Compressed(nn.Module):
    """Blocks that run one after the other, trained as `rd.make_reversible` does.

        chain = rd.Chain([stem, rd.Compressed([block() for _ in range(24)]), head])

    A unit for residual blocks that are to stay what they are, where couplings would be another
    network. With `backward="store"`, "reverse" or "overlap" the chain leaves it to keep its bits.

    Args:
        blocks: Modules that keep the shape of their input.
        bits: Bits that are kept of every value and block, from 1 to 8.
        takes: Names of keywords that all blocks receive beside their input.
    """

    def __init__(
        self, blocks: Iterable[nn.Module], bits: int = 2, *, takes: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.takes = tuple(takes)
        make_reversible(self, bits, "blocks")

    def forward(self, x: Tensor, /, **side: Any) -> Any:
        for block in self.blocks:
            x = block(x, **side)
        return x
