"""Every family: equal gradients in every backward, inverses, pipelines, and training."""

import copy
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.families import EACH, EACH_DEPTH, NAMES, REVERSIBLE, is_text
from support.oracle import gradients, run_plainly, weigh, worst_error

import redivider as rd
from redivider.models.catalogue import FAMILIES, resolve
from redivider.models.summary import summarise


def test_every_family_has_a_row():
    assert {resolve(name)[0].prefix for name in NAMES} == {family.prefix for family in FAMILIES}


def _cases_by_backward():
    """Yield all cases; networks without couplings have nothing to reverse."""
    for name, options in EACH_DEPTH:
        reversing = ("reverse", "reverse-checkpoint") if name.startswith("rev") else ()
        for backward in ("store", "checkpoint", *reversing):
            yield name, options, backward


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "backward"), [*_cases_by_backward()])
def test_loss_and_gradients_are_those_of_plain_autograd(name, options, backward):
    model = rd.create_model(name, backward=backward, dtype=torch.float64, **options)
    _unsettle(model)
    plain = copy.deepcopy(model)
    x = resolve(name, **options)[1].example(5)
    x = x.double() if x.is_floating_point() else x
    torch.manual_seed(1)
    loss = weigh(model(x))
    loss.backward()
    torch.manual_seed(1)
    true = weigh(run_plainly(plain, x))
    true.backward()
    assert loss.item() == pytest.approx(true.item(), rel=1e-12)
    assert worst_error(gradients(model), gradients(plain)) <= 1e-10
    for key, buffer in plain.named_buffers():
        assert torch.allclose(model.get_buffer(key), buffer, rtol=1e-12), key


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), REVERSIBLE)
def test_least_is_kept_where_junctions_keep_their_input_alone(name, options):
    kept = summarise(name, also=("checkpoint", "reverse", "reverse-checkpoint"), **options).kept
    least = kept.pop("reverse-checkpoint")
    assert least <= min(kept.values())
    if "depth" in options:
        deeper = {**options, "depth": options["depth"] + 4}
        more = summarise(name, also=("reverse-checkpoint",), **deeper).kept
        assert more["reverse-checkpoint"] == least


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), EACH_DEPTH)
def test_every_coupling_is_inverted(name, options):
    model = rd.create_model(name, dtype=torch.float64, **options)
    _unsettle(model)
    couplings = [unit for unit in model if isinstance(unit, rd.Coupling)]
    assert bool(couplings) == name.startswith("rev")
    x = resolve(name, **options)[1].example(5)
    report = rd.check_reversible(model, x.double() if x.is_floating_point() else x, tolerance=1e-12)
    assert len(report.errors) == len(couplings)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), EACH)
def test_it_runs_through_a_pipeline(name, options):
    model = rd.create_model(name, **options)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    pipe = rd.Pipeline(
        model,
        stages=4,
        loss=(lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()))
        if is_text(name)
        else F.cross_entropy,
        optimizer=lambda stage: torch.optim.SGD(stage.parameters(), lr=0.1),
        accumulate=2,
    )
    torch.manual_seed(0)
    resolved = resolve(name, **options)[1]
    losses = []
    for n in range(8):  # the first stage has its gradients after six
        x = resolved.example(4)
        target = x if is_text(name) else torch.randint(10, (4,))
        tick = pipe.step(x, target)
        assert tick.microbatch == (n - 3 if n >= 3 else None)
        losses += [] if tick.loss is None else [tick.loss.item()]
    pipe.flush()
    assert len(losses) == 5 and all(torch.tensor(losses).isfinite())
    parameters = model.named_parameters()
    same = [key for key, param in parameters if torch.equal(param, before[key])]
    same = [key for key in same if not key.endswith("conv.bias")]  # batch norm cancels it
    assert not same, f"these were not trained: {same}"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), REVERSIBLE)
def test_it_learns_a_batch_of_real_data(name, options):
    """Train on digits; language models on bytes of a text in $REDIVIDER_DATA or of the licence."""
    options = {key: value for key, value in options.items() if "drop" not in key}
    if "net" not in name:
        options["width"] = 32
    model = rd.create_model(name, **options)
    x, target = _text(options["context"], "roberta" in name) if is_text(name) else _digits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(30):
        loss = F.cross_entropy(model(x).flatten(0, -2), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if losses[-1] < 0.5 * losses[0]:
            return
    pytest.fail(f"the loss is not halved: {losses}")


def _digits():
    data = pytest.importorskip("sklearn.datasets").load_digits()
    images = torch.tensor(data.images[:10], dtype=torch.float32)[:, None]
    return (images - images.mean()) / images.std(), torch.tensor(data.target[:10])


def _text(context, masked):
    stored = Path(os.environ.get("REDIVIDER_DATA", "/nowhere")) / "tinyshakespeare" / "input.txt"
    licence = Path(__file__).parents[2] / "LICENSE"
    text = (stored if stored.exists() else licence).read_bytes()
    tokens = torch.frombuffer(bytearray(text[: 8 * (context + 1)]), dtype=torch.uint8).long()
    rows = tokens.view(8, context + 1)
    if masked:
        hidden = torch.arange(context) % 6 == 3
        x = rows[:, :context]
        return x.masked_fill(hidden, 255), x.masked_fill(~hidden, -100)
    return rows[:, :-1], rows[:, 1:]


def _unsettle(model):
    """Move the weights off their initial values, because zeros and ones hide mistakes."""
    torch.manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
