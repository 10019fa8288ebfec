"""Hidden tokens: how many, which, and what stands in their place."""

from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from redivider.data import DataError, Text
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
    tokens, made = batches(n * context, rate=rate, context=context, seed=seed, train=train)
    for x, y in islice(made.since(0), n - 1):
        asked = y != -100
        assert int(asked.sum()) == max(1, round(rate * context))
        true = torch.where(asked, y, x)
        start = next(s for s in range(len(tokens)) if torch.equal(tokens[s : s + context], true[0]))
        assert start % context == 0 or train
        assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (1, context)
        assert (x[~asked] < MASK).all()


@given(st.integers(1, 90), st.integers(1, 20))
def test_in_evaluation_every_token_is_seen_and_nothing_beyond_is_asked_for(num, context):
    tokens, made = batches(num, 3, context=context, train=False, rate=0.5)
    x, y = map(torch.cat, zip(*made, strict=True))
    assert x.shape == (-(-num // context), context)
    x, y = x.flatten(), y.flatten()
    assert (y[num:] == -100).all()
    assert torch.equal(torch.where(y != -100, y, x)[:num], tokens)
    assert ((y.view(-1, context) != -100).sum(1) >= 1).all()
    again = torch.cat([each for _, each in made]).flatten()
    assert torch.equal(again, y)


def test_eight_of_ten_are_masked_one_is_another_and_one_is_shown():
    _, made = batches(400_000, context=1000, train=False)
    x, y = map(torch.cat, zip(*made, strict=True))
    asked = y != -100
    assert asked.float().mean().item() == pytest.approx(0.15)
    seen, true = x[asked], y[asked]
    assert (seen == MASK).float().mean().item() == pytest.approx(0.8, abs=0.005)
    assert (seen == true).float().mean().item() == pytest.approx(0.1 + 0.1 / 256, abs=0.005)
    others = seen[(seen != MASK) & (seen != true)]
    assert len(others.unique()) == 256
    places = asked.nonzero()[:, 1].bincount(minlength=1000).float()
    assert 30 < places.min() and places.max() < 100, "every place in a window is as likely"


def test_epochs_and_seeds_hide_others_and_steps_are_functions_of_both():
    options = {"context": 50, "train": True}
    found = []
    for seed in (0, 1):
        _, made = batches(120, seed=seed, **options)
        found += [frozenset((made[epoch][1][0] != -100).nonzero().flatten()) for epoch in range(9)]
        fresh = batches(120, seed=seed, **options)[1]
        for step in (7, 0, 3):
            assert all(map(torch.equal, fresh[step], made[step]))
    assert len({tuple(sorted(map(int, each))) for each in found}) == 18


@pytest.mark.parametrize("rate", [0, -0.1, 1.5, float("nan")])
def test_a_part_that_cannot_be_says_so(rate):
    with pytest.raises(DataError, match="masked must be above 0 and at most 1, got"):
        batches(100, rate=rate)
