"""Ring buffers of inputs: an input comes back when it is due, unchanged."""

from typing import Any

import torch

from redivider.pipeline.stages.ring_buffer import Ring


def value(number) -> Any:
    image = torch.full((2, 3, 4, 4), float(number)).to(memory_format=torch.channels_last)
    return {"image": image, "rest": (torch.arange(3) + number,)}


def test_what_was_put_comes_back_after_the_delay():
    slots = torch.zeros(2, dtype=torch.int64)
    ring = Ring([value(n) for n in range(5, 9)], 5, slots)
    for n in range(9, 30):
        slots[0], slots[1] = ring.slot(n), ring.slot(n - 4)
        ring.put(value(n))
        taken = ring.take()
        assert torch.equal(taken["image"], value(n - 4)["image"])
        assert torch.equal(taken["rest"][0], value(n - 4)["rest"][0])
        assert torch.equal(ring.get(n)["image"], value(n)["image"])


def test_strides_stay_and_others_are_taken_in():
    slots = torch.zeros(2, dtype=torch.int64)
    ring = Ring([value(0)], 0, slots)
    assert ring.get(0)["image"].stride() == value(0)["image"].stride()
    plain: dict[str, Any] = {"image": torch.randn(2, 3, 4, 4), "rest": (torch.arange(3),)}
    ring.put(plain)
    assert torch.equal(ring.take()["image"], plain["image"])
    spread: dict[str, Any] = {
        "image": torch.randn(2, 3, 4, 8)[..., ::2],
        "rest": (torch.arange(6)[::2],),
    }
    ring.put(spread)
    assert torch.equal(ring.take()["image"], spread["image"])
    assert torch.equal(ring.take()["rest"][0], spread["rest"][0])


def test_inputs_that_overlap_themselves_are_kept_whole():
    expanded = torch.arange(3.0)[:, None].expand(3, 4)
    ring = Ring([expanded], 0, torch.zeros(2, dtype=torch.int64))
    assert torch.equal(ring.get(0), expanded)
