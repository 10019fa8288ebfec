"""Steps of a lifted row, in plain torch; lift_kernels.py has the same steps as kernels for a GPU.

A block of a row takes four steps:

    forward    lift        (u, x)   --> x', the bits that the shift drops, and the value of x'
               couple      (u, x')  --> u' and its value, from the block's output at x'
    backward   undo        (u', x') --> u and x, from the same output
               pull_back   (du', dx') --> gradients of u and x

Streams are 32-bit integers on the grid, values have the dtype of the network. A step of the forward
writes the largest value that leaves the grid to `peak`, which stays 0 where none does.
"""

import torch
from torch import Tensor

from redivider.arithmetic import Fixed
from redivider.lift import lift, undo_lift

Streams = tuple[Tensor, Tensor]


class LiftSteps:
    """Steps of a lifted row.

    Args:
        bits: Bits that are kept of every value and block.
        grid: Grid of the streams.
        dtype: Type of values.
    """

    def __init__(self, bits: int, grid: Fixed, dtype: torch.dtype) -> None:
        self.bits, self.grid, self.dtype = bits, grid, dtype

    def enter(self, value: Tensor, peak: Tensor) -> Tensor:
        """Return the stream of values that enter a row."""
        stored, fault = self.grid.store(value)
        _note(fault, peak, value)
        return stored

    def real(self, stored: Tensor) -> Tensor:
        """Return the values of a stream."""
        return self.grid.real(stored, self.dtype)

    def lift(
        self, u: Tensor, x: Tensor, sign: Tensor, peak: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the second stream lifted, its values, and the bits that the inverse needs."""
        lifted, kept, fault = lift(u, x, sign, self.bits)
        value = self.real(lifted)
        _note(fault, peak, value)
        return lifted, value, kept

    def couple(self, u: Tensor, point: Tensor, output: Tensor, peak: Tensor) -> Streams:
        """Add a block's residual to the first stream; return the stream and its values.

        Args:
            u: The stream.
            point: Values at which the block was evaluated.
            output: Output of the block there.
            peak: Receiver of the largest value that leaves the grid.
        """
        residual = _residual(point, output)
        stored, fault = self.grid.add(u, residual)
        value = self.real(stored)
        _note(fault, peak, value, residual)
        return stored, value

    def undo(
        self, u: Tensor, x: Tensor, point: Tensor, output: Tensor, sign: Tensor, kept: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return both streams before a block, and the values of the second."""
        u = self.grid.subtract(u, _residual(point, output))
        x = undo_lift(u, x, sign, kept, self.bits)
        return u, x, self.real(x)

    def pull_back(
        self, du: Tensor | None, dx: Tensor | None, through: Tensor | None, sign: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of both streams before a block.

        Args:
            du: Gradient of the block's output.
            dx: Gradient of the point at which it was evaluated, from the block after it.
            through: Gradient of that point through the block, of which du is the part that the
                residual does not have.
            sign: Signs of the lift.
        """
        total = add_wide(through, dx)
        if total is None and du is None:
            return None, None
        like = du if du is not None else total
        assert like is not None
        total = torch.zeros_like(like, dtype=wide_of(like)) if total is None else total
        t = total if du is None else total - du
        step = t * (sign * 2.0**-self.bits).to(total.dtype)
        return (total + step).to(self.dtype), -step.to(self.dtype)


def wide_of(tensor: Tensor) -> torch.dtype:
    """Return a type for sums: float32 for half precision, else the tensor's own."""
    return torch.promote_types(tensor.dtype, torch.float32)


def add_wide(*parts: Tensor | None) -> Tensor | None:
    """Return the sum of tensors, of which some may be None, in float32 or wider."""
    total = None
    for part in parts:
        if part is not None:
            total = part.to(wide_of(part)) if total is None else total + part
    return total


def _residual(point: Tensor, output: Tensor) -> Tensor:
    wide = wide_of(point)  # in half precision a difference would be rounded once more
    return output.detach().to(wide) - point.to(wide)


def _note(fault: Tensor | None, peak: Tensor, *values: Tensor) -> None:
    """Write the largest of the values to `peak` where there is a fault."""
    if fault is None or fault.is_meta or not values[0].numel():
        return
    if fault.device.type != "cpu" or fault:  # on the CPU it is read at once
        largest = torch.stack([value.detach().abs().amax().double() for value in values]).amax()
        peak.copy_(torch.where(fault, largest, 0.0))
