"""Drift of floating-point streams: seen while training, and reported by the checker."""

import warnings

import pytest
import torch
from support.networks import MLP
from torch import nn

import redivider as rd


class Loud(nn.Module):
    """An f whose residual is so much larger than the stream that bf16 loses the stream."""

    def __init__(self, gain: float = 100.0) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.gain = gain

    def forward(self, x):
        return self.gain * torch.sin(self.linear(x))


def chain(make=Loud, depth: int = 4, dtype=torch.bfloat16, **options) -> rd.Chain:
    couplings = [rd.Coupling(make()) for _ in range(depth)]
    return rd.Chain([rd.Duplicate(), *couplings, rd.Fuse()], **options).to(dtype)


def train(model: rd.Chain, steps: int, dtype=torch.bfloat16) -> list[int]:
    """Return the steps, counted from 1, in which a warning fired."""
    fired = []
    for step in range(1, steps + 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(torch.randn(8, 16, dtype=dtype, requires_grad=True)).sum().backward()
        fired += [step for entry in caught if issubclass(entry.category, rd.DriftWarning)]
    return fired


def test_the_check_fires_during_training_and_names_the_row():
    with pytest.warns(rd.DriftWarning, match=r"unit 1, Coupling\(Loud\).*fixed"):
        chain()(torch.randn(8, 16).bfloat16()).sum().backward()


def test_it_runs_every_so_many_steps():
    assert train(chain(check_every=3), 7) == [1, 4, 7]
    assert train(chain(check_every=0), 3) == []
    assert train(chain(check_every=1).eval(), 3) == []
    with pytest.raises(ValueError, match="check_every"):
        chain(check_every=-1)


def test_it_is_silent_where_streams_are_good_enough():
    assert train(chain(MLP16, 12, torch.float32, check_every=1), 3, torch.float32) == []
    with torch.autocast("cpu", torch.bfloat16):
        assert train(chain(MLP16, 12, torch.float32, check_every=1), 3, torch.float32) == []
    assert train(chain(arithmetic="fixed", check_every=1), 3) == []


def test_it_compares_each_row():
    couplings = [rd.Coupling(f) for f in (MLP16(), Loud(), Loud())]
    units = [
        rd.Duplicate(),
        couplings[0],
        rd.Fuse("mean"),
        rd.Duplicate(),
        *couplings[1:],
        rd.Fuse(),
    ]
    with pytest.warns(rd.DriftWarning, match="unit 4, ") as caught:
        rd.Chain(units).bfloat16()(torch.randn(8, 16).bfloat16()).sum().backward()
    assert len(caught) == 1


def test_it_finds_an_f_that_is_not_deterministic_on_an_exact_grid():
    class Forgetful(nn.Module):
        calls = 0

        def forward(self, x):
            Forgetful.calls += 1
            return x * 2.0**-12 * Forgetful.calls

    assert train(chain(Forgetful, arithmetic="fixed", dtype=torch.float32), 1, torch.float32) == [1]


@pytest.mark.parametrize("error", [1e-2, 1e-4, 1e-6])
def test_the_estimate_is_close_to_the_true_error(error):
    from redivider.backward.drift import Drift
    from redivider.backward.mailbox import Mailbox

    seen = []

    class Recorder(Mailbox):
        def post(self, value, read):
            seen.append(value[0].item())

    a, b = torch.randn(2, 64, 32, 128)
    noisy = [x + error * torch.randn_like(x) for x in (a, b)]
    Drift((a, b), 1.0, "here", Recorder()).compare(tuple(noisy))
    assert seen[0] == pytest.approx(error, rel=0.3)


def test_values_that_are_not_numbers_do_not_pass_for_small_drift():
    class Breaks(nn.Module):
        calls = 0

        def forward(self, x):
            Breaks.calls += 1
            return x * (torch.nan if Breaks.calls > 2 else 1.0)

    model = chain(Breaks, depth=2, dtype=torch.float32)
    with pytest.warns(rd.DriftWarning, match="are not finite, though those.* twice"):
        model(torch.randn(8, 16, requires_grad=True)).sum().backward()
    Breaks.calls = 0
    assert train(chain(Breaks, depth=2, dtype=torch.float32), 1, torch.float32) == [1]


def test_what_cannot_be_rounding_is_not_said_to_be():
    class Counts(nn.Module):
        calls = 0

        def forward(self, x):
            Counts.calls += 1
            return x * Counts.calls

    with pytest.warns(rd.DriftWarning, match=r"suffer; if rd.check_reversible .* twice \(random"):
        chain(Counts, 1, torch.float32)(torch.randn(8, 16, requires_grad=True)).sum().backward()


def test_streams_that_overflow_only_when_they_are_rebuilt_are_told_apart():
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            return 2 * x + self.linear(x)

    torch.manual_seed(0)
    model = chain(Skips, 90, torch.float32)
    y = model(torch.randn(8, 16))
    assert y.isfinite().all()
    with pytest.warns(rd.DriftWarning, match="rebuilt.*not finite, though .* a skip of its own"):
        y.sum().backward()


def test_a_forward_that_is_not_finite_is_told_as_such():
    model = chain(MLP16, 2, torch.float32)
    with pytest.warns(rd.DriftWarning, match="of the forward are not finite.* look at the input"):
        model(torch.full((8, 16), torch.nan)).sum().backward()


class MLP16(MLP):
    def __init__(self) -> None:
        super().__init__(16)


def test_check_reversible_reports_drift_by_unit():
    report = rd.check_reversible(chain(MLP16, 6, torch.float32), torch.randn(8, 16))
    assert list(report.errors) == [f"unit {i}, Coupling(MLP16)" for i in range(6, 0, -1)]
    assert 0 < report.worst < 1e-6
    assert "unit 1, Coupling(MLP16)" in str(report) and "and 1 more" in str(report)
    with pytest.raises(ValueError, match=r"unit 3, Coupling\(Loud\).*recovered with a relative"):
        rd.check_reversible(chain(), torch.randn(8, 16).bfloat16())
    assert rd.check_reversible(chain(), torch.randn(8, 16).bfloat16(), tolerance=1e4).worst > 0.01
