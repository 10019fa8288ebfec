"""Tapes: inputs in any order in memory, read back in any order."""

import pytest
import torch

from redivider.backward.tape import Tape, Tapes


def stream(num=4):
    """Return inputs of neighbouring units, which differ a little."""
    generator = torch.Generator().manual_seed(0)
    steps = [torch.randn(3, 8, 4, 5, generator=generator) for _ in range(num)]
    return [steps[0] + 0.1 * sum(steps[1:n], torch.zeros(())) for n in range(1, num + 1)]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3, 1, 2), (1, 2, 3, 0), (3, 2, 1, 0)])
def test_inputs_are_read_as_they_were_whatever_their_order_in_memory(order):
    inputs = [x.permute(order) for x in stream()]
    known = Tape(8, inputs[0])
    places = [known.append(x) for x in inputs]
    assert torch.allclose(known.read(places[0]), inputs[0], atol=1e-5)
    for place, x in zip(places, inputs, strict=True):
        read = known.read(place)
        assert read.stride() == x.stride()
        assert (read - x).norm() <= 0.01 * x.norm()


def test_an_input_that_follows_a_reading_is_compared_with_the_last_one():
    """As where a part of the loss has its backward in the middle of the forward."""
    inputs = stream(5)
    plain, read = Tape(8, inputs[0]), Tape(8, inputs[0])
    for x in inputs:
        plain.append(x)
        read.append(x)
        read.read(0)
    for place in (4, 0, 2, 3, 1):
        assert torch.allclose(read.read(place), plain.read(place), atol=1e-5)


def test_inputs_that_differ_in_kind_have_tapes_of_their_own():
    tapes, x = Tapes(), torch.randn(2, 4, 8)
    others = [x.double(), x.mT.contiguous().mT, x[:1]]
    assert tapes.tape_for(torch.randn(2, 4, 8)) is tapes.tape_for(x)
    assert len({id(tapes.tape_for(own)) for own in (x, *others)}) == 4
    assert tapes.tape_for(torch.arange(8)) is None
