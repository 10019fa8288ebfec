"""Saving: outputs of a few operations inside of a unit, kept so that its second run skips them.

Fused attention is kept without a mark: its output, logsumexp and random state. `save` marks any
other tensor. All else runs again.

In eager mode the first run of a module notes these outputs, by operator and number, and the second
run receives them instead of running the operators. In compiled code no operator can be seen: there
torch's own selective checkpointing keeps the same tensors (compile.py), and marks are operators.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from redivider._torch_private import TorchDispatchMode, compiled_call
from redivider.backward.strategy import Keeping, Strategy
from redivider.coupling import Coupling
from redivider.errors import UnitError
from redivider.replay import Call
from redivider.replay.random import devices_of, get_state, set_state
from redivider.replay.stack import pushed
from redivider.tree import map_tensors, storages_of, tensors_of

# Kernels among which `F.scaled_dot_product_attention` chooses.
FUSED_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_efficient_attention,
    torch.ops.aten._scaled_dot_product_cudnn_attention,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable,
}

PRODUCTS = {
    torch.ops.aten.mm,
    torch.ops.aten.addmm,
    torch.ops.aten.bmm,
    torch.ops.aten.baddbmm,
    torch.ops.aten.convolution,
    torch.ops.aten._scaled_mm,
}


def save(x: Tensor) -> Tensor:
    """Return x, and keep it for the backward: the operation that made it is not run again.

        def forward(self, a):  # of the f of a coupling, or of a junction
            hidden = rd.save(self.up(self.norm(a)))
            return self.down(F.gelu(hidden))

    It has an effect with `backward="save"`, or where a plan chooses that. Elsewhere it does
    nothing. Mark results of expensive operations, such as matrix products. Fused attention needs no
    mark.
    """
    if torch.compiler.is_compiling():
        return _save(x) if _marks_are_kept else x
    if _recorders:
        _recorders[-1].mark(x)
    return x


@torch.library.custom_op("redivider::save", mutates_args=())
def _save(x: Tensor) -> Tensor:
    return x.clone()  # by other compilers than Inductor: an output may not be an input


_save.register_fake(torch.empty_like)
_save.register_autograd(lambda ctx, grad: grad)

_marks_are_kept = False  # in code that is being compiled


class Saving:
    """Outputs of operations that the first run of a module keeps and later runs receive.

    Args:
        call: Its call.
    """

    def __init__(self, call: Call) -> None:
        if any(compiled_call(module) is not None for module in call.modules):
            raise UnitError(
                'a part of it is compiled, and "save" cannot look into that; compile all of it: '
                "chain.compile()"
            )
        self._module = call.module
        call.first = self.record
        self._outputs: dict[_Place, tuple[Any, _States]] = {}
        self._tensors: list[Tensor] = []

    @property
    def num_tensors(self) -> int:
        """Number of tensors that the first run keeps."""
        return sum(len(tensors_of(output)) for output, _ in self._outputs.values())

    def record(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module for the first time."""
        recorder = _Recorder()
        with pushed(_recorders, recorder), recorder:
            result = self._module(*args, **kwargs)
        for place, operation in recorder.kept.items():
            output = operation.read()
            self._tensors += tensors_of(output)
            self._outputs[place] = map_tensors(lambda _: _PLACEHOLDER, output), operation.states
        return result

    def take(self) -> list[Tensor]:
        """Return the tensors to save for the backward, and forget them."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def replay(self, tensors: Sequence[Tensor]) -> Callable[..., Any]:
        """Return a function that runs the module again, with the tensors that were saved."""
        following = iter(tensors)
        kept = {
            place: (map_tensors(lambda _: next(following), output), states)
            for place, (output, states) in self._outputs.items()
        }

        def run(*args: Any, **kwargs: Any) -> Any:
            with _Player(kept):
                return self._module(*args, **kwargs)

        return run


_PLACEHOLDER = torch.empty(0)
_States: TypeAlias = dict[torch.device, Tensor]
"""States after an operation, of the generators from which it drew."""


class _Place(NamedTuple):
    """An operation of a run: its operator, and how often that ran before."""

    operator: Any
    number: int


class _Operation:
    """An operation and its output; the memory of a single tensor is not held.

    Results of matrix products often live on in a view alone, so a reference to the tensor would
    not do: its geometry is noted, and the tensor is made again from the one that was marked.
    """

    def __init__(self, place: _Place, output: Any, states: _States) -> None:
        self.place, self.states = place, states
        self.marked: Tensor | None = None
        self._output = None if isinstance(output, Tensor) else output
        if isinstance(output, Tensor):
            self._geometry = output.size(), output.stride(), output.storage_offset()
        self._versions = [tensor._version for tensor in tensors_of(output)]

    def read(self) -> Any:
        """Return the output, once its run is over."""
        output = self._output
        if output is None:
            assert self.marked is not None
            base = self.marked if self.marked._base is None else self.marked._base
            output = base.detach().as_strided(*self._geometry)
        output = map_tensors(Tensor.detach, output)
        if [tensor._version for tensor in tensors_of(output)] != self._versions:
            raise UnitError(
                f"it writes to a tensor that is saved, the result of {self.place.operator}, so "
                "that its second run would write again; write to a copy, or move rd.save"
            )
        return output


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that numbers the operations of a run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts: Counter[Any] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        place = _Place(func, self._counts[func])
        self._counts[func] += 1
        return self.run(place, args, kwargs or {})

    def run(self, place: _Place, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation, or do something instead."""
        raise NotImplementedError


class _Recorder(_Counting):  # type: ignore[no-untyped-call]
    """Dispatch mode that keeps outputs of attention, and of operations whose results are marked."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[_Place, _Operation] = {}
        # By address of a storage: the storage, and the operation that allocated it.
        self._makers: dict[int, tuple[ref[torch.UntypedStorage], _Operation]] = {}

    def run(self, place: _Place, args: Any, kwargs: dict[str, Any]) -> Any:
        is_random = torch.Tag.nondeterministic_seeded in place.operator.tags
        before = _get_states(args, kwargs) if is_random else {}
        output = place.operator(*args, **kwargs)
        after = _get_states(args, kwargs) if is_random else {}
        states = {
            device: state
            for device, state in after.items()
            if not torch.equal(state, before[device])
        }
        entering = {storage._cdata for storage in storages_of((args, kwargs))}
        allocated = [storage for storage in storages_of(output) if storage._cdata not in entering]
        if allocated:  # not a view, and not in place
            operation = _Operation(place, output, states)
            for storage in allocated:
                self._makers[storage._cdata] = ref(storage), operation
            if place.operator.overloadpacket in FUSED_ATTENTION:
                self.kept[place] = operation
        return output

    def mark(self, x: Tensor) -> None:
        """Keep the output of the operation that made a tensor, if it is of this run."""
        storage = x.untyped_storage()
        known, operation = self._makers.get(storage._cdata, (None, None))
        # The address may be that of another storage, which is gone.
        if operation is not None and known is not None and known() is storage:
            operation.marked = x
            self.kept[operation.place] = operation


class _Player(_Counting):  # type: ignore[no-untyped-call]
    """Dispatch mode that returns outputs that were kept."""

    def __init__(self, kept: dict[_Place, tuple[Any, _States]]) -> None:
        super().__init__()
        self._kept = kept

    def run(self, place: _Place, args: Any, kwargs: dict[str, Any]) -> Any:
        if place not in self._kept:
            return place.operator(*args, **kwargs)
        output, states = self._kept[place]
        for device, state in states.items():  # operations after it must draw the same numbers
            set_state(device, state)
        return map_tensors(Tensor.detach, output)  # which autograd makes a part of its graph


_recorders: list[_Recorder] = []  # of the runs that are under way, one inside of the other


def _get_states(args: Any, kwargs: dict[str, Any]) -> _States:
    tensors = tensors_of((args, kwargs))
    device = tensors[0].device if tensors else torch.device(kwargs.get("device") or "cpu")
    return {device: get_state(device) for device in devices_of(device)}


def refine(strategy: Strategy, unit: nn.Module, keeping: Keeping) -> Keeping:
    """Return what a unit keeps by a strategy that saves or trims.

    Args:
        strategy: The strategy.
        unit: The unit; if it is compiled, a compiled variant of it keeps a smaller graph.
        keeping: What it would keep otherwise.
    """
    if not (strategy.saves or strategy.trims):
        return keeping
    module = unit.f if isinstance(unit, Coupling) else unit
    compiled, kind = compiled_call(module), type(module).__name__
    run = getattr(compiled, "run_trimmed" if strategy.trims else "run_saving", None)
    has_weights = any(True for _ in module.parameters())  # without any it stays uncompiled
    if strategy.trims and run is None and has_weights:
        raise UnitError(f'{kind} is not compiled, as backward="trim" needs it: chain.compile()')
    if compiled is not None and run is None:
        raise UnitError(f'{kind} is compiled by itself; for backward="save" use chain.compile()')
    if run is not None and strategy.offloads:
        raise UnitError(f'{kind} is compiled, and cannot be run by "offload-save"; use "save"')
    if strategy.trims or run is not None:
        return Keeping("graph", run=run)
    return keeping._replace(saving=Saving)


@contextmanager
def marks_kept() -> Iterator[None]:
    """Compile marks to operators inside, which the contexts below keep."""
    global _marks_are_kept
    before, _marks_are_kept = _marks_are_kept, True
    try:
        yield
    finally:
        _marks_are_kept = before


def _overloads(packets: Iterable[Any]) -> list[Any]:
    return [getattr(packet, name) for packet in packets for name in packet.overloads()]


_SAVED = [torch.ops.redivider.save.default, *_overloads(FUSED_ATTENTION)]
make_saving_contexts = partial(create_selective_checkpoint_contexts, _SAVED)
"""Contexts for torch's checkpoint, in compiled code, that keep what `Saving` keeps."""
make_trimming_contexts = partial(
    create_selective_checkpoint_contexts, [*_SAVED, *_overloads(PRODUCTS)]
)
"""Contexts that keep results of products as well."""
