"""Every number of the log, and every field that changes one, compared to plain torch."""

import math
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support import training
from support.archives import write_cifar
from support.training import REVNET, recipe, rows
from torch.utils._python_dispatch import TorchDispatchMode

from redivider.data import load
from redivider.train.build import build, num_microbatches
from redivider.train.engine import BackpropEngine, PipelineEngine
from redivider.train.loop import train
from redivider.train.runs import read_run
from redivider.train.task import Labels, make_task

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def test_rates_epochs_and_speed_are_those_of_the_line(tmp_path, monkeypatch):
    times = iter(range(10**6))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(times)))
    config = recipe(method="store", schedule="step", milestones=(0.3,), warmup=0.2)
    train(config, tmp_path / "run")
    lines = read_run(tmp_path / "run").train
    per_epoch = 89
    for line, before in zip(lines, [None, *lines], strict=False):
        update = line["step"] // 2
        assert line["update"] == update
        assert line["epoch"] == pytest.approx(line["step"] / per_epoch)
        warm = 0.2 * per_epoch / 2
        factor = update / warm if update < warm else 1.0  # of the last update that was done
        factor *= 0.1 if (update - 1) * 2 / per_epoch >= 0.3 else 1.0
        assert line["lr"] == pytest.approx(0.05 * factor)
        if before is not None:
            num = 16 * (line["step"] - before["step"])
            took = line["seconds"] - before["seconds"]
            assert line["samples_per_second"] == pytest.approx(num / took)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_adamw_and_clipping_by_hand(clip, tmp_path):
    config = recipe(
        method="store",
        optimizer="adamw",
        betas=(0.5, 0.7),
        lr=3e-3,
        clip_norm=clip,
        schedule="constant",
        warmup=0,
        accumulate=1,
        label_smoothing=0.3,
        epochs=0.2,
        **REVNET,
    )
    train(config, tmp_path / "run")
    model = training.revnet()
    optimizer = torch.optim.AdamW(training.groups(model.parameters()), lr=3e-3, betas=(0.5, 0.7))
    batches = load("digits", train=True).batches(16, train=True, seed=0)
    for step in range(18):
        x, y = batches[step]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, label_smoothing=0.3).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    trained = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(trained[name], tensor) for name, tensor in model.state_dict().items())


def test_a_pipeline_is_built_as_the_recipe_says():
    config = recipe(
        method="dsp",
        stages=3,
        latency=2,
        lookahead="displacement",
        arithmetic="fixed",
        clip_norm=0.7,
        seed=5,
        accumulate=3,
        lr=0.9,
        lr_by_delay=True,
    )
    engine = build(config)
    assert isinstance(engine, PipelineEngine)
    pipe = engine.pipe
    assert (pipe.method.name, pipe.latency, pipe.seed) == ("dsp", 2, 5)
    assert pipe.lookahead == "displacement"
    assert pipe.arithmetic.exact and pipe.accumulate == 3
    assert pipe._clip is not None and pipe._clip.norm == 0.7
    assert len(pipe.stages) == 3 and pipe.balance > 1
    optimizers = [stage.optimizer for stage in pipe.stages if stage.optimizer is not None]
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    assert rates == [0.9 / (1 + 8 / 3), 0.9 / (1 + 4 / 3), 0.9]
    engine = build(recipe(method="petra", stages=2))
    assert isinstance(engine, PipelineEngine)
    assert engine.pipe.balance < 1.9  # by work, not by number


def test_bf16_computes_in_bf16():
    seen = []
    for precision in ("bf16", "float32"):
        for method in ("store", "petra"):
            engine = build(recipe(method=method, precision=precision))
            hook = engine.task.body[-1].register_forward_hook(
                lambda module, x, y: seen.append(y.dtype)
            )
            engine.step(*engine.task.train[0])
            engine.step(*engine.task.train[1])
            engine.evaluate()
            hook.remove()
            assert set(seen) == {torch.bfloat16 if precision == "bf16" else torch.float32}
            seen.clear()


class Casts(TorchDispatchMode):
    """Counts how often tensors at some places in memory are cast to bf16."""

    def __init__(self, tensors):
        super().__init__()
        self.nums = {tensor.data_ptr(): 0 for tensor in tensors}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.bfloat16:
            if args[0].data_ptr() in self.nums:
                self.nums[args[0].data_ptr()] += 1
        return func(*args, **kwargs)


def test_bf16_casts_the_weights_once_an_update():
    options: dict[str, Any] = {"precision": "bf16", "accumulate": 3, "schedule": "constant"}
    engine = build(recipe(method="store", **options, **REVNET))
    assert isinstance(engine, BackpropEngine)
    model = training.revnet()
    optimizer = torch.optim.SGD(
        training.groups(model.parameters()), lr=0.05, momentum=0.9, nesterov=True
    )
    batches = [engine.task.train[step] for step in range(9)]
    for start in range(0, 9, 3):
        before = [param.clone() for param in engine.task.model.parameters()]
        with Casts(engine.task.model.parameters()) as casts:
            for x, y in batches[start : start + 3]:
                engine.step(x, y)
        assert set(casts.nums.values()) == {0, 1}  # norms are not cast
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = (
            engine._optimizer.param_groups[0]["lr"]
        )
        optimizer.zero_grad()
        for x, y in batches[start : start + 3]:
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            (loss / 3).backward()
        optimizer.step()
        pairs = [*zip(engine.task.model.parameters(), model.parameters(), strict=True)]
        assert all(torch.equal(one, other) for one, other in pairs)
        assert not any(map(torch.equal, before, model.parameters()))


def test_seeds_reach_weights_order_and_text(tmp_path):
    (tmp_path / "input.txt").write_text("".join(map(chr, range(32, 120))) * 20)
    one, other = (build(recipe(seed=seed)) for seed in (0, 1))
    assert not torch.equal(one.task.train[0][0], other.task.train[0][0])
    pairs = zip(one.task.model.parameters(), other.task.model.parameters(), strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)
    text = {"data": "text", "data_folder": str(tmp_path), "context": 8}
    text |= {"model": "gpt_nano", "model_options": {"width": 8, "heads": 2, "depth": 1}}
    one, other = (build(recipe(seed=seed, **text)) for seed in (0, 1))
    assert not torch.equal(one.task.train[0][0], other.task.train[0][0])


@pytest.mark.parametrize("model", ["gpt_nano", "roberta_base"])
def test_text_is_evaluated_by_its_targets(model, tmp_path, monkeypatch):
    """The last window is not full; each target counts once, and the rest not at all."""
    monkeypatch.setattr("redivider.train.task.TOKENS", 32)  # two windows, and one
    (tmp_path / "input.txt").write_text("some words, and others, and more of them. " * 9 + "end")
    config = recipe(
        data="text",
        data_folder=str(tmp_path),
        context=16,
        model=model,
        model_options={"width": 8, "heads": 2, "depth": 1},
        microbatch=1,
        method="store",
    )
    engine = build(config)
    assert isinstance(engine, BackpropEngine)
    network = engine.task.model.eval()
    batches = list(engine.task.test)
    assert [len(x) for x, _ in batches] == [2, 1]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert (y < 0).any()
    if model == "roberta_base":
        assert (y >= 0).sum(1).tolist() == [2, 2, 1]  # 15 % of 16, 16 and 7
        assert (x == 256).any() and network[-1].out_features == 257
    else:
        assert network[-1].out_features == 256
    wanted = F.cross_entropy(network(x).flatten(0, 1), y.flatten(), ignore_index=-100)
    assert engine.evaluate().loss == pytest.approx(wanted.item(), rel=1e-5)
    assert engine.task.body.training and engine.task.loss.training


@pytest.mark.parametrize(
    ("microbatch", "context", "num"), [(1, 16, 1024), (2, 1024, 16), (32, 1024, 32), (1, 2**15, 1)]
)
def test_text_is_evaluated_many_tokens_at_a_time(microbatch, context, num, tmp_path):
    (tmp_path / "train.txt").write_text("ab" * 2**15)
    (tmp_path / "valid.txt").write_text("ba" * 2**15)
    config = recipe(
        data="text",
        data_folder=str(tmp_path),
        context=context,
        model="gpt_nano",
        model_options={"width": 8, "heads": 2, "depth": 1},
        microbatch=microbatch,
        method="store",
    )
    task = make_task(config, torch.device("cpu"))
    assert len(task.train[0][0]) == microbatch and len(task.test[0][0]) == num


def test_labels_are_smooth_in_training_only():
    scores, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 0, 1])
    loss = Labels(0.2)
    smooth = F.cross_entropy(scores, labels, label_smoothing=0.2)
    assert torch.equal(loss(scores, labels)[0], smooth)
    plain, correct = loss.eval()(scores, labels)
    assert torch.equal(plain, F.cross_entropy(scores, labels))
    assert correct == (scores.argmax(1) == labels).sum()


def test_fractions_of_epochs_round_as_people_do():
    for epochs, per_epoch, accumulate, wanted in (
        (1.1, 100, 1, 110),
        (1.1, 390, 1, 429),
        (90, 22, 5, 1980),
        (50 / 15, 15, 2, 50),
        (0.5, 89, 2, 46),
        (1e-6, 100, 4, 4),
    ):
        config = recipe(epochs=epochs, accumulate=accumulate)
        assert num_microbatches(config, per_epoch) == wanted


@pytest.mark.parametrize("log_every", [10, 1000])
def test_memory_is_known_whenever_lines_come(log_every, tmp_path):
    config = recipe(method="petra", log_every=log_every)
    train(config, tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert len(run.memory) == 1 and sum(run.held("activations")) > 0
    assert [row["step"] for row in rows(tmp_path / "run", "memory")] == [6]  # when it is full
    assert len(run.timeline) == 1
    assert math.isfinite(run.train[-1]["loss"])


def test_memory_is_what_the_stages_hold(tmp_path):
    config = recipe(method="petra")
    train(config, tmp_path / "run")
    engine = build(config)
    for step in range(6):
        engine.step(*engine.task.train[step])
    holdings = engine.holdings()
    assert holdings is not None and all(held.messages > 0 for held in holdings)
    wanted = [held.activations + held.messages for held in holdings]
    assert read_run(tmp_path / "run").held("activations") == wanted


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own
def test_compile_reaches_the_units():
    for method in ("store", "petra"):
        engine = build(recipe(method=method, compile=True))
        compiled = [unit._compiled_call_impl for unit in engine.task.body.units()]
        assert all(call is not None for call in compiled)


def test_channels_last_reaches_images_and_weights(tmp_path):
    write_cifar(tmp_path, "cifar100", "binary", packed=False, num=32)
    for wanted in (True, False):
        config = recipe(channels_last=wanted, data="cifar100", data_folder=str(tmp_path), **REVNET)
        engine = build(config)
        weight = engine.task.model.get_parameter("block1_1.f.0.conv.weight")
        for tensor in (weight, engine.task.train[0][0], engine.task.test[0][0]):
            assert tensor.is_contiguous(memory_format=torch.channels_last) == wanted


def test_threads_are_those_of_the_recipe(tmp_path, monkeypatch):
    seen = []
    step = BackpropEngine.step

    def watched(self, x, y):
        seen.append(torch.get_num_threads())
        return step(self, x, y)

    monkeypatch.setattr(BackpropEngine, "step", watched)
    before = torch.get_num_threads()
    train(recipe(threads=before + 1, epochs=0.05, method="store"), tmp_path / "run")
    assert set(seen) == {before + 1} and torch.get_num_threads() == before
