"""What one rank of a column has, given to all of them."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_loads

from redivider.pipeline.runners.topology import Team
from redivider.pipeline.runners.transport import dtype_of, dump_tree, name_of


def share_tree(team: Team, tree: Any, device: torch.device) -> Any:
    """Give the last rank's tree of tensors and plain data to all."""
    leaves, spec = tree_flatten(tree)
    looks = [
        [list(each.shape), name_of(each.dtype)] if isinstance(each, Tensor) else {"is": each}
        for each in leaves
    ]
    said = json.dumps([dump_tree(spec), looks]) if team.is_last else ""
    text, looks = json.loads(team.tell_column(said)[-1])
    if not team.is_last:
        leaves = [_make(look, device) for look in looks]
    for each in leaves:
        if isinstance(each, Tensor):
            team.spread_in_column(each, team.num_places - 1)
    return tree_unflatten(leaves, treespec_loads(text))


def share_all(team: Team, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give every rank's tensors to all, on the host, in the order of ranks."""
    looks = [[name, list(each.shape), name_of(each.dtype)] for name, each in own.items()]
    found = {}
    for place, text in enumerate(team.tell_column(json.dumps(looks))):
        for name, shape, dtype in json.loads(text):
            if place == team.place:
                found[name] = own[name].detach().to("cpu", copy=True)
            else:
                found[name] = torch.empty(shape, dtype=dtype_of(dtype))
            team.spread_in_column(found[name], place)
    return found


def _make(look: Any, device: torch.device) -> Any:
    """A leaf as it looks: a tensor to be filled, or what it is."""
    if isinstance(look, dict):
        return look["is"]
    shape, dtype = look
    return torch.empty(shape, dtype=dtype_of(dtype), device=device)
