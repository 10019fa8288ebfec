"""Batches of images in memory: a pure function of the seed and the step."""

from dataclasses import replace
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.images import equal, make_images, one_by_one

from redivider.data import DataError, Images
from redivider.data.augment import Normalise
from redivider.data.order import draw, permutation


def test_a_training_batch_is_what_a_slow_loop_makes():
    images = make_images()
    batches = images.batches(16, train=True, seed=5)
    order = permutation(50, seed=5, epoch=2)
    chance = draw(torch.arange(50), seed=5, epoch=2, purpose="crop and flip")
    here = slice(16, 32)
    index, bits = order[here], chance[here]
    cut = one_by_one(images.pixels[index], bits % 9, bits // 9 % 9, bits // 81 % 2, padding=4)
    x, y = batches[2 * 3 + 1]
    assert torch.equal(x, Normalise(images.mean, images.std)(cut))
    assert torch.equal(y, images.labels[index])
    assert len({tuple(corner) for corner in torch.stack([bits % 9, bits // 9 % 9], 1).tolist()}) > 8
    assert 0 < int((bits // 81 % 2).sum()) < 16


def test_an_epoch_shows_every_image_at_most_once():
    images = make_images(padding=0, flip=False)
    images.labels.copy_(torch.arange(50) % 10)
    batches = images.batches(16, train=True)
    assert len(batches) == 3
    for epoch in (0, 1, 7):
        x = torch.cat([batches[3 * epoch + i][0] for i in range(3)])
        assert len(x.flatten(1).unique(dim=0)) == 48


@pytest.mark.slow
@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(0, 3))
def test_visited_in_any_order(steps, seed):
    batches = make_images().batches(7, train=True, seed=seed)
    in_order = list(islice(batches.since(0), 41))
    fresh = make_images().batches(7, train=True, seed=seed)
    for step in steps:
        assert equal(fresh[step], in_order[step])


def test_a_resumed_run_sees_what_the_uninterrupted_one_saw():
    true = list(islice(make_images().batches(16, train=True, seed=1).since(0), 20))
    for stop in (0, 1, 3, 10):
        torch.manual_seed(stop)
        again = make_images().batches(16, train=True, seed=1).since(stop)
        assert all(map(equal, islice(again, 20 - stop), true[stop:]))


def test_epochs_and_seeds_differ():
    batches, other = (make_images().batches(50, train=True, seed=seed) for seed in (0, 1))
    seen = [batches[0][0], batches[1][0], other[0][0]]
    assert not any(torch.equal(seen[i], seen[j]) for i in range(3) for j in range(i))


def test_evaluation_is_in_order_complete_and_plain():
    images = make_images()
    batches = images.batches(16, train=False)
    steps = list(batches)
    assert len(batches) == len(steps) == 4
    assert [len(y) for _, y in steps] == [16, 16, 16, 2]
    x, y = map(torch.cat, zip(*steps, strict=True))
    assert torch.equal(x, Normalise(images.mean, images.std)(images.pixels))
    assert torch.equal(y, images.labels)
    assert equal(batches[3], steps[3])
    assert len(list(batches.since(2))) == 2
    with pytest.raises(IndexError, match="no step 4; an epoch has 4"):
        batches[4]


def test_a_batch_is_the_callers_own():
    images = make_images()
    kept = images.pixels.clone(), images.labels.clone()
    for train in (True, False):
        x, y = images.batches(8, train=train)[0]
        x.zero_(), y.zero_()
    assert equal((images.pixels, images.labels), kept)


def test_padding_and_flip_can_be_set():
    images = make_images()
    plain = replace(images, padding=0, flip=False).batches(50, train=True)
    index = permutation(50, seed=0, epoch=0)
    assert torch.equal(plain[0][0], Normalise(images.mean, images.std)(images.pixels[index]))
    mirrored = replace(images, padding=0, flip=True).batches(50, train=True)[0][0]
    same = (mirrored == plain[0][0]).flatten(1).all(1)
    assert 10 < int(same.sum()) < 40
    assert torch.equal(mirrored[~same].flip(-1), plain[0][0][~same])


def test_dtype_and_format():
    x, y = make_images().batches(8, train=True, channels_last=True)[0]
    assert x.dtype == torch.float32 and y.dtype == torch.int64
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(x, make_images().batches(8, train=True)[0][0])


def test_the_callers_random_numbers_are_left_alone():
    before = torch.get_rng_state()
    next(make_images().batches(8, train=True).since(5))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_device_makes_the_same_batches():
    for train in (True, False):
        here, there = (
            make_images().batches(16, train=train, device=device) for device in ("cpu", "cuda")
        )
        for step, visited in enumerate(islice(there.since(0), 3)):
            assert equal(visited, there[step])
            for one, other in zip(here[step], visited, strict=True):
                torch.testing.assert_close(one, other.cpu(), rtol=1e-6, atol=1e-6)


def test_bad_input():
    images = make_images()
    with pytest.raises(DataError, match="made has 50 samples, too few for a batch of 64"):
        images.batches(64, train=True)
    assert len(images.batches(64, train=False)) == 1
    for size in (0, -1, 2.5, True):
        with pytest.raises(DataError, match="batch_size must be a whole number"):
            images.batches(size, train=True)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="padding"):
        replace(images, padding=32)
    batches = images.batches(8, train=True)
    with pytest.raises(IndexError, match="no step -1"):
        batches[-1]
    with pytest.raises(TypeError, match=r"since\(step\)"):
        iter(batches)
    with pytest.raises(DataError, match="labels outside 0 to 4"):
        Images("made", images.pixels, images.labels, 5, images.mean, images.std)
