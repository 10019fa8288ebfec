"""Inputs of a pipeline: refused if it cannot train with them, and watched for changes."""

import pytest
import torch
import torch.nn.functional as F
from support.oracle import equal
from torch import nn

import redivider as rd


class Masked(nn.Linear):
    def forward(self, a, mask):  # type: ignore[override]
        return super().forward(a) * mask


METHODS = ["petra", "dsp", "delayed", "delayed-graph", "exact-inverse", "approximate-input"]


def build(method="petra", **options):
    torch.manual_seed(0)
    units = [
        nn.Linear(5, 8),
        rd.Duplicate(),
        rd.Coupling(Masked(8, 8), takes=("mask",)),
        rd.Coupling(nn.Linear(8, 8)),
        rd.Fuse(),
        nn.Linear(16, 3),
    ]
    return rd.Pipeline(
        units,
        stages=4,
        loss=F.mse_loss,
        method=method,
        optimizer=lambda stage: torch.optim.SGD(stage.parameters(), lr=0.05),
        **options,
    )


def make_batch():
    return {"x": torch.randn(4, 5), "target": torch.randn(4, 3), "mask": torch.randn(4, 8)}


def step(pipe, batch):
    return pipe.step(batch["x"], batch["target"], mask=batch["mask"])


@pytest.mark.parametrize("what", ["x", "target", "mask"])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_in_flight_must_not_be_changed(method, what):
    pipe = build(method)
    batches = [make_batch() for _ in range(3)]
    for batch in batches:
        step(pipe, batch)
    batches[1][what][0] = 1
    said = "target" if what == "target" else "input"
    with pytest.raises(rd.ChangedError, match=f"the {said} of micro-batch 1 .* clone"):
        step(pipe, make_batch())
    with pytest.raises(RuntimeError, match=r"stopped .* micro-batch 1"):
        pipe.flush()


def test_a_flush_and_a_state_look_at_it_too():
    for use in (rd.Pipeline.flush, rd.Pipeline.state_dict):
        pipe, batch = build(), make_batch()
        step(pipe, batch)
        batch["x"].zero_()
        with pytest.raises(rd.ChangedError, match="micro-batch 0"):
            use(pipe)


def test_what_has_left_may_be_changed():
    pipe, batches = build(latency=2), [make_batch() for _ in range(40)]
    for i, batch in enumerate(batches):
        step(pipe, batch)
        met = i - 2 * 3  # three stages on the way to the loss, and as many back
        if met >= 0:
            batches[met]["target"].zero_()
        if met - 6 >= 0:
            batches[met - 6]["x"].zero_()
            batches[met - 6]["mask"].zero_()
    pipe.flush()
    for batch in batches:
        batch["x"].zero_()
    step(pipe, make_batch())


def test_a_clone_of_one_buffer_is_a_tensor_of_its_own():
    pipes, buffer = [build(), build()], torch.empty(4, 5)
    for _ in range(20):
        batch = make_batch()
        buffer.copy_(batch["x"])
        ticks = [step(pipes[0], batch), step(pipes[1], batch | {"x": buffer.clone()})]
        assert equal(*[tick.loss for tick in ticks])


@pytest.mark.parametrize("what", ["x", "target", "mask"])
def test_what_requires_grad_is_refused(what):
    pipe, batch = build(), make_batch()
    batch[what].requires_grad_()
    name = {"x": "the input", "target": "the target", "mask": "the keyword 'mask'"}[what]
    with pytest.raises(ValueError, match=f"{name} requires grad"):
        step(pipe, batch)
    step(pipe, make_batch())


def test_inference_mode_is_refused():
    pipe = build()
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"under torch\.inference_mode"):
        step(pipe, make_batch())
    with torch.inference_mode():
        batch = make_batch()
    with pytest.raises(ValueError, match="the input was made in inference mode"):
        step(pipe, batch)
    step(pipe, make_batch())


@pytest.mark.parametrize("x", [None, [1, 2], "text"])
def test_a_step_without_a_tensor_is_refused(x):
    pipe = build()
    with pytest.raises(TypeError, match="a step needs a tensor"):
        pipe.step(x, None, mask=torch.zeros(4, 8))
    step(pipe, make_batch())
