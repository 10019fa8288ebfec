"""The single autograd node of a compiled run, called without autograd's engine.

The engine runs every node on the CUDA stream where its forward ran. A compiled module is a single
node, and calling it directly runs it on the current stream.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from redivider._torch_private import backward_keeps_graph


class Root:
    """Edge where gradients of an output enter the graph; it does not hold the output's memory."""

    def __init__(self, output: Tensor) -> None:
        self.edge = get_gradient_edge(output) if output.requires_grad else None
        self.dtype = output.dtype


def find_compiled_node(roots: Sequence[Root], leaves: Sequence[Tensor]) -> Any:
    """Return the node between these roots and leaves, if it is the only one and can be called."""
    nodes: set[Any] = {root.edge and root.edge.node for root in roots}
    node: Any = nodes.pop() if len(nodes) == 1 else None
    # Only torch's own compiled nodes: others may rely on what the engine does around a call. And
    # compiled code frees what it has saved, unless the engine says that the graph is retained.
    if not hasattr(getattr(node, "_forward_cls", None), "compiled_bw") or backward_keeps_graph():
        return None
    ends = {end for leaf in leaves for end in (id(leaf), leaf.grad_fn)} - {None}
    following = [function for function, _ in node.next_functions]
    if len(following) != len(node.needs_input_grad):  # not all arguments are tensors
        return None
    return node if all(end is None or _end(end) in ends for end in following) else None


def call_node(
    node: Any, roots: Sequence[Root], grads: Sequence[Tensor | None], leaves: Sequence[Tensor]
) -> list[Tensor | None]:
    """Pull gradients of the outputs back to the leaves, on the current CUDA stream."""
    output_grads: list[Tensor | None] = [None] * len(node._input_metadata)
    for root, grad in zip(roots, grads, strict=True):
        assert root.edge is not None
        place, like = root.edge.output_nr, node._input_metadata[root.edge.output_nr]
        if grad is None:
            grad = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        # One output may occur twice, and so may a leaf.
        output_grads[place] = _sum(output_grads[place], grad.to(root.dtype))
    input_grads = node.apply(*output_grads)
    by_end: dict[Any, Tensor | None] = {}
    for (function, _), grad in zip(node.next_functions, input_grads, strict=True):
        if function is not None:
            by_end[_end(function)] = _sum(by_end.get(_end(function)), grad)
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
    """Identify the leaf that a node belongs to, by its variable or the node of its view."""
    variable = getattr(node, "variable", None)
    return node if variable is None else id(variable)
