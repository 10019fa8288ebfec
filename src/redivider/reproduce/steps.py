"""A training step of any model of the catalogue, to be timed or to see whether it fits."""

import gc
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from redivider.captured import capture
from redivider.chain import Chain
from redivider.models.catalogue import create_model, resolve
from redivider.models.cross_entropy import ChunkedCrossEntropy
from redivider.models.language import Language

Rows: TypeAlias = Mapping[str, dict[str, Any]]
"""What has been measured, by the names of the runs."""


class Step:
    """Forward and backward of noise, under autocast to bf16, without an optimizer.

    Args:
        model: Its name.
        batch: Samples.
        device: Where.
        dtype: Of the weights.
        compiled: Whether units are compiled.
        **options: Of the model.
    """

    def __init__(
        self,
        model: str,
        batch: int,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.bfloat16,
        compiled: bool = False,
        **options: Any,
    ) -> None:
        made_for = resolve(model, **options)[1]
        self.device = device
        self.chain = _make(model, device, dtype, options)
        if compiled:
            self.chain.compile(dynamic=False)
        with device:  # large batches take the CPU a while to draw
            self.x = made_for.example(batch)
        self.loss: Callable[[Tensor], Tensor] = self._classify
        self.body: Any = self.chain
        """What comes before the loss."""
        if isinstance(made_for, Language):
            chunked = ChunkedCrossEntropy(self.chain[-1], chunk=2048)
            self.loss, self.body = (lambda y: chunked(y, self.x)), self.chain[:-1]
        else:
            self._labels = torch.randint(made_for.num_classes, (batch,), device=device)
        self.body.check_every = 0

    def run(self, backward: str | None = None) -> Tensor:
        """Do it once, in one way if it is told; the gradients are new."""
        if backward is not None:
            self.body.backward = backward
        self.chain.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.loss(self.body(self.x))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def captured(self, backward: str | None = None) -> Callable[[], Tensor]:
        """The same as a CUDA graph."""
        nothing = torch.zeros((), device=self.device)
        captured = capture(lambda _: self.run(backward), nothing)
        return lambda: captured(nothing)

    def _classify(self, scores: Tensor) -> Tensor:
        return F.cross_entropy(scores.float(), self._labels)


def _make(name: str, device: torch.device, dtype: torch.dtype, options: dict[str, Any]) -> Chain:
    """With weights drawn on the device: on the CPU a giant takes a minute, and any will do here."""
    chain = create_model(name, device="meta", dtype=dtype, **options)
    chain.to_empty(device=device)
    for module in reversed(list(chain.modules())):
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
    return chain


@cache
def take_workspaces(device: torch.device) -> None:
    """Let cuBLAS take its workspaces, one for every CUDA stream: no measurement should pay them."""
    if device.type == "cuda":
        Step("rev_vit_tiny", 2, device, depth=1).captured("overlap")


def let_go() -> None:
    """Give memory back that nothing refers to."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
