"""Order of the actions of a pipeline as waves: one kind of action in several stages. No torch.

In a wave every stage runs its next micro-batch. Waves follow each other in an order in which every
message is sent before it is read, and in which each device finds its own actions in their order.

    gpipe            all forwards, then all backwards (Huang et al. 2019)
    1f1b             a `Schedule` of latency 0.5 with the micro-batches of one update
    interleaved      every device has two stages, far apart in the model (Narayanan et al. 2021)
    zero-bubble      1f1b; gradients of weights come later and fill gaps (ZB-H1, Qi et al. 2023)
    zero-bubble-h2   the same for a `Schedule` of latency 1, with twice the memory
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from redivider.pipeline.schedule import KINDS, Kind, Schedule

CHUNKS = 2
"""Stages of a device in the interleaved order."""
Wave: TypeAlias = tuple[Kind, Sequence[int]]


def schedule_waves(schedule: Schedule, num: int, when: range | None = None) -> Iterator[Wave]:
    """Yield the actions of `num` micro-batches, slot by slot.

    Args:
        schedule: The schedule.
        num: Number of micro-batches that enter.
        when: The slots; all by default.
    """
    last = schedule.num_stages - 1
    tables: dict[tuple[Kind, int], list[tuple[int, int]]] = {}
    for kind in KINDS:
        for stage in range(last + 1):
            # The last stage runs its backward right after its forward: as if in the next slot.
            slot = schedule.slot(kind, stage) + (kind == "B" and stage == last)
            tables.setdefault((kind, slot % 2), []).append((slot, stage))
    rows = {key: tuple(zip(*sorted(pairs), strict=True)) for key, pairs in tables.items()}
    for slot in range(2 * schedule.num_ticks(num) + 1) if when is None else when:
        for kind in KINDS:
            slots, stages = rows.get((kind, slot % 2), ((), ()))
            active = stages[bisect_right(slots, slot - 2 * num) : bisect_right(slots, slot)]
            if active:
                yield kind, active


def gpipe_waves(num_devices: int, num: int) -> Iterator[Wave]:
    """Yield all forwards, then all backwards."""
    for _ in range(num):
        yield "F", range(num_devices)
    for _ in range(num):
        yield "B", range(num_devices - 1, -1, -1)


def interleaved_waves(num_devices: int, num: int) -> Iterator[Wave]:
    """Yield the interleaved order: stage c J + j is chunk c of device j.

    Groups of J micro-batches pass the chunks one after the other. With q counting micro-batches and
    chunks in this order, device j runs forward q in tick q + j, and backward q as many ticks later
    as it has forwards in advance.
    """
    total, warm_up = CHUNKS * num, (CHUNKS - 1) * num_devices
    chunks = [q // num_devices % CHUNKS * num_devices for q in range(total)]
    for tick in range(total + 2 * num_devices + warm_up):
        devices = range(max(0, tick - total + 1), min(num_devices, tick + 1))
        yield "F", [chunks[tick - j] + j for j in devices]
        first = tick - 2 * (num_devices - 1) - warm_up  # backward of device 0
        devices = range(max(0, -first), min(num_devices, total - first))
        yield "B", [warm_up - chunks[first + j] + j for j in devices]
