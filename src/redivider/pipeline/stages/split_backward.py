"""Gradients of a run's inputs first and those of its weights later, without repeated work.

    output
      |
      M ----- its weights      first pass: output, M, N, input; note the gradients that enter M, N
      |                        second pass: from M, and from N, to their weights
      N ----- its weights
      |
    input

A product computes only the gradients that a pass asks for. Weights of other nodes, such as norms,
and those that are used twice get their gradients in the first pass.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from redivider.replay.call import GraphRun, place_grads


def pull_back_first(
    run: GraphRun, grads: Sequence[Tensor | None], num: int
) -> tuple[list[Tensor | None], Callable[[], list[Tensor | None]]]:
    """Return the gradients of a run's first leaves, and a function that returns the others'.

    They are computed when it is called, if that repeats no work.
    """
    first, others = run.leaves[:num], run.leaves[num:]
    wanted, later = ([leaf for leaf in leaves if leaf.requires_grad] for leaves in (first, others))
    edges, entering = run.entering(grads)
    if edges and wanted and later:
        computed, finish = SplitGraph(edges, wanted, later).pull_back(entering)
        return place_grads(computed, first), lambda: place_grads(finish(), others)
    everything = run.pull_back(grads)
    return everything[:num], lambda: everything[num:]


# Nodes of which each pass computes a part, and both together nothing twice.
PRODUCTS = {"AddmmBackward0", "MmBackward0", "BmmBackward0", "LinearBackward0"}
PRODUCTS |= {"ConvolutionBackward0", "MkldnnLinearBackward0", "BaddbmmBackward0"}


class SplitGraph:
    """Graph whose products on the way to the inputs note the gradients that enter them.

    Args:
        roots: Where the gradients of the outputs enter.
        inputs: Tensors whose gradients come first.
        weights: Leaves whose gradients come later.
    """

    def __init__(
        self, roots: Sequence[GradientEdge], inputs: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> None:
        self._roots, self._inputs, self._weights = roots, inputs, weights
        owners = _find_owners(roots, inputs, weights)
        num_owners = Counter(index for indices in owners.values() for index in indices)
        self._products = {
            node: later
            for node, indices in owners.items()
            if node.name() in PRODUCTS
            and (later := [index for index in indices if num_owners[index] == 1])
        }
        """Nodes whose weights come later, and the indices of these weights."""
        postponed = {index for indices in self._products.values() for index in indices}
        self._now = [index for index in range(len(weights)) if index not in postponed]

    def pull_back(
        self, grads: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor | None], Callable[[], list[Tensor | None]]]:
        """Return the gradients of the inputs, and a function that computes those of the weights."""
        entered: dict[Any, Any] = {}
        handles = [node.register_prehook(_note(entered, node)) for node in self._products]
        now = [*self._inputs, *(self._weights[index] for index in self._now)]
        computed = torch.autograd.grad(
            self._roots, now, grads, retain_graph=True, allow_unused=True
        )
        input_grads, *own_grads = computed[: len(self._inputs)], *computed[len(self._inputs) :]

        def finish() -> list[Tensor | None]:
            weight_grads: list[Tensor | None] = [None] * len(self._weights)
            for index, grad in zip(self._now, own_grads, strict=True):
                weight_grads[index] = grad
            for node, indices in self._products.items():
                if node not in entered:
                    continue  # no gradient has come here
                pairs = [(i, grad) for i, grad in enumerate(entered[node]) if grad is not None]
                computed = torch.autograd.grad(
                    [GradientEdge(node, i) for i, _ in pairs],
                    [self._weights[index] for index in indices],
                    [grad for _, grad in pairs],
                    retain_graph=True,
                    allow_unused=True,
                )
                for index, grad in zip(indices, computed, strict=True):
                    weight_grads[index] = grad
            for handle in handles:
                handle.remove()
            return weight_grads

        return input_grads, finish


def _note(entered: dict[Any, Any], node: Any) -> Callable[..., Any]:
    """Return a hook that notes gradients in the first pass, and restores them in the second.

    A hook that f has put on a tensor changes the gradient in each pass.
    """
    return lambda grads: entered.setdefault(node, grads)


def _find_owners(
    roots: Sequence[GradientEdge], inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> dict[Any, list[int]]:
    """Return, for nodes on a path to the inputs, the weights that their other paths lead to."""
    ends = {tensor.grad_fn for tensor in inputs}
    places = {id(weight): index for index, weight in enumerate(weights)}
    leads_to_input: dict[Any, bool] = {}
    reached: dict[Any, set[int]] = {}  # weights, by all paths from a node
    owners: dict[Any, list[int]] = {}
    stack: list[tuple[Any, bool]] = [(edge.node, False) for edge in roots]
    while stack:
        node, is_done = stack.pop()
        if node in leads_to_input:
            continue
        following = [] if node in ends else [after for after, _ in node.next_functions if after]
        if not is_done:
            stack.append((node, True))
            stack += [(after, False) for after in following if after not in leads_to_input]
            continue
        leads_to_input[node] = node in ends or any(leads_to_input[after] for after in following)
        variable = None if following else getattr(node, "variable", None)
        reached[node] = {places[id(variable)]} if id(variable) in places else set()
        for after in following:
            reached[node] |= reached[after]
        aside = set().union(*(reached[after] for after in following if not leads_to_input[after]))
        if leads_to_input[node] and aside:
            owners[node] = sorted(aside)
    for edge in roots:
        if not leads_to_input[edge.node] and reached[edge.node]:
            owners[edge.node] = sorted(reached[edge.node])
    return owners
