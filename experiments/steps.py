"""Training step of any model of the catalogue, for measurements of time and memory."""

import gc
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from redivider.chain import Chain
from redivider.gpu.capture import capture
from redivider.models.catalogue import create_model, resolve
from redivider.models.cross_entropy import ChunkedCrossEntropy
from redivider.models.language import Language

Rows: TypeAlias = Mapping[str, dict[str, Any]]
"""Rows that are already measured, by the name of the run."""


class Step:
    """Forward and backward of random inputs under autocast to bf16, without an optimizer.

    Args:
        model: Name of the model.
        batch: Number of samples.
        device: Device of weights and inputs.
        dtype: Dtype of the weights.
        compiled: Compile the units.
        **options: Options of the model.
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
        model_options = resolve(model, **options)[1]
        self.device = device
        self.chain = _make(model, device, dtype, options)
        if compiled:
            self.chain.compile(dynamic=False)
        with device:  # the CPU would take long to draw a large batch
            self.x = model_options.example(batch)
        self.loss: Callable[[Tensor], Tensor] = self._classify
        self.body: Any = self.chain
        """Part of the chain before the loss."""
        if isinstance(model_options, Language):
            chunked = ChunkedCrossEntropy(self.chain[-1], chunk=2048)
            self.loss, self.body = (lambda y: chunked(y, self.x)), self.chain[:-1]
        else:
            self._labels = torch.randint(model_options.num_classes, (batch,), device=device)
        self.body.check_every = 0

    def run(self, backward: str | None = None) -> Tensor:
        """Run the step once, with new gradients, and return the loss.

        Args:
            backward: Mode of the backward; the current one if None.
        """
        if backward is not None:
            self.body.backward = backward
        self.chain.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.loss(self.body(self.x))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def captured(self, backward: str | None = None) -> Callable[[], Tensor]:
        """Return the step captured as a CUDA graph."""
        unused = torch.zeros((), device=self.device)  # capture takes at least one input
        captured = capture(lambda _: self.run(backward), unused)
        return lambda: captured(unused)

    def _classify(self, scores: Tensor) -> Tensor:
        return F.cross_entropy(scores.float(), self._labels)


def _make(name: str, device: torch.device, dtype: torch.dtype, options: dict[str, Any]) -> Chain:
    """Return a model whose weights are drawn on the device.

    On the CPU a giant takes a minute to draw, and here the values do not matter.
    """
    chain = create_model(name, device="meta", dtype=dtype, **options)
    chain.to_empty(device=device)
    for module in reversed(list(chain.modules())):  # children first: a parent may redraw theirs
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
    return chain


@cache
def take_workspaces(device: torch.device) -> None:
    """Make cuBLAS allocate its workspaces, one per CUDA stream, before memory is measured."""
    if device.type == "cuda":
        Step("rev_vit_tiny", 2, device, depth=1).captured("overlap")


def free_memory() -> None:
    """Free memory that nothing refers to, also in torch's cache."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
