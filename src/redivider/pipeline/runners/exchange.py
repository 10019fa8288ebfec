"""Exchange of messages between a process and its two neighbours.

schedule.py says which messages a tick has; wire.py moves them.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from redivider.pipeline.runners.topology import Team
from redivider.pipeline.runners.wire import (
    AS_IT_IS,
    NUM_TEAMS,
    Buffers,
    Incoming,
    Outgoing,
    Post,
    dtype_of,
    name_of,
)
from redivider.pipeline.schedule import Direction, Leg, Schedule
from redivider.pipeline.stages.compression import Packing
from redivider.pipeline.stages.message import Flow, Message

# Flow, gradients and, upwards, side inputs of a message.
Contents: TypeAlias = tuple[Flow, list[Any], dict[str, Any]]


class Mail:
    """Lines of a process to the processes before and after it.

    Args:
        team: The processes.
        own: The stages of this one.
        schedule: Schedule of the pipeline.
        packing: How messages are packed.
        device: Device on which messages are wanted.
    """

    def __init__(
        self,
        team: Team,
        own: range,
        schedule: Schedule,
        packing: Packing,
        device: torch.device,
    ) -> None:
        if not team.batches and team.number >= NUM_TEAMS:
            raise RuntimeError(
                f"these processes have made {NUM_TEAMS:,} pipelines, which leaves no tags for the "
                "messages of another one; start new processes"
            )
        self._team, self._device = team, device
        self._own, self._schedule = own, schedule
        self.is_packed = packing.dtype is not None
        """Whether messages travel in another form than they are read in."""
        self._post = post = Post(team)
        self.incoming: dict[Direction, Incoming] = {}
        self._outgoing: dict[Direction, Outgoing] = {}
        self._sent: list[Direction] = []  # in this tick
        self._when_full: dict[int, tuple[list[Direction], ...]] = {}
        self._num_evaluated = Counter[str]()
        self.max_leaving = max_leaving = 2 * schedule.max_ticks
        """Messages to a neighbour that may be on their way, at most."""
        if team.place > 0:
            below = team.ranks[team.place - 1]
            self.incoming["up"] = Incoming(post, team, packing, below, "up", device)
            self._outgoing["down"] = Outgoing(post, team, packing, below, "down", max_leaving)
        if not team.is_last:
            above = team.ranks[team.place + 1]
            self.incoming["down"] = Incoming(post, team, packing, above, "down", device)
            self._outgoing["up"] = Outgoing(post, team, packing, above, "up", max_leaving)

    @property
    def num_bytes_sent(self) -> int:
        """Bytes of messages of ticks that were sent so far."""
        return sum(line.bytes_sent for line in self._outgoing.values())

    def arriving(self, ticks: range, entered: int) -> Iterator[Leg]:
        """Yield the messages that neighbours send here in some ticks.

        Micro-batches are counted since the pipeline was empty; `entered` is how many have entered.
        """
        for t in ticks:
            for group in range(self._schedule.num_groups):
                yield from self._schedule.received(t, group, self._own, entered)

    def expect(self, legs: Iterator[Leg]) -> None:
        """Post receives early, if the backend matches by tag."""
        if not self._team.batches:
            for direction, num in Counter(leg.direction for leg in legs).items():
                self.incoming[direction].expect(num)

    def send(self, direction: Direction, message: Message) -> None:
        """Send a message to the next process, or to the one before."""
        self.send_packed(direction, self.pack(direction, message))

    def pack(self, direction: Direction, message: Message) -> list[Tensor]:
        """Return the bytes of a message to the next process, or to the one before."""
        flow, side = message.flow, message.side if direction == "up" else {}
        tree, exact = (flow.value, message.grads), (name_of(flow.dtype), side)
        return self._outgoing[direction].pack(tree, exact)

    def send_packed(self, direction: Direction, data: list[Tensor]) -> None:
        """Send the bytes of a message."""
        self._outgoing[direction].send_packed(data)
        self._sent.append(direction)

    def take(self, direction: Direction) -> Contents:
        """Wait for the next message; return its flow, gradients and, upwards, side inputs."""
        return _contents(self.incoming[direction].take())

    def allocate(self, direction: Direction) -> tuple[Buffers, Contents]:
        """Return memory for a message, of zeros, and the message in it."""
        line = self.incoming[direction]
        buffers = line.allocate()
        for tensor in buffers.data:
            tensor.zero_()
        return buffers, _contents(line.unpack(buffers))

    def take_into(self, direction: Direction, buffers: Buffers) -> None:
        """Wait for the next message, and leave it in these buffers."""
        received = self.incoming[direction].take_buffers()
        if received is not buffers:
            torch._foreach_copy_(buffers.parts, received.parts)

    def exchange(self, t: int, group: int, entered: int) -> None:
        """Start the batch of a group of actions, if the backend matches by order."""
        directions, self._sent = self._sent, []
        if not self._team.batches:
            return
        due, arriving = self._directions(t, group, entered)
        # Else receives would match other messages.
        assert directions == due, f"tick {t} sent {directions} and not {due}"
        for direction in arriving:
            self.incoming[direction].post_next()
        self._post.exchange()
        self.catch_up()

    def _directions(self, t: int, group: int, entered: int) -> tuple[list[Direction], ...]:
        """Return the directions of the messages that are sent and received after some actions."""
        is_full = self._schedule.num_in_flight <= t < entered
        if not is_full or group not in self._when_full:
            functions = (self._schedule.sent, self._schedule.received)
            directions = tuple(
                [leg.direction for leg in function(t, group, self._own, entered)]
                for function in functions
            )
            if not is_full:
                return directions
            self._when_full[group] = directions  # the same in every tick
        return self._when_full[group]

    def catch_up(self) -> None:
        """Wait for old transfers: the host runs ahead of the GPU by at most latency + 2 ticks."""
        self._team.catch_up(self._schedule.num_groups * (self._schedule.max_ticks + 2))

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        for line in self._outgoing.values():
            line.finish()
        self._team.catch_up()

    def pass_on(self, flow: Flow, side: dict[str, Any]) -> None:
        """Send a value to evaluate to the next process, if there is one; any shape will do."""
        if not self._team.is_last:
            above = self._team.ranks[self._team.place + 1]
            line = Outgoing(self._post, self._team, AS_IT_IS, above, "evaluate", 1)
            line.number = self._count("passed on")
            line.send(flow.value, (name_of(flow.dtype), side))
            self._post.exchange()
            line.finish()

    def take_over(self) -> tuple[Flow, dict[str, Any]]:
        """Return the value to evaluate that the process before has passed on."""
        below = self._team.ranks[self._team.place - 1]
        line = Incoming(self._post, self._team, AS_IT_IS, below, "evaluate", self._device)
        line.number = self._count("taken over")
        line.post_next()
        self._post.exchange()
        value, (dtype, side) = line.take()
        return Flow(value, dtype_of(dtype)), side

    def _count(self, what: str) -> int:
        self._num_evaluated[what] += 1
        return self._num_evaluated[what]


def _contents(tree: Any) -> Contents:
    (value, grads), (dtype, side) = tree
    return Flow(value, dtype_of(dtype)), grads, side
