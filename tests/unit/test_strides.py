"""The order of dimensions in memory, and tensors without gaps."""

import pytest
import torch

from redivider.strides import dense, inverse, is_dense, memory_order


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 1, 0, 2)])
def test_the_order_of_memory_is_found_and_undone(order):
    x = torch.arange(120.0).view(2, 3, 4, 5).permute(inverse(order))
    assert memory_order(x) == order
    in_memory = x.permute(memory_order(x))
    assert in_memory.is_contiguous()
    back = in_memory.permute(inverse(memory_order(x)))
    assert torch.equal(back, x) and back.stride() == x.stride()


def test_dimensions_of_size_one_stay_in_place():
    x = torch.zeros(2, 1, 4, 5).to(memory_format=torch.channels_last)
    assert memory_order(x) == (0, 1, 2, 3)


def test_a_half_becomes_dense_and_a_transposed_one_stays():
    half, transposed = torch.randn(2, 6).chunk(2, dim=1)[0], torch.randn(2, 6).t()
    assert not is_dense(half) and is_dense(transposed)
    copies = dense([half, transposed])
    assert torch.equal(copies[0], half) and is_dense(copies[0]) and copies[1] is transposed
