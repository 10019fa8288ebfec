"""Saved operations in compiled units, which keep graphs that torch's partitioner has cut."""

import copy

import pytest
import torch
from support.networks import MLP, Attention, Marked
from support.oracle import gradients, run_plainly, weigh, worst_error
from torch import nn

import redivider as rd

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),  # the compiler does
    pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated"),  # the compiler's own
]


def step(chain, x):
    """Return gradients, and the bytes that the graph holds besides weights and random state."""
    chain.zero_grad()
    weights = {param.data_ptr() for param in chain.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor):
        if tensor.data_ptr() not in weights and tensor.dtype != torch.uint8:
            saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = chain(x)
    weigh(loss).backward()
    return copy.deepcopy(gradients(chain)), sum(saved.values())


def test_gradients_and_bytes():
    torch.manual_seed(0)
    functions = [Attention(8), Marked(8, 0.3)]
    units = [nn.Linear(6, 8), rd.Duplicate(), *map(rd.Coupling, functions), rd.Fuse(), Marked(16)]
    chain = rd.Chain(units).double()
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    chain.compile(backend="aot_eager", dynamic=False)
    held: dict[str, int] = {}
    true: dict = {}
    mixed = ["store", "store", "save", "reverse", "checkpoint", "trim"]
    for backward in ("store", "save", "trim", mixed):
        chain.backward = backward
        grads, held[str(backward)] = step(chain, x)
        true = true or grads  # compiled dropout draws other numbers than eager dropout
        assert worst_error(grads, true) <= 1e-12
    assert held["save"] < held["trim"] < held["store"]
    chain.backward = "offload-save"
    with pytest.raises(rd.UnitError, match='use "save"'):
        chain(x)


def test_graphs_keep_inputs_and_what_is_saved():
    chain = rd.Chain([rd.Coupling(Attention(8)), rd.Coupling(Marked(8).eval())], backward="save")
    chain.compile(backend="aot_eager", dynamic=False)
    streams = tuple(torch.randn(2, 3, 5, 8))
    _, held = step(chain, streams)
    stream, logsumexp = streams[0].nbytes, 4 * 3 * 2 * 5
    # Attention: its input, its output and logsumexp. The other one: its input, and two streams.
    assert held == 5 * stream + logsumexp


def test_writing_in_place():
    """Compiled code may write to its own tensors."""
    f = nn.Sequential(MLP(8), nn.ReLU(inplace=True), nn.Linear(8, 8))
    chain = rd.Chain([rd.Coupling(f)], backward="save").double()
    plain = copy.deepcopy(chain)
    chain.compile(backend="aot_eager", dynamic=False)
    a, b = torch.randn(2, 4, 8, dtype=torch.float64)
    weigh(chain((a, b))).backward()
    weigh(run_plainly(plain, (a, b))).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12
