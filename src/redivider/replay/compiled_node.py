"""The one autograd node of a compiled run, called without the engine.

Autograd's engine runs every node on the CUDA stream where its forward ran. A compiled module is a
single node, and calling it by hand runs it on the current stream, whichever that is.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


class Root:
    """Where gradients of an output enter the graph, if they do; not the output's own memory."""

    def __init__(self, output: Tensor) -> None:
        self.edge = get_gradient_edge(output) if output.requires_grad else None
        self.dtype = output.dtype


def find_compiled_node(roots: Sequence[Root], leaves: Sequence[Tensor]) -> Any:
    """The node between these roots and leaves, if it is one alone and can be called by hand."""
    nodes: set[Any] = {each.edge and each.edge.node for each in roots}
    node: Any = nodes.pop() if len(nodes) == 1 else None
    # Only torch's own compiled nodes: others may rely on what the engine does around a call. And
    # compiled code frees what it has saved, unless the engine says that it is needed once more.
    if not hasattr(getattr(node, "_forward_cls", None), "compiled_bw") or _keeps_graph():
        return None
    ends = {end for leaf in leaves for end in (id(leaf), leaf.grad_fn)} - {None}
    after = [each for each, _ in node.next_functions]
    if len(after) != len(node.needs_input_grad):  # some arguments are no tensors
        return None
    return node if all(each is None or _end(each) in ends for each in after) else None


def call_node(
    node: Any, roots: Sequence[Root], grads: Sequence[Tensor | None], leaves: Sequence[Tensor]
) -> list[Tensor | None]:
    """Pull gradients of the outputs back to the leaves, on the current CUDA stream."""
    given: list[Tensor | None] = [None] * len(node._input_metadata)
    for root, grad in zip(roots, grads, strict=True):
        assert root.edge is not None
        place, like = root.edge.output_nr, node._input_metadata[root.edge.output_nr]
        if grad is None:
            grad = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        given[place] = _sum(given[place], grad.to(root.dtype))  # one output may be there twice
    found = node.apply(*given)
    by_end: dict[Any, Tensor | None] = {}
    for (after, _), grad in zip(node.next_functions, found, strict=True):
        if after is not None:
            by_end[_end(after)] = _sum(by_end.get(_end(after)), grad)  # as may a leaf
    return [
        by_end.get(id(leaf) if leaf.grad_fn is None else leaf.grad_fn)
        if leaf.requires_grad
        else None
        for leaf in leaves
    ]


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _end(node: Any) -> Any:
    """What tells the leaf that a node belongs to: its variable, or the node of its view."""
    variable = getattr(node, "variable", None)
    return node if variable is None else id(variable)


def _keeps_graph() -> bool:
    kept: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return kept
