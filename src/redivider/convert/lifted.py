"""Lift: residual blocks as one unit of a chain, trained reversibly."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from redivider.convert.reversible import make_reversible


class Lift(nn.Module):
    """Residual blocks, run one after the other and trained reversibly (`rd.make_reversible`).

        chain = rd.Chain([stem, rd.Lift([block() for _ in range(24)]), head])

    A unit for blocks u + h(u) that are to stay what they are, where couplings would be another
    network. It takes and returns one tensor. With `backward="store"`, "reverse" or "overlap" the
    chain leaves it to keep its bits.

    Args:
        blocks: Modules that keep the shape of their input.
        bits: Bits that are kept of every value and block, from 1 to 8.
        grid: Streams are whole multiples of 2^-grid.
        takes: Names of keywords that all blocks receive beside their input.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        bits: int = 2,
        *,
        grid: int = 20,
        takes: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.takes = tuple(takes)
        make_reversible(self, bits, "blocks", grid=grid)

    def forward(self, x: Tensor, /, **side: Any) -> Any:
        for block in self.blocks:
            x = block(x, **side)
        return x
