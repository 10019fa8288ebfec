"""A whole training step as one CUDA graph: forward, backward and optimizer, launched at once.

At small batches a GPU waits for the host that launches its kernels. A captured step is launched in
one call; two CUDA streams inside it (overlap.py) become parallel branches.
"""

import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from redivider.auto import WAYS, forcing, timer
from redivider.chain import Chain, observing

NUM_WARM_UPS = 3
NUM_TIMED = 10


class CaptureError(RuntimeError):
    """A step that cannot be captured."""


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

    The step is run a few times on the examples first; afterwards the weights of its optimizers,
    their state and the buffers of its chains are put back as they were. Random numbers are new in
    every step, and the same in the two runs of a unit. Learning rates may change between steps.

    Args:
        step: A function of tensors that returns tensors; all that it does with them is captured,
            and its Python code is not run again.
        example_inputs: The tensors of a step, on the GPU; later ones must have the same shapes.
    """
    return Captured(step, example_inputs)


class Captured:
    """A captured step: call it with tensors like the examples."""

    def __init__(self, step: Callable[..., Any], example_inputs: Any) -> None:
        examples = (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
        inputs, self._spec = _split_inputs(tuple(examples))
        if not torch.cuda.is_available() or not all(each.is_cuda for each in inputs):
            devices = sorted({str(each.device) for each in inputs})
            raise CaptureError(
                f"a step is captured on a CUDA device, and its examples must be there, not on "
                f"{', '.join(devices)}; without one call the function itself"
            )
        self._step = step
        self._static = [each.detach().clone() for each in inputs]
        state = _State()
        with _Stream(), observing(state.meet), state.optimizers_seen():
            with forcing("reverse"):
                self._warm_up(state)
            way = self._fastest(state) if state.chooses else "reverse"
            with forcing(way):
                self._capture()
            state.put_back()
        self._rates = _Rates(state.optimizers)
        self._parameters = state.parameters()

    def __call__(self, *inputs: Any) -> Any:
        """Run the step; what it returns is the caller's own copy."""
        given, spec = _split_inputs(inputs)
        if spec != self._spec:
            raise CaptureError(f"it was captured for inputs like {self._spec}, got {spec}")
        for index, (static, each) in enumerate(zip(self._static, given, strict=True)):
            if static.shape != each.shape or static.dtype != each.dtype:
                raise CaptureError(
                    f"input {index} is {each.dtype} {tuple(each.shape)}, and the step was captured "
                    f"for {static.dtype} {tuple(static.shape)}; capture another one for it"
                )
            static.copy_(each, non_blocking=True)
        self._rates.refresh()
        self._graph.replay()
        torch.autograd.graph.increment_version(self._parameters)  # the graph wrote behind its back
        return tree_map_only(Tensor, Tensor.clone, self._output)

    def _warm_up(self, state: "_State") -> None:
        for number in range(NUM_WARM_UPS):
            last = number == NUM_WARM_UPS - 1
            with _refused("cannot be captured") if last else _plainly():
                self._run(waits="error" if last else "default")
            if number == 0:
                state.prepare_optimizers()
        torch.cuda.synchronize()
        state.read_mail()  # faults of the warm-up; and nothing is under way while capturing

    def _run(self, *, waits: str) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it may miss some
            torch.cuda.set_sync_debug_mode(waits)
        try:
            return self._step(*tree_unflatten(self._static, self._spec))
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def _capture(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with _generator_saved(), torch.cuda.graph(self._graph, stream=torch.cuda.current_stream()):
            with _refused("failed while it was captured"):
                output = self._run(waits="default")
        for each in tree_leaves(output):
            if not isinstance(each, Tensor) and each is not None:
                raise CaptureError(
                    f"the step returns a {type(each).__name__}, which would stay the same for "
                    "ever; return tensors"
                )
        self._output = tree_map_only(Tensor, Tensor.detach, output)

    def _fastest(self, state: "_State") -> str:
        """Capture the step in each way that its chains may choose from, and time it."""
        took = {}
        for way in WAYS:
            with forcing(way):
                self._run(waits="default")
                self._capture()
            took[way] = self._time()
            self._graph.reset()
            del self._output
        state.settle(took)
        return min(took, key=lambda way: took[way])

    def _time(self) -> float:
        start, end = timer(), timer()
        self._graph.replay()
        start.record()
        for _ in range(NUM_TIMED):
            self._graph.replay()
        end.record()
        end.synchronize()
        took: float = start.elapsed_time(end) / NUM_TIMED
        return took


class _State:
    """What a step changes, as far as it can be found out while it runs."""

    def __init__(self) -> None:
        self.optimizers: list[Optimizer] = []
        self.chains: list[Chain] = []
        self._before: list[tuple[Tensor, Tensor]] = []
        self._states: dict[int, dict[tuple[int, str], Tensor]] = {}
        self._random = torch.cuda.get_rng_state()

    @property
    def chooses(self) -> bool:
        """Whether a chain asks which way is faster."""
        return any(chain.backward == "auto" for chain in self.chains)

    def meet(self, chain: Chain) -> None:
        """Remember a chain that is about to run, and its buffers."""
        if not any(each is chain for each in self.chains):
            self.chains.append(chain)
            self._remember(chain.buffers())

    @contextmanager
    def optimizers_seen(self) -> Iterator[None]:
        """Remember optimizers that are about to step, and their weights."""
        handle = register_optimizer_step_pre_hook(self._meet_optimizer)
        try:
            yield
        finally:
            handle.remove()

    def parameters(self) -> list[Tensor]:
        """All weights that the step trains."""
        groups = [group for each in self.optimizers for group in each.param_groups]
        return [each for group in groups for each in group["params"]]

    def prepare_optimizers(self) -> None:
        """Let learning rates be read on the device, or refuse what would wait for the host."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                on_device = group.get("capturable") or group.get("fused")
                if "capturable" in group:
                    if not on_device:
                        name = type(optimizer).__name__
                        raise CaptureError(
                            f"{name} counts its steps on the host; make it with capturable=True or "
                            "fused=True"
                        )
                    group["capturable"] = True  # as a fused one is, without saying so
                if on_device and not isinstance(group["lr"], Tensor):
                    device = group["params"][0].device
                    group["lr"] = torch.tensor(float(group["lr"]), device=device)

    def settle(self, took: dict[str, float]) -> None:
        """Tell the chains which way was faster."""
        for chain in self.chains:
            chain.settle(took)

    def read_mail(self) -> None:
        """Hear what the chains have to say."""
        for chain in self.chains:
            chain.poll()

    def put_back(self) -> None:
        """Undo what the warm-up has done."""
        torch.cuda.set_rng_state(self._random)
        with torch.no_grad():
            for tensor, before in self._before:
                tensor.copy_(before)
            for optimizer in self.optimizers:
                saved = self._states[id(optimizer)]
                for parameter, state in optimizer.state.items():
                    for key, value in state.items():
                        if isinstance(value, Tensor):
                            old = saved.get((id(parameter), key))
                            value.zero_() if old is None else value.copy_(old)

    def _meet_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if any(each is optimizer for each in self.optimizers):
            return
        self.optimizers.append(optimizer)
        self._remember(each for group in optimizer.param_groups for each in group["params"])
        self._states[id(optimizer)] = {
            (id(parameter), key): value.clone()
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }

    def _remember(self, tensors: Any) -> None:
        self._before += [(each, each.detach().clone()) for each in tensors]


class _Rates:
    """Learning rates: in the graph they are tensors, outside of it anyone may set numbers."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._groups = [
            (type(optimizer).__name__, group, group["lr"])
            for optimizer in optimizers
            for group in optimizer.param_groups
        ]

    def refresh(self) -> None:
        """Bring changed rates to the device."""
        for name, group, captured in self._groups:
            if group["lr"] is captured:
                continue
            if isinstance(captured, Tensor):
                captured.fill_(group["lr"])
                group["lr"] = captured
            elif group["lr"] != captured:
                raise CaptureError(
                    f"the learning rate of {name} is a number in the captured step ({captured}) "
                    f"and cannot become {group['lr']}; make the optimizer with fused=True"
                )


class _Stream:
    """A CUDA stream beside the caller's, as a capture needs it."""

    def __enter__(self) -> None:
        self._caller, self._own = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._own.wait_stream(self._caller)
        self._context = torch.cuda.stream(self._own)
        self._context.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)
        self._caller.wait_stream(self._own)


@contextmanager
def _generator_saved() -> Iterator[None]:
    """After a capture that failed the generator would still wait for its end: replace its state."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    fresh = generator.clone_state()
    try:
        yield
    except RuntimeError as error:
        generator.graphsafe_set_state(fresh)
        # The end of the capture fails as well, and would hide what it failed of.
        cause = error.__context__
        if isinstance(cause, CaptureError) and error is not cause:
            raise cause from cause.__cause__
        raise


@contextmanager
def _plainly() -> Iterator[None]:
    yield


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Say which line of the caller's cannot be captured, and why."""
    try:
        yield
    except CaptureError:
        raise
    except RuntimeError as error:
        waits = "synchroniz" in str(error) or "captur" in str(error)
        if not waits:
            raise
        ours = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [each for each in frames if not each.filename.startswith(ours)]
        where = f"{theirs[-1].filename}:{theirs[-1].lineno}: {theirs[-1].line}" if theirs else ""
        raise CaptureError(
            f"the step {what}: the host would wait for the device, or do what a graph cannot hold, "
            f"at {where or 'a place inside torch'}; move it out of the step ({_first_line(error)})"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _split_inputs(inputs: tuple[Any, ...]) -> tuple[list[Tensor], Any]:
    values, spec = tree_flatten(inputs)
    for each in values:
        if not isinstance(each, Tensor):
            raise CaptureError(
                f"a captured step takes tensors, got {type(each).__name__}: a number would be the "
                "same for ever; make it a tensor, or let the function close over it"
            )
    return values, spec
