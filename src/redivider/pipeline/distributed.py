"""A pipeline over several processes: each holds some of the stages, and runs their part of a tick.

The same calls in the same order in every process, and the same numbers as `Pipeline`: what a tick
does is the same function of the schedule, only that some messages travel (runners/transport.py).
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from redivider.chain import verify_keywords
from redivider.initial import materialise
from redivider.pipeline.checkpoint.files import all_well, read_state, write_state
from redivider.pipeline.checkpoint.shards import Parts
from redivider.pipeline.checkpoint.snapshot import configuration, verify_snapshot
from redivider.pipeline.diagnostics.probe import Probe
from redivider.pipeline.partition import cut_evenly, units_of
from redivider.pipeline.pipeline import Pipeline, Tick
from redivider.pipeline.runners.collectives import share_all, share_tree
from redivider.pipeline.runners.exchange import Mail
from redivider.pipeline.runners.process_group import own_gpu
from redivider.pipeline.runners.topology import Team
from redivider.pipeline.schedule import Leg, Way, lag
from redivider.pipeline.stages.placement import units_of_stages
from redivider.pipeline.stages.stage import Message
from redivider.pipeline.stages.unit import Flow
from redivider.replay.autocast import Autocast
from redivider.replay.random import mix_seeds
from redivider.replay.statistics import counting_layers


class DistributedPipeline(Pipeline):
    """A `Pipeline` whose stages are spread over the processes that torchrun has started.

        model = rd.create_model("revnet50", device="meta")    # takes no memory
        pipe = rd.DistributedPipeline(model, loss=F.cross_entropy, optimizer=...)
        for images, targets in batches:
            tick = pipe.step(images, targets)     # the loss is on the last rank

    Every process calls the same methods in the same order. Inputs are needed on the first rank of a
    column, targets on the last one; others may give None. A process holds its own units alone.

    Args:
        model: As for `Pipeline`; best on the meta device, so that no process has all of it. First
            weights are then those that `create_model` draws for this seed.
        loss: As for `Pipeline`.
        optimizer: As for `Pipeline`; called for the stages that are here.
        stages: As for `Pipeline`; "auto" for one on each rank. Several stages may share a rank.
        mesh: A mesh of the dimensions ("data", "stage"): replicas of the pipeline, which average
            their gradients at each update. None for all ranks in one pipeline.
        device: Where the stages of this process are to be; the model's own device, or for one on
            the meta device its GPU if there are any.
        share_loss: Whether every rank is told the loss; they wait for it at every tick.
        timeout: Seconds that a process waits for another one before it ends the run.
        seed: As for `Pipeline`; the first rank's if not given.
        example: As for `Pipeline`; the same shapes on all ranks.
        options: Others of `Pipeline`.
    """

    is_spread = True

    def __init__(
        self,
        model: Any,
        *,
        loss: Callable[..., Any],
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        stages: int | Sequence[int] | Literal["auto"] = "auto",
        mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        share_loss: bool = False,
        timeout: float = 300.0,
        seed: int | None = None,
        example: Any = None,
        **options: Any,
    ) -> None:
        units = units_of(model)
        self._device = _resolve_device(units, device)
        self._team = team = Team(mesh, self._device, timeout)
        self.num_replicas = team.num_columns
        self._share_loss = share_loss
        # Of every micro-batch in flight, what does not travel with its messages.
        self._known: dict[int, tuple[dict[str, Any], Autocast]] = {}
        self._future_targets: dict[int, Any] = {}
        if example is not None and _is_meta(units.values()):
            example = tree_map_only(Tensor, lambda each: each.to("meta"), example)
        with team.guarding():
            if seed is None:
                seed = int(team.tell_all(str(torch.initial_seed()))[0])
            super().__init__(
                model,
                stages=team.num_places if stages == "auto" else stages,
                loss=loss,
                optimizer=optimizer,
                seed=seed,
                example=example,
                **options,
            )
            self._verify_agreement()
            self._mail = Mail(
                team, self._own, len(self.cut), self.latency, self.packing, self._device
            )
            for stage in self.stages:
                team.spread([*stage.module.parameters(), *stage.module.buffers()])
                stage.average = self._average if team.num_columns > 1 else None

    def step(self, x: Any = None, target: Any = None, /, **side: Any) -> Tick:
        """Run one tick; inputs are needed on the first rank, targets on the last one.

        Side inputs are needed on the first rank, and travel with their micro-batch.
        """
        with self._guarding():
            return super().step(x, target, **side)

    def flush(self, *, update: bool = False) -> list[Tick]:
        with self._guarding():
            ticks = super().flush(update=update)
            self._mail.finish()
            return ticks

    @torch.no_grad()
    def evaluate(self, x: Any = None, /, **side: Any) -> Any:
        """Run the model in evaluation mode by the weights of now; the result is on every rank.

        The input is needed on the first rank.
        """
        with self._guarding():
            output = share_tree(self._team, self.evaluate_here(x, **side), self._device)
            self._mail.catch_up()
            return output

    @torch.no_grad()
    def evaluate_here(self, x: Any = None, /, **side: Any) -> Any:
        """The same, but the result is on the last rank alone; nobody waits for it."""
        with self._guarding(), self._evaluating():
            verify_keywords(side, self._takes)
            flow = Flow(x)
            if self._team.place:
                flow, side = self._mail.take_over()
            for stage in self.stages:
                for unit in stage.units:
                    flow = unit.evaluate(flow, side)
            self._mail.pass_on(flow, side)
            self._mail.catch_up()
        if not self._team.is_last:
            return None
        if flow.dtype is None:
            return flow.value
        return tuple(self.arithmetic.real(each, flow.dtype) for each in flow.value)

    def probe(self, every: int = 100) -> Probe:
        """Not here: a probe needs the whole network in one process."""
        raise ValueError(
            "a probe compares with the gradient of the whole network, which no process has; use "
            "rd.Pipeline with the same stages: its numbers are the same"
        )

    def state_dict(self) -> dict[str, Any]:
        """This process's part of the state; `save` writes all of them as one."""
        with self._guarding():
            self._drain()
            return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from this process's part, or from a whole state, bit for bit."""
        with self._guarding():
            self._drain()
            all_well(self._team, lambda: verify_snapshot(self, state))
            super().load_state_dict(state)
            entries = tree_map_only(
                Tensor, lambda each: each.to(self._device), state["microbatches"]
            )
            ticks = lag("B", self._own[0], len(self.cut), self.latency)  # until it has left
            self._known = {
                n: (each["side"], Autocast(self._device, each["autocast"]))
                for n, each in entries.items()
                if n - self._first + ticks >= self._tick
            }
            here = {n for inbox in self._up for n in inbox}
            self._future_targets = {
                n: tree_map_only(Tensor, lambda each: each.to(self._device), target)
                for n, target in state["targets"].items()
                if self._team.is_last and n not in here
            }

    def save(self, folder: str | Path) -> None:
        """Write the state of all processes to one folder, on a disk that they share."""
        self._verify_running()
        with self._guarding():
            write_state(folder, self.parts.to_write(self.state_dict()), self._team)

    def load(self, folder: str | Path) -> None:
        """Continue from a folder that any number of processes has written, by the same cut."""
        with self._guarding():
            state = read_state(folder, self.parts.wants, self._team)
            self.load_state_dict(self.parts.own(state))

    def full_state_dict(self) -> dict[str, Tensor]:
        """The weights and buffers of the uncut model, under its names, on every rank."""
        with self._guarding():
            return share_all(self._team, super().full_state_dict())

    def close(self) -> None:
        """Take in what is on its way, so that the others may end, too; in all processes."""
        if self._stopped is None:
            with self._guarding():
                self._drain()
        self._team.watch.close()

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def parts(self) -> Parts:
        """Which part of a state on disk is this process's."""
        return Parts(self._team, self._own, self._units)

    @property
    def team(self) -> Team:
        """This process among the others."""
        return self._team

    @property
    def num_bytes_sent(self) -> int:
        """By messages of ticks, from here, so far."""
        return self._mail.num_bytes_sent

    def __repr__(self) -> str:
        stages = f"{self._own.start} to {self._own[-1]}" if len(self._own) > 1 else self._own[0]
        return f"Distributed{super().__repr__()} stages {stages} on rank {self._team.rank}"

    def _take_part(self, units: dict[str, nn.Module], loss: Any) -> tuple[range, int]:
        """The stages of this rank, as even as can be; they get memory and weights."""
        team, num = self._team, len(self.cut)
        if num < team.num_places:
            raise ValueError(
                f"{num} stages cannot be spread over {team.num_places} processes; start {num} or "
                "fewer, or cut the model into more stages"
            )
        sizes = cut_evenly(self._loads, team.num_places)
        starts = [sum(sizes[:place]) for place in range(team.num_places)]
        for place, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            stages = f"stage {start}" if size == 1 else f"stages {start} to {start + size - 1}"
            team.name_stages(place, stages)
        own = range(starts[team.place], starts[team.place] + sizes[team.place])
        named = list(units.items())
        here = dict(named[index] for index in units_of_stages(self.cut, own))
        if team.is_last and isinstance(loss, nn.Module):
            here["loss"] = loss
        without = {name: unit for name, unit in here.items() if _is_meta([unit])}
        materialise(without, seed=self.seed, device=self._device)
        for name in here.keys() - without.keys():
            here[name].to(self._device)
        return own, mix_seeds(self.seed, team.column) if team.column else self.seed

    def _verify_agreement(self) -> None:
        """Refuse processes that were given different things."""
        clip = None if self._clip is None else [self._clip.norm, self._clip.over]
        mine = configuration(self) | {
            "cut": self.cut,
            "clip_norm": clip,
            "lr_by_delay": self._lr_by_delay,
            "share_loss": self._share_loss,
        }
        texts = [json.loads(each) for each in self._team.tell_all(json.dumps(mine))]
        for key, value in texts[0].items():
            for rank, other in zip(self._team.everyone, texts, strict=True):
                if other[key] != value:
                    raise ValueError(
                        f"rank {rank} was given another {key} than rank {self._team.everyone[0]}: "
                        f"{other[key]} and not {value}"
                    )

    def _guarding(self) -> AbstractContextManager[None]:
        return self._team.guarding()

    def _enter(self, n: int, x: Any, target: Any, side: dict[str, Any]) -> None:
        team, autocast = self._team, Autocast(self._device)
        self._known[n] = (side, autocast)
        if team.is_last:
            self._given.note(n, (), target)
        if team.is_last and team.num_places > 1:
            self._future_targets[n], target = target, None
        if team.place == 0:
            self._given.note(n, (x, side), target if team.is_last else None)
            if x is None:
                raise ValueError("the first rank of a column needs the inputs, and got none")
            self._up[0][n] = Message(n, Flow(x), autocast, side, target)

    def _deliver(self, way: Way, j: int, message: Message) -> None:
        if j in self._own:
            super()._deliver(way, j, message)
            return
        self._mail.send(way, message)

    def _fetch(self, way: Way, j: int, n: int) -> Message:
        if n in self._inbox(way, j):
            return super()._fetch(way, j, n)
        return self._receive(way, n)

    def _receive(self, way: Way, n: int) -> Message:
        flow, grads, arrived = self._mail.take(way)
        side, autocast = self._known[n]
        if way == "down":
            return Message(n, flow, autocast, side, grads=grads)
        self._known[n] = (arrived, autocast)
        return Message(n, flow, autocast, arrived, self._future_targets.pop(n, None))

    def _backward(self, j: int, n: int) -> None:
        super()._backward(j, n)
        if j == self._own[0]:
            del self._known[n]

    def _run_tick(self) -> Tick:
        self._team.watch.note(f"tick {self._first + self._tick}")
        t = self._tick
        self._mail.expect(self._arriving(range(t - self.latency, t + self.latency)))
        tick = super()._run_tick()
        if self._share_loss:
            tick = self._with_loss(tick, t)
        if tick.loss is None and not self._team.is_last:
            at = self._team.ranks[-1]
            why = f"the loss is on rank {at}, the last of this column; share_loss=True sends it"
            return Tick(reason=why)
        return tick

    def _arriving(self, ticks: range) -> Iterator[Leg]:
        """The messages that are sent to stages here in some ticks, and have not been taken in."""
        for leg in self._mail.arriving(ticks, self._entered):
            if self._first + leg.microbatch not in self._inbox(leg.way, leg.stage):
                yield leg

    def _drain(self) -> None:
        """Take in all that is on its way, as it is between two ticks of a pipeline in one place."""
        for way, j, local in self._arriving(range(self._tick - self.latency, self._tick)):
            n = self._first + local
            self._inbox(way, j)[n] = self._receive(way, n)
        self._mail.finish()

    def _end_tick(self) -> None:
        self._mail.exchange(self._tick - 1, self._entered)

    def _norms(self) -> list[Tensor]:
        if self._clip is None or self._clip.over == "stage":
            return [torch.zeros(())] * len(self.cut)  # nobody asks
        mine = torch.zeros(len(self.cut), dtype=torch.float64, device=self._team.device)
        for stage in self.stages:
            mine[stage.index] = stage.norm
        norms = torch.stack(self._team.gather(mine, in_column=True)).sum(0)
        return list(norms.to(self._device))

    def _in_flight(self) -> dict[int, tuple[dict[str, Any], Autocast]]:
        return dict(self._known)

    def _targets(self) -> dict[int, Any]:
        return super()._targets() | self._future_targets

    @torch.no_grad()
    def _average(self, module: nn.Module) -> None:
        """Average gradients and running statistics over the replicas of a stage.

        A parameter that one replica has not used has a gradient of zero there.
        """
        trained = [each for each in module.parameters() if each.requires_grad]
        is_used = [float(each.grad is not None) for each in trained]
        used = torch.tensor(is_used, device=self._device)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        layers = counting_layers(list(module.modules()))
        names = ("running_mean", "running_var")
        running = [layer.get_buffer(name) for layer in layers for name in names]
        self._team.average([used, *grads, *running])
        if not all(is_used):  # else a GPU need not be waited for
            for parameter, grad, part in zip(trained, grads, used.tolist(), strict=True):
                parameter.grad = grad if part else None

    def _with_loss(self, tick: Tick, t: int) -> Tick:
        """Tell all the loss of a tick, if it has one."""
        local = t - lag("F", len(self.cut) - 1, len(self.cut), self.latency)
        if not 0 <= local < self._entered:
            return tick
        told = torch.zeros((), dtype=torch.float64, device=self._team.device)
        if tick.loss is not None:
            told.copy_(tick.loss.detach())
        self._team.spread_in_column(told, self._team.num_places - 1)
        if tick.loss is not None:
            return tick
        return Tick(self._first + local, told.to(self._device))


def _resolve_device(units: dict[str, nn.Module], device: torch.device | str | None) -> torch.device:
    if device is not None:
        found = torch.device(device)
        return own_gpu() if found == torch.device("cuda") else found
    if not _is_meta(units.values()):
        parameters = (each for unit in units.values() for each in unit.parameters())
        return next((each.device for each in parameters), torch.device("cpu"))
    return own_gpu() if torch.cuda.is_available() else torch.device("cpu")


def _is_meta(modules: Iterable[nn.Module]) -> bool:
    return any(each.is_meta for m in modules for each in (*m.parameters(), *m.buffers()))
