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
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

from redivider.pipeline.dense import dense, order_of
from redivider.pipeline.packing import Packing
from redivider.pipeline.team import Team

NUM_TENSORS = 2**10  # of a message, at most
NUM_TEAMS = 2**5  # pipelines that may be at work at once
NUM_TAGS = 2**13  # messages until tags begin anew
Kind: TypeAlias = Literal["up", "down", "evaluate"]
KINDS: tuple[Kind, ...] = get_args(Kind)
AS_IT_IS = Packing(None)
Look: TypeAlias = tuple[TreeSpec, list[Any]]


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
    _num: int = 0
    _look: Look | None = None
    _leaving: deque[list[Transfer]] = field(default_factory=deque)

    def send(self, tree: Any, exact: Any) -> None:
        """Send a message, and what must not be rounded of it."""
        leaves, spec = tree_flatten((tree, exact))
        num = len(tree_leaves(tree))
        packed = [
            [dense(part) for part in (self.packing if i < num else AS_IT_IS).pack(leaf)]
            if isinstance(leaf, Tensor)
            else None
            for i, leaf in enumerate(leaves)
        ]
        looks = [
            _plain(leaf) if parts is None else [name_of(leaf.dtype), *map(_look_of, parts)]
            for leaf, parts in zip(leaves, packed, strict=True)
        ]
        begun = self._tell((spec, looks))
        parts = [part for some in packed if some is not None for part in some]
        flat = [part.permute(order_of(part)) for part in parts]
        for i, part in enumerate(_on(self.team.device, flat)):
            begun.append(
                self.post.begin(
                    "send", part, self.rank, _tag(self.team.number, self.kind, self._num, i)
                )
            )
            self.bytes_sent += part.nbytes
        self._num += 1
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

    def _tell(self, look: Look) -> list[Transfer]:
        """Say how messages look, once; refuse one that looks otherwise."""
        if self._look == look:
            return []
        if self._look is not None:
            raise ValueError(_differ(self._look, look))
        self._look = look
        text = json.dumps([dump_tree(look[0]), look[1]])
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(self.team.device)
        size = torch.tensor([len(data)], device=self.team.device)
        return [
            self.post.begin(
                "send", each, self.rank, _tag(self.team.number, self.kind, 0, NUM_TENSORS - 2 + i)
            )
            for i, each in enumerate((size, data))
        ]


@dataclass
class Incoming:
    """Messages from a neighbour, in the order in which they were sent."""

    post: Post
    team: Team
    packing: Packing
    rank: int
    kind: Kind
    device: torch.device
    """Where messages are wanted."""
    _num: int = 0
    _look: Look | None = None
    _posted: deque[list[Transfer]] = field(default_factory=deque)

    def expect(self, num: int) -> None:
        """Make ready for as many messages, if it is known how they look."""
        while self._look is not None and len(self._posted) < num:
            wired = [part for look in self._look[1] if _is_tensor(look) for part in look[1:]]
            begun = []
            for i, (shape, dtype, order) in enumerate(wired):
                buffer = torch.empty(
                    [shape[each] for each in order],
                    dtype=dtype_of(dtype),
                    device=self.team.device,
                    pin_memory=self.team.device.type == "cpu" and self.device.type == "cuda",
                )
                tag = _tag(self.team.number, self.kind, self._num, i)
                begun.append(self.post.begin("receive", buffer, self.rank, tag))
            self._posted.append(begun)
            self._num += 1

    def take(self) -> Any:
        """The next message; waits for it."""
        if self._look is None:
            self._look = self._hear()
        if not self._posted:
            self.expect(1)
            self.post.exchange()
        parts = iter([transfer.wait() for transfer in self._posted.popleft()])
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
            leaves.append(self.packing.unpack(found, dtype_of(dtype)))
        return tree_unflatten(leaves, spec)

    def _hear(self) -> Look:
        size = torch.zeros(1, dtype=torch.int64, device=self.team.device)
        self._receive(size, 0)
        data = torch.zeros(int(size), dtype=torch.uint8, device=self.team.device)
        self._receive(data, 1)
        spec, looks = json.loads(bytes(data.tolist()).decode())
        return treespec_loads(spec), looks

    def _receive(self, tensor: Tensor, i: int) -> None:
        tag = _tag(self.team.number, self.kind, 0, NUM_TENSORS - 2 + i)
        transfer = self.post.begin("receive", tensor, self.rank, tag)
        self.post.exchange()
        transfer.wait()


def name_of(dtype: torch.dtype | None) -> str | None:
    """A dtype in plain data."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def dtype_of(name: str | None) -> Any:
    """A dtype from plain data."""
    return None if name is None else getattr(torch, name)


def dump_tree(spec: TreeSpec) -> str:
    """A tree's structure as text."""
    try:
        return treespec_dumps(spec)
    except NotImplementedError:
        raise TypeError(
            f"between processes only tensors in tuples, lists and dictionaries travel, got {spec}"
        ) from None


def _tag(team: int, kind: Kind, num: int, i: int) -> int:
    """So that a message can be taken for no other; NCCL has no tags, and goes by the order."""
    line = (team % NUM_TEAMS) * 4 + KINDS.index(kind)
    return ((num % NUM_TAGS) * 4 * NUM_TEAMS + line) * NUM_TENSORS + i


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
    return [list(tensor.shape), name_of(tensor.dtype), order_of(tensor)]


def _differ(before: Look, now: Look) -> str:
    """Why a message cannot follow another one."""
    if before[0] == now[0]:
        for one, other in zip(before[1], now[1], strict=True):
            if one != other and not _is_tensor(one):
                return (
                    f"a side input is {other!r} now, and was {one!r}: numbers must stay the same "
                    "over all micro-batches; give one that changes as a tensor"
                )
    shapes = [", ".join(_say(each) for each in look[1]) for look in (now, before)]
    return (
        f"messages are {shapes[0]} now, and were {shapes[1]}: all micro-batches of a "
        "DistributedPipeline have one shape; leave the last, smaller batch of an epoch out"
    )


def _say(look: Any) -> str:
    return f"{look[1][0]} {look[0]}" if _is_tensor(look) else repr(look)


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
