"""Cost of messages: bytes of a tick against the formula, and the share of time spent waiting."""

from statistics import median
from typing import Any

import torch.distributed as dist
from launch import launch
from ours import Petra
from setting import Setting


def messages(setting: Setting, processes: list[int]) -> list[dict[str, Any]]:
    """Return a row for each process, for every number of processes above one."""
    rows = []
    for num in processes:
        if num > 1:
            rows += [{"processes": num, **row} for row in launch(work, num, setting)]
    return rows


def work(rank: int, setting: Setting) -> dict[str, Any]:
    """Measure in one process."""
    num = dist.get_world_size()
    petra = Petra(setting, setting.cut(num))
    seconds, waited, sent = [], [], 0
    for _ in range(setting.rounds):
        dist.barrier()
        petra.run(2)
        petra.waited.clear()
        before = petra.pipe.num_bytes_sent
        seconds.append(petra.run(setting.num_microbatches))
        waited.append(sum(end - start for start, end in petra.waited))
        sent = petra.pipe.num_bytes_sent - before
    dist.barrier()
    petra.close()
    # Up: two streams. Down: two streams and their gradients.
    streams = (2 if rank < num - 1 else 0) + (4 if rank > 0 else 0)
    shares = [part / whole for part, whole in zip(waited, seconds, strict=True)]
    return {
        "rank": rank,
        "bytes a tick": sent // setting.num_microbatches,
        "by the formula": streams * setting.stream_bytes,
        "ms a tick": 1000 * median(seconds) / setting.num_microbatches,
        "MB/s": sent / 1e6 / median(seconds),
        "waiting, % of a tick": 100 * median(shares),
    }
