"""Search for a skip in the graph of f: a path from its output to its input by sums alone.

    pre-norm    a + g(norm(a))         post-norm    norm(a + g(a)), relu(a + g(a))

A difference block(a) - a, and a sum with something that does not depend on the input, is no skip.
"""

from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from redivider._torch_private import scale_of_second

SUMS = {"AddBackward0": 1.0, "SubBackward0": -1.0}  # with the sign of the second term
COPIES = ("AliasBackward0", "CloneBackward0", "ToCopyBackward0", "ViewBackward0")
AFTER_SUMS = ("GeluBackward0", "NativeLayerNormBackward0", "ReluBackward0")
NUM_SEARCHED = 1000  # nodes; more would be no block


def has_skip(output: Any, a: Tensor) -> bool:
    """Return whether the graph of an output is that of `a` plus a function of `a`."""
    if not isinstance(output, Tensor) or not a.requires_grad or output.grad_fn is None:
        return False
    source = get_gradient_edge(a).node
    num_paths, total, stack = 0, 0.0, [(output.grad_fn, 1.0)]
    for _ in range(NUM_SEARCHED):
        if not stack:
            break
        node, factor = stack.pop()
        if node is source:
            num_paths, total = num_paths + 1, total + factor
            continue
        name, parents = node.name(), [parent for parent, _ in node.next_functions]
        factors = []  # of the parents that are followed
        if name in SUMS:
            factors = [factor, SUMS[name] * scale_of_second(node) * factor]
        elif name in COPIES or (name in AFTER_SUMS and _is_sum(parents[0])):
            factors = [factor]
        pairs = zip(parents, factors, strict=False)
        stack += [(parent, share) for parent, share in pairs if parent is not None]
    return total != 0 and _num_edges(output.grad_fn, source) > num_paths


def _is_sum(node: Any) -> bool:
    return node is not None and node.name() in SUMS


def _num_edges(root: Any, source: Any) -> int:
    """Count the edges of a graph that lead to a node."""
    num, queue, seen = 0, [root], {root, source}
    while queue:
        for parent, _ in queue.pop().next_functions:
            num += parent is source
            if parent is not None and parent not in seen:
                seen.add(parent)
                queue.append(parent)
    return num
