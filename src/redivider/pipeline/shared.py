"""What one rank of a column has, given to all of them."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from redivider.pipeline.mail import dtype_of, name_of
from redivider.pipeline.team import Team


def share_tree(team: Team, tree: Any, device: torch.device) -> Any:
    """Give the last rank's tree of tensors to all."""
    leaves, spec = tree_flatten(tree)
    looks = [[list(each.shape), name_of(each.dtype)] for each in leaves if team.is_last]
    said = json.dumps([treespec_dumps(spec), looks]) if team.is_last else ""
    text, looks = json.loads(team.tell_all(said, team.stage_group)[-1])
    if not team.is_last:
        leaves = [torch.empty(shape, dtype=dtype_of(d), device=device) for shape, d in looks]
    for each in leaves:
        team.spread_in_column(each, team.num_places - 1)
    return tree_unflatten(leaves, treespec_loads(text))


def share_all(team: Team, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give every rank's tensors to all, on the host, in the order of ranks."""
    looks = [[name, list(each.shape), name_of(each.dtype)] for name, each in own.items()]
    found = {}
    for place, text in enumerate(team.tell_all(json.dumps(looks), team.stage_group)):
        for name, shape, dtype in json.loads(text):
            is_mine = place == team.place
            found[name] = own[name].cpu() if is_mine else torch.empty(shape, dtype=dtype_of(dtype))
            team.spread_in_column(found[name], place)
    return found
