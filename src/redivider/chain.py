"""Chain: consecutive units as one module, whose activation memory does not grow with depth.

Its `backward` names a strategy (backward/strategy.py): what every unit keeps between forward and
backward. Without grad mode every chain runs as plain modules do, and keeps nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from redivider._torch_private import call_uncompiled, is_exporting, original_module
from redivider.arithmetic import Arithmetic, resolve_arithmetic
from redivider.backward.mailbox import Mailbox
from redivider.backward.node import keep_input
from redivider.backward.row import Row, prepare_streams
from redivider.backward.strategy import STORE, Strategy, begin_pass, resolve_strategies
from redivider.coupling import Coupling, run_by
from redivider.errors import UnitError, did_you_mean, naming
from redivider.replay.autocast import uncached_casts
from redivider.replay.stack import pushed

if TYPE_CHECKING:
    from redivider.backward.auto import Auto


class Chain(nn.Module):
    """Couplings and junctions, run one after the other as one module.

        units = [nn.Linear(8, 64), rd.Duplicate(), *couplings, rd.Fuse("concat"), nn.Linear(128, 2)]
        chain = rd.Chain(units, backward="reverse")
        loss(chain(x)).backward()

    Every unit receives the output of the one before; a coupling takes and returns a pair of
    streams. Keywords of the call go to the units that take them: `Coupling(f, takes=("mask",))`, or
    any other module with an attribute `takes`. A keyword that the caller leaves out is not passed
    on. Length, indices, slices, iteration and the keys of `state_dict` are those of an
    `nn.Sequential`.

    Args:
        units: The modules, in order; or a dict of them, whose keys name them in `state_dict`.
        backward: "store" keeps all activations (plain backprop), "checkpoint" the input of every
            unit, "offload" the same in host memory, "reverse" nothing of a coupling and all of a
            junction, "reverse-checkpoint" nothing of a coupling and the input of a junction,
            "compress" the same in 2 bits a value, with approximate gradients.
            "save" is "reverse-checkpoint", and "offload-save" is "offload", but attention and what
            `rd.save` marks are kept as well, and not run again. "trim", for compiled units, keeps
            results of products, too.
            "overlap" is "reverse", and "checkpoint-overlap" is "checkpoint", with the recomputation
            of a unit beside the backward of the next one on a GPU. "auto" times "reverse" and
            "overlap" on a GPU, and keeps the faster one. A list has one of these names, but "auto",
            for every unit, as a plan does (`rd.plan`).
        arithmetic: "float", or "fixed" for reversal to the last bit: `Fixed(bits=20)`.
        check_every: Interval, in training steps, at which a reversing chain compares its rebuilt
            input with the original, and one that compresses its inputs with what it knows of them,
            and warns of drift; 0 for never.
        drift_tolerance: Relative difference beyond which that check warns.
    """

    def __init__(
        self,
        units: Iterable[nn.Module] | Mapping[str, nn.Module],
        *,
        backward: str | Sequence[str] = "reverse",
        arithmetic: str | Arithmetic = "float",
        check_every: int = 100,
        drift_tolerance: float = 1e-2,
    ) -> None:
        super().__init__()
        if not isinstance(units, Iterable):
            raise TypeError(f"a chain takes a list of units, got one {type(units).__name__}")
        interval: Any = check_every
        if not isinstance(interval, Integral) or int(interval) < 0:
            raise ValueError(f"check_every must be 0 (never) or more steps, got {interval!r}")
        tolerance: Any = drift_tolerance
        if not (isinstance(tolerance, Real) and float(tolerance) >= 0):
            raise ValueError(f"drift_tolerance must be 0 or more, got {tolerance!r}")
        self._backward: str | tuple[str, ...] = "store"  # until the number of units is known
        self.arithmetic = arithmetic
        self.check_every = check_every
        self.drift_tolerance = drift_tolerance
        self._num_steps = 0
        self._mailbox = Mailbox()
        self._auto: Auto | None = None  # choices of "auto", once there are some
        has_names = isinstance(units, Mapping | nn.ModuleDict)
        named = dict(units.items() if has_names else enumerate(units))  # type: ignore[union-attr]
        for index, (name, unit) in enumerate(named.items()):
            if not isinstance(unit, nn.Module):
                raise TypeError(
                    f"unit {index} must be a torch.nn.Module, got {type(unit).__name__}"
                )
            if isinstance(original_module(unit), Coupling):
                raise TypeError(
                    f"unit {index} is a compiled coupling, which a chain cannot look into; compile "
                    "its function instead: coupling.f.compile()"
                )
            if isinstance(unit, Coupling) and type(unit).residual is not Coupling.residual:
                raise TypeError(
                    f"unit {index}, {type(unit).__name__}, has a residual of its own, which only "
                    "plain backprop would call; make it the forward of f"
                )
            self._add(str(name), unit)
        if not self._modules:
            raise ValueError("a chain needs at least one unit")
        self.backward = backward

    @property
    def backward(self) -> str | tuple[str, ...]:
        """Strategy that provides the inputs of the backward, or a tuple with one for every unit.

        May be set at any time.
        """
        return self._backward

    @backward.setter
    def backward(self, backward: str | Sequence[str]) -> None:
        resolve_strategies(backward, len(self))
        self._backward = backward if isinstance(backward, str) else tuple(backward)

    @property
    def arithmetic(self) -> Arithmetic:
        """Arithmetic that adds the residuals; may be set, also by name."""
        return self._arithmetic

    @arithmetic.setter
    def arithmetic(self, arithmetic: str | Arithmetic) -> None:
        self._arithmetic = resolve_arithmetic(arithmetic)

    def _add(self, name: str, unit: nn.Module) -> None:
        if name in self._modules:
            raise ValueError(f"two units are called {name!r}")
        try:
            self.add_module(name, unit)
        except KeyError as error:
            raise ValueError(f"a unit cannot be called {name!r}: {error.args[0]}") from None

    def forward(self, x: Any, /, **side: Any) -> Any:
        """Run all units on x; every unit receives those of the keywords that it takes."""
        verify_keywords(side, self.takes)
        if torch.compiler.is_compiling() and (self._is_plain() or is_exporting()):
            from redivider.backward.traced import run_traced

            return run_traced(self.segments(), partial(taken, side=side), x, self.arithmetic)
        return _run_eagerly(self, x, side)

    def inverse(self, streams: Any, /, **side: Any) -> Any:
        """Return the input of a chain of couplings from its output, up to rounding."""
        verify_keywords(side, self.takes)
        for index, (key, unit) in reversed(list(enumerate(self._named_units()))):
            with naming(name_unit(index, unit, key)):
                if not isinstance(unit, Coupling):
                    raise UnitError("it has no inverse; take the couplings alone, as chain[2:-2]")
                streams = unit.inverse(streams, **taken(unit, side))
        return streams

    def compile(self, **options: Any) -> None:
        """Compile the units one by one: every coupling's f, in forward and recovery, and junctions.

        Units that differ only in the values of their weights share their graphs. The chain itself
        is not compiled. `options` are those of `torch.compile`.
        """
        from redivider.compile import CompiledArithmetic, compile_units

        compile_units(self, **options)
        self.arithmetic = CompiledArithmetic(self.arithmetic, **options)
        self._auto = None  # times measured before no longer hold

    @property
    def takes(self) -> tuple[str, ...]:
        """Keywords that at least one unit takes."""
        return takes_of(self)

    def units(self) -> Iterator[nn.Module]:
        """Iterate over the units, in order."""
        return iter(self)

    def segments(self) -> list[tuple[bool, list[tuple[str, nn.Module]]]]:
        """Group named units into rows of couplings (True) and runs of other units (False)."""
        groups: list[tuple[bool, list[tuple[str, nn.Module]]]] = []
        for index, (key, unit) in enumerate(self._named_units()):
            in_row = isinstance(unit, Coupling)
            if not groups or groups[-1][0] != in_row:
                groups.append((in_row, []))
            groups[-1][1].append((name_unit(index, unit, key), unit))
        return groups

    def _named_units(self) -> list[tuple[str, nn.Module]]:  # named_children omits repeated units
        return list(self._modules.items())  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())  # type: ignore[arg-type]

    def __getitem__(self, index: int | slice) -> Any:
        if not isinstance(index, slice):
            return list(self)[index]
        own = self.backward
        return Chain(
            dict(self._named_units()[index]),
            backward=own if isinstance(own, str) else own[index],
            arithmetic=self.arithmetic,
            check_every=self.check_every,
            drift_tolerance=self.drift_tolerance,
        )

    def extra_repr(self) -> str:
        return f"backward={self.backward!r}, arithmetic={self.arithmetic!r}"

    def poll(self) -> None:
        """Raise faults and warn of drift that the device has reported for earlier steps."""
        self._mailbox.poll()

    def _strategies(self) -> list[Strategy]:
        backward = self.backward if torch.is_grad_enabled() else "store"
        return resolve_strategies(backward, len(self))

    def _is_plain(self) -> bool:
        return {*self._strategies()} == {STORE} and not self.arithmetic.exact

    def _count_step(self) -> float | None:
        """Count a training step; return the tolerance if this step checks for drift."""
        reverses = any(strategy.reverses for strategy in self._strategies())
        # A replay of a captured step has no host to read the result.
        is_captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if is_captured or not (self.training and reverses and self.check_every):
            return None
        self._num_steps += 1
        if (self._num_steps - 1) % self.check_every:
            return None
        return 0.0 if self.arithmetic.exact else self.drift_tolerance


# A compiler cannot trace autograd nodes, random generators and rows: compile f instead.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run_eagerly(chain: Chain, x: Any, side: dict[str, Any]) -> Any:
    for observe in _observers:
        observe(chain)
    chain._mailbox.poll()
    # By a plan, no unit leaves casts behind that autocast would keep to the end of the step.
    with nullcontext() if isinstance(chain.backward, str) else uncached_casts():
        return _run_units(chain, x, side)


def _run_units(chain: Chain, x: Any, side: dict[str, Any]) -> Any:
    exact, drift_tolerance = chain.arithmetic.exact, chain._count_step()
    keepings = begin_pass(chain._strategies(), chain, x)
    keepers = {keeping.keeper for keeping in keepings if keeping.keeper is not None}
    if drift_tolerance is not None:
        for keeper in keepers:
            keeper.report_to(chain._mailbox)
    auto = None
    if chain.backward == "auto" and torch.is_grad_enabled():
        from redivider.backward.auto import Auto  # few chains need it

        auto = chain._auto = chain._auto or Auto()
    hint = ""
    for in_row, units in chain.segments():
        own, keepings = keepings[: len(units)], keepings[len(units) :]
        row: Row | None = None
        if in_row:
            names = [name for name, _ in units]
            with naming(names[0]):
                x = prepare_streams(x)
                if auto is not None:
                    sides = [taken(unit, side) for _, unit in units]
                    own = auto.begin_row(units, x, sides, chain.arithmetic)
                if exact or any(keeping.keep != "graph" or keeping.run for keeping in own):
                    row = Row(names, own, chain.arithmetic, chain._mailbox)
                    x = row.enter(x, drift_tolerance=drift_tolerance)
        for (name, unit), keeping in zip(units, own, strict=True):
            keywords = taken(unit, side)
            with naming(name, hint):
                if row is not None and isinstance(unit, Coupling):
                    _verify_forward(unit)
                    with run_by(row, unit):  # which runs f, compiled or not
                        x = call_uncompiled(unit, x, **keywords)
                elif in_row or keeping.keep == "graph":
                    x = (keeping.run or unit)(x, **keywords)
                else:
                    x = keep_input(name, unit, (x,), keywords, keeping, exact=exact)
            for keeper in keepers - {keeping.keeper}:
                keeper.skip()
            hint = ""
        if row is not None:
            with naming(units[0][0]):
                row.verify_complete()
        if in_row:
            hint = ", which was given a pair of streams: rd.Fuse makes one tensor of it"
    return x


_observers: list[Callable[[Chain], None]] = []


def observing(observe: Callable[[Chain], None]) -> AbstractContextManager[Any]:
    """Call a function with every chain that is about to run."""
    return pushed(_observers, observe)


def _verify_forward(coupling: Coupling) -> None:
    """Refuse a coupling whose own forward only plain backprop would call."""
    if getattr(coupling.forward, "__func__", None) is not Coupling.forward:
        raise UnitError(
            "it has a forward of its own, which only plain backprop would call; put the "
            "computation into f, or compile f"
        )


def name_unit(index: int, unit: nn.Module, key: str = "") -> str:
    """Describe a unit for errors by its index, key and type."""
    inner = f"({type(unit.f).__name__})" if isinstance(unit, Coupling) else ""
    own = f" ({key})" if key not in ("", str(index)) else ""
    return f"unit {index}{own}, {type(unit).__name__}{inner}"


def takes_of(units: Iterable[nn.Module]) -> tuple[str, ...]:
    """Return the keywords that at least one unit takes."""
    return tuple(dict.fromkeys(name for unit in units for name in getattr(unit, "takes", ())))


def verify_keywords(side: dict[str, Any], takes: Sequence[str]) -> None:
    """Refuse keywords that no unit takes."""
    for name in side:
        if name not in takes:
            hint = did_you_mean(name, takes, "see Coupling(f, takes=...)")
            known = list(takes) or "none"
            raise TypeError(f"no unit takes the keyword {name!r}, they take {known}; {hint}")


def taken(unit: nn.Module, side: dict[str, Any]) -> dict[str, Any]:
    """Return those of the keywords that this unit takes."""
    return {name: side[name] for name in getattr(unit, "takes", ()) if name in side}
