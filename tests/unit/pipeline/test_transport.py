"""Messages between processes: a rank sends what its neighbour expects to receive."""

from itertools import combinations, pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from redivider.pipeline.runners import captured, wire
from redivider.pipeline.runners.exchange import Mail
from redivider.pipeline.runners.wire import SMALL, Incoming, Outgoing, Post, _on
from redivider.pipeline.schedule import Schedule
from redivider.pipeline.stages.compression import Packing


def spreads(stages: int):
    """Yield every spread of consecutive stages over two or more processes."""
    for num in range(1, stages):
        for ends in combinations(range(1, stages), num):
            yield [range(*pair) for pair in pairwise([0, *ends, stages])]


@pytest.mark.slow
@pytest.mark.parametrize("latency", [1, 2, 3])
@pytest.mark.parametrize("stages", range(2, 7))
def test_the_batches_of_neighbours_mirror_each_other(stages, latency):
    """In every tick, for every spread of the stages, until the pipeline is empty again."""
    schedule = Schedule(stages, latency)
    for entered in (1, 2 * stages):
        for t in range(schedule.num_ticks(entered) + 1):
            for spread in spreads(stages):
                out = [schedule.sent(t, 0, own, entered) for own in spread]
                into = [schedule.received(t, 0, own, entered) for own in spread]
                for place in range(len(spread) - 1):
                    ups = [leg for leg in out[place] if leg.direction == "up"]
                    downs = [leg for leg in out[place + 1] if leg.direction == "down"]
                    assert ups == [leg for leg in into[place + 1] if leg.direction == "up"]
                    assert downs == [leg for leg in into[place] if leg.direction == "down"]
                    assert len(ups) <= 1 and len(downs) <= 1  # no other order is possible
                    assert all(leg.stage == spread[place + 1][0] for leg in ups)
                    assert all(leg.stage == spread[place][-1] for leg in downs)
                assert not [leg for leg in out[0] if leg.direction == "down"]
                assert not [leg for leg in out[-1] if leg.direction == "up"]


@pytest.mark.parametrize("latency", [1, 2, 3])
def test_a_message_is_read_a_latency_after_its_tick(latency):
    schedule, own, entered = Schedule(4, latency), range(1, 3), 9
    for t in range(schedule.num_ticks(entered)):
        for direction, stage, microbatch in schedule.received(t, 0, own, entered):
            kind = "F" if direction == "up" else "B"
            due = schedule.actions(t + latency, entered)
            assert (kind, stage, microbatch) in due


def test_a_tick_that_sends_something_else_is_refused():
    team: Any = SimpleNamespace(batches=True, place=0, is_last=True)
    mail = Mail(team, range(1), Schedule(2), Packing(None), torch.device("cpu"))
    with pytest.raises(AssertionError, match="tick 0 sent"):
        mail.exchange(0, 0, 1)  # without the message to stage 1


def test_side_inputs_travel_from_where_streams_are():
    streams, number = torch.zeros(3, device="meta"), torch.tensor(0.5)
    assert [sent.device.type for sent in _on(streams.device, [streams, number])] == ["meta"] * 2


def test_a_transfer_that_has_not_begun_is_not_waited_for():
    team: Any = SimpleNamespace(batches=True, stage_group=None)
    post = Post(team)
    transfer = post.begin("receive", [torch.zeros(0)], 3, 0)
    transfer.wait()  # nothing travels
    transfer.is_queued = True
    with pytest.raises(AssertionError, match="rank 3 has not begun"):
        transfer.wait()


def test_tags_of_messages_differ():
    """Also of those of different pipelines, up to the last tensor of the last message."""
    teams = (0, 1, 2**5, wire.NUM_TEAMS - 1)
    nums = (0, 1, wire.NUM_TAGS - 2, wire.NUM_TAGS - 1)
    firsts = [wire._tag(*line) for line in product(teams, wire.KINDS, nums)]
    assert len({*firsts}) == 3 * 4**2
    assert all(first % wire.NUM_TENSORS == 0 for first in firsts)
    assert max(firsts) + wire.NUM_TENSORS <= 2**31


def test_a_message_has_as_many_tensors_as_tags():
    team: Any = SimpleNamespace(batches=False)
    with pytest.raises(ValueError, match="1025 tensors, and over gloo it may have 1024; join"):
        Post(team).begin("send", [torch.zeros(1)] * (wire.NUM_TENSORS + 1), 1, 0)


class Loop:
    """A team of one process, and a post that receives what it sends."""

    rank, number, device = 0, 0, torch.device("cpu")

    def __init__(self) -> None:
        self._notes: dict[str, str] = {}
        self.sent: list[list[Tensor]] = []

    def put_note(self, key: str, text: str) -> None:
        self._notes[key] = text

    def take_note(self, key: str, rank: int) -> str:
        return self._notes[key]

    def begin(self, direction: str, tensors: list, rank: int, tag: int) -> SimpleNamespace:
        if direction == "send":
            self.sent.append(tensors)
        else:
            for target, source in zip(tensors, self.sent[-1], strict=True):
                target.copy_(source.reshape(-1).view(torch.uint8))
        return SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize(
    "shape, exact, num",
    [
        ((4, 8), torch.arange(3), 1),
        ((4, 8), torch.tensor([], dtype=torch.bool), 1),
        ((3, 3), torch.arange(3), 3),  # a stream of 36 bytes: the next would not be aligned
        ((SMALL // 8,), torch.arange(3), 3),
    ],
)
def test_tensors_of_a_small_message_travel_as_one(shape, exact, num):
    loop: Any = Loop()
    streams = (torch.randn(shape), torch.randn(shape))
    Outgoing(loop, loop, Packing(None), 0, "up", 2).send(streams, {"mask": exact})
    assert len(loop.sent[0]) == num
    incoming = Incoming(loop, loop, Packing(None), 0, "up", loop.device)
    received, side = incoming.take()
    assert all(map(torch.equal, received, streams)) and torch.equal(side["mask"], exact)
    assert side["mask"].dtype == exact.dtype


def test_messages_arrive_in_turns_in_fixed_memory():
    loop: Any = Loop()
    outgoing = Outgoing(loop, loop, Packing(None), 0, "up", 9)
    incoming = Incoming(loop, loop, Packing(None), 0, "up", loop.device)
    values = [torch.full((4,), float(n)) for n in range(7)]
    outgoing.send(values[0], {})
    assert torch.equal(incoming.take()[0], values[0])
    rotation = [incoming.allocate() for _ in range(2)]
    incoming.rotate(rotation, 0)
    for n in (1, 2, 3):
        outgoing.send(values[n], {})
        incoming.post_next()
        assert incoming.take_buffers() is rotation[(n - 1) % 2]
        assert torch.equal(rotation[(n - 1) % 2].parts[0], values[n])
    for n in (4, 5):
        outgoing.send(values[n], {})
        incoming.post_next()
    taken = incoming.take()[0]  # is no view of the rotation
    incoming.stop_rotating()
    for buffers in rotation:
        buffers.parts[0].fill_(-1)
    assert torch.equal(taken, values[4]) and torch.equal(incoming.take()[0], values[5])
    outgoing.send(values[6], {})
    assert torch.equal(incoming.take()[0], values[6])


def test_as_many_ticks_are_recorded_as_messages_leave(monkeypatch):
    monkeypatch.setattr(captured, "NUM_PHASES", 1)
    cpu = torch.device("cpu")
    assert captured.num_phases(1, 10, cpu) == 2
    assert captured.num_phases(1, 10, cpu, least=5) == 5
    assert captured.num_phases(2, 10, cpu, least=5) == 6
