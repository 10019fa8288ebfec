"""What a process sends to its neighbours in a pipeline, and gets from them.

Which messages there are is said by tick.py: what a neighbour's stage does in a tick arrives after
the latency.
"""

from collections.abc import Iterator
from typing import Any

import torch

from redivider.pipeline.packing import Packing
from redivider.pipeline.stage import Message, Way
from redivider.pipeline.team import Team
from redivider.pipeline.tick import actions
from redivider.pipeline.unit import Flow
from redivider.pipeline.wire import AS_IT_IS, Incoming, Outgoing, Post, dtype_of, name_of


class Mail:
    """The lines of a process to the ones before and after it.

    Args:
        team: The processes.
        own: The stages of this one.
        num_stages: Of the pipeline.
        latency: Ticks that a message travels.
        packing: Of messages.
        device: Where they are wanted.
    """

    def __init__(
        self,
        team: Team,
        own: range,
        num_stages: int,
        latency: int,
        packing: Packing,
        device: torch.device,
    ) -> None:
        self._team, self._device = team, device
        self._num_stages, self._latency = num_stages, latency
        self._post = post = Post(team)
        self._incoming: dict[Way, Incoming] = {}
        self._outgoing: dict[Way, Outgoing] = {}
        # The action of a neighbour that sends, by the stage here that gets it.
        self._senders: dict[tuple[str, int], tuple[Way, int]] = {}
        most = 2 * latency
        if team.place > 0:
            below = team.ranks[team.place - 1]
            self._senders["F", own[0] - 1] = ("up", own[0])
            self._incoming["up"] = Incoming(post, team, packing, below, "up", device)
            self._outgoing["down"] = Outgoing(post, team, packing, below, "down", most)
        if not team.is_last:
            above = team.ranks[team.place + 1]
            self._senders["B", own[-1] + 1] = ("down", own[-1])
            self._incoming["down"] = Incoming(post, team, packing, above, "down", device)
            self._outgoing["up"] = Outgoing(post, team, packing, above, "up", most)

    @property
    def num_bytes_sent(self) -> int:
        """By messages of ticks, so far."""
        return sum(each.bytes_sent for each in self._outgoing.values())

    def arriving(self, ticks: range, entered: int) -> Iterator[tuple[Way, int, int]]:
        """The messages that neighbours send in some ticks: which way, to which stage, of which one.

        Micro-batches are counted since the pipeline was empty; so many have entered.
        """
        for t in ticks:
            for kind, stage, local in actions(t, self._num_stages, self._latency, entered):
                if (kind, stage) in self._senders:
                    yield *self._senders[kind, stage], local

    def ticks_ahead(self, t: int) -> range:
        """When what is to be made ready for at tick t is sent: what is on its way, and soon."""
        # NCCL's receives of a tick begin with its sends.
        ahead = 1 if self._team.batches else self._latency
        return range(t - self._latency, t + ahead)

    def expect(self, way: Way, num: int) -> None:
        """Make ready for the next messages."""
        self._incoming[way].expect(num)

    def send(self, way: Way, message: Message) -> None:
        """Send a message to the next process, or to the one before."""
        flow, side = message.flow, message.side if way == "up" else {}
        tree, exact = (flow.value, message.grads), (name_of(flow.dtype), side)
        self._outgoing[way].send(tree, exact)

    def take(self, way: Way) -> tuple[Flow, list[Any], dict[str, Any]]:
        """The next message: its flow, gradients and, upwards, side inputs; waits for it."""
        (value, grads), (dtype, side) = self._incoming[way].take()
        return Flow(value, dtype_of(dtype)), grads, side

    def exchange(self) -> None:
        """Begin the transfers of a tick, where they begin together."""
        self._post.exchange()

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        for each in self._outgoing.values():
            each.finish()

    def pass_on(self, flow: Flow, side: dict[str, Any]) -> None:
        """Send what is evaluated to the next process, if there is one; it may look as it likes."""
        if not self._team.is_last:
            above = self._team.ranks[self._team.place + 1]
            line = Outgoing(self._post, self._team, AS_IT_IS, above, "evaluate", 1)
            line.send(flow.value, (name_of(flow.dtype), side))
            self._post.exchange()
            line.finish()

    def take_over(self) -> tuple[Flow, dict[str, Any]]:
        """What the process before has passed on."""
        below = self._team.ranks[self._team.place - 1]
        line = Incoming(self._post, self._team, AS_IT_IS, below, "evaluate", self._device)
        value, (dtype, side) = line.take()
        return Flow(value, dtype_of(dtype)), side
