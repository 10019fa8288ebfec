"""A pipeline over several processes: each holds some of the stages, and runs their part of a tick.

Every process makes the same calls in the same order, and the numbers equal those of `Pipeline`: a
tick is the same function of the schedule, and only the transport of some messages differs.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from redivider.chain import verify_keywords
from redivider.initial import materialise
from redivider.pipeline.checkpoint.files import all_or_none, read_state, write_state
from redivider.pipeline.checkpoint.shards import Parts
from redivider.pipeline.checkpoint.snapshot import configuration, verify_snapshot
from redivider.pipeline.diagnostics.probe import Probe
from redivider.pipeline.partition import cut_evenly, units_of
from redivider.pipeline.pipeline import Pipeline
from redivider.pipeline.runners.collectives import broadcast_tree, gather_named
from redivider.pipeline.runners.process_group import own_gpu
from redivider.pipeline.runners.process_transport import BetweenProcesses
from redivider.pipeline.runners.topology import Team
from redivider.pipeline.stages.message import Flow
from redivider.pipeline.stages.placement import units_of_stages
from redivider.pipeline.tick import Tick
from redivider.replay.seeded import mix_seeds
from redivider.tree import map_tensors


class DistributedPipeline(Pipeline):
    """`Pipeline` whose stages are spread over the processes that torchrun has started.

        model = rd.create_model("revnet50", device="meta")    # takes no memory
        pipe = rd.DistributedPipeline(model, loss=F.cross_entropy, optimizer=...)
        for images, targets in batches:
            tick = pipe.step(images, targets)     # the loss is on the last rank

    Every process calls the same methods in the same order. Inputs are needed on the first rank of a
    column, targets on the last one; others may pass None. A process holds only its own units.

    Args:
        model: As for `Pipeline`; best on the meta device, so that no process has all of it. First
            weights are then those that `create_model` draws for this seed.
        loss: As for `Pipeline`.
        optimizer: As for `Pipeline`; called for the stages of this process.
        stages: As for `Pipeline`; "auto" for one on every rank. Several stages may share a rank.
        mesh: A mesh of the dimensions ("data", "stage"): replicas of the pipeline, which average
            their gradients at every update. None for all ranks in one pipeline.
        device: Device of this process's stages. By default the model's own device, or, for a model
            on the meta device, this process's GPU if there is one.
        share_loss: Whether to send the loss to every rank; all ranks then wait for it every tick.
        timeout: Seconds to wait for another process before the run fails.
        seed: As for `Pipeline`; the first rank's seed by default.
        example: As for `Pipeline`; the same shapes on all ranks.
        options: Other options of `Pipeline`.
    """

    is_spread = True
    transport: BetweenProcesses

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
        if example is not None and _is_meta(units.values()):
            example = map_tensors(lambda tensor: tensor.to("meta"), example)
        with team.guarding():
            if seed is None:
                seed = int(team.gather_text(str(torch.initial_seed()))[0])
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
            for stage in self.stages:
                team.broadcast_to_replicas([*stage.module.parameters(), *stage.module.buffers()])

    def step(self, x: Any = None, target: Any = None, /, **side: Any) -> Tick:
        """Run one tick; inputs are needed on the first rank, targets on the last one.

        Side inputs are needed on the first rank, and travel with their micro-batch.
        """
        with self._guarding():
            return super().step(x, target, **side)

    def flush(self, *, update: bool = False) -> list[Tick]:
        with self._guarding():
            ticks = super().flush(update=update)
            self.transport.mail.finish()
            return ticks

    @torch.no_grad()
    def evaluate(self, x: Any = None, /, **side: Any) -> Any:
        """Run the model in evaluation mode by the current weights; the result is on every rank.

        The input is needed on the first rank.
        """
        with self._guarding():
            output = broadcast_tree(self._team, self.evaluate_here(x, **side), self._device)
            self.transport.mail.catch_up()
            return output

    @torch.no_grad()
    def evaluate_here(self, x: Any = None, /, **side: Any) -> Any:
        """Run `evaluate`, but leave the result on the last rank; no other rank waits for it."""
        with self._guarding(), self._evaluating():
            verify_keywords(side, self._takes)
            flow = Flow(x)
            if self._team.place:
                flow, side = self.transport.mail.take_over()
            for stage in self.stages:
                for unit in stage.units:
                    flow = unit.evaluate(flow, side)
            self.transport.mail.pass_on(flow, side)
            self.transport.mail.catch_up()
        return flow.real(self.arithmetic) if self._team.is_last else None

    def probe(self, every: int = 100) -> Probe:
        """Raise an error: a probe needs the whole network in one process."""
        raise ValueError(
            "a probe compares with the gradient of the whole network, which no process has; use "
            "rd.Pipeline with the same stages: its numbers are the same"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return this process's part of the state; `save` writes all parts as one."""
        with self._guarding():
            self.transport.drain()
            return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from this process's part, or from a whole state, bit for bit."""
        with self._guarding():
            self.transport.drain()
            all_or_none(self._team, lambda: verify_snapshot(self, state))
            super().load_state_dict(state)
            self.transport.restore(state)

    def save(self, folder: str | Path) -> None:
        """Write the state of all processes to one folder, on a disk that they share."""
        self._verify_running()
        with self._guarding():
            write_state(folder, self.parts.to_write(self.state_dict()), self._team)

    def load(self, folder: str | Path) -> None:
        """Resume from a folder that any number of processes has written, with the same cut."""
        with self._guarding():
            state = read_state(folder, self.parts.wants, self._team)
            self.load_state_dict(self.parts.own(state))

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the weights and buffers of the uncut model, under its names, on every rank."""
        with self._guarding():
            return gather_named(self._team, super().full_state_dict())

    def close(self) -> None:
        """Receive all messages in flight, so that the other processes can end; call it in all."""
        if self._stopped is None:
            with self._guarding():
                self.transport.drain()
        self._team.watch.close()

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def parts(self) -> Parts:
        """Parts of a state on disk that belong to this process."""
        return Parts(self._team, self._own, self._units)

    @property
    def team(self) -> Team:
        """Position of this process among the others."""
        return self._team

    @property
    def num_bytes_sent(self) -> int:
        """Bytes of messages of ticks that this process has sent so far."""
        return self.transport.mail.num_bytes_sent

    def __repr__(self) -> str:
        stages = f"{self._own.start} to {self._own[-1]}" if len(self._own) > 1 else self._own[0]
        return f"Distributed{super().__repr__()} stages {stages} on rank {self._team.rank}"

    def _take_part(self, units: dict[str, nn.Module], loss: Any) -> tuple[range, int]:
        """Return the stages of this rank and the seed of its replica; initialize the weights."""
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
        on_meta = {name: unit for name, unit in here.items() if _is_meta([unit])}
        materialise(on_meta, seed=self.seed, device=self._device)
        for name in here.keys() - on_meta.keys():
            here[name].to(self._device)
        return own, mix_seeds(self.seed, team.column) if team.column else self.seed

    def _verify_agreement(self) -> None:
        """Refuse processes that were called with different arguments."""
        clip = None if self._clip is None else [self._clip.norm, self._clip.over]
        mine = configuration(self) | {
            "cut": self.cut,
            "clip_norm": clip,
            "lr_by_delay": self._lr_by_delay,
            "share_loss": self._share_loss,
        }
        settings = [json.loads(text) for text in self._team.gather_text(json.dumps(mine))]
        for key, value in settings[0].items():
            for rank, other in zip(self._team.everyone, settings, strict=True):
                if other[key] != value:
                    raise ValueError(
                        f"rank {rank} was given another {key} than rank {self._team.everyone[0]}: "
                        f"{other[key]} and not {value}"
                    )

    def _make_transport(self) -> BetweenProcesses:
        return BetweenProcesses(
            self.in_flight,
            self.packing,
            team=self._team,
            own=self._own,
            device=self._device,
            share_loss=self._share_loss,
            share_norms=self._clip is not None and self._clip.over == "all",
        )

    def _guarding(self) -> AbstractContextManager[None]:
        return self._team.guarding()


def _resolve_device(units: dict[str, nn.Module], device: torch.device | str | None) -> torch.device:
    if device is not None:
        chosen = torch.device(device)
        return own_gpu() if chosen == torch.device("cuda") else chosen
    if not _is_meta(units.values()):
        params = (param for unit in units.values() for param in unit.parameters())
        return next((param.device for param in params), torch.device("cpu"))
    return own_gpu() if torch.cuda.is_available() else torch.device("cpu")


def _is_meta(modules: Iterable[nn.Module]) -> bool:
    return any(tensor.is_meta for m in modules for tensor in (*m.parameters(), *m.buffers()))
