"""Compiled units: the same numbers, and graphs that layers share."""

import copy

import pytest
import torch
from networks import MLP, Attention
from oracle import gradients, run_plainly, weigh, worst_error
from torch import nn

import redivider as rd

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Counting:
    """A compiler that changes nothing and counts."""

    def __init__(self):
        self.graphs = []

    def __call__(self, module, inputs):
        self.graphs.append({node.target for node in module.graph.nodes})
        return module.forward

    def with_matrices(self):
        linear = {torch._C._nn.linear, torch.nn.functional.linear}
        return sum(bool(linear & graph) for graph in self.graphs)


@pytest.fixture(autouse=True)
def _reset():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def token_chain(depth, **options):
    makers = (lambda: Attention(8, 2), lambda: MLP(8))
    couplings = [rd.Coupling(makers[i % 2]()) for i in range(depth)]
    units = [nn.Linear(6, 8), rd.Duplicate(), *couplings, rd.Fuse(), nn.Linear(16, 3)]
    return rd.Chain(units, **options).double()


@pytest.mark.parametrize("backward", ["reverse", "checkpoint", "overlap", "store"])
def test_layers_share_two_graphs_of_a_kind_and_gradients_are_the_same(backward):
    chain = token_chain(8, backward=backward)
    plain = copy.deepcopy(chain)
    compiler = Counting()
    chain.compile(backend=compiler)
    x = torch.randn(4, 5, 6).double()
    for _ in range(3):
        weigh(chain(x)).backward()
        weigh(run_plainly(plain, x)).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12
    kinds = 2  # attention and MLP
    junctions = 2 * (2 if backward == "checkpoint" else 1)  # stem and head
    assert kinds + 2 <= compiler.with_matrices() <= 2 * kinds + junctions


def test_on_the_grid_reversal_stays_exact():
    chain = token_chain(5, backward="reverse", arithmetic="fixed")
    stored = copy.deepcopy(chain)
    stored.backward = "store"
    x = torch.randn(4, 5, 6).double()
    for each in (chain, stored):
        each.compile(backend=Counting())
        weigh(each(x)).backward()
    for key, grad in gradients(stored).items():
        assert torch.equal(gradients(chain)[key], grad), key
    assert rd.check_reversible(chain, x).worst == 0.0
    assert repr(chain.arithmetic) == "Fixed(bits=20)"


def test_a_copy_starts_uncompiled_and_the_model_stays_usable():
    chain = token_chain(3)
    compiler = Counting()
    chain.compile(backend=compiler)
    x = torch.randn(4, 5, 6).double()
    other = copy.deepcopy(chain)
    y = other(x)
    assert compiler.graphs == []
    assert torch.allclose(chain(x), y) and compiler.graphs
    assert list(other.state_dict()) == list(chain.state_dict())


def test_drop_path_and_dropout_of_a_model_share_graphs_over_the_layers():
    options = {"width": 16, "heads": 2, "image_size": 8, "patch_size": 2, "in_channels": 1}
    drops = {"drop_path": 0.3, "dropout": 0.1, "attention_dropout": 0.1}
    model = rd.create_model("rev_vit_tiny", depth=8, num_classes=10, **options, **drops)
    compiler = Counting()
    model.compile(backend=compiler)
    for _ in range(3):
        model(torch.randn(4, 1, 8, 8)).sum().backward()
    # Two kinds of f, with and without drop-path, in forward and recovery; and the head.
    assert compiler.with_matrices() <= 2 * 2 * 2 + 1
