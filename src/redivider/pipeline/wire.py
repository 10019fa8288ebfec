"""Messages between the stages of neighbouring processes.

A message is a tree of tensors. How it looks, its tree, shapes and dtypes, goes ahead of the first
one in each direction; all that follow look the same, and travel as bare tensors: nothing is copied
where the backend reaches the device. Where it does not (gloo, from a GPU), they pass through pinned
memory.

gloo    a transfer begins at once; receives are posted a latency ahead, where it is known that
        there will be something to receive, and sends do not block
NCCL    the transfers of a tick begin together when its computation is queued, in one batch
"""

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import (
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

from redivider.pipeline.dense import dense, order_of
from redivider.pipeline.packing import Packing
from redivider.pipeline.team import Team

NUM_TENSORS = 2**12  # of a message, at most
NUM_TAGS = 2**15  # micro-batches until tags begin anew
Kind: TypeAlias = Literal["up", "down", "evaluate"]
KINDS: tuple[Kind, ...] = get_args(Kind)
AS_IT_IS = Packing(None)


class Transfer:
    """A tensor on its way, to or from a rank."""

    def __init__(self, team: Team, tensor: Tensor, rank: int) -> None:
        self._team, self.tensor, self._rank = team, tensor, rank
        self.work: Any = None

    def wait(self) -> Tensor:
        """Wait until it has arrived, or left."""
        if self.work is not None:
            self._team.wait(self.work, self._rank)
            self.work = None
        return self.tensor


class Post:
    """Begins transfers, at once or all of a tick together."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._queued: list[tuple[Transfer, dist.P2POp]] = []

    def begin(self, way: str, tensor: Tensor, rank: int, tag: int) -> Transfer:
        """Begin to "send" or to "receive" a tensor."""
        transfer = Transfer(self._team, tensor, rank)
        if not tensor.numel():
            return transfer
        function: Any = dist.isend if way == "send" else dist.irecv
        group = self._team.stage_group
        with self._team.talking(rank):
            if self._team.batches:
                self._queued.append((transfer, dist.P2POp(function, tensor, rank, group, tag)))
            else:
                transfer.work = function(tensor, rank, group=group, tag=tag)
        return transfer

    def exchange(self) -> None:
        """Begin what was queued, in one batch."""
        if self._queued:
            works = dist.batch_isend_irecv([op for _, op in self._queued])
            for transfer, _ in self._queued:
                transfer.work = _All(works)
            self._queued = []


class _All:
    """Several works as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self, timeout: Any) -> None:
        for each in self._works:
            each.wait(timeout)


@dataclass
class Outgoing:
    """Messages to a neighbour."""

    post: Post
    team: Team
    packing: Packing
    rank: int
    kind: Kind
    most: int
    """Messages that may be on their way before one more waits for the first of them."""
    bytes_sent: int = 0
    _look: str | None = None
    _leaving: deque[list[Transfer]] = field(default_factory=deque)

    def send(self, n: int, tree: Any, exact: Any) -> None:
        """Send a message of micro-batch n, and what must not be rounded of it."""
        leaves, spec = tree_flatten((tree, exact))
        num = len(tree_leaves(tree))
        packed = [
            [dense(part) for part in (self.packing if i < num else AS_IT_IS).pack(leaf)]
            if isinstance(leaf, Tensor)
            else None
            for i, leaf in enumerate(leaves)
        ]
        looks = [
            _plain(leaf) if parts is None else [_name(leaf.dtype), *map(_look_of, parts)]
            for leaf, parts in zip(leaves, packed, strict=True)
        ]
        look = json.dumps([treespec_dumps(spec), looks])
        begun = [] if self._look == look else self._tell(n, look)
        parts = [part for some in packed if some is not None for part in some]
        flat = [part.permute(order_of(part)) for part in parts]
        for i, part in enumerate(_on(self.team.device, flat)):
            begun.append(self.post.begin("send", part, self.rank, _tag(self.kind, n, i)))
            self.bytes_sent += part.nbytes
        self._leaving.append(begun)
        while len(self._leaving) > self.most:
            self._finish_first()

    def finish(self) -> None:
        """Wait until all is received."""
        while self._leaving:
            self._finish_first()

    def _finish_first(self) -> None:
        for each in self._leaving[0]:
            each.wait()
        self._leaving.popleft()

    def _tell(self, n: int, look: str) -> list[Transfer]:
        """Say how messages look; once."""
        if self._look is not None:
            raise ValueError(
                f"micro-batch {n} has messages of {_shapes(look)}, those before of "
                f"{_shapes(self._look)}: all micro-batches of a DistributedPipeline have one "
                "shape; leave the last, smaller batch of an epoch out"
            )
        self._look = look
        data = torch.frombuffer(bytearray(look.encode()), dtype=torch.uint8).to(self.team.device)
        size = torch.tensor([len(data)], device=self.team.device)
        found = []
        for i, each in enumerate((size, data)):
            tag = _tag(self.kind, n, NUM_TENSORS - 2 + i)
            found.append(self.post.begin("send", each, self.rank, tag))
        return found


@dataclass
class Incoming:
    """Messages from a neighbour."""

    post: Post
    team: Team
    packing: Packing
    rank: int
    kind: Kind
    device: torch.device
    """Where messages are wanted."""
    _look: Any = None
    _posted: dict[int, list[Transfer]] = field(default_factory=dict)

    def expect(self, n: int) -> None:
        """Make ready for the message of micro-batch n, if it is known how it looks."""
        if self._look is None or n in self._posted:
            return
        _, looks = self._look
        wired = [part for look in looks if _is_tensor(look) for part in look[1:]]
        self._posted[n] = []
        for i, (shape, dtype, order) in enumerate(wired):
            buffer = torch.empty(
                [shape[each] for each in order],
                dtype=getattr(torch, dtype),
                device=self.team.device,
                pin_memory=self.team.device.type == "cpu" and self.device.type == "cuda",
            )
            tag = _tag(self.kind, n, i)
            self._posted[n].append(self.post.begin("receive", buffer, self.rank, tag))

    def take(self, n: int) -> Any:
        """The message of micro-batch n; waits for it."""
        if self._look is None:
            self._look = self._hear(n)
        if n not in self._posted:
            self.expect(n)
            self.post.exchange()
        parts = iter([transfer.wait() for transfer in self._posted.pop(n)])
        spec, looks = self._look
        leaves = []
        for look in looks:
            if not _is_tensor(look):
                leaves.append(look)
                continue
            dtype, *wired = look
            found = [
                next(parts).permute(_inverse(order)).to(self.device, non_blocking=True)
                for _, _, order in wired
            ]
            leaves.append(self.packing.unpack(found, getattr(torch, dtype)))
        return tree_unflatten(leaves, treespec_loads(spec))

    def _hear(self, n: int) -> Any:
        size = torch.zeros(1, dtype=torch.int64, device=self.team.device)
        self._receive(size, _tag(self.kind, n, NUM_TENSORS - 2))
        data = torch.zeros(int(size), dtype=torch.uint8, device=self.team.device)
        self._receive(data, _tag(self.kind, n, NUM_TENSORS - 1))
        return json.loads(bytes(data.tolist()).decode())

    def _receive(self, tensor: Tensor, tag: int) -> None:
        transfer = self.post.begin("receive", tensor, self.rank, tag)
        self.post.exchange()
        transfer.wait()


def _tag(kind: Kind, n: int, i: int) -> int:
    """So that a message can be taken for no other; NCCL has no tags, and goes by the order."""
    return ((n % NUM_TAGS) * 4 + KINDS.index(kind)) * NUM_TENSORS + i


def _on(device: torch.device, tensors: list[Tensor]) -> list[Tensor]:
    """The same where they must be to travel."""
    if not tensors or tensors[0].device == device:
        return tensors
    found = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
    for there, here in zip(found, tensors, strict=True):
        there.copy_(here, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return found


def _look_of(tensor: Tensor) -> list[Any]:
    return [list(tensor.shape), _name(tensor.dtype), order_of(tensor)]


def _shapes(look: str) -> str:
    leaves = json.loads(look)[1]
    return ", ".join(f"{e[1][0]} {e[0]}" if _is_tensor(e) else str(e) for e in leaves)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_tensor(look: Any) -> bool:
    return isinstance(look, list)


def _plain(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return leaf
    raise TypeError(
        f"a side input of a DistributedPipeline holds a {type(leaf).__name__}; only tensors, "
        "numbers and strings travel"
    )


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(each) for each in range(len(order))]
