"""Collectives over the ranks of a column, for trees and for named tensors."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_loads

from redivider.pipeline.runners.topology import Team
from redivider.pipeline.runners.wire import dtype_of, dump_tree, name_of


def broadcast_tree(team: Team, tree: Any, device: torch.device) -> Any:
    """Broadcast the last rank's tree of tensors and plain data to all ranks."""
    leaves, spec = tree_flatten(tree)
    layouts = [
        [list(leaf.shape), name_of(leaf.dtype)] if isinstance(leaf, Tensor) else {"is": leaf}
        for leaf in leaves
    ]
    # The others do not know the tree, so its structure travels first, as text.
    header = json.dumps([dump_tree(spec), layouts]) if team.is_last else ""
    structure, layouts = json.loads(team.gather_text(header, in_column=True)[-1])
    if not team.is_last:
        leaves = [_empty_leaf(layout, device) for layout in layouts]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            team.broadcast_in_column(leaf, team.num_places - 1)
    return tree_unflatten(leaves, treespec_loads(structure))


def gather_named(team: Team, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gather the named tensors of all ranks on every rank, on the host, in the order of ranks."""
    layouts = [[name, list(tensor.shape), name_of(tensor.dtype)] for name, tensor in own.items()]
    gathered = {}
    for place, text in enumerate(team.gather_text(json.dumps(layouts), in_column=True)):
        for name, shape, dtype in json.loads(text):
            if place == team.place:
                gathered[name] = own[name].detach().to("cpu", copy=True)
            else:
                gathered[name] = torch.empty(shape, dtype=dtype_of(dtype))
            team.broadcast_in_column(gathered[name], place)
    return gathered


def _empty_leaf(layout: Any, device: torch.device) -> Any:
    """Return an empty tensor of a layout, or the plain value that it holds."""
    if isinstance(layout, dict):
        return layout["is"]
    shape, dtype = layout
    return torch.empty(shape, dtype=dtype_of(dtype), device=device)
