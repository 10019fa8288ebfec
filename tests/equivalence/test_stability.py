"""Largest stable rate on a quadratic, whose gradients come late, with and without look-ahead.

Weights w with the losses c / 2 w^2, in the first of two stages. The optimizer is the momentum of
Adam: m <- 0.9 m + 0.1 g, w <- w - lr m. With a delay of d backward passes, d of the k gradients of
an update belong to weights of the update before. Eigenvalues of this recursion give the bound.
Rates just below and just above it are curvatures of two weights, which do not know each other.
"""

import numpy as np
import pytest
import torch
from torch import nn

import redivider as rd

B = 0.9
SLOW = pytest.mark.slow


class Weights(nn.Module):
    def __init__(self, num):
        super().__init__()
        self.w = nn.Parameter(torch.ones(num, dtype=torch.float64))

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


def growths(rates, latency, accumulate, lookahead, num_updates=70):
    """Return by how much the weights of a pipeline grow in an update, in the end."""
    curvatures = torch.tensor(rates, dtype=torch.float64)
    x = torch.ones(1, len(rates), dtype=torch.float64)
    weights = Weights(len(rates))
    pipe = rd.Pipeline(
        [weights, nn.Identity()],
        stages=2,
        loss=lambda y, target: (curvatures * y * y).sum() / 2,
        optimizer=lambda s: torch.optim.SGD(s.parameters(), 1.0, momentum=B, dampening=B),
        accumulate=accumulate,
        latency=latency,
        lookahead=lookahead,
    )
    sizes = []
    for n in range(num_updates * accumulate):
        pipe.step(x)
        if n % accumulate == 0:
            sizes.append(weights.w.detach().abs())
    half = num_updates // 2
    first, last = (torch.stack(part).amax(0) for part in (sizes[half - 20 : half], sizes[-20:]))
    return ((last / first) ** (1 / (num_updates - half))).tolist()


@pytest.mark.parametrize(
    "latency, accumulate, lookahead, bound",
    [
        (0.5, 1, False, 1.0),
        (0.5, 1, True, 2.7),
        (0.5, 1, "lead", 2.9),
        pytest.param(2, 5, False, 1.26, marks=SLOW),
        pytest.param(2, 5, True, 3.08, marks=SLOW),
        pytest.param(2, 5, "lead", 4.0, marks=SLOW),
        pytest.param(1, 3, False, 1.51, marks=SLOW),
        pytest.param(1, 3, True, 3.41, marks=SLOW),
        pytest.param(1, 3, "lead", 5.2, marks=SLOW),
        pytest.param(0.5, 8, False, 8.0, marks=SLOW),
        pytest.param(0.5, 8, True, 8.46, marks=SLOW),
        pytest.param(0.5, 8, "lead", 33.8, marks=SLOW),
    ],
)
def test_the_largest_stable_rate(latency, accumulate, lookahead, bound):
    late = 2 * latency / accumulate
    rates = [0.95 * bound, 1.05 * bound]
    expected = [radius(rate, late, lookahead) for rate in rates]
    assert expected[0] < 1 < expected[1]
    assert growths(rates, latency, accumulate, lookahead) == pytest.approx(expected, abs=0.01)
