"""What is given away is apart from what will change: weights and buffers, updated in place."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


def apart(value: Any, tensors: Iterable[Tensor]) -> Any:
    """A value that shares no memory with tensors which will change while somebody has it."""
    own = set(map(_memory, tensors))

    def copied(each: Tensor) -> Tensor:
        return each.clone() if _memory(each) in own else each

    return tree_map_only(Tensor, copied, value)


def _memory(each: Tensor) -> int | None:
    return each.untyped_storage().data_ptr() if each.layout is torch.strided else None
