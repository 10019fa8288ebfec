"""The same network trained by the code published with PETRA, if there is a clone of it."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.backends import cudnn

CIFAR_IMAGES, WARM_UP_EPOCHS = 50_000, 5
PEAK, DECAY = 0.1, 5e-4  # rate for 256 images an update; weight decay


def petra_tick(
    path: str, model: str, batch: int, device: torch.device
) -> Callable[[Tensor, Tensor], Any]:
    """Return a tick of the authors' simulator, as the loop of their `main.py` runs it.

    The stages of a RevNet for CIFAR-10 in float32, trained by PETRA with their recipe, but with an
    update in every tick. What is left out of the loop is the loader, the accuracy and the meters.
    Only torch and numpy are needed: their `main.py`, which asks for more, is not imported.

    Args:
        path: A clone of stephane-rivaud/PETRA.
        model: `revnet18` or `revnet50`; their other names do as well.
        batch: Images of a tick, by which they scale the learning rate.
        device: Where all stages are.

    Returns:
        A function of a batch and its labels, both on the device, to the loss of the batch that is
        in the head by now, or to None as long as there is none. With J stages, the first loss comes
        with tick J, and from tick 2J - 1 on every tick has the work of all passes.
    """
    if path not in sys.path:
        sys.path.insert(0, path)
    warm_up_lr = importlib.import_module("async_torch.optim.scheduler").warm_up_lr
    peak = PEAK * batch / 256
    net = _simulator(model, peak).to(device, torch.float32)
    ticks, per_epoch = 0, -(-CIFAR_IMAGES // batch)

    def tick(x: Tensor, target: Tensor) -> Any:
        nonlocal ticks
        x = x.contiguous()  # as from their loader; another layout would spread through the net
        if ticks < WARM_UP_EPOCHS * per_epoch:
            net.set_lr(warm_up_lr(ticks, WARM_UP_EPOCHS * per_epoch, peak))
        with _cudnn(), torch.no_grad():
            loss, output, _ = net.forward_and_update(x, target, ticks % per_epoch)
        net.synchronize_layers()
        ticks += 1
        return None if output is None else loss

    return tick


def _simulator(model: str, rate: float) -> Any:
    """Return all stages, with one optimizer for weights and one without decay for the rest."""
    get_model = importlib.import_module("async_torch.models.utils").get_model
    add_optimizer = importlib.import_module("async_torch.optim.optimizer").add_optimizer
    layers = get_model("cifar10", model, False, store_input=False, store_param=False)
    sgd = {"lr": rate, "momentum": 0.9, "dampening": 0.0, "nesterov": True, "maximize": False}
    for layer in layers:
        add_optimizer(layer, "sgd", sgd | {"weight_decay": DECAY}, _decays)
        add_optimizer(layer, "sgd", sgd | {"weight_decay": 0.0}, lambda name: not _decays(name))
    return importlib.import_module("async_torch.sequential_layers").AsynchronousSequential(layers)


def _decays(name: str) -> bool:
    return "_bn" not in name and "bias" not in name


@contextmanager
def _cudnn() -> Iterator[None]:
    """Apply their settings for a tick; like them, leave TF32 as it is.

    torch caches cuDNN's plan for a convolution whatever the settings: the second method to meet a
    shape in a process uses the plan of the first.
    """
    names = ("enabled", "benchmark", "deterministic")
    before = [getattr(cudnn, name) for name in names]
    try:
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic = True, True, False
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(cudnn, name, value)
