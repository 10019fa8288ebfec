"""Runs of f and memory of a step: f runs twice, and what is kept does not grow with depth."""

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from support.networks import MLP, vector_chain
from support.oracle import weigh
from support.patience import seconds
from torch import nn

import redivider as rd
from redivider.checks.memory import Live


class Counted(MLP):
    runs = 0

    def forward(self, x):
        Counted.runs += 1
        return super().forward(x)


@pytest.mark.parametrize("backward, runs", [("store", 1), ("checkpoint", 2), ("reverse", 2)])
@pytest.mark.parametrize("arithmetic", ["float", "fixed"])
def test_f_runs_exactly_as_often_as_the_method_says(backward, runs, arithmetic):
    depth = 5
    chain = vector_chain(Counted, depth, backward=backward, arithmetic=arithmetic)
    for _ in range(3):  # the first step, which verifies f, is no dearer than the others
        Counted.runs = 0
        weigh(chain(torch.randn(4, 6))).backward()
        assert Counted.runs == runs * depth


@pytest.mark.parametrize("backward", ["store", "checkpoint", "reverse"])
@pytest.mark.parametrize("arithmetic", ["float", "fixed"])
def test_f_runs_once_without_grad_and_in_evaluation_and_nothing_is_kept(backward, arithmetic):
    chain = vector_chain(Counted, 5, backward=backward, arithmetic=arithmetic)
    x = torch.randn(4, 6)
    Counted.runs = 0
    with torch.no_grad():
        assert chain(x).grad_fn is None
    assert Counted.runs == 5
    chain.eval()
    with torch.no_grad():
        quiet = chain(x)
    Counted.runs = 0
    streams = streams_of(chain)
    y = chain(x)
    assert Counted.runs == 5
    assert torch.equal(y, quiet)
    if backward == "reverse":  # gradients can be asked for, and still nothing is kept
        assert sum(alive(streams)) <= 2
        weigh(y).backward()
        assert all(param.grad is not None for param in chain.parameters())


def streams_of(chain: rd.Chain) -> list[weakref.ref]:
    """Return weak references to the storages of the couplings' outputs, filled as they run."""
    references: list[weakref.ref] = []
    for unit in chain:
        if isinstance(unit, rd.Coupling):
            unit.register_forward_hook(
                lambda _, __, out: references.append(weakref.ref(out[0].untyped_storage()))
            )
    return references


def alive(references: list[weakref.ref]) -> list[bool]:
    gc.collect()
    return [reference() is not None for reference in references]


@pytest.mark.parametrize("arithmetic", ["float", "fixed"])
def test_only_the_last_streams_of_a_row_live_between_forward_and_backward(arithmetic):
    couplings = [rd.Coupling(MLP(8)) for _ in range(9)]
    chain = rd.Chain([rd.Duplicate(), *couplings, rd.Fuse()], arithmetic=arithmetic)
    streams = streams_of(chain)
    y = chain(torch.randn(4, 8))
    # The last output and the one before it, which is its second stream; a grid keeps integers.
    kept = [False] * 7 + [True] * 2 if arithmetic == "float" else [False] * 9
    assert alive(streams) == kept
    y.sum().backward()
    assert alive(streams) == [False] * 9, "a backward frees what it does not retain"


def test_the_control_a_stored_chain_keeps_every_stream():
    couplings = [rd.Coupling(MLP(8)) for _ in range(9)]
    chain = rd.Chain([rd.Duplicate(), *couplings, rd.Fuse()], backward="store")
    streams = streams_of(chain)
    y = chain(torch.randn(4, 8))
    assert all(alive(streams)[:-1]), "the concatenation of the last one has copied it"
    del y
    assert not any(alive(streams))


def test_a_forward_that_fails_leaves_nothing_behind():
    class Fails(nn.Module):
        def forward(self, x):
            raise KeyError("no")

    couplings = [*(rd.Coupling(MLP(8)) for _ in range(4)), rd.Coupling(Fails())]
    chain = rd.Chain([rd.Duplicate(), *couplings])
    streams = streams_of(chain)
    with pytest.raises(KeyError) as raised:
        chain(torch.randn(4, 8))
    assert raised.value.__notes__ == ["in unit 5, Coupling(Fails)"]
    del raised
    assert alive(streams) == [False] * 4


def test_dropping_the_output_frees_all_without_the_garbage_collector():
    chain = rd.Chain([rd.Duplicate(), *(rd.Coupling(MLP(8)) for _ in range(4)), rd.Fuse()])
    streams = streams_of(chain)
    gc.disable()
    try:
        y = chain(torch.randn(4, 8))
        del y
        assert [reference() is not None for reference in streams] == [False] * 4
    finally:
        gc.enable()


STREAM = 4 * 2**20

MEASURE = """
import resource, sys, torch
from torch import nn
import redivider as rd
from redivider.checks.memory import Live

torch.set_num_threads(1)

class F(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
    def forward(self, x):
        return torch.sigmoid(x * self.scale)

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

x = torch.randn(2**17, 8)  # a stream of 4 MiB
for word in sys.argv[1:]:
    backward, depth = word.split(":")
    couplings = [rd.Coupling(F()) for _ in range(int(depth))]
    chain = rd.Chain([rd.Duplicate(), *couplings], backward=backward)
    before = resident()
    y = chain(x)
    held = resident() - before
    (y[0].sum() + y[1].sum()).backward()
    del y
    print(held, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def measure(*runs: str) -> list[tuple[int, int]]:
    """Return bytes held between forward and backward, and the process's peak, run after run."""
    # Large blocks straight from the system, so that a freed one leaves the process at once.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", MEASURE, *runs]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=seconds(100)
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    return [(int(held), int(peak)) for held, peak in rows]


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="reads the process's size on Linux"
)
def test_a_process_is_no_larger_at_depth_64_than_at_depth_8():
    # A first, shallow step pays for what torch allocates once.
    _, (held_8, peak_8), (held_64, peak_64), (stored_32, _) = measure(
        "reverse:2", "reverse:8", "reverse:64", "store:32"
    )
    # 56 couplings more: storing would hold as many streams. Allocators keep some freed blocks, and
    # others than glibc's keep more.
    assert abs(held_64 - held_8) < 8 * STREAM
    assert peak_64 - peak_8 < 8 * STREAM
    assert held_8 < 8 * STREAM
    assert stored_32 > 16 * STREAM, "the control: the measure sees what is stored"


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [0, 2])
@pytest.mark.parametrize("backward", ["store", "checkpoint", "reverse", "overlap"])
def test_nothing_is_left_after_a_backward_though_the_loss_is_kept(backward, frozen):
    chain = vector_chain(MLP, 6, backward=backward)
    for unit in list(chain)[: 2 + frozen]:
        unit.requires_grad_(not frozen)
    losses = []
    with Live() as live:
        for _ in range(4):
            loss = weigh(chain(torch.randn(1000, 6)))
            loss.backward()
            chain.zero_grad()
            losses.append(loss)
            del loss
            gc.collect()
            assert live.bytes < 1000  # losses and figures, and no stream, which has 24,000
