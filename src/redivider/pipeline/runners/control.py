"""What the host tells a captured tick, which can ask nothing: numbers, rates, coefficients."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from redivider.pipeline.stages.fused_optimizer import rate_dtype
from redivider.pipeline.stages.lookahead import coefficients, steps_done
from redivider.pipeline.stages.stage import Stage

NUM_AHEAD = 2  # coefficients of a group's prediction, at most


class Control:
    """Small tensors on a device that the host fills before a replay.

    From now on learning rates are among them.

    Args:
        pipe: The pipeline.
        device: Where it is.
        num_rings: Each needs to know which slot a tick fills, and which one it reads.
    """

    def __init__(self, pipe: Any, device: torch.device, num_rings: int) -> None:
        self._pipe = pipe
        numbers = torch.zeros(1 + 2 * num_rings, dtype=torch.int64, device=device)
        self._numbers, self.device = numbers, device
        self.microbatch = numbers[:1]
        """The one that meets its loss."""
        self.slots = numbers[1:].view(-1, 2)
        groups = [group for stage in pipe.stages for group in stage.groups]
        size = (1 + NUM_AHEAD) * len(groups)
        self._rates = torch.zeros(size, dtype=rate_dtype(device), device=device)
        self._sent: tuple[list[float], int] = [], -1
        self._extra_steps: dict[Stage, list[int]] = {}
        self._find_rates([], [0] * len(pipe.stages))  # notes what the rates were made with
        self._group_rates = list(zip(groups, self._rates, strict=False))
        self._take_rates()
        for stage in pipe.stages:
            if stage.ahead is not None and stage.optimizer is not None:
                done = steps_done(stage.optimizer)
                if done is None:
                    raise RuntimeError("parameters of a group have done different numbers of steps")
                self._extra_steps[stage] = [each - stage.num_updates for each in done]

    @contextmanager
    def giving_coefficients(self) -> Iterator[None]:
        """Let stages predict by what the host has worked out."""
        stages = self._pipe.stages
        num_groups = sum(len(stage.groups) for stage in stages)
        rows = iter(self._rates[num_groups:].view(-1, NUM_AHEAD))
        for stage in stages:
            given = [list(next(rows)) for _ in stage.groups]
            if stage.ahead is not None:
                stage.ahead.given = given
        try:
            yield
        finally:
            for stage in stages:
                if stage.ahead is not None:
                    stage.ahead.given = None

    def send(self, numbers: Sequence[int], due: Sequence[Stage], num_ahead: Sequence[int]) -> None:
        """Fill everything, before what is launched next; nobody waits.

        Args:
            numbers: The micro-batch that meets its loss, and the slots of rings.
            due: The stages that will update.
            num_ahead: The updates that each stage looks ahead.
        """
        _send(numbers, self._numbers)
        if self._pipe._factor is None:
            self._take_rates()
            return
        rates = self._find_rates(due, num_ahead)
        if (rates, self._rates._version) != self._sent:  # a caller may have written there
            _send(rates, self._rates)
            self._sent = rates, self._rates._version

    def _take_rates(self) -> None:
        """Bring the groups' rates, which somebody may have set, to where ticks read them."""
        for group, rate in self._group_rates:
            if group["lr"] is not rate:
                group["lr"] = rate.fill_(group["lr"])

    def _find_rates(self, due: Sequence[Stage], num_ahead: Sequence[int]) -> list[float]:
        """Learning rates, of updates that are due, else of the last ones; then coefficients."""
        rates: list[float] = []
        ahead: list[list[float]] = []
        if self._pipe._factor is None:
            return []  # they are the caller's
        for stage, num in zip(self._pipe.stages, num_ahead, strict=True):
            update = max(0, stage.num_updates - (stage not in due))
            rates += stage.rates(self._pipe._factor(update))
            found: list[list[float]] = [[] for _ in stage.groups]
            if num and stage.optimizer is not None:
                done = [each + stage.num_updates for each in self._extra_steps[stage]]
                found = coefficients(stage.optimizer, stage.factors(num), done)
            ahead += [(each + [0.0] * NUM_AHEAD)[:NUM_AHEAD] for each in found]
        return [*rates, *(number for each in ahead for number in each)]


def _send(values: Sequence[float], target: Tensor) -> None:
    # The host's memory is not used again before it was read: torch's allocator sees to that.
    host = torch.tensor(values, dtype=target.dtype, pin_memory=target.is_cuda)
    target.copy_(host, non_blocking=True)
