"""The same networks trained by other libraries, where they are installed."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import redivider as rd
from redivider.models.catalogue import resolve

Run = Callable[[], Tensor]


def peer_steps(
    model: str, options: dict[str, Any], batch: int, minrev: str | None
) -> dict[str, Run]:
    """Return a training step of every peer that can be imported, by name.

    Args:
        model: A reversible ViT of ours, whose size the peers' network has.
        options: Its options.
        batch: Images of a step.
        minrev: Path of minREV, if there is one.
    """
    steps: dict[str, Run] = {}
    if minrev:
        sys.path.insert(0, minrev)
        for name, module, kind in (
            ("minREV reversible", "rev", "RevViT"),
            ("minREV PaReprop", "fast_rev", "FastRevViT"),
        ):
            network = getattr(importlib.import_module(module), kind)
            steps[name] = _step(_minrev(network, model, options), batch, torch.float32)
    for name, wrap in (("revlib", _revlib), ("memcnn", _memcnn)):
        try:
            chain = rd.create_model(model, device="cuda", dtype=torch.bfloat16, **options)
            net = nn.Sequential(chain[0], _Joined(), wrap(chain[1:-1]), _Apart(), chain[-1])
        except ImportError:
            continue
        steps[name] = _step(net, batch, torch.bfloat16)
    return steps


def _minrev(kind: Any, model: str, options: dict[str, Any]) -> nn.Module:
    """Build minREV's own model, with its fp16 autocast inside."""
    config = resolve(model, **options)[1]
    net: nn.Module = kind(
        embed_dim=config.width,
        n_head=config.heads,
        depth=config.depth,
        patch_size=(16, 16),
        image_size=(224, 224),
        num_classes=1000,
        enable_amp=True,
    )
    return net.cuda()


def _revlib(couplings: rd.Chain) -> nn.Module:
    revlib = importlib.import_module("revlib")
    fs = [coupling.f for coupling in couplings]
    net: nn.Module = revlib.ReversibleSequential(*fs, split_dim=2)
    return net


def _memcnn(couplings: rd.Chain) -> nn.Module:
    memcnn = importlib.import_module("memcnn")
    fs = [coupling.f for coupling in couplings]
    blocks = [
        memcnn.InvertibleModuleWrapper(memcnn.AdditiveCoupling(f, g, split_dim=2))
        for f, g in zip(fs[::2], fs[1::2], strict=True)
    ]
    return nn.Sequential(*blocks)


class _Joined(nn.Module):
    def forward(self, streams: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat(streams, 2)


class _Apart(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, 2)
        return a, b


def _step(net: nn.Module, batch: int, dtype: torch.dtype) -> Run:
    x = torch.randn(batch, 3, 224, 224, device="cuda", dtype=dtype)
    target = torch.randint(1000, (batch,), device="cuda")

    def step() -> Tensor:
        net.zero_grad()
        loss = F.cross_entropy(net(x).float(), target)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return step
