"""A whole training step as one CUDA graph: forward, backward and optimizer, launched at once.

At small batches a GPU waits for the host that launches its kernels. A captured step is launched in
one call; two CUDA streams inside it (backward/overlap.py) become parallel branches.
"""

import gc
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from redivider.backward.auto import before_capture
from redivider.chain import observing
from redivider.errors import CaptureError
from redivider.gpu.cuda_graph import capturing
from redivider.gpu.rollback import Rollback, Settings
from redivider.tree import map_tensors

NUM_WARM_UPS = 3


def capture(step: Callable[..., Any], example_inputs: Any) -> "Captured":
    """Capture a training step as a CUDA graph.

        def train(images, targets):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), targets)
            loss.backward()
            optimizer.step()
            return loss

        step = rd.capture(train, (images, targets))
        for images, targets in loader:
            loss = step(images, targets)

    The step first runs a few times on the examples. Afterwards the weights of its optimizers and
    chains, their state and buffers are restored. Random numbers are new in every step, and the same
    in both runs of a unit. Learning rates may change between steps.

    Args:
        step: A function of tensors that returns tensors. Its GPU work is captured; its Python code
            does not run again.
        example_inputs: The tensors of a step, on the GPU; later ones must have the same shapes.
    """
    return Captured(step, example_inputs)


class Captured:
    """Captured step, called with tensors like the examples."""

    def __init__(self, step: Callable[..., Any], example_inputs: Any) -> None:
        if isinstance(example_inputs, Mapping):
            raise CaptureError("a captured step takes its tensors in order: give a tuple of them")
        examples = (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
        inputs, self._spec = _split_inputs(tuple(examples))
        if not torch.cuda.is_available() or {x.device.type for x in inputs} != {"cuda"}:
            devices = sorted({str(x.device) for x in inputs})
            raise CaptureError(
                f"a step is captured on a CUDA device, and its examples must be there, not on "
                f"{', '.join(devices)}; without one call the function itself"
            )
        self._step = step
        self._device = inputs[0].device
        self._static = [x.detach().clone() for x in inputs]
        with torch.cuda.device(self._device):
            self._prepare(Rollback(self._device))

    def __call__(self, *inputs: Any) -> Any:
        """Run the step, and return copies of its outputs."""
        tensors, spec = _split_inputs(inputs)
        if spec != self._spec:
            raise CaptureError(f"it was captured for inputs like {self._spec}, got {spec}")
        self._settings.refresh()
        with torch.cuda.device(self._device):
            for index, (static, x) in enumerate(zip(self._static, tensors, strict=True)):
                if static.shape != x.shape or static.dtype != x.dtype:
                    raise CaptureError(
                        f"input {index} is {x.dtype} {tuple(x.shape)}, and the step was "
                        f"captured for {static.dtype} {tuple(static.shape)}; capture another one"
                    )
                static.copy_(x, non_blocking=True)
            self._attach_gradients()
            self._graph.replay()
            # The graph has changed the weights without autograd noticing.
            torch.autograd.graph.increment_version(list(self._gradients))
            return map_tensors(Tensor.clone, self._output)

    def _prepare(self, rollback: Rollback) -> None:
        done = False
        with (
            _own_stream(self._device),
            observing(rollback.add_chain),
            rollback.watching_optimizers(),
            before_capture(),
        ):
            try:
                self._warm_up(rollback)
                self._capture()
                self._gradients = {param: param.grad for param in rollback.parameters}
                done = True
            finally:
                torch.cuda.synchronize()
                rollback.restore(settings=not done)
        self._settings = Settings(rollback.optimizers)

    def _warm_up(self, rollback: Rollback) -> None:
        for number in range(NUM_WARM_UPS):
            last = number == NUM_WARM_UPS - 1
            with _refused("cannot be captured") if last else nullcontext():
                self._run(waits="error" if last else "default")
            if number == 0:
                rollback.prepare_optimizers()
        torch.cuda.synchronize()
        rollback.poll()  # nothing may be in flight during the capture

    def _run(self, *, waits: str) -> Any:
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the mode may miss some waits
            torch.cuda.set_sync_debug_mode(waits)
        try:
            return self._step(*tree_unflatten(self._static, self._spec))
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def _capture(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        gc.collect()  # frees the memory of graphs that are no longer used
        with capturing(self._graph, torch.cuda.current_stream()):
            with _refused("failed while it was captured"):
                output = self._run(waits="default")
        for leaf in tree_leaves(output):
            if leaf is not None and not (isinstance(leaf, Tensor) and leaf.is_cuda):
                kind = "a tensor on the CPU" if isinstance(leaf, Tensor) else type(leaf).__name__
                raise CaptureError(
                    f"the step returns {kind}, which would be a constant of the graph; return "
                    "tensors on the GPU"
                )
        self._output = map_tensors(Tensor.detach, output)

    def _attach_gradients(self) -> None:
        """Move gradients to the memory that the graph uses, with their current values."""
        for parameter, grad in self._gradients.items():
            if grad is None or parameter.grad is grad:
                continue
            grad.zero_() if parameter.grad is None else grad.copy_(parameter.grad)
            parameter.grad = grad


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """Use a CUDA stream beside the caller's, as a capture must.

    Every capture has one of its own (torch has 32, then they repeat): with a graph, torch 2.13
    frees the cuBLAS workspaces of its stream, also those that other graphs captured there use.
    """
    caller = torch.cuda.current_stream(device)
    own = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    own.wait_stream(caller)
    try:
        with torch.cuda.stream(own):
            yield
    finally:
        caller.wait_stream(own)


@contextmanager
def _refused(verdict: str) -> Iterator[None]:
    """Raise an error that names the line of the caller that cannot be captured, and why."""
    try:
        yield
    except CaptureError:
        raise
    except RuntimeError as error:
        message = str(error).partition("\n")[0]
        if not any(word in message for word in ("synchroniz", "captur", "legacy")):
            raise
        # Skip the frames of this package and of torch, to find the caller's line.
        ours = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if not frame.filename.startswith(ours)]
        where = f"{theirs[-1].filename}:{theirs[-1].lineno}: {theirs[-1].line}" if theirs else ""
        raise CaptureError(
            f"the step {verdict}: the host would wait for the device, or do what a graph cannot "
            f"hold, at {where or 'a place inside torch'}; move it out of the step. If that line is "
            f"a backward(), let go of losses and outputs of earlier steps first ({message})"
        ) from error


def _split_inputs(inputs: tuple[Any, ...]) -> tuple[list[Tensor], Any]:
    values, spec = tree_flatten(inputs)
    for value in values:
        if not isinstance(value, Tensor):
            raise CaptureError(
                f"a captured step takes tensors, got {type(value).__name__}: a number would be the "
                "same for ever; make it a tensor, or let the function close over it"
            )
        if value.requires_grad:
            raise CaptureError("an input of a captured step requires grad; detach it")
    return values, spec
