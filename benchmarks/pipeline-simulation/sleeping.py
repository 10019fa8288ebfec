"""Pipelines whose actions take a known time: they sleep, and compute next to nothing."""

import random
import time
from collections import defaultdict
from statistics import mean, stdev
from typing import Any

import torch
import torch.distributed as dist
from ours import Petra
from setting import Setting
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class TimedPetra(Petra):
    """PETRA over processes that notes how long its actions take, waiting not included.

    Args:
        setting: Model and sizes of the runs.
        cut: The units of each stage.
        latency: Ticks that a message travels.
        sleeps: Seconds that a forward and a backward sleep.
        jitter: Standard deviation of the sleeps, as a part of them.
    """

    def __init__(
        self,
        setting: Setting,
        cut: list[int],
        *,
        latency: float,
        sleeps: tuple[float, float] = (0.0, 0.0),
        jitter: float = 0.0,
    ) -> None:
        self._sleeps, self._jitter = sleeps, jitter
        self._dice = random.Random(dist.get_rank())
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        super().__init__(setting, cut, latency=latency, accumulate=8, fill=False)
        (stage,) = self.pipe.stages
        for name in ("run_forward", "run_backward", "finish_backward", "update"):
            setattr(stage, name, self._timed(name, getattr(stage, name)))

    def _timed(self, name: str, run: Any) -> Any:
        forward, backward = self._sleeps
        later = (backward - forward) / 2  # gradients of weights, which come after sending

        def timed(*args: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            result = run(*args, **keywords)
            sleep = {"run_forward": forward, "run_backward": backward, "finish_backward": later}
            if keywords.get("is_urgent"):
                sleep["run_backward"] -= later
            if sleep.get(name):
                factor = max(0.0, self._dice.gauss(1.0, self._jitter))
                time.sleep(max(0.0, factor * sleep[name] - (time.perf_counter() - start)))
            self.seconds[name].append(time.perf_counter() - start)
            return result

        return timed

    def measure(self, num: int, rounds: int) -> list[dict[str, float]]:
        """Return, for every round, the seconds of a micro-batch, of a forward and of a backward.

        Rounds follow each other without a pause, so that no process waits for the others. `jitter`
        is the relative deviation of the time of a forward or a backward.
        """
        self.run(2 * self.num_until_full)
        return [self._run_round(num) for _ in range(rounds)]

    def _run_round(self, num: int) -> dict[str, float]:
        self.seconds.clear()
        tick = self.run(num) / num
        means = {name: sum(seconds) / num for name, seconds in self.seconds.items()}
        actions = [self.seconds[name] for name in ("run_forward", "run_backward")]
        jitter = mean(stdev(seconds) / mean(seconds) for seconds in actions)
        forward = means.pop("run_forward")
        backward = sum(means.values())
        return {"tick": tick, "forward": forward, "backward": backward, "jitter": jitter}


class _Sleep(torch.autograd.Function):
    """Identity that sleeps in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], None


class SleepyModule(nn.Module):
    """A small layer that sleeps in its forward and in its backward."""

    def __init__(self, sleeps: tuple[float, float]) -> None:
        super().__init__()
        self._layer, self._sleeps = nn.Linear(16, 16), sleeps

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer, and sleep."""
        time.sleep(self._sleeps[0])
        y: Tensor = _Sleep.apply(self._layer(x), self._sleeps[1])  # type: ignore[no-untyped-call]
        return y


class SleepyRival:
    """A schedule of torch.distributed.pipelining whose stages sleep."""

    def __init__(self, method: str, sleeps: tuple[float, float], microbatches: int) -> None:
        rank, num = dist.get_rank(), dist.get_world_size()
        self._num, self._is_ends = microbatches, (rank == 0, rank == num - 1)
        self._stage = PipelineStage(SleepyModule(sleeps), rank, num, torch.device("cpu"))
        self._schedule = SCHEDULES[method](self._stage, microbatches, loss_fn=_loss)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        for name in ("forward_one_chunk", "backward_one_chunk"):
            setattr(self._stage, name, self._timed(name, getattr(self._stage, name)))

    def _timed(self, name: str, run: Any) -> Any:
        def timed(*args: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            result = run(*args, **keywords)
            self.seconds[name] += time.perf_counter() - start
            return result

        return timed

    def measure(self, rounds: int) -> list[dict[str, float]]:
        """Return, for every round, the seconds of a micro-batch, of a forward and of a backward."""
        self._step()
        results = []
        for _ in range(rounds):
            self.seconds.clear()
            start = time.perf_counter()
            self._step()
            seconds = {"tick": time.perf_counter() - start}
            seconds["forward"] = self.seconds["forward_one_chunk"]
            seconds["backward"] = self.seconds["backward_one_chunk"]
            results.append({name: value / self._num for name, value in seconds.items()})
        return results

    def _step(self) -> None:
        is_first, is_last = self._is_ends
        x = torch.randn(self._num, 16)
        self._schedule.step(*([x] if is_first else []), **({"target": x} if is_last else {}))


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()
