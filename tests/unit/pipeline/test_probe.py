"""The probe: equal to explicit histories and plain autograd, and without effect on training."""

import pytest
import torch
import torch.nn.functional as F
from support.oracle import equal
from support.pipelines import CUTS, batches, build, network, refer
from support.reference import METHODS, inner, run_unit
from support.stateful import build as build_with_everything
from support.stateful import feed
from torch import Tensor, nn

import redivider as rd

EXACT = ("delayed", "delayed-graph", "exact-inverse")


def plain_gradient(units, weights, x, target):
    """Return the gradients of plain backprop with these weights, by unit and name."""
    leaves = [{n: w.clone().requires_grad_() for n, w in own.items()} for own in weights]
    for unit, own in zip(units, leaves, strict=True):
        x = run_unit(unit, own, x)
    wanted = [leaf for own in leaves for leaf in own.values()]
    grads = iter(torch.autograd.grad(F.cross_entropy(x, target), wanted))
    return [{name: next(grads) for name in own} for own in leaves]


def compare(one, other):
    a, b = (torch.cat([grad.flatten() for grad in grads]) for grads in (one, other))
    return float(a @ b / (a.norm() * b.norm())), float(a.norm() / b.norm())


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, cut, accumulate, latency, lookahead",
    [
        ("petra", CUTS[5], 1, 1, None),
        ("petra", CUTS[3], 3, 2, None),
        ("petra", CUTS[5], 1, 1, "momentum"),
        ("petra", CUTS[5], 1, 0.5, None),
        ("delayed", CUTS[3], 2, 1.5, None),
        ("dsp", CUTS[3], 1, 1, None),
        ("approximate-input", CUTS[5], 2, 1, None),
        ("delayed-graph", CUTS[3], 1, 1, "momentum"),
    ],
)
def test_it_finds_what_histories_and_plain_autograd_give(
    method, cut, accumulate, latency, lookahead
):
    model = network()
    reference = refer(model, cut, method, accumulate, latency, lookahead=lookahead)
    pipe = build(rd.Pipeline, model, cut, method, accumulate, latency, lookahead=lookahead)
    probe = pipe.probe(every=4)
    for x, target in batches(21):  # of the fourth, all is known after 12 + 8
        reference.tick((x, target))
        pipe.step(x, target)
    units, rebuilt_errors = reference.units, []
    gradients: dict[tuple[int, int], dict[str, Tensor]] = {}
    for n, u, name, grad in reference.gradients:
        gradients.setdefault((n, u), {})[name] = grad
    assert len({row.microbatch for row in probe.qualities}) >= 4
    assert {row.microbatch % 4 for row in probe.qualities} == {0}
    for row in probe.qualities:
        n, j = row.microbatch, row.stage
        up = reference.up
        slot = 2 * n + (up[-1] if j == len(cut) - 1 else 2 * up[-1] - up[j] + 1)
        if latency == int(latency):
            slot -= slot % 2  # no stage updates before the tick ends
        x, target = reference.batches[n]
        now = plain_gradient(units, reference.weights[slot], x, target)
        then = plain_gradient(units, [reference.used[n, u] for u in range(len(units))], x, target)
        own = [u for u in reference.stages[j] if list(inner(units[u]).parameters())]
        names = [(u, name) for u in own for name in now[u]]
        mine, end, delayed = (
            [source[u][name] for u, name in names]
            for source in ({u: gradients.get((n, u), {}) for u in own}, now, then)
        )
        expected = [*compare(mine, end), *compare(mine, delayed), *compare(delayed, end)]
        measured = [
            row.cosine,
            row.ratio,
            row.cosine_to_delayed,
            row.ratio_to_delayed,
            row.cosine_of_delayed,
            row.ratio_of_delayed,
        ]
        assert measured == pytest.approx(expected, rel=1e-9)
        seam = units[reference.stages[j][-1] : reference.stages[j][-1] + 2]
        in_row = j + 1 < len(cut) and all(isinstance(unit, rd.Coupling) for unit in seam)
        if in_row and METHODS[method][1] is not None:
            rebuilt, true = reference.back[n, j][0], reference.outputs[n, j]
            a, b = (torch.cat([t.flatten() for t in pair]) for pair in (rebuilt, true))
            error = float((a - b).norm() / b.norm())
            assert row.rebuilt_error == pytest.approx(error, rel=1e-6, abs=1e-13)
            rebuilt_errors.append(error)
    if method == "petra" and len(cut) == 5:
        assert max(rebuilt_errors) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_with_weights_that_stand_still_all_gradients_are_one(method):
    model = network()
    pipe = rd.Pipeline(
        model,
        stages=CUTS[5],
        loss=F.cross_entropy,
        method=method,
        optimizer=lambda stage: torch.optim.SGD(stage.parameters(), lr=0.0, momentum=0.9),
    )
    probe = pipe.probe(every=3)
    for x, target in batches(14):
        pipe.step(x, target)
    assert {row.stage for row in probe.qualities} == {0, 1, 2, 3, 4}
    for row in probe.qualities:
        values = [row.cosine, row.ratio, row.cosine_to_delayed, row.ratio_of_delayed]
        assert values == pytest.approx([1.0] * 4, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_methods_that_are_exact_but_late_find_the_delayed_gradient(method):
    model = network()
    pipe = build(rd.Pipeline, model, CUTS[5], method, 1, 1)
    probe = pipe.probe(every=5)
    for x, target in batches(20):
        pipe.step(x, target)
    late = [row for row in probe.qualities if row.stage < 4]
    worst = max(abs(row.cosine_to_delayed - 1) for row in late)
    assert worst < 1e-9 if method in EXACT else worst > 1e-6
    assert max(abs(row.cosine - 1) for row in late) > 1e-4, "staleness must show"


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, arithmetic",
    [
        *((method, "float") for method in METHODS),
        *((method, "fixed") for method in ("petra", "delayed", "exact-inverse")),
    ],
)
def test_it_leaves_no_trace_in_the_training(method, arithmetic):
    """With dropout, batch norm, a buffer that moves, a mask, and a loss with a parameter."""
    _, plain = build_with_everything(method, arithmetic=arithmetic)
    _, watched = build_with_everything(method, arithmetic=arithmetic)
    probe = watched.probe(every=2)
    assert equal(feed(watched, 0, 14), feed(plain, 0, 14))
    assert equal(watched.state_dict(), plain.state_dict())
    watched.flush()
    assert len(probe.qualities) == 4 * 7 and not probe._samples
    if arithmetic == "fixed" and method == "exact-inverse":
        rebuilt = [row.rebuilt_error for row in probe.qualities if row.stage == 1]
        assert rebuilt and max(rebuilt) == 0.0


def test_a_state_that_is_loaded_ends_the_samples_in_flight():
    _, pipe = build_with_everything()
    probe = pipe.probe(every=1)
    feed(pipe, 0, 5)
    state, before = pipe.state_dict(), len(probe.qualities)
    pipe.load_state_dict(state)
    assert not probe._samples
    feed(pipe, 5, 4)
    fresh = {row.microbatch for row in probe.qualities[before:]}
    assert fresh == {5}, "only what entered since"


@pytest.mark.slow
def test_it_prints_and_draws(tmp_path):
    _, pipe = build_with_everything()
    probe = pipe.probe(every=3)
    assert "no samples yet" in str(probe) and "multiple of 3" in str(probe)
    feed(pipe, 0, 20)
    lines, legend = (part.splitlines() for part in str(probe).split("\n\n"))
    assert len(lines) == 2 + 4 and lines[2].split()[0] == "0"
    explained = " ".join(line[:16] for line in legend)
    for column in ("to end-to-end", "to delayed", "delayed to end", "cosine", "ratio", "rebuilt"):
        assert column in lines[0] + lines[1] and column in explained
    matplotlib = pytest.importorskip("matplotlib")
    backend = matplotlib.get_backend()
    matplotlib.use("svg")
    try:
        probe.plot(tmp_path / "quality.png")
        assert matplotlib.get_backend() == "svg"  # the caller's
    finally:
        matplotlib.use(backend)
    assert (tmp_path / "quality.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="every must be at least 1"):
        pipe.probe(every=0)


def tied_network():
    torch.manual_seed(0)
    f = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    units = [nn.Linear(5, 4), rd.Duplicate(), rd.Coupling(f), rd.Coupling(f), rd.Fuse()]
    return rd.Chain([*units, nn.Linear(8, 3)])


def test_gradients_of_shared_weights_are_compared_whole():
    pipe = rd.Pipeline(
        tied_network(),
        stages=[2, 2, 2],
        loss=F.cross_entropy,
        optimizer=lambda stage: torch.optim.SGD(stage.parameters(), lr=0.0),
    )
    probe = pipe.probe(every=1)
    for x, target in batches(10):
        pipe.step(x.float(), target)
    tied = [row for row in probe.qualities if row.stage == 1]
    assert [(row.cosine, row.ratio) for row in tied] == [
        pytest.approx((1.0, 1.0), abs=1e-5) for _ in tied
    ]
    assert tied


def test_weights_that_units_of_a_stage_share():
    """Gradients of both are summed, in the training's own order."""
    ends = []
    for watched in (False, True):
        model = tied_network()
        pipe = build(rd.Pipeline, model, [2, 2, 2], "petra", 2, 1)
        probe = pipe.probe(every=1) if watched else None
        for x, target in batches(20):
            pipe.step(x.float(), target)
        ends.append([param.detach().clone() for param in model.parameters()])
    assert all(map(torch.equal, *ends))
    assert probe is not None
    assert {row.stage for row in probe.qualities} == {0, 1, 2}
    last = [row for row in probe.qualities if row.stage == 2]
    assert max(abs(row.cosine_to_delayed - 1) for row in last) < 1e-5


def test_a_fault_of_a_comparison_does_not_stop_the_training(monkeypatch):
    _, pipe = build_with_everything(arithmetic="fixed")
    probe = pipe.probe(every=2)

    def fails(*args):
        raise OverflowError("off the grid")

    monkeypatch.setattr("redivider.pipeline.stages.unit.Unit.trace", fails)
    feed(pipe, 0, 20)
    assert probe.qualities and all(row.cosine != row.cosine for row in probe.qualities)
