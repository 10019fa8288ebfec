"""Training methods: the state that a unit keeps until its backward, and the weights used there.

    method              a coupling keeps   a junction keeps   weights in the backward
    petra               nothing            input              current
    dsp                 input              input              current
    delayed             input              input              stashed
    delayed-graph       graph              graph              stashed
    exact-inverse       nothing            input              stashed
    approximate-input   nothing            input              inverse: current; gradient: stashed

petra: Rivaud et al. 2025; dsp: Xu et al. 2020; delayed: PipeDream, Narayanan et al. 2019;
delayed-graph: ADL, Zhuang et al. 2021. The last two are ablations of PETRA. "Inverse" is the run
that rebuilds a coupling's input. No torch here.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from redivider.errors import not_one_of

if TYPE_CHECKING:
    from redivider.backward.strategy import Keep


@dataclass(frozen=True)
class Method:
    """Training method: a row of the table in methods.py."""

    name: str
    coupling: "Keep"
    junction: "Keep"
    weights: Literal["current", "stashed"]
    inverse: Literal["current", "stashed"]


METHODS = {
    method.name: method
    for method in (
        Method("petra", "nothing", "input", "current", "current"),
        Method("dsp", "input", "input", "current", "current"),
        Method("delayed", "input", "input", "stashed", "stashed"),
        Method("delayed-graph", "graph", "graph", "stashed", "stashed"),
        Method("exact-inverse", "nothing", "input", "stashed", "stashed"),
        Method("approximate-input", "nothing", "input", "stashed", "current"),
    )
}


def resolve_method(name: str) -> Method:
    """Return the method of a name."""
    if name not in METHODS:
        raise ValueError(not_one_of("method", name, METHODS))
    return METHODS[name]
