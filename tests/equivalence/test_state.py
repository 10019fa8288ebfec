"""Saved after any tick and loaded into a fresh pipeline, training continues to the last bit."""

import json
import os
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.networks import ConvNorm
from support.oracle import equal
from support.reference import METHODS
from support.stateful import OPTIMIZERS, build, feed
from torch import nn
from torch.utils._pytree import tree_leaves

import redivider as rd
from redivider.pipeline.checkpoint.files import MANIFEST, Alone, StateError, write_state


@pytest.mark.slow
@pytest.mark.parametrize("method, at", [("petra", 0), *((method, 11) for method in METHODS)])
def test_the_next_12_ticks_are_equal_to_the_last_bit(method, at, tmp_path):
    _, pipe = build(method)
    feed(pipe, 0, at)
    pipe.save(tmp_path / "state")
    state = pipe.state_dict()
    _, from_disk = build(method, seed=1)
    from_disk.load(tmp_path / "state")
    _, from_memory = build(method, seed=2)
    from_memory.load_state_dict(state)
    true = feed(pipe, at, 12)
    for other in (from_disk, from_memory):
        assert equal(feed(other, at, 12), true)
        assert equal(other.state_dict(), pipe.state_dict())
    flushed = [(tick.microbatch, tick.loss, tick.aux) for tick in pipe.flush()]
    assert len(flushed) == 3
    assert equal([(t.microbatch, t.loss, t.aux) for t in from_disk.flush()], flushed)
    assert equal(from_disk.state_dict(), pipe.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"arithmetic": "fixed"},
        {"latency": 3, "optimizer": "adamw"},
        {"latency": 0.5, "optimizer": "muon", "lookahead": True},
        {"accumulate": 1, "lookahead": "lead"},
        {"clip_norm": 0.1, "clip_over": "all", "optimizer": "adamw"},
        {"lookahead": True},
        {"lookahead": True, "accumulate": 1, "optimizer": "adamw"},
        {"lookahead": True, "method": "delayed-graph", "accumulate": 1},
        {"lookahead": True, "method": "approximate-input", "arithmetic": "fixed"},
    ],
)
def test_with_every_option(options, tmp_path):
    _, pipe = build(**options)
    feed(pipe, 0, 9)
    pipe.save(tmp_path / "state")
    _, other = build(seed=1, **options)
    other.load(tmp_path / "state")
    assert equal(feed(other, 9, 12), feed(pipe, 9, 12))
    assert equal(other.state_dict(), pipe.state_dict())


def images(number):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(2, 7, 9, 6, generator=generator).permute(0, 3, 1, 2)  # channels last
    return x[:, ::2], torch.randint(3, (2,), generator=generator)  # and with gaps


@pytest.mark.slow
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("method", ["petra", "dsp", "delayed"])
def test_tensors_come_back_as_they_lay(method, channels_last, tmp_path):
    """Check halves of tensors, images with channels last, and views fed by the caller."""

    def build_images():
        torch.manual_seed(0)
        couplings = [rd.Coupling(ConvNorm(4)) for _ in range(3)]
        ends = [rd.Fuse(dim=1), nn.Flatten(), nn.Linear(8 * 5 * 7, 3)]
        model = rd.Chain([nn.Conv2d(3, 8, 3), rd.Split(dim=1), *couplings, *ends])
        if channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer, stages = OPTIMIZERS["sgd"], [2, 1, 1, 1, 1, 2]
        return rd.Pipeline(
            model, stages=stages, loss=F.cross_entropy, optimizer=optimizer, method=method
        )

    def strides(pipe):
        inboxes = [*pipe.in_flight.up, *pipe.in_flight.down]
        messages = [message for inbox in inboxes for message in inbox.values()]
        trees = [(message.flow.value, message.grads) for message in messages]
        kept = [entry.value for unit in pipe._units.values() for entry in unit.kept.values()]
        grads = [param.grad for param in pipe._chain.parameters()]
        trained = [stage.optimizer for stage in pipe.stages if stage.optimizer is not None]
        moments = [state for optimizer in trained for state in optimizer.state.values()]
        leaves = tree_leaves((trees, kept, grads, moments))
        return [leaf.stride() for leaf in leaves if isinstance(leaf, torch.Tensor)]

    pipe, other = build_images(), build_images()
    for n in range(13):
        pipe.step(*images(n))
    for inbox in (*pipe.in_flight.up, *pipe.in_flight.down):
        for message in inbox.values():
            leaves = tree_leaves((message.flow.value, message.grads))
            assert all(is_dense(leaf) for leaf in leaves if leaf is not None)
    pipe.save(tmp_path / "state")
    other.load(tmp_path / "state")
    assert strides(other) == strides(pipe)
    for n in range(13, 28):
        losses = [p.step(*images(n)).loss for p in (pipe, other)]
        assert torch.equal(losses[0], losses[1])
    assert equal(pipe.state_dict(), other.state_dict())


def is_dense(tensor):
    """Return whether the elements fill a piece of memory without gaps."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() == 1 + sum((n - 1) * s for n, s in pairs)


def test_the_weights_alone_are_the_models_own_state_dict():
    model, pipe = build()
    before = list(model.state_dict())
    feed(pipe, 0, 9)
    assert list(model.state_dict()) == before
    other, _ = build(seed=1)
    other.load_state_dict(model.state_dict())
    x, mask = torch.randn(6, 4, 5), torch.rand(4, 4)
    with torch.no_grad():
        assert torch.equal(other.eval()(x, mask=mask), pipe.evaluate(x, mask=mask))


def test_a_state_with_the_former_name_of_lookahead_loads():
    _, pipe = build("petra", lookahead=True)
    feed(pipe, 0, 7)
    state = pipe.state_dict()
    state["pipeline"]["lookahead"] = "momentum"
    _, other = build("petra", lookahead=True)
    other.load_state_dict(state)
    assert equal(feed(other, 7, 5), feed(pipe, 7, 5))
    _, plain = build("petra")
    with pytest.raises(StateError, match="with lookahead displacement, and this one has None"):
        plain.load_state_dict(state)


def test_a_state_is_a_copy():
    _, pipe = build()
    feed(pipe, 0, 9)
    state = pipe.state_dict()
    kept = json.dumps(state["units"]["0"]["weights"]["weight"].tolist())
    feed(pipe, 9, 5)
    assert json.dumps(state["units"]["0"]["weights"]["weight"].tolist()) == kept


def test_saving_replaces_an_older_state_and_nothing_else(tmp_path):
    _, pipe = build()
    feed(pipe, 0, 3)
    pipe.save(tmp_path / "state")
    feed(pipe, 3, 3)
    pipe.save(tmp_path / "state")
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    _, other = build(seed=1)
    other.load(tmp_path / "state")
    assert equal(other.state_dict(), pipe.state_dict())
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("precious")
    with pytest.raises(StateError, match="holds no state"):
        pipe.save(tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter").read_text() == "precious"
    with pytest.raises(NotADirectoryError, match=r"cannot make it .*chapter/state'"):
        pipe.save(tmp_path / "thesis" / "chapter" / "state")


def test_what_cannot_be_saved_is_refused_and_leaves_the_old_state(tmp_path):
    _, pipe = build()
    pipe.save(tmp_path / "state")
    files = {path.name: path.read_bytes() for path in (tmp_path / "state").iterdir()}
    pipe.step(torch.randn(6, 4, 5), {1, 2})
    with pytest.raises(StateError, match="cannot hold a set"):
        pipe.save(tmp_path / "state")
    assert {path.name: path.read_bytes() for path in (tmp_path / "state").iterdir()} == files
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


DAMAGES = {
    "cut short": lambda data: data[: len(data) // 2],
    "flipped": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
    "empty": lambda data: b"",
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [MANIFEST, "unit-2.safetensors", "stage-1.safetensors"])
def test_a_damaged_state_says_so_and_changes_nothing(name, damage, tmp_path):
    _, pipe = build()
    feed(pipe, 0, 9)
    pipe.save(tmp_path / "state")
    path = tmp_path / "state" / name
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    before = pipe.state_dict()
    with pytest.raises(StateError, match=name):
        pipe.load(tmp_path / "state")
    assert equal(pipe.state_dict(), before)
    path.unlink()
    with pytest.raises(StateError, match=name):
        pipe.load(tmp_path / "state")


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"method": "dsp"}, "with method petra, and this one has dsp"),
    "accumulate": ({"accumulate": 3}, "with accumulate 2, and this one has 3"),
    "latency": ({"latency": 2}, "with latency 1, and this one has 2"),
    "cut": ({"stages": (2, 2, 2, 3)}, r"stages=\[1, 3, 2, 3\]"),
    "arithmetic": ({"arithmetic": "fixed"}, "with arithmetic"),
    "optimizer": ({"optimizer": "sgd"}, "stage 0 is SGD, and in the state AdamW"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_state_of_another_pipeline_says_what_differs_and_changes_nothing(what):
    options, message = OTHERS[what]
    state = build()[1].state_dict()
    _, other = build(**options)
    before = other.state_dict()
    with pytest.raises(StateError, match=message):
        other.load_state_dict(state)
    assert equal(other.state_dict(), before)


def test_a_state_of_another_model_or_of_something_else_is_refused():
    state = build()[1].state_dict()
    model = rd.Chain([nn.Linear(5, 9), nn.Linear(9, 3)])
    pipe = rd.Pipeline(
        model, stages=2, loss=F.cross_entropy, optimizer=OPTIMIZERS["sgd"], accumulate=2, seed=7
    )
    with pytest.raises(StateError, match="with units"):
        pipe.load_state_dict(state)
    state["units"]["0"]["weights"]["weight"] = torch.zeros(9, 5)
    with pytest.raises(StateError, match=r"unit 0, Linear .* weight is float32 of \(9, 5\)"):
        build()[1].load_state_dict(state)
    with pytest.raises(StateError, match="not a state"):
        pipe.load_state_dict({"weights": 1})


def test_two_processes_may_not_write_one_file(tmp_path):
    class Two(Alone):
        def gather_text(self, text):
            return [text, text]

    with pytest.raises(StateError, match=r"two processes have written loss\.safetensors"):
        write_state(tmp_path / "state", {"loss": torch.zeros(2)}, Two())
    assert not list(tmp_path.iterdir())


def fail_once(pipe):
    def fail(*_):
        raise ArithmeticError("once")

    handle = pipe.stages[1].optimizer.register_step_pre_hook(fail)
    return handle


def test_a_pipeline_that_was_stopped_has_no_state(tmp_path):
    _, pipe = build()
    feed(pipe, 0, 12)
    handle = fail_once(pipe)
    with pytest.raises(ArithmeticError):
        feed(pipe, 12, 20)
    handle.remove()
    with pytest.raises(RuntimeError, match="stopped in the middle of a tick by: ArithmeticError"):
        pipe.state_dict()
    with pytest.raises(RuntimeError, match="stopped"):
        pipe.save(tmp_path / "state")


def test_an_update_of_a_flush_that_fails_stops_the_pipeline():
    _, pipe = build(accumulate=5)
    feed(pipe, 0, 4)
    fail_once(pipe)
    with pytest.raises(ArithmeticError):
        pipe.flush(update=True)
    with pytest.raises(RuntimeError, match="stopped"):
        pipe.flush()


def plain(loss=None, dtype=torch.float32, frozen=False, **options):
    units = [nn.Linear(5, 4, dtype=dtype), nn.Linear(4, 3, dtype=dtype)]
    units[0].requires_grad_(not frozen)
    return rd.Pipeline(
        units,
        stages=2,
        loss=loss or F.cross_entropy,
        seed=0,
        **{"optimizer": OPTIMIZERS["sgd"], **options},
    )


DIFFER = {
    "groups": (
        lambda: plain(
            optimizer=lambda stage: torch.optim.SGD(
                [{"params": [param]} for param in stage.parameters()], lr=0.1
            )
        ),
        r"other groups of parameters .* of \[1, 1\] tensors, and there of \[2\]",
    ),
    "frozen": (lambda: plain(frozen=True), "stage 0 is none, and in the state SGD"),
    "dtype": (
        lambda: plain(dtype=torch.float64),
        "weight is float32 of .* in the state, and float64",
    ),
    "loss": (
        lambda: plain(loss=nn.CrossEntropyLoss(weight=torch.ones(3))),
        "the loss differs .* weight is not there in the state, and float32",
    ),
    "kind": (
        lambda: plain(optimizer=lambda stage: torch.optim.Rprop(stage.parameters())),
        "stage 0 is Rprop, and in the state SGD",
    ),
}


@pytest.mark.parametrize("what", DIFFER)
def test_a_state_that_would_fit_in_part_changes_nothing(what):
    make, message = DIFFER[what]
    state, other = plain().state_dict(), make()
    before = other.state_dict()
    with pytest.raises(StateError, match=message):
        other.load_state_dict(state)
    assert equal(other.state_dict(), before)
    assert not other._stopped


def test_what_a_killed_process_of_this_number_left_is_in_nobodys_way(tmp_path):
    left = tmp_path / f".state.new-{os.getpid()}"
    left.mkdir()
    (left / "manifest.json").write_text("half")
    pipe = plain()
    pipe.save(tmp_path / "state")
    pipe.load(tmp_path / "state")
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_link_to_a_state_stays_one(tmp_path):
    pipe = plain()
    pipe.save(tmp_path / "state")
    (tmp_path / "last").symlink_to(tmp_path / "state")
    pipe.step(torch.randn(2, 5), torch.tensor([0, 1]))
    pipe.save(tmp_path / "last")
    assert (tmp_path / "last").is_symlink()
    pipe.load(tmp_path / "state")


def test_numbers_of_numpy_are_numbers(tmp_path):
    pipe = plain(accumulate=np.int64(2), latency=np.int32(1))
    pipe.save(tmp_path / "state")
    pipe.load(tmp_path / "state")


class Named(NamedTuple):
    y: torch.Tensor


@pytest.mark.parametrize(
    "target, said",
    [
        (Named(torch.zeros(2, 3)), "cannot hold a Named"),
        (torch.zeros(2, 3, dtype=torch.complex128), "complex128"),
    ],
)
def test_targets_that_files_cannot_hold_are_refused(target, said, tmp_path):
    pipe = plain(loss=lambda output, target: output.sum())
    pipe.step(torch.randn(2, 5), target)
    with pytest.raises(StateError, match=said):
        pipe.save(tmp_path / "state")
    assert not any(tmp_path.iterdir())


def test_names_of_units_may_have_any_letters(tmp_path):
    model = rd.Chain({"a/b": nn.Linear(5, 4), "ä %": nn.Linear(4, 3)})
    pipe = rd.Pipeline(model, stages=2, loss=F.cross_entropy, optimizer=OPTIMIZERS["sgd"], seed=0)
    pipe.step(torch.randn(2, 5), torch.tensor([0, 1]))
    pipe.save(tmp_path / "state")
    pipe.load(tmp_path / "state")


@pytest.mark.parametrize("kind", ["sgd", "adamw", "muon"])
def test_kernels_are_those_of_the_pipeline_and_not_of_the_state(kind):
    def make(fused):
        def optimizer(stage):
            made = OPTIMIZERS[kind](stage)
            made.param_groups[-1]["fused"] = fused
            return made

        torch.manual_seed(0)
        units = [nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3)]
        return rd.Pipeline(units, stages=2, loss=F.cross_entropy, optimizer=optimizer, seed=0)

    def feed(pipe, first, last):
        for n in range(first, last):
            torch.manual_seed(n)
            pipe.step(torch.randn(4, 5), torch.randint(3, (4,)))

    for before, after in ((None, True), (True, None)):
        pipe, resumed = make(before), make(after)
        feed(pipe, 0, 6)
        resumed.load_state_dict(pipe.state_dict())
        assert all(stage.groups[-1]["fused"] is after for stage in resumed.stages)
        feed(pipe, 6, 12)
        feed(resumed, 6, 12)
        ours, theirs = pipe.full_state_dict(), resumed.full_state_dict()
        assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)
