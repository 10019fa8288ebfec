"""Lifted row: residual blocks that run reversibly by the lift (lift.py), one autograd node a block.

    forward    (u, u) --> block 0 --> block 1 --> ... --> block n-1 --> (u, x), kept
                            bits        bits                 bits
    backward   (u, u) <-- block 0 <-- block 1 <-- ... <-- block n-1 <--

Between forward and backward a block keeps a few bits per value, and the last one both streams. In
the backward every block is evaluated once more, recovers its streams and hands them to the one
before. The residual of a block is its output minus its input. The caller sees u alone.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from redivider.arithmetic import Fixed
from redivider.backward.lift_steps import LiftSteps, Streams, add_wide
from redivider.backward.mailbox import Mailbox
from redivider.backward.node import Kept
from redivider.backward.row import mark, poisoned
from redivider.errors import UnitError
from redivider.lift import draw_signs
from redivider.replay import Call, GraphRun, Record

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LiftedRow:
    """Residual blocks of one forward pass and its backward, and the streams between them.

    Args:
        names: Names of the blocks, for errors.
        bits: Bits that are kept of every value and block.
        grid: Grid of the streams.
        mailbox: Receiver of faults from the device.
    """

    def __init__(self, names: Sequence[str], bits: int, grid: Fixed, mailbox: Mailbox) -> None:
        self.names, self.bits, self.grid = names, bits, grid
        self.next = 0
        """Index of the block whose turn it is."""
        self._mailbox = mailbox
        self._stored: Streams  # in the forward: (u, x) on the grid
        # What the last block has returned: without its graph, and its mark and flag of that time.
        self._expected: tuple[Tensor, Any, bool]
        # Largest values that have left the grid: two numbers a block, by its lift and its coupling.
        self._peaks: Tensor
        # In the backward, by block: recovered streams, and the values of the second.
        self._outputs: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def is_complete(self) -> bool:
        """Whether all blocks have run."""
        return self.next == len(self.names)

    def run(
        self,
        block: nn.Module,
        u: Tensor,
        x: Tensor | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, Tensor]:
        """Run the block whose turn it is; return its result, and the new second stream.

        The row must not hold the second stream itself: its graph leads back to the row.

        Args:
            block: The block.
            u: Stream that the last block has returned.
            x: Second stream, as autograd sees it; None for the first block.
            args: Other arguments of the block.
            kwargs: Its keywords.
        """
        index = self.next
        if index == 0:
            self.steps = _steps_for(u, self.bits, self.grid)
            self._peaks = torch.zeros(2 * len(self.names), device=u.device)
            stored = self.steps.enter(u, self._peaks[0])
            self._verify_peak(0)
            self._stored = (stored, stored)
        elif not _is_same(u, *self._expected):
            raise UnitError(
                "its input is not the output of the block before, which a row of blocks needs to "
                "be rebuilt; what lies between blocks must not change it"
            )
        call, tensors = Call.split(block, (u, *args), kwargs)
        streams = [u] if x is None else [u, x]
        node = _KeptBits(self, index, call, len(streams))
        out, point, *beside = node.apply([*streams, *tensors[1:]])
        self.next += 1
        self._expected = out.detach(), mark(out), out.requires_grad
        if self.is_complete:
            if not self._reports_at_once:
                # The host reads of a fault later: until then, the loss and its gradients are NaN.
                fault = (self._peaks != 0).any()
                out, *beside = (poisoned(value, fault) for value in (out, *beside))
            self._mailbox.post(self._peaks, self._read_peaks)
            del self._stored, self._expected, self._peaks
        leaves = iter([out, *beside])
        values = [next(leaves) if is_tensor else other for is_tensor, other in node.leaves]
        return tree_unflatten(values, node.spec), point

    def lift(self, index: int) -> tuple[Tensor, list[Tensor]]:
        """Return the point at which a block is evaluated, and what the inverse needs."""
        u, x = self._stored
        if index == 0:
            return self.steps.real(u), []
        sign = draw_signs(u)
        lifted, value, kept = self.steps.lift(u, x, sign, self._peaks[2 * index])
        self._verify_peak(2 * index)
        self._stored = (u, lifted)
        return value, [kept, sign]

    def couple(self, index: int, point: Tensor, output: Tensor) -> Tensor:
        """Add a block's residual to the first stream; return the values of the new one."""
        u, x = self._stored
        u, value = self.steps.couple(u, point, output, self._peaks[2 * index + 1])
        self._verify_peak(2 * index + 1)
        self._stored = (u, x)
        if index == len(self.names) - 1 and not self._reports_at_once:
            value.masked_fill_((self._peaks != 0).any(), torch.nan)
        return value

    def undo(
        self, index: int, streams: Streams, point: Tensor, output: Tensor, kept: Sequence[Tensor]
    ) -> None:
        """Recover the streams before a block, and hand them to the block before."""
        packed, sign = kept
        self._outputs = {index - 1: self.steps.undo(*streams, point, output, sign, packed)}

    def kept(self, index: int) -> Sequence[Tensor]:
        """Return the streams that this block must save: its output if it is the last one."""
        return self._stored if index == len(self.names) - 1 else ()

    def take_back(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the next block has recovered: its streams, and the values of the second."""
        if index not in self._outputs:
            raise RuntimeError(
                f"{self.names[index]}: its output reached the loss, but that of the last block did "
                "not, and only from there can it be rebuilt; include it in the loss, or call "
                "rd.make_plain(model)"
            )
        return self._outputs[index]

    def let_go(self, index: int) -> None:
        """Release the streams after a block, whose backward is done."""
        self._outputs.pop(index, None)

    @property
    def _reports_at_once(self) -> bool:
        """Whether the host reads faults at once; a GPU is not waited for."""
        return self._peaks.device.type == "cpu"

    def _verify_peak(self, place: int) -> None:
        """Raise if a value has left the grid, where that is known."""
        if self._reports_at_once and self._peaks[place]:
            self._read_peaks(self._peaks)

    def _read_peaks(self, peaks: Tensor) -> None:
        if (peaks != 0).any():
            first = int((peaks != 0).to(torch.uint8).argmax())
            raise _overflow(self.names[first // 2], float(peaks[first]), self.grid)


class _KeptBits(Kept):
    """State of a block: the bits that its lift has dropped."""

    def __init__(self, row: LiftedRow, index: int, call: Call, num_streams: int) -> None:
        self.name = row.names[index]
        self._row, self._index, self._call = row, index, call
        self._num_streams = num_streams  # inputs of the node that are streams
        self._record: Record
        self._sign: Tensor | None = None
        self.leaves: list[tuple[bool, Any]]
        """Leaves of the block's output: True and None for a tensor, else False and the value."""
        self.spec: Any

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        row, others = self._row, tensors[self._num_streams :]
        x, kept = row.lift(self._index)
        # As in the second run, so that both use the same kernels.
        goes_on = any(stream.requires_grad for stream in tensors[: self._num_streams])
        point = x.detach().requires_grad_(goes_on)
        output, self._record = self._call.first_run([point, *others], with_graph=True)
        leaves, self.spec = tree_flatten(output)
        self.leaves = [
            (isinstance(leaf, Tensor), None if isinstance(leaf, Tensor) else leaf)
            for leaf in leaves
        ]
        hidden, *beside = _verify_output(leaves, x)
        u = row.couple(self._index, x, hidden)
        return (u, x, *beside), (*others, *kept, *row.kept(self._index))

    def prepare(self, saved: Sequence[Tensor], needs: Sequence[bool], *, flows: bool) -> GraphRun:
        row, num_others = self._row, len(needs) - self._num_streams
        others, rest = saved[:num_others], list(saved[num_others:])
        if self._index == len(row.names) - 1:
            u, x, point = rest[-2], rest[-1], row.steps.real(rest[-1])
        else:
            u, x, point = row.take_back(self._index)
        kept = rest[:2] if self._index else []
        self._sign = kept[1] if kept else None
        goes_on = any(needs[: self._num_streams])
        run_needs = [goes_on, *needs[self._num_streams :]]
        run = self._call.rerun([point, *others], run_needs, self._record)
        if goes_on and kept:
            row.undo(self._index, (u, x), point, tree_flatten(run.output)[0][0], kept)
        return run

    def finish(
        self, prepared: GraphRun, needs: Sequence[bool], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        du, dx, *beside = grads
        self._row.let_go(self._index)
        through, *others = prepared.pull_back([du, *beside])
        if not any(needs[: self._num_streams]):
            return [None] * self._num_streams + others
        if self._sign is None:  # the first block: both streams are its input
            total = add_wide(through, dx)
            return [None if total is None else total.to(self._row.steps.dtype), *others]
        return [*self._row.steps.pull_back(du, dx, through, self._sign), *others]


def _verify_output(leaves: Sequence[Any], x: Tensor) -> list[Tensor]:
    """Return the tensors of a block's output, of which the first must be a stream like `x`."""
    hidden = leaves[0] if leaves else None
    if not isinstance(hidden, Tensor) or hidden.shape != x.shape or hidden.device != x.device:
        kind = tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
        raise UnitError(
            f"a residual block returns a tensor of the shape of its input, {tuple(x.shape)}, or a "
            f"tuple that begins with it, got {kind}"
        )
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _is_same(u: Tensor, expected: Tensor, marked: Any, requires_grad: bool) -> bool:
    """Return whether a tensor is what a block has returned, or a view of all of it."""
    ours, theirs = ((t.shape, t.stride(), t.storage_offset(), t.dtype) for t in (u, expected))
    return (mark(u), ours, u.requires_grad) == (marked, theirs, requires_grad)


def _steps_for(u: Tensor, bits: int, grid: Fixed) -> LiftSteps:
    """Return the steps for a stream: kernels where there are any."""
    if u.is_cuda and u.is_contiguous() and u.dtype in KERNEL_DTYPES:
        try:
            from redivider.backward.lift_kernels import LiftKernels
        except ImportError:  # torch comes with Triton on Linux only
            pass
        else:
            return LiftKernels(bits, grid, u.dtype)
    return LiftSteps(bits, grid, u.dtype)


def _overflow(name: str, peak: float, grid: Fixed) -> ArithmeticError:
    if not peak < float("inf"):
        return FloatingPointError(f"{name}: it gave a value that is not finite")
    fits = next(
        bits for bits in range(grid.bits, -1, -1) if 4 * peak < 2 ** (31 - bits) or not bits
    )
    return OverflowError(
        f"{name}: values of {peak:.3g} leave the grid of 2^-{grid.bits}, which ends at "
        f"{2 ** (31 - grid.bits):,}; use rd.make_reversible(model, grid={fits}), which ends at "
        f"{2 ** (31 - fits):,}"
    )
