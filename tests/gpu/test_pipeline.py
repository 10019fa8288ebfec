"""Pipelines on a GPU, eager: the numbers of the CPU, and states that continue to the last bit."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support.networks import MLP, Attention, ConvNorm
from support.oracle import equal
from support.reference import METHODS
from torch import nn

import redivider as rd

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

OPTIMIZERS = {
    "sgd": lambda stage: torch.optim.SGD(stage.parameters(), lr=0.02, momentum=0.9),
    "adamw": lambda stage: torch.optim.AdamW(stage.parameters(), lr=0.01),
    "adamw fused": lambda stage: torch.optim.AdamW(stage.parameters(), lr=0.01, fused=True),
}


def network(dropout: float = 0.0) -> rd.Chain:
    torch.manual_seed(0)
    makers = (lambda: Attention(8), lambda: MLP(8, dropout))
    couplings = [rd.Coupling(makers[i % 2]()) for i in range(5)]
    return rd.Chain(
        [nn.Linear(5, 8), rd.Duplicate(), *couplings, rd.Fuse(), Pool(), nn.Linear(16, 3)]
    )


class Pool(nn.Module):
    def forward(self, x):
        return x.mean(1)


def batch(n: int, device: str, dtype=torch.float64):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(4, 6, 5, generator=generator, dtype=dtype)
    return x.to(device), torch.randint(3, (4,), generator=generator).to(device)


def pipeline(model, method="petra", optimizer="sgd", **options) -> rd.Pipeline:
    return rd.Pipeline(
        model,
        stages=5,
        loss=F.cross_entropy,
        optimizer=OPTIMIZERS[optimizer],
        method=method,
        seed=1,
        **{"accumulate": 2, **options},
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", METHODS)
def test_it_follows_the_cpu(method, optimizer):
    ends = []
    for device in ("cpu", "cuda"):
        model = network().double().to(device)
        pipe = pipeline(model, method, optimizer)
        for n in range(30):
            pipe.step(*batch(n, device))
        pipe.flush()
        ends.append([p.detach().cpu() for p in model.parameters()])
    for one, other in zip(*ends, strict=True):
        assert torch.allclose(one, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", METHODS)
def test_saved_and_loaded_it_continues_to_the_last_bit(method, optimizer, tmp_path):
    pipe = pipeline(network(0.3).cuda(), method, optimizer)
    with torch.autocast("cuda", torch.bfloat16):
        for n in range(9):
            pipe.step(*batch(n, "cuda", torch.float32))
    pipe.save(tmp_path / "state")
    other = pipeline(network(0.3).cuda(), method, optimizer)
    other.load(tmp_path / "state")
    with torch.autocast("cuda", torch.bfloat16):
        for n in range(9, 30):
            ticks = [p.step(*batch(n, "cuda", torch.float32)) for p in (pipe, other)]
            assert equal(ticks[0].loss, ticks[1].loss)
    assert equal(pipe.state_dict(), other.state_dict())


def test_a_state_of_the_cpu_goes_on_on_the_gpu(tmp_path):
    cpu = pipeline(network().double(), optimizer="adamw")
    for n in range(9):
        cpu.step(*batch(n, "cpu"))
    cpu.save(tmp_path / "state")
    cuda = pipeline(network().double().cuda(), optimizer="adamw")
    cuda.load(tmp_path / "state")
    for n in range(9, 20):
        one, other = cpu.step(*batch(n, "cpu")), cuda.step(*batch(n, "cuda"))
        assert one.loss is not None and other.loss is not None
        assert other.loss.item() == pytest.approx(one.loss.item(), rel=1e-9)


@pytest.mark.parametrize("arithmetic", ["float", "fixed"])
def test_dropout_is_replayed_under_autocast(arithmetic):
    """With frozen weights the gradient of every micro-batch is that of a chain with its masks."""
    model = network(0.5).cuda()
    pipe = rd.Pipeline(
        model,
        stages=5,
        loss=F.cross_entropy,
        optimizer=lambda stage: torch.optim.SGD(stage.parameters(), lr=0.0),
        arithmetic=arithmetic,
        seed=1,
        capture=False,  # a recording runs them once more
    )
    masks: dict[nn.Module, list] = {}
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda m, _, y: masks.setdefault(m, []).append(y == 0))
    with torch.autocast("cuda", torch.bfloat16):
        for n in range(6):
            pipe.step(*batch(n, "cuda", torch.float32))
        pipe.flush()
    for runs in masks.values():
        assert len(runs) == 13  # one of them learned which weights autocast casts
        distinct = [m for i, m in enumerate(runs) if not any(torch.equal(m, o) for o in runs[:i])]
        assert len(distinct) == 6


def test_batch_norm_and_images():
    torch.manual_seed(0)
    couplings = [rd.Coupling(ConvNorm(4)) for _ in range(4)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    model = rd.Chain([nn.Conv2d(3, 8, 3), rd.Split(dim=1), *couplings, rd.Fuse(dim=1), head])
    ends = []
    for device in ("cpu", "cuda"):
        copied = copy.deepcopy(model).double().to(device)
        pipe = pipeline(copied)
        for n in range(20):
            generator = torch.Generator().manual_seed(n)
            x = torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64)
            target = torch.randint(3, (4,), generator=generator)
            pipe.step(x.to(device), target.to(device))
        pipe.flush()
        ends.append([value.cpu() for value in copied.state_dict().values()])
    for one, other in zip(*ends, strict=True):
        assert torch.allclose(one.double(), other.double(), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("capture", [False, True])
def test_stages_are_measured(capture):
    torch.manual_seed(0)
    model = rd.create_model("rev_vit_tiny", num_classes=10, image_size=32, depth=2, device="cuda")
    x = torch.randn(4, 3, 32, 32, device="cuda")
    costs = rd.measure_stages(model, 3, x, capture=capture)
    assert min(costs.forward) > 0 and min(costs.backward) > 0 and min(costs.stored) > 0
    assert sum(costs.weights) == sum(p.nbytes for p in model.parameters())
