"""Values that must not alias weights or buffers, because those are updated in place."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from redivider.tree import map_tensors


def unaliased(value: Any, tensors: Iterable[Tensor]) -> Any:
    """Clone the tensors of `value` that share memory with `tensors`; return the others as is.

    The result can be kept or sent while `tensors` are updated in place.
    """
    storages = set(map(_storage, tensors))

    def clone_alias(tensor: Tensor) -> Tensor:
        return tensor.clone() if _storage(tensor) in storages else tensor

    return map_tensors(clone_alias, value)


def _storage(tensor: Tensor) -> int | None:
    # Sparse tensors have no storage, and count as one: a needless clone is harmless.
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else None
