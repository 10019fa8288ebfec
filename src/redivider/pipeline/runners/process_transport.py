"""Transport between processes: stages that are elsewhere are reached through lines (exchange.py).

A message carries its flow, its gradients and, upwards, its side inputs. Targets and autocast
settings do not travel: every process notes them when the micro-batch enters.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from redivider.pipeline.runners.captured_mail import CapturedMail
from redivider.pipeline.runners.exchange import Mail
from redivider.pipeline.runners.in_flight import InFlight
from redivider.pipeline.runners.replicas import Shares
from redivider.pipeline.runners.topology import Team
from redivider.pipeline.runners.transport import Transport
from redivider.pipeline.schedule import Direction, Leg
from redivider.pipeline.stages.compression import Packing
from redivider.pipeline.stages.message import Flow, Message
from redivider.pipeline.stages.stage import Stage
from redivider.pipeline.tick import Tick
from redivider.replay.autocast import Autocast
from redivider.tree import map_tensors


class BetweenProcesses(Transport):
    """Transport of a process that holds some of the stages.

    Args:
        in_flight: Inboxes of the stages, and counters.
        packing: How messages between stages are packed.
        team: The processes.
        own: The stages of this one.
        device: Device of its stages.
        share_loss: Whether to send the loss to every rank.
        share_norms: Whether clipping needs the gradient norms of all stages.
    """

    def __init__(
        self,
        in_flight: InFlight,
        packing: Packing,
        *,
        team: Team,
        own: range,
        device: torch.device,
        share_loss: bool,
        share_norms: bool,
    ) -> None:
        super().__init__(in_flight, packing, own)
        self._team, self._device = team, device
        self._share_loss, self.shares_norms = share_loss, share_norms
        self.mail = Mail(team, own, in_flight.schedule, packing, device)
        self.matches_by_order = team.batches
        self.has_replicas = team.num_columns > 1
        self.max_leaving = self.mail.max_leaving
        self._contexts: dict[int, tuple[dict[str, Any], Autocast]] = {}
        self._future_targets: dict[int, Any] = {}  # of micro-batches on their way to the last rank

    def enter(self, n: int, x: Any, target: Any, side: dict[str, Any]) -> Message | None:
        team, autocast = self._team, Autocast(self._device)
        self._contexts[n] = (side, autocast)
        if team.is_last and team.num_places > 1:
            self._future_targets[n] = target
        if self.is_spread:
            target = None
        if team.place > 0:
            return None
        if x is None:
            raise ValueError("the first rank of a column needs the inputs, and got none")
        message = self.in_flight.up[0][n] = Message(n, Flow(x), autocast, side, target)
        return message

    def begin_tick(self) -> None:
        flight = self.in_flight
        self._team.watch.note(f"tick {flight.first + flight.tick}")
        # Over gloo a message leaves only after its receive has been posted. Post receives so early
        # that the sender hears of them before it can send: until then it waits for another message
        # from here. Count micro-batches that have not entered, too: receives that a flush leaves
        # over take the next messages.
        ahead = flight.schedule.max_ticks
        self.mail.expect(self._arriving(flight.tick + ahead + 1, flight.entered + ahead))

    def deliver(self, direction: Direction, stage: int, message: Message) -> None:
        if stage in self.own:
            self._put(direction, stage, message)
        else:
            self.mail.send(direction, message)

    def fetch(self, direction: Direction, stage: int, n: int) -> Message:
        inbox = self.in_flight.inbox(direction, stage)
        return inbox.pop(n) if n in inbox else self._receive(direction, n)

    def capture(self, entering: Message, num_phases: int, device: torch.device) -> CapturedMail:
        return CapturedMail(self, entering, num_phases, device)

    def side_of(self, n: int) -> dict[str, Any]:
        """Return the side inputs of a micro-batch in flight."""
        return self._contexts[n][0]

    def note_side(self, n: int, side: dict[str, Any]) -> None:
        """Note the side inputs of a micro-batch, which travel with it."""
        self._contexts[n] = side, self._contexts[n][1]

    def take_target(self, n: int) -> Any:
        """Return the target of a micro-batch that has come to the last rank; None elsewhere."""
        return self._future_targets.pop(n, None)

    def forget(self, stage: int, n: int) -> None:
        if stage == self.own[0]:
            del self._contexts[n]

    def exchange(self, t: int, group: int) -> None:
        self.mail.exchange(t, group, self.in_flight.entered)

    def average(self, stages: Sequence[Stage]) -> None:
        if self.has_replicas:
            for stage in stages:
                Shares(stage.module).average(self._team)

    def average_shares(self, shares: Sequence[Shares]) -> None:
        for share in shares:
            share.average(self._team)

    def drain(self) -> None:
        """Receive all messages in flight, so that inboxes hold what they hold in one process."""
        flight = self.in_flight
        for direction, stage, local in self._arriving(flight.tick, flight.entered):
            n = flight.first + local
            flight.inbox(direction, stage)[n] = self._receive(direction, n)
        self.mail.finish()

    def contexts(self) -> dict[int, tuple[dict[str, Any], Autocast]]:
        return dict(self._contexts)

    def targets(self) -> dict[int, Any]:
        return super().targets() | self._future_targets

    def restore(self, state: dict[str, Any]) -> None:
        """Note what a state knows of the micro-batches in flight, after the inboxes are filled."""
        flight = self.in_flight
        ticks = flight.schedule.lag("B", self.own[0])  # until a micro-batch has left
        self._contexts = {
            n: (entry["side"], Autocast(self._device, entry["autocast"]))
            for n, entry in self._moved(state["microbatches"]).items()
            if n - flight.first + ticks >= flight.tick
        }
        here = {n for inbox in flight.up for n in inbox}
        self._future_targets = {
            n: self._moved(target)
            for n, target in state["targets"].items()
            if self._team.is_last and n not in here
        }

    def norms(self, stages: Sequence[Stage]) -> list[Tensor]:
        num_stages = self.in_flight.schedule.num_stages
        if not self.shares_norms:
            return [torch.zeros(())] * num_stages  # unused
        mine = torch.zeros(num_stages, dtype=torch.float64, device=self._team.device)
        for stage in stages:
            mine[stage.index] = stage.norm
        norms = torch.stack(self._team.gather(mine, in_column=True)).sum(0)
        return list(norms.to(self._device))

    def report(self, tick: Tick, t: int) -> Tick:
        if self._share_loss:
            tick = self._with_loss(tick, t)
        if tick.loss is None and not self._team.is_last:
            at = self._team.ranks[-1]
            why = f"the loss is on rank {at}, the last of this column; share_loss=True sends it"
            return Tick(reason=why)
        return tick

    def _with_loss(self, tick: Tick, t: int) -> Tick:
        """Send the loss of a tick to all ranks, if it has one."""
        schedule = self.in_flight.schedule
        local = t - schedule.lag("F", schedule.num_stages - 1)
        if not 0 <= local < self.in_flight.entered:
            return tick
        loss = torch.zeros((), dtype=torch.float64, device=self._team.device)
        if tick.loss is not None:
            loss.copy_(tick.loss.detach())
        self._team.broadcast_in_column(loss, self._team.num_places - 1)
        if tick.loss is not None:
            return tick
        return Tick(self.in_flight.first + local, loss.to(self._device))

    def _arriving(self, end: int, entered: int) -> Iterator[Leg]:
        """Yield the messages sent here before tick `end` that have not been received.

        Of all micro-batches, `entered` will have entered by then.
        """
        flight = self.in_flight
        ticks = range(flight.tick - flight.schedule.max_ticks, end)
        for leg in self.mail.arriving(ticks, entered):
            is_here = flight.first + leg.microbatch in flight.inbox(leg.direction, leg.stage)
            if not is_here and not flight.schedule.is_read(leg, flight.tick):
                yield leg

    def _receive(self, direction: Direction, n: int) -> Message:
        flow, grads, arrived = self.mail.take(direction)
        side, autocast = self._contexts[n]
        if direction == "down":
            return Message(n, flow, autocast, side, grads=grads)
        self.note_side(n, arrived)
        return Message(n, flow, autocast, arrived, self.take_target(n))

    def _moved(self, tree: Any) -> Any:
        return map_tensors(lambda tensor: tensor.to(self._device), tree)
