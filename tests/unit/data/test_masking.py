"""Masked tokens: how many, which, and what replaces them."""

from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from redivider.data import DataError, Text
from redivider.data.masking import Masking
from redivider.data.vocabulary import Bytes

MASK = 256


def batches(num, batch_size=1, *, train=True, rate=0.15, **options):
    tokens = (torch.arange(num) * 31 + 7) % 256
    text = Text("made", tokens, Bytes())
    return tokens, text.batches(batch_size, train=train, masked=rate, **options)


@given(
    st.integers(2, 40), st.integers(2, 6), st.floats(0.01, 1.0), st.integers(0, 3), st.booleans()
)
def test_windows_have_as_many_targets_and_show_all_other_tokens(context, n, rate, seed, train):
    tokens, windows = batches(n * context, rate=rate, context=context, seed=seed, train=train)
    for x, y in islice(windows.since(0), n - 1):
        asked = y != -100
        assert int(asked.sum()) == max(1, round(rate * context))
        true = torch.where(asked, y, x)
        start = next(s for s in range(len(tokens)) if torch.equal(tokens[s : s + context], true[0]))
        assert start % context == 0 or train
        assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (1, context)
        assert (x[~asked] < MASK).all()


@given(st.integers(1, 90), st.integers(1, 20), st.integers(0, 3))
def test_in_evaluation_windows_are_full_and_nothing_is_asked_for_twice(num, context, seed):
    """The last window starts earlier, without padding; only its new tokens are targets."""
    tokens, windows = batches(num, 3, context=context, train=False, rate=0.5, seed=seed)
    x, y = map(torch.cat, zip(*windows, strict=True))
    last = min(context, num)
    assert x.shape == (-(-num // context), last)
    starts = [min(n * context, num - last) for n in range(len(x))]
    for n, start in enumerate(starts):
        true = torch.where(y[n] != -100, y[n], x[n])
        assert torch.equal(true, tokens[start : start + last])
        new = last if n * context == start else num - n * context
        asked = (y[n] != -100).nonzero().flatten()
        assert len(asked) == max(1, round(0.5 * new))
        assert (asked >= last - new).all(), "what an earlier window had is only shown"
    others = batches(num, 3, context=context, train=False, rate=0.5, seed=seed + 1)[1]
    targets = torch.cat([targets for _, targets in others])
    assert torch.equal(targets, y), "all runs are asked the same"


def test_eight_of_ten_are_masked_one_is_another_and_one_is_shown():
    _, windows = batches(400_000, context=1000, train=False)
    x, y = map(torch.cat, zip(*windows, strict=True))
    asked = y != -100
    assert asked.float().mean().item() == pytest.approx(0.15)
    seen, true = x[asked], y[asked]
    assert (seen == MASK).float().mean().item() == pytest.approx(0.8, abs=0.005)
    assert (seen == true).float().mean().item() == pytest.approx(0.1 + 0.1 / 256, abs=0.005)
    others = seen[(seen != MASK) & (seen != true)]
    assert len(others.unique()) == 256
    places = asked.nonzero()[:, 1].bincount(minlength=1000).float()
    assert 30 < places.min() and places.max() < 100, "every place in a window is as likely"


def test_epochs_and_seeds_hide_others():
    """In the same windows; a replaced token may become any of the vocabulary."""
    places = torch.arange(400).view(4, 100)
    every = torch.ones(4, 100, dtype=torch.bool)
    masks, others = set(), set()
    for seed in range(3):
        for epoch in range(4):
            seen, asked = Masking(0.3, 500, seed).hide(places, places, every, epoch=epoch)
            assert ((asked != -100).sum(1) == 30).all()
            masks.add(tuple((asked != -100).flatten().tolist()))
            others |= set(seen[(seen != 500) & (seen != places)].tolist())
    assert len(masks) == 12
    assert others and max(others) > 300 and max(others) < 500


def test_steps_are_functions_of_the_seed():
    options = {"context": 50, "train": True}
    for seed in (0, 1):
        windows, fresh = (batches(120, seed=seed, **options)[1] for _ in range(2))
        steps = [windows[step] for step in range(9)]
        for step in (7, 0, 3):
            assert all(map(torch.equal, fresh[step], steps[step]))


@pytest.mark.parametrize("rate", [0, -0.1, 1.5, float("nan"), True, "0.15"])
def test_a_part_that_cannot_be_says_so(rate):
    with pytest.raises(DataError, match=f"a number above 0 and at most 1, .* got {rate!r}"):
        batches(100, rate=rate)
