"""Messages between the stages of neighbouring processes.

A message is a tree of tensors. Its tree, shapes and dtypes go through the store once per direction,
before the first message. All messages of a direction look the same and travel as bytes, without a
copy where the backend can read the device. With gloo on a GPU they pass through pinned memory.

gloo    matches by tag. A transfer begins at once. Receives are posted up to `latency` ticks ahead.
NCCL    matches by order. All transfers of a tick begin in one batch at its end: what is sent in a
        tick has its receive posted in the same tick. So the batches of neighbours mirror each
        other, whatever fits into NCCL's buffers. They run beside the next ticks.

    tick t:  rank 0  F B  [send up,   recv down]        read at tick t + latency
             rank 1  F B  [send down, recv up  ]
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

from redivider.pipeline.runners.topology import Team
from redivider.pipeline.stages.compression import Packing
from redivider.pipeline.stages.layout import dense, order_of

NUM_TENSORS = 2**10  # of a message, at most
NUM_TEAMS = 2**5  # pipelines that may be at work at once
NUM_TAGS = 2**13  # messages until tags begin anew
Kind: TypeAlias = Literal["up", "down", "evaluate"]
KINDS: tuple[Kind, ...] = get_args(Kind)
AS_IT_IS = Packing(None)
Look: TypeAlias = tuple[TreeSpec, list[Any]]


class Transfer:
    """Tensors of one message that are being sent to, or received from, a rank."""

    def __init__(self, team: Team, tensors: Sequence[Tensor], rank: int) -> None:
        self._team, self.tensors, self.rank = team, tensors, rank
        self.is_queued = False
        self.works: list[Any] = []

    def wait(self) -> Sequence[Tensor]:
        """Wait for all of them, and return them."""
        if self.is_queued:
            raise RuntimeError(
                f"a transfer with rank {self.rank} is waited for before it has begun; this is a "
                "defect of redivider"
            )
        for work in self.works:
            self._team.wait(work, self.rank)
        self.works = []
        return self.tensors


class Post:
    """Starts transfers: at once with gloo, in one batch per tick with NCCL."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._queued: list[Transfer] = []
        self._ops: list[dist.P2POp] = []

    def begin(
        self, way: Literal["send", "receive"], tensors: Sequence[Tensor], rank: int, tag: int
    ) -> Transfer:
        """Start to send or receive the tensors of a message; tensor i has the tag `tag` + i."""
        transfer = Transfer(self._team, tensors, rank)
        function: Any = dist.isend if way == "send" else dist.irecv
        group = self._team.stage_group
        # As bytes: no backend supports all dtypes.
        parts = [
            (i, tensor.reshape(-1).view(torch.uint8))
            for i, tensor in enumerate(tensors)
            if tensor.numel()
        ]
        if self._team.batches:
            self._ops += [dist.P2POp(function, data, rank, group) for _, data in parts]
            transfer.is_queued = bool(parts)
            self._queued.append(transfer)
        else:
            with self._team.talking(rank):
                transfer.works = [function(d, rank, group=group, tag=tag + i) for i, d in parts]
        return transfer

    def exchange(self) -> None:
        """Start all queued transfers in one batch."""
        queued, ops = self._queued, self._ops
        self._queued, self._ops = [], []
        if not ops:
            return
        ranks = {transfer.rank for transfer in queued}
        rank = ranks.pop() if len(ranks) == 1 else None
        ready = self._team.mark()
        with self._team.talking(rank):
            works = dist.batch_isend_irecv(ops)
        for transfer in queued:
            if transfer.is_queued:
                transfer.is_queued, transfer.works = False, works
        for work in works:
            self._team.follow(work, rank, ready)


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
    number: int = 0
    """Number of this line among those of its kind to that rank."""
    bytes_sent: int = 0
    _num: int = 0
    _look: Look | None = None
    _signature: Any = None
    _leaving: deque[Transfer] = field(default_factory=deque)

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
        self._verify_look(spec, leaves, packed)
        parts = [part for some in packed if some is not None for part in some]
        flat = [p if p.is_contiguous() else p.permute(order_of(p)) for p in parts]
        flat = _on(self.team.device, flat)
        tag = _tag(self.team.number, self.kind, self._num)
        self._leaving.append(self.post.begin("send", flat, self.rank, tag))
        self.bytes_sent += sum(part.nbytes for part in flat)
        self._num += 1
        self.finish(self.most)

    def finish(self, most: int = 0) -> None:
        """Wait until all messages except the last few have been sent."""
        while len(self._leaving) > most:
            self._leaving.popleft().wait()

    def _verify_look(
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
        looks = [
            _plain(leaf) if parts is None else [name_of(leaf.dtype), *map(_look_of, parts)]
            for leaf, parts in zip(leaves, packed, strict=True)
        ]
        self._tell((spec, looks))
        self._signature = signature

    def _tell(self, look: Look) -> None:
        """Say how messages look, once; refuse one that looks otherwise."""
        if self._look == look:
            return
        if self._look is not None:
            raise ValueError(_differ(self._look, look))
        self._look = look
        note = f"{self.kind} {self.number} of rank {self.team.rank}"
        self.team.put_note(note, json.dumps([dump_tree(look[0]), look[1]]))


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
    number: int = 0
    """Number of this line among those of its kind from that rank."""
    _num: int = 0
    _look: Look | None = None
    _posted: deque[Transfer] = field(default_factory=deque)

    def expect(self, num: int) -> None:
        """Post receives for the next `num` messages, once their shapes are known."""
        while self._look is not None and len(self._posted) < num:
            self.post_next()

    def post_next(self) -> None:
        """Post the receive of the next message."""
        if self._look is None:
            note = f"{self.kind} {self.number} of rank {self.rank}"
            spec, looks = json.loads(self.team.take_note(note, self.rank))
            self._look = treespec_loads(spec), looks
        wired = [part for look in self._look[1] if _is_tensor(look) for part in look[1:]]
        buffers = [
            torch.empty(
                [shape[each] for each in order],
                dtype=dtype_of(dtype),
                device=self.team.device,
                pin_memory=self.team.device.type == "cpu" and self.device.type == "cuda",
            )
            for shape, dtype, order in wired
        ]
        tag = _tag(self.team.number, self.kind, self._num)
        self._posted.append(self.post.begin("receive", buffers, self.rank, tag))
        self._num += 1

    def take(self) -> Any:
        """The next message; waits for it."""
        if not self._posted:
            self.post_next()
        assert self._look is not None
        parts = iter(self._posted.popleft().wait())
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


def _tag(team: int, kind: Kind, num: int) -> int:
    """Return the tag of a message's first tensor, unique among messages in flight."""
    line = (team % NUM_TEAMS) * 4 + KINDS.index(kind)
    return ((num % NUM_TAGS) * 4 * NUM_TEAMS + line) * NUM_TENSORS


def _on(device: torch.device, tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors on the device from which they are sent.

    Check each one: a side input may be on the host while streams are on the GPU.
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
