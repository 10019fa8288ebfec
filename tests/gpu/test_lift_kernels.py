"""Kernels of the lift do what the steps in plain torch do, to the last bit.

They also run without a GPU, where Triton is installed: TRITON_INTERPRET=1 pytest THIS_FILE
"""

import os

import pytest
import torch

from redivider.arithmetic import Fixed
from redivider.backward.lift_steps import LiftSteps
from redivider.lift import draw_signs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU, or Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton")

from redivider.backward import lift_kernels  # noqa: E402
from redivider.backward.lift_kernels import LiftKernels  # noqa: E402

DTYPES = [torch.float32, torch.float16]
if not INTERPRETED:  # the interpreter truncates to bf16
    DTYPES.append(torch.bfloat16)


def both(bits=2, dtype=torch.float32, grid=20):
    return [kind(bits, Fixed(grid), dtype) for kind in (LiftSteps, LiftKernels)]


def tensors(seed, shape, dtype, size=1.0, number=1):
    generator = torch.Generator().manual_seed(seed)
    made = (
        torch.randn(shape, generator=generator).mul(size).to(DEVICE, dtype) for _ in range(number)
    )
    return list(made)


def streams(shape, seed=0, size=2**24):
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(-size, size, (2, *shape), dtype=torch.int32, generator=generator)
    return list(made.to(DEVICE))


def peak():
    return torch.zeros((), device=DEVICE)


def equal(*pairs):
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(*pairs, strict=True))


# The fifth is aligned: a block of values is of one sample.
@pytest.mark.parametrize("shape", [(2, 5, 7), (3, 1000), (1, 1), (4, 0), (8, 1024)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [1, 2, 3, 8])
def test_a_block_forth_and_back(bits, dtype, shape):
    u, x = streams(shape)
    sign = draw_signs(u)
    (output,) = tensors(1, shape, dtype)
    results = []
    for steps in both(bits, dtype):
        peaks = peak(), peak()
        lifted, point, kept = steps.lift(u, x, sign, peaks[0])
        new_u, value = steps.couple(u, point, output, peaks[1])
        back = steps.undo(new_u, lifted, point, output, sign, kept)
        assert torch.equal(back[0], u) and torch.equal(back[1], x)
        results.append([lifted, point, kept, new_u, value, *back, *peaks])
    assert equal(*results)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_dx", [False, True])
@pytest.mark.parametrize("shape", [(3, 50), (4, 1024)], ids=str)
def test_gradients(shape, dtype, has_dx):
    du, dx, through = tensors(2, shape, dtype, number=3)
    sign = draw_signs(du)
    grads = [steps.pull_back(du, dx if has_dx else None, through, sign) for steps in both(3, dtype)]
    assert equal(*grads)
    assert grads[0][0].dtype == dtype


def test_tensors_with_other_strides():
    u, x = streams((4, 6))
    sign = draw_signs(u)
    output, du, dx, through = (t.T for t in tensors(3, (6, 4), torch.float32, number=4))
    results = []
    for steps in both():
        lifted, point, kept = steps.lift(u, x, sign, peak())
        new_u, value = steps.couple(u, point, output, peak())
        back = steps.undo(new_u, lifted, point, output, sign, kept)
        results.append([value, *back, *steps.pull_back(du, dx, through, sign)])
    assert equal(*results)


def test_halves_are_rounded_to_even():
    shape = (1, 8)
    u, _ = streams(shape)
    output = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 0.49999997, 2**23 + 1, 2**22 + 0.5]])
    output = output.to(DEVICE) * 2.0**-20
    point = torch.zeros(shape, device=DEVICE)
    plain, kernel = (steps.couple(u, point, output, peak())[0] - u for steps in both())
    assert plain.tolist() == [[0, 2, 2, 0, -2, 0, 2**23 + 1, 2**22]]
    assert torch.equal(plain, kernel)


@pytest.mark.parametrize("value", [5000.0, 1900.0, float("inf"), float("nan")])
def test_values_beyond_the_grid(value):
    u = torch.full((1, 40), 1500 * 2**20, dtype=torch.int32, device=DEVICE)
    output = torch.zeros(1, 40, device=DEVICE)
    output[0, 7] = value
    for steps in both():
        seen = peak()
        steps.couple(u, torch.zeros_like(output), output, seen)
        if isinstance(steps, LiftKernels):
            assert float(seen) == (value + 1500 if value == value else float("inf"))
        assert seen != 0  # NaN or a number


def test_a_lift_beyond_the_grid():
    u = torch.full((1, 9), 2**31 - 1, dtype=torch.int32, device=DEVICE)
    x = -u
    for steps in both():
        seen = peak()
        steps.lift(u, x, torch.ones(1, 1, dtype=torch.int8, device=DEVICE), seen)
        assert float(seen) > 0


def test_indices_of_64_bits(monkeypatch):
    monkeypatch.setattr(lift_kernels, "MAX_INT32", 0)
    test_a_block_forth_and_back(2, torch.float32, (3, 1000))
    test_gradients((4, 1024), torch.float32, True)
