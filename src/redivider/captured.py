"""A whole training step as one CUDA graph: forward, backward and optimizer, launched at once.

At small batches a GPU waits for the host that launches its kernels. A captured step is launched in
one call; two CUDA streams inside it (overlap.py) become parallel branches.
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
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from redivider.auto import faster, forcing, time_ways
from redivider.chain import observing
from redivider.errors import CaptureError
from redivider.graph import capturing
from redivider.step_state import Settings, StepState

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

    The step is run a few times on the examples first; afterwards the weights of its optimizers and
    chains, their state and buffers are put back as they were. Random numbers are new in every step,
    and the same in the two runs of a unit. Learning rates may change between steps.

    Args:
        step: A function of tensors that returns tensors; all that it does with them is captured,
            and its Python code is not run again.
        example_inputs: The tensors of a step, on the GPU; later ones must have the same shapes.
    """
    return Captured(step, example_inputs)


class Captured:
    """A captured step: call it with tensors like the examples."""

    def __init__(self, step: Callable[..., Any], example_inputs: Any) -> None:
        if isinstance(example_inputs, Mapping):
            raise CaptureError("a captured step takes its tensors in order: give a tuple of them")
        examples = (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
        inputs, self._spec = _split_inputs(tuple(examples))
        if not torch.cuda.is_available() or {each.device.type for each in inputs} != {"cuda"}:
            devices = sorted({str(each.device) for each in inputs})
            raise CaptureError(
                f"a step is captured on a CUDA device, and its examples must be there, not on "
                f"{', '.join(devices)}; without one call the function itself"
            )
        self._step = step
        self._device = inputs[0].device
        self._static = [each.detach().clone() for each in inputs]
        with torch.cuda.device(self._device):
            self._prepare(StepState(self._device))

    def __call__(self, *inputs: Any) -> Any:
        """Run the step; what it returns is the caller's own copy."""
        given, spec = _split_inputs(inputs)
        if spec != self._spec:
            raise CaptureError(f"it was captured for inputs like {self._spec}, got {spec}")
        self._settings.refresh()
        with torch.cuda.device(self._device):
            for index, (static, each) in enumerate(zip(self._static, given, strict=True)):
                if static.shape != each.shape or static.dtype != each.dtype:
                    raise CaptureError(
                        f"input {index} is {each.dtype} {tuple(each.shape)}, and the step was "
                        f"captured for {static.dtype} {tuple(static.shape)}; capture another one"
                    )
                static.copy_(each, non_blocking=True)
            self._attach_gradients()
            self._graph.replay()
            # The graph wrote behind autograd's back.
            torch.autograd.graph.increment_version(list(self._gradients))
            return tree_map_only(Tensor, Tensor.clone, self._output)

    def _prepare(self, state: StepState) -> None:
        done = False
        with _own_stream(self._device), observing(state.meet_chain), state.optimizers_seen():
            try:
                with forcing("reverse"):
                    self._warm_up(state)
                way = self._fastest(state) if state.chooses else "reverse"
                with forcing(way):
                    self._capture()
                self._gradients = {each: each.grad for each in state.parameters}
                done = True
            finally:
                torch.cuda.synchronize()
                state.put_back(settings=not done)
        self._settings = Settings(state.optimizers)

    def _warm_up(self, state: StepState) -> None:
        for number in range(NUM_WARM_UPS):
            last = number == NUM_WARM_UPS - 1
            with _refused("cannot be captured") if last else nullcontext():
                self._run(waits="error" if last else "default")
            if number == 0:
                state.prepare_optimizers()
        torch.cuda.synchronize()
        state.read_mail()  # nothing may be under way while capturing

    def _run(self, *, waits: str) -> Any:
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it may miss some
            torch.cuda.set_sync_debug_mode(waits)
        try:
            return self._step(*tree_unflatten(self._static, self._spec))
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def _capture(self, pool: Any = None) -> None:
        self._graph = torch.cuda.CUDAGraph()
        gc.collect()  # the memory of graphs that are gone
        with capturing(self._graph, torch.cuda.current_stream(), pool):
            with _refused("failed while it was captured"):
                output = self._run(waits="default")
        for each in tree_leaves(output):
            if each is not None and not (isinstance(each, Tensor) and each.is_cuda):
                what = "a tensor on the CPU" if isinstance(each, Tensor) else type(each).__name__
                raise CaptureError(
                    f"the step returns {what}, which would stay the same for ever; return tensors "
                    "on the GPU"
                )
        self._output = tree_map_only(Tensor, Tensor.detach, output)

    def _fastest(self, state: StepState) -> str:
        """Capture the step in each way that its chains may choose from, and time them in turn."""
        graphs: list[torch.cuda.CUDAGraph] = []

        def run(way: str) -> None:
            with forcing(way):
                self._run(waits="default")

        def ready(way: str) -> Callable[[], None]:
            with forcing(way):
                # In the same memory: what one step leaves there is nothing to the next.
                self._capture(pool=graphs[0].pool() if graphs else None)
            graphs.append(self._graph)
            return self._graph.replay

        took = time_ways(run, ready)
        for each in graphs:
            each.reset()
        del self._output
        for chain in state.chains:
            chain.settle(took)
        return faster(took)

    def _attach_gradients(self) -> None:
        """Let gradients be where the graph has them, with the value that they have now."""
        for parameter, grad in self._gradients.items():
            if grad is None or parameter.grad is grad:
                continue
            grad.zero_() if parameter.grad is None else grad.copy_(parameter.grad)
            parameter.grad = grad


_streams: dict[torch.device, torch.cuda.Stream] = {}


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """A CUDA stream beside the caller's, as a capture needs it; the same one for all captures."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    caller, own = torch.cuda.current_stream(device), _streams[device]
    own.wait_stream(caller)
    try:
        with torch.cuda.stream(own):
            yield
    finally:
        caller.wait_stream(own)


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Say which line of the caller's cannot be captured, and why."""
    try:
        yield
    except CaptureError:
        raise
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        if "synchroniz" not in said and "captur" not in said and "legacy" not in said:
            raise
        ours = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [each for each in frames if not each.filename.startswith(ours)]
        where = f"{theirs[-1].filename}:{theirs[-1].lineno}: {theirs[-1].line}" if theirs else ""
        raise CaptureError(
            f"the step {what}: the host would wait for the device, or do what a graph cannot hold, "
            f"at {where or 'a place inside torch'}; move it out of the step. If that line is a "
            f"backward(), let go of losses and outputs of earlier steps first ({said})"
        ) from error


def _split_inputs(inputs: tuple[Any, ...]) -> tuple[list[Tensor], Any]:
    values, spec = tree_flatten(inputs)
    for each in values:
        if not isinstance(each, Tensor):
            raise CaptureError(
                f"a captured step takes tensors, got {type(each).__name__}: a number would be the "
                "same for ever; make it a tensor, or let the function close over it"
            )
        if each.requires_grad:
            raise CaptureError("an input of a captured step requires grad; detach it")
    return values, spec
