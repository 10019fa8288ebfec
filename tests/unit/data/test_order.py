"""The order is a permutation, and everything random a function of (seed, epoch, position)."""

from zlib import crc32

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from redivider.data.order import draw, permutation

SEEDS = st.integers(-(2**70), 2**70)


def mixed(x: int) -> int:
    """Apply SplitMix64's finaliser, in Python integers."""
    x %= 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def drawn(position: int, seed: int, epoch: int, purpose: str) -> int:
    key = 0
    for part in (seed, epoch, crc32(purpose.encode())):
        key = mixed(key + (part + 1) * 0x9E3779B97F4A7C15)
    return mixed(key + position * 0x9E3779B97F4A7C15) % 2**63


@given(SEEDS, st.integers(0, 2**40), st.lists(st.integers(0, 2**62), max_size=20))
def test_numbers_equal_the_plain_formula(seed, epoch, positions):
    numbers = draw(torch.tensor(positions, dtype=torch.int64), seed=seed, epoch=epoch, purpose="a")
    assert numbers.tolist() == [drawn(position, seed, epoch, "a") for position in positions]


@given(SEEDS, st.integers(0, 1000), st.integers(0, 300))
def test_the_order_is_a_permutation_and_equals_itself(seed, epoch, num):
    order = permutation(num, seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(num))
    torch.manual_seed(seed % 1000)
    assert torch.equal(order, permutation(num, seed=seed, epoch=epoch))


def test_orders_differ_by_epoch_and_seed():
    orders = {
        tuple(permutation(50, seed=seed, epoch=epoch).tolist())
        for seed in range(-3, 10)
        for epoch in range(10)
    }
    assert len(orders) == 130


def test_purposes_differ():
    positions = torch.arange(100)
    one, other = (draw(positions, seed=0, epoch=0, purpose=name) for name in ("one", "other"))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("num", [2, 9, 10])
def test_every_number_comes_equally_often(num):
    numbers = draw(torch.arange(90_000), seed=0, epoch=3, purpose="a") % num
    shares = numbers.bincount(minlength=num) / 90_000 * num
    assert (shares - 1).abs().max() < 0.06


@pytest.mark.slow
def test_every_sample_comes_first_equally_often():
    firsts = torch.stack([permutation(8, seed=1, epoch=epoch) for epoch in range(2000)])
    for place in range(8):
        shares = firsts[:, place].bincount(minlength=8) / 250
        assert (shares - 1).abs().max() < 0.25


def test_the_callers_random_numbers_are_left_alone():
    before = torch.get_rng_state()
    permutation(10, seed=0, epoch=0)
    assert torch.equal(torch.get_rng_state(), before)
