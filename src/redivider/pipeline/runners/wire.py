"""Messages between the stages of neighbouring processes.

A message is a tree of tensors. Its tree, shapes and dtypes go through the store once per direction,
before the first message. All messages of a direction look the same and travel as bytes: the tensors
of a small message in one buffer, because a transfer costs more than a copy; those of a large one
without a copy, where the backend can read the device. With gloo on a GPU they pass through pinned
memory.

gloo    matches by tag. A transfer begins once the sender knows of the receive, which is posted
        `latency` ticks before the one that sends the message.
NCCL    matches by order. All transfers of a tick begin in one batch at its end: what is sent in a
        tick has its receive posted in the same tick. So the batches of neighbours mirror each
        other, and cannot deadlock when NCCL's buffers are full. They run beside the next ticks.

    tick t:  rank 0  F B  [send up,   recv down]        read at tick t + latency
             rank 1  F B  [send down, recv up  ]
"""

import json
import math
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

from redivider._torch_private import Operation, begin_batch
from redivider.pipeline.runners.topology import Team
from redivider.pipeline.stages.compression import Packing
from redivider.strides import dense, inverse, memory_order

# Numbers that make a tag, together of 31 bits. A receive that nothing has matched outlives its
# pipeline, so no other one may use its tags.
NUM_TENSORS = 2**10  # of a message, at most
NUM_TEAMS = 2**11  # pipelines that the same processes may make
NUM_TAGS = 2**8  # messages of a line until its tags begin anew
SMALL = 4 * 2**20  # bytes of a message that is sent as one tensor
Kind: TypeAlias = Literal["up", "down", "evaluate"]
KINDS: tuple[Kind, ...] = get_args(Kind)
AS_IT_IS = Packing(None)
Layout: TypeAlias = tuple[TreeSpec, list[Any]]


class Transfer:
    """Tensors of one message that are being sent to, or received from, a rank."""

    def __init__(self, team: Team, tensors: Sequence[Tensor], rank: int) -> None:
        self._team, self.tensors, self.rank = team, tensors, rank
        self.is_queued = False
        self.works: list[Any] = []

    def wait(self) -> None:
        """Wait for all tensors."""
        assert not self.is_queued, f"a transfer with rank {self.rank} has not begun"
        for work in self.works:
            self._team.wait(work, self.rank)
        # Also for the other transfers of a batch, which share the list: all waits are on the stream
        # of the ticks.
        self.works.clear()


class Post:
    """Starts transfers: at once with gloo, in one batch per tick with NCCL."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._queued: list[Transfer] = []
        self._batch: list[Operation] = []

    def begin(
        self, direction: Literal["send", "receive"], tensors: Sequence[Tensor], rank: int, tag: int
    ) -> Transfer:
        """Start to send or receive the bytes of a message; tensor i has the tag `tag` + i."""
        transfer = Transfer(self._team, tensors, rank)
        parts = [(i, tensor) for i, tensor in enumerate(tensors) if tensor.numel()]
        if self._team.batches:
            self._batch += [Operation(direction == "send", data, rank) for _, data in parts]
            transfer.is_queued = bool(parts)
            self._queued.append(transfer)
        else:
            if len(tensors) > NUM_TENSORS:
                raise ValueError(
                    f"a message has {len(tensors)} tensors, and over gloo it may have "
                    f"{NUM_TENSORS}; join tensors of side inputs"
                )
            function: Any = dist.isend if direction == "send" else dist.irecv
            group = self._team.stage_group
            with self._team.watch.waiting_for(rank):
                transfer.works = [function(d, rank, group=group, tag=tag + i) for i, d in parts]
        return transfer

    def exchange(self) -> None:
        """Start all queued transfers in one batch."""
        queued, batch = self._queued, self._batch
        self._queued, self._batch = [], []
        if not batch:
            return
        ranks = {transfer.rank for transfer in queued}
        rank = ranks.pop() if len(ranks) == 1 else None
        start = self._team.mark()
        with self._team.watch.waiting_for(rank):
            works = begin_batch(self._team.stage_group, batch)
        for transfer in queued:
            if transfer.is_queued:
                transfer.is_queued, transfer.works = False, works
        self._team.follow(works, rank, start)


@dataclass(frozen=True)
class Buffers:
    """Memory of a message that is received: as it travels, and as the tensors of the message."""

    data: list[Tensor]
    parts: list[Tensor]


@dataclass
class Outgoing:
    """Messages to a neighbour."""

    post: Post
    team: Team
    packing: Packing
    rank: int
    kind: Kind
    max_leaving: int
    """Messages that may be on their way before one more waits for the first of them."""
    number: int = 0
    """Number of this line among the lines of its kind to that rank."""
    bytes_sent: int = 0
    _num: int = 0
    _layout: Layout | None = None
    _signature: Any = None
    _leaving: deque[Transfer] = field(default_factory=deque)

    def send(self, tree: Any, exact: Any) -> None:
        """Send a message: a tree that may be rounded, and one that must stay exact."""
        self.send_packed(self.pack(tree, exact))

    def pack(self, tree: Any, exact: Any) -> list[Tensor]:
        """Return the bytes of a message as they travel, in one or several tensors."""
        leaves, spec = tree_flatten((tree, exact))
        num = len(tree_leaves(tree))
        packed = [
            [dense(part) for part in (self.packing if i < num else AS_IT_IS).pack(leaf)]
            if isinstance(leaf, Tensor)
            else None
            for i, leaf in enumerate(leaves)
        ]
        self._verify_layout(spec, leaves, packed)
        parts = [part for tensors in packed if tensors is not None for part in tensors]
        # As bytes: no backend supports all dtypes.
        flat = [_bytes_of(p if p.is_contiguous() else p.permute(memory_order(p))) for p in parts]
        if _are_joined([part.nbytes for part in flat]):
            flat = [torch.cat([part.to(flat[0].device) for part in flat])]
        return flat

    def send_packed(self, flat: list[Tensor]) -> None:
        """Send the bytes of a message."""
        flat = _on(self.team.device, flat)
        tag = _tag(self.team.number, self.kind, self._num)
        self._leaving.append(self.post.begin("send", flat, self.rank, tag))
        self.bytes_sent += sum(part.nbytes for part in flat)
        self._num += 1
        self.finish(self.max_leaving)

    def finish(self, max_leaving: int = 0) -> None:
        """Wait until all messages except the last few have been sent."""
        while len(self._leaving) > max_leaving:
            self._leaving.popleft().wait()

    def _verify_layout(
        self, spec: TreeSpec, leaves: Sequence[Any], packed: Sequence[list[Tensor] | None]
    ) -> None:
        """Announce shapes and dtypes with the first message; refuse a message with others."""
        signature = (
            spec,
            [
                (leaf.dtype, parts[0].shape, parts[0].stride()) if parts else leaf
                for leaf, parts in zip(leaves, packed, strict=True)
            ],
        )
        if signature == self._signature:
            return
        layouts = [
            _plain(leaf) if parts is None else [name_of(leaf.dtype), *map(_layout_of, parts)]
            for leaf, parts in zip(leaves, packed, strict=True)
        ]
        self._announce((spec, layouts))
        self._signature = signature

    def _announce(self, layout: Layout) -> None:
        """Send the layout of the messages, once; refuse a message with another one."""
        if self._layout == layout:
            return
        if self._layout is not None:
            raise ValueError(_differ(self._layout, layout))
        self._layout = layout
        note = f"{self.kind} {self.number} of rank {self.team.rank}"
        self.team.put_note(note, json.dumps([dump_tree(layout[0]), layout[1]]))


@dataclass
class Incoming:
    """Messages from a neighbour, in the order in which they were sent."""

    post: Post
    team: Team
    packing: Packing
    rank: int
    kind: Kind
    device: torch.device
    """Device on which messages are wanted."""
    number: int = 0
    """Number of this line among the lines of its kind from that rank."""
    _num: int = 0
    _layout: Layout | None = None
    _posted: deque[tuple[Transfer, Buffers]] = field(default_factory=deque)
    _rotation: Sequence[Buffers] = ()
    _first: int = 0  # message for the first buffers of the rotation

    def expect(self, num: int) -> None:
        """Post receives for the next `num` messages, once their shapes are known."""
        while self._layout is not None and len(self._posted) < num:
            self.post_next()

    def post_next(self) -> None:
        """Post the receive of the next message."""
        if self._rotation:
            buffers = self._rotation[(self._num - self._first) % len(self._rotation)]
        else:
            buffers = self.allocate()
        tag = _tag(self.team.number, self.kind, self._num)
        self._posted.append((self.post.begin("receive", buffers.data, self.rank, tag), buffers))
        self._num += 1

    def allocate(self) -> Buffers:
        """Allocate memory for a message; wait until its shapes are known."""
        if self._layout is None:
            note = f"{self.kind} {self.number} of rank {self.rank}"
            spec, layouts = json.loads(self.team.take_note(note, self.rank))
            self._layout = treespec_loads(spec), layouts
        wired = [part for layout in self._layout[1] if _is_tensor(layout) for part in layout[1:]]
        shapes = [[shape[dim] for dim in order] for shape, _, order in wired]
        dtypes = [dtype_of(dtype) for _, dtype, _ in wired]
        sizes = [math.prod(s) * d.itemsize for s, d in zip(shapes, dtypes, strict=True)]
        joined = [sum(sizes)] if _are_joined(sizes) else sizes
        pinned = self.team.device.type == "cpu" and self.device.type == "cuda"
        whole = [
            torch.empty(size, dtype=torch.uint8, device=self.team.device, pin_memory=pinned)
            for size in joined
        ]
        data = whole if joined is sizes else torch.split(whole[0], sizes)
        parts = [d.view(t).view(s) for d, t, s in zip(data, dtypes, shapes, strict=True)]
        return Buffers(whole, parts)

    def rotate(self, rotation: Sequence[Buffers], num_read: int) -> None:
        """Receive the next messages into these buffers, in turns.

        Args:
            rotation: The buffers; the first ones are for the next message that a tick reads.
            num_read: Messages that were received, but that no tick has read.
        """
        self._rotation = rotation
        self._first = self._num - len(self._posted) - num_read

    def stop_rotating(self) -> None:
        """Allocate memory for every message again, and copy those that have not been taken."""
        rotation, self._rotation = self._rotation, ()
        for i, (transfer, buffers) in enumerate(self._posted):
            if any(buffers is fixed for fixed in rotation):
                transfer.wait()
                self._posted[i] = transfer, Buffers([], [part.clone() for part in buffers.parts])

    def take(self) -> Any:
        """Wait for the next message, and return it."""
        buffers = self.take_buffers()
        if self._rotation:
            buffers = Buffers([], [part.clone() for part in buffers.parts])
        return self.unpack(buffers)

    def take_buffers(self) -> Buffers:
        """Wait for the next message, and return the memory that it was received into."""
        if not self._posted:
            self.post_next()
        transfer, buffers = self._posted.popleft()
        transfer.wait()
        return buffers

    def unpack(self, buffers: Buffers) -> Any:
        """Return the message that was received into some buffers."""
        assert self._layout is not None
        parts = iter(buffers.parts)
        spec, layouts = self._layout
        leaves = []
        for layout in layouts:
            if not _is_tensor(layout):
                leaves.append(layout)
                continue
            dtype, *wired = layout
            tensors = [
                next(parts).permute(inverse(order)).to(self.device, non_blocking=True)
                for _, _, order in wired
            ]
            leaves.append(self.packing.unpack(tensors, dtype_of(dtype)))
        return tree_unflatten(leaves, spec)


def name_of(dtype: torch.dtype | None) -> str | None:
    """Return the name of a dtype."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def dtype_of(name: str | None) -> Any:
    """Return the dtype of a name."""
    return None if name is None else getattr(torch, name)


def dump_tree(spec: TreeSpec) -> str:
    """Return the structure of a tree as text."""
    try:
        return treespec_dumps(spec)
    except NotImplementedError:
        raise TypeError(
            f"between processes only tensors in tuples, lists and dictionaries travel, got {spec}"
        ) from None


def _tag(team: int, kind: Kind, num: int) -> int:
    """Return the tag of a message's first tensor, which no message of another line has."""
    line = team * 4 + KINDS.index(kind)
    return ((num % NUM_TAGS) * 4 * NUM_TEAMS + line) * NUM_TENSORS


def _are_joined(sizes: Sequence[int]) -> bool:
    """Return whether tensors of these sizes, in bytes, are sent as one; both sides compute it.

    Inside of one buffer, a dtype begins at a multiple of its size.
    """
    return len(sizes) > 1 and sum(sizes) <= SMALL and all(size % 16 == 0 for size in sizes[:-1])


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _on(device: torch.device, tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors on the device from which they are sent.

    Check every one: a side input may be on the host while streams are on the GPU.
    """
    if device.type != "cpu":
        return [tensor.to(device) for tensor in tensors]
    gpu = next((tensor.device for tensor in tensors if tensor.device != device), None)
    if gpu is None:
        return tensors
    pinned = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
    for target, source in zip(pinned, tensors, strict=True):
        target.copy_(source, non_blocking=True)
    torch.cuda.current_stream(gpu).synchronize()
    return pinned


def _layout_of(tensor: Tensor) -> list[Any]:
    return [list(tensor.shape), name_of(tensor.dtype), memory_order(tensor)]


def _differ(before: Layout, now: Layout) -> str:
    """Return the text of an error: a message has another layout than the messages before it."""
    if before[0] == now[0]:
        for one, other in zip(before[1], now[1], strict=True):
            if one != other and not _is_tensor(one):
                return (
                    f"a side input is {other!r} now, and was {one!r}: numbers must stay the same "
                    "over all micro-batches; give one that changes as a tensor"
                )
    shapes = [", ".join(_describe(part) for part in layout[1]) for layout in (now, before)]
    return (
        f"messages are {shapes[0]} now, and were {shapes[1]}: all micro-batches of a "
        "DistributedPipeline have one shape; leave the last, smaller batch of an epoch out"
    )


def _describe(layout: Any) -> str:
    return f"{layout[1][0]} {layout[0]}" if _is_tensor(layout) else repr(layout)


def _is_tensor(layout: Any) -> bool:
    return isinstance(layout, list)


def _plain(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return leaf
    raise TypeError(
        f"a side input of a DistributedPipeline holds a {type(leaf).__name__}; only tensors, "
        "numbers and strings travel"
    )
