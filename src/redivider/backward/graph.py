"""Search of autograd's graph for the node of a unit."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from redivider.backward.node import Kept

NUM_SEARCHED = 24  # nodes: additions and views lie between units


def find_unit(node: Any) -> Any:
    """Return the node of the unit that the backward reaches next after a node, if it is near."""
    nodes = _previous_nodes(node)
    return find_node(nodes, lambda own: isinstance(getattr(own, "kept", None), Kept), NUM_SEARCHED)


def find_node(nodes: Sequence[Any], is_wanted: Callable[[Any], bool], most: int) -> Any:
    """Return the first wanted node among some nodes, and those that the backward reaches next.

    Args:
        nodes: Nodes to begin with.
        is_wanted: Predicate of nodes.
        most: Number of nodes to search.
    """
    queue, seen = deque(nodes), set(nodes)
    for _ in range(most):
        if not queue:
            return None
        node = queue.popleft()
        if is_wanted(node):
            return node
        following = [other for other in _previous_nodes(node) if other not in seen]
        queue.extend(following)
        seen.update(following)
    return None


def _previous_nodes(node: Any) -> list[Any]:
    """Return the nodes that the backward reaches next, without parameters, which may be many."""
    nodes = [function for function, _ in node.next_functions if function is not None]
    return [function for function in nodes if function.next_functions or hasattr(function, "kept")]
