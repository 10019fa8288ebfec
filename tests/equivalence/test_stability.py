"""Largest stable rate on a quadratic, whose gradients come late, with and without look-ahead.

One weight w with the loss c / 2 w^2, in the first of two stages. The optimizer is the momentum of
Adam: m <- 0.9 m + 0.1 g, w <- w - lr m. With a delay of d backward passes, d of the k gradients of
an update belong to weights of the update before. Eigenvalues of this recursion give the bound.
"""

import numpy as np
import pytest
import torch
from torch import nn

import redivider as rd

B = 0.9
SLOW = pytest.mark.slow


class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return self.w * x


def radius(rate, late, lookahead):
    """Return the largest eigenvalue of an update of (w, w before, w before that, m).

    Args:
        rate: Rate times curvature.
        late: Part of the gradients that belong to the weights before.
        lookahead: True if these ran by the weights before plus the last displacement; "lead" if
            updates go further by what they have grown.
    """
    w, before, oldest, m = np.eye(4)
    forward = 2 * before - oldest if lookahead is True else before
    grad = rate * ((1 - late) * w + late * forward)
    m = B * m + (1 - B) * grad
    growth = (1 - B) / B * (grad - m)  # of m
    step = m + (late + min(late, 1)) * growth * (lookahead == "lead")
    return max(abs(np.linalg.eigvals(np.stack([w - step, w, before, m]))))


def growth(rate, latency, accumulate, lookahead, num_updates=70):
    """Return by how much the weight of a pipeline grows in an update, in the end."""
    x = torch.ones(1, 1, dtype=torch.float64)
    weight = Weight()
    pipe = rd.Pipeline(
        [weight, nn.Identity()],
        stages=2,
        loss=lambda y, target: (y * y).sum() / 2,
        optimizer=lambda s: torch.optim.SGD(s.parameters(), rate, momentum=B, dampening=B),
        accumulate=accumulate,
        latency=latency,
        lookahead=lookahead,
    )
    sizes = []
    for n in range(num_updates * accumulate):
        pipe.step(x)
        if n % accumulate == 0:
            sizes.append(abs(float(weight.w.detach())))
    half = num_updates // 2
    first, last = max(sizes[half - 20 : half]), max(sizes[-20:])
    return (last / first) ** (1 / (num_updates - half))


@pytest.mark.parametrize(
    "latency, accumulate, lookahead, bound",
    [
        (0.5, 1, False, 1.0),
        (0.5, 1, True, 2.7),
        (0.5, 1, "lead", 2.9),
        pytest.param(2, 9, False, 2.25, marks=SLOW),
        pytest.param(2, 9, True, 4.3, marks=SLOW),
        pytest.param(2, 9, "lead", 9.0, marks=SLOW),
        pytest.param(1, 9, False, 4.5, marks=SLOW),
        pytest.param(1, 9, True, 6.2, marks=SLOW),
        pytest.param(1, 9, "lead", 21.5, marks=SLOW),
        pytest.param(0.5, 20, False, 20, marks=SLOW),
        pytest.param(0.5, 20, True, 13.6, marks=SLOW),
        pytest.param(0.5, 20, "lead", 34.8, marks=SLOW),
    ],
)
def test_the_largest_stable_rate(latency, accumulate, lookahead, bound):
    late = 2 * latency / accumulate
    for rate, is_stable in ((0.95 * bound, True), (1.05 * bound, False)):
        expected = radius(rate, late, lookahead)
        assert (expected < 1) == is_stable
        assert growth(rate, latency, accumulate, lookahead) == pytest.approx(expected, abs=0.01)
