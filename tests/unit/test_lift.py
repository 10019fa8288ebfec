"""The lift and its inverse are equal to the last bit, and its bits take little memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from redivider.lift import draw_signs, lift, pack, undo_lift, unpack


@given(bits=st.integers(1, 8), num=st.integers(0, 40), seed=st.integers(0, 9))
def test_packed_numbers_come_back(bits, num, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2**bits, (num,), generator=generator).to(torch.uint8)
    packed = pack(values, bits)
    assert packed.numel() == bits * -(-num // 8)
    assert torch.equal(unpack(packed, bits, values.shape), values.to(torch.int32))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("size", [2**10, 2**30])
def test_the_inverse_is_exact(bits, size):
    generator = torch.Generator().manual_seed(bits)
    u, x = torch.randint(-size, size, (2, 4, 5, 7), dtype=torch.int32, generator=generator)
    sign = draw_signs(u)
    lifted = lift(u, x, sign, bits)
    assert not lifted.fault
    assert torch.equal(undo_lift(u, lifted.x, sign, lifted.kept, bits), x)
    step = lifted.x.double() - u.double()
    exact = sign * (u.double() - x.double()) / 2**bits
    assert (step - exact).abs().max() <= 1


def test_one_sign_for_every_sample():
    torch.manual_seed(0)
    sign = draw_signs(torch.zeros(64, 3, 2))
    assert sign.shape == (64, 1, 1) and set(sign.flatten().tolist()) == {-1, 1}


def test_numbers_beyond_the_grid_are_a_fault():
    u = torch.tensor([[2**31 - 1]], dtype=torch.int32)
    x = torch.tensor([[-5]], dtype=torch.int32)
    assert lift(u, x, torch.ones_like(u), 2).fault
    assert not lift(u, -x, -torch.ones_like(u), 2).fault
    u, x = (torch.tensor([[size * 2**20]], dtype=torch.int32) for size in (2000, 1600))
    assert lift(u, x, torch.ones_like(u), 2).fault  # 2,100 is beyond the grid
