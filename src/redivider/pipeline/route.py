"""Which messages travel between processes in a tick. No torch here.

A function of the schedule alone: the sender and the receiver of a message count it in the same
tick, so that a backend may match messages by their order.
"""

from typing import Literal, NamedTuple, TypeAlias

from redivider.pipeline.tick import actions

Way: TypeAlias = Literal["up", "down"]


class Leg(NamedTuple):
    """A message on its way to a stage of the next process, or of the one before."""

    way: Way
    stage: int
    microbatch: int


def sent(t: int, own: range, stages: int, latency: int, num_microbatches: int) -> list[Leg]:
    """The messages that leave a process in a tick, in the order of its actions.

    Args:
        t: The tick, counted since the pipeline was empty, as micro-batches are.
        own: The stages of the process.
        stages: Number of stages.
        latency: Ticks that a message travels.
        num_microbatches: How many have entered.
    """
    legs = _legs(t, stages, latency, num_microbatches)
    return [leg for source, leg in legs if source in own and leg.stage not in own]


def received(t: int, own: range, stages: int, latency: int, num_microbatches: int) -> list[Leg]:
    """The messages that neighbours send to a process in a tick; it needs them a latency later."""
    legs = _legs(t, stages, latency, num_microbatches)
    return [leg for source, leg in legs if source not in own and leg.stage in own]


def _legs(t: int, stages: int, latency: int, num_microbatches: int) -> list[tuple[int, Leg]]:
    """All messages of a tick, with the stage that sends them."""
    found: list[tuple[int, Leg]] = []
    for kind, stage, microbatch in actions(t, stages, latency, num_microbatches):
        if kind == "F" and stage + 1 < stages:
            found.append((stage, Leg("up", stage + 1, microbatch)))
        elif kind == "B" and stage > 0:
            found.append((stage, Leg("down", stage - 1, microbatch)))
    return found
