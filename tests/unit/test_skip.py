"""A whole residual block inside of a coupling is found, and nothing else is."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.networks import MLP
from torch import nn

import redivider as rd


class Block(nn.Module):
    """A residual block of two branches, with `after` behind each sum."""

    def __init__(self, after: nn.Module | None = None) -> None:
        super().__init__()
        self.branches = nn.ModuleList([MLP(8), MLP(8)])
        self.after = after or nn.Identity()

    def forward(self, x):
        for branch in self.branches:
            x = self.after(x + branch(x))
        return x


class Basic(nn.Module):
    """A block as in a ResNet: the sum is made in place, and so is what follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.branch(x)
        out += x
        return self.relu(out)


class Half(Block):
    def forward(self, x):
        return torch.add(self.branches[0](x), x.clone(), alpha=0.5)


WHOLE = {
    "pre-norm": Block,
    "post-norm": lambda: Block(nn.LayerNorm(8)),
    "gelu": lambda: Block(nn.GELU()),
    "in place": Basic,
    "half": Half,
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    "encoder, pre-norm": lambda: nn.TransformerEncoderLayer(
        8, 2, 16, batch_first=True, norm_first=True
    ),
}


class Branch(Block):
    """What a block adds to its input."""

    def forward(self, x):
        return super().forward(x) - x


class Shifted(nn.Module):
    """A sum with something that does not depend on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x + self.shift


class Parallel(Block):
    """A sum of two branches."""

    def forward(self, x):
        return self.branches[0](x) + self.branches[1](x)


class Inside(nn.Module):
    """A block behind a layer: its skip begins there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(8, 8), Block()

    def forward(self, x):
        return self.block(self.first(x))


class NormFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.norm(x)
        return x + self.linear(x)


class Twice(nn.Module):
    def forward(self, x):
        return x + x


RIGHT = {
    "mlp": lambda: MLP(8),
    "branch": Branch,
    "shifted": Shifted,
    "parallel": Parallel,
    "inside": Inside,
    "norm first": NormFirst,
    "identity": nn.Identity,
    "twice": Twice,
}


def chain_of(make: Any, backward: str = "reverse", arithmetic: str = "float") -> rd.Chain:
    units = [nn.Linear(8, 8), rd.Duplicate(), *(rd.Coupling(make()) for _ in range(2)), rd.Fuse()]
    return rd.Chain(units, backward=backward, arithmetic=arithmetic)


def num_warnings(run: Any) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    assert all(issubclass(warning.category, rd.SkipWarning) for warning in caught)
    return len(caught)


def step(chain: Any) -> None:
    chain(torch.randn(3, 4, 8)).sum().backward()


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("backward", ["store", "checkpoint", "reverse"])
def test_the_first_call_warns_and_no_other(kind, backward):
    chain = chain_of(WHOLE[kind], backward)
    assert [num_warnings(lambda: step(chain)) for _ in range(3)] == [2, 0, 0]
    assert num_warnings(lambda: step(copy.deepcopy(chain))) == 2, "a copy is another coupling"


@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.parametrize("backward", ["store", "checkpoint", "reverse"])
def test_nothing_else_is_taken_for_a_skip(kind, backward):
    chain = chain_of(RIGHT[kind], backward)
    step(chain)
    assert not rd.check_reversible(chain, torch.randn(3, 4, 8)).notes


def test_the_warning_says_what_to_do():
    message = r"f, Block, adds its own input .* give Coupling the branch alone"
    with pytest.warns(rd.SkipWarning, match=message):
        step(chain_of(Block))


@pytest.mark.parametrize("arithmetic", ["float", "fixed"])
def test_check_reversible_reports_it_at_any_time(arithmetic):
    chain, x = chain_of(Block, arithmetic=arithmetic), torch.randn(3, 4, 8)
    with pytest.warns(rd.SkipWarning):
        rd.check_reversible(chain, x)
    report = rd.check_reversible(chain, x)  # without a second warning
    assert list(report.notes) == ["unit 3, Coupling(Block)", "unit 2, Coupling(Block)"]
    *_, last = str(report).splitlines()
    assert last.startswith("unit 3, Coupling(Block) and 1 more: f, Block, adds its own input")
    assert num_warnings(lambda: step(chain)) == 0


def test_a_coupling_alone_and_one_in_a_pipeline_warn():
    coupling = rd.Coupling(Block())
    a, b = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
    with torch.no_grad():
        coupling((a, b))  # without a graph there is nothing to see
    assert [num_warnings(lambda: coupling((a, b))) for _ in range(2)] == [1, 0]
    for method in ("petra", "delayed-graph"):
        pipe = rd.Pipeline(
            chain_of(Block),
            stages=2,
            loss=lambda y, t: F.mse_loss(y, torch.zeros_like(y)),
            optimizer=lambda stage: torch.optim.SGD(stage.parameters(), lr=0.01),
            method=method,
        )
        assert num_warnings(lambda pipe=pipe: [pipe.step(torch.randn(3, 4, 8)) for _ in "123"]) == 2


@pytest.mark.slow
def test_traced_chains_are_left_alone():
    x = torch.randn(3, 4, 8)
    compiled: Any = torch.compile(chain_of(Block, "store"), backend="eager", fullgraph=True)
    compiled(x)
    torch.export.export(chain_of(Block).eval(), (x,))
