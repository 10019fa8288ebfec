"""A network made reversible in place: the same network in evaluation, little memory in training.

Every block gets a subclass of its own class, with the same name. Its forward is the block's own one
in evaluation and without gradients. In training it runs by a strategy (backward/strategy.py): its
input goes to a tape of a few bits a value (backward/tape.py), or a plan says otherwise (budget/).
Parameters, buffers, hooks and the keys of `state_dict` stay as they are.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import cache, wraps
from inspect import Parameter, signature
from typing import Any, TypeAlias, TypeVar
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from redivider._torch_private import compiled_call, remove_forward_pre_hook
from redivider.backward.graph import find_node
from redivider.backward.mailbox import Mailbox
from redivider.backward.node import Keeper, KeptInput
from redivider.backward.quantizer import MAX_BITS
from redivider.backward.strategy import Strategy, resolve_strategy
from redivider.backward.tape import BITS, Tapes
from redivider.compile import compile_units
from redivider.convert.blocks import find_blocks
from redivider.errors import UnitError, naming
from redivider.replay import Call
from redivider.replay.autocast import uncached_casts
from redivider.tree import tensors_of

Model = TypeVar("Model", bound=nn.Module)
PLACE = "_redivider_place"  # attribute of a block: its list, and its index there
PLAIN = "_redivider_plain"  # attribute of a block: itself, to be run by its original forward
UNPLANNED = "unplanned"  # strategy of a block for which a plan has no choice
ENABLE = "gradient_checkpointing_enable"
# Nodes of the graph to search for the block before; only the first block of a pass searches all.
NUM_SEARCHED = 1000
CHECK_EVERY = 100  # passes, in which inputs are compared with what is known of them


def make_reversible(model: Model, bits: int = BITS, blocks: str | None = None) -> Model:
    """Train the blocks of a network in little memory, and leave the network as it is; return it.

        model = rd.make_reversible(AutoModelForCausalLM.from_pretrained("gpt2"))

    In `train()` and with gradients, a block keeps `bits` bits of every value of its input, where
    checkpointing keeps 16 or 32, and the backward runs it again. Outputs are those of the original
    network, bit for bit. Gradients are approximate: a block is run again a little off its input, by
    about the error of rounding a residual to `bits` bits. `rd.make_plain` undoes it.

    Args:
        model: A network with a list of blocks, whose first argument is the stream.
        bits: Bits that are kept of every value and block, from 1 to 8. More disturb gradients less.
        blocks: Name of the list, such as "encoder.layers"; not needed if there is only one.
    """
    if isinstance(bits, bool) or not isinstance(bits, int) or not 1 <= bits <= MAX_BITS:
        raise ValueError(f"bits must be a whole number from 1 to {MAX_BITS}, got {bits!r}")
    name, members = find_blocks(model, blocks)
    for block in members:
        if PLACE in vars(block):
            raise ValueError(f"{name} is reversible already; call rd.make_plain(model) first")
        if "forward" in vars(block):
            raise ValueError(
                f"the forward of a block in {name} has been replaced, as accelerate's hooks do; "
                "call rd.make_reversible before"
            )
        if compiled_call(block) is not None:
            raise ValueError(f"a block in {name} is compiled; compile after rd.make_reversible")
        if getattr(block, "gradient_checkpointing", False):
            raise ValueError(
                "gradient checkpointing is on, and a reversible model does without; call "
                "model.gradient_checkpointing_disable() first"
            )
    if len(members) == 1:
        raise ValueError(
            f"{name} has one block, and blocks are compressed relative to each other: use "
            "checkpointing"
        )
    if len(set(members)) < len(members):
        raise ValueError(f"{name} has a block twice, and a block can have one place in a row")
    names = [f"{name}.{index}" for index in range(len(members))]
    row = Blocks(names, bits)
    for index, block in enumerate(members):
        setattr(block, PLACE, (row, index))
        setattr(block, PLAIN, (_Plain(block),))  # a tuple, because it is no part of the block
        row.add(index, block)
        kind: Any = type(block)
        block.__class__ = _reversible_class(kind)
    remove_forward_pre_hook(model, _switch_cache_off)  # of a call for another list
    model.register_forward_pre_hook(_switch_cache_off, with_kwargs=True)
    if hasattr(model, ENABLE):
        setattr(model, ENABLE, _refuse_checkpointing)
    return model


def make_plain(model: Model) -> Model:
    """Undo `make_reversible`, in place; return the model."""
    blocks = [module for module in model.modules() if PLACE in vars(module)]
    for block in blocks:
        if type(block) not in _ORIGINAL:
            raise ValueError(
                f"a block is {type(block).__name__}, made of a reversible one since (by FSDP?)"
            )
        if "forward" in vars(block) and not _is_own_forward(block):
            raise ValueError(
                "the forward of a block has been replaced since, as accelerate's hooks do; remove "
                "them, and call rd.make_plain again"
            )
    for block in blocks:
        vars(block).pop("forward", None)  # left behind by a hook that was removed
        block.__class__ = _ORIGINAL[type(block)]
        delattr(block, PLACE)
        delattr(block, PLAIN)
    # If there are none, they were made plain before, through a part of the model.
    has_changed = len(blocks) > 0
    for module in model.modules():
        has_changed |= remove_forward_pre_hook(module, _switch_cache_off)
        if vars(module).get(ENABLE) is _refuse_checkpointing:
            delattr(module, ENABLE)
            has_changed = True
    if not has_changed:
        raise ValueError(f"{type(model).__name__} is not reversible")
    return model


def _is_own_forward(block: nn.Module) -> bool:
    """Return whether the forward that a block has as an attribute is that of its class."""
    return getattr(vars(block)["forward"], "__func__", None) is type(block).forward


Observe: TypeAlias = Callable[["Blocks", int, Tensor, tuple[Any, ...], dict[str, Any]], Any]
Keepers: TypeAlias = WeakValueDictionary[Strategy, Keeper]


class Blocks:
    """A list of blocks, and the strategies by which they train.

    Args:
        names: Names of the blocks.
        bits: Bits that a block keeps of every value.
    """

    def __init__(self, names: list[str], bits: int) -> None:
        self._refs: list[Callable[[], Any]] = [_nothing] * len(names)  # weak: blocks may be removed
        self.backward = ["compress"] * len(names)
        self.observe: Observe | None = None
        """Function that runs a block in training instead, to measure it."""
        self.names, self._bits = names, bits
        self._is_checked = False
        self._num_passes = 0
        self._mailbox = Mailbox()
        self.compiled: dict[Any, Any] = {}
        """Compiled functions, which blocks share that differ in their weights only."""

    def __getstate__(self) -> dict[str, Any]:
        # Compiled functions cannot be copied. Blocks may be copied alone: copies add themselves.
        return {**vars(self), "compiled": {}, "_refs": [_nothing] * len(self.names)}

    @property
    def plain(self) -> list[Any]:
        """The blocks, as modules that run by the original forward; None for those that are gone."""
        return [find() for find in self._refs]

    def add(self, index: int, block: nn.Module) -> None:
        """Add a block to the list."""
        (plain,) = getattr(block, PLAIN)
        self._refs[index] = ref(plain)

    @property
    def trains(self) -> bool:
        """Whether a block is in training mode; the others may be frozen in evaluation mode."""
        return any(plain is not None and plain.wrapped.training for plain in self.plain)

    # A compiler cannot trace autograd nodes and tapes.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block in training."""
        plain = self.plain[index]
        with naming(self.names[index]):
            if getattr(plain.wrapped, "gradient_checkpointing", False):
                _refuse_checkpointing()
            x, args, kwargs = plain.split_stream(*_without_cache(args, kwargs))
            tensors = (*plain.parameters(), *tensors_of((x, args, kwargs)))
            if not any(tensor.requires_grad for tensor in tensors):
                return plain(x, *args, **kwargs)
            if self.observe is not None:
                return self.observe(self, index, x, args, kwargs)
            if self.backward[index] == UNPLANNED:
                raise ValueError(
                    f"the plan has no choice for {self.names[index]}, which was frozen or absent "
                    "when it was made; make a new one: rd.plan(model, ...).apply()"
                )
            keepers = _find_mark(x, self)  # of the pass that the stream belongs to
            keepers = Keepers() if keepers is None else keepers
            output = self.run_by(self.backward[index], index, keepers, x, args, kwargs)
            for tensor in tensors_of(output):
                _set_mark(tensor, self, keepers)
            if index == len(self.names) - 1:
                self._warn_once(keepers)
            return output

    def _warn_once(self, keepers: Keepers) -> None:
        """Warn after the first pass if no two inputs had one shape."""
        all_tapes = [keeper for keeper in keepers.values() if isinstance(keeper, Tapes)]
        if self._is_checked or not all_tapes:
            return
        self._is_checked = True
        if all(tapes.num_inputs > 1 and not tapes.num_codes for tapes in all_tapes):
            warnings.warn(
                f"{self.names[0].rpartition('.')[0]}: no two blocks have inputs of one shape, so "
                "nothing is compressed; name a list of blocks that keep it, blocks=...",
                stacklevel=2,
            )

    def run_by(
        self,
        backward: str,
        index: int,
        keepers: Keepers,
        x: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a block by a strategy.

        Args:
            backward: Name of the strategy.
            index: Index of the block.
            keepers: Keepers of inputs that the blocks of a pass share, by strategy.
            x: The stream.
            args: Other arguments of the block.
            kwargs: Its keywords.
        """
        plain, strategy = self.plain[index], resolve_strategy(backward)
        for other in [] if strategy.offloads else list(keepers.values()):
            other.skip()
        if strategy.junction == "graph":
            with uncached_casts():  # autocast would keep them to the end of the step
                return plain(x, *args, **kwargs)
        call, inputs = Call.split(plain, (x, *args), kwargs)
        keeper = keepers.get(strategy) or self.make_keeper(strategy, x)
        # With the graph of the first run, gradients of what a block keeps inside are noticed.
        if keeper is None:
            kept = KeptInput(self.names[index], call, with_graph=True)
        else:
            keepers[strategy] = keeper
            kept = keeper.make_kept(self.names[index], call, with_graph=True, num_inputs=1)
        kept.returns_others = True
        if strategy.saves:
            from redivider.backward.saving import Saving

            kept.saving = Saving(call)
        return kept.run(inputs)

    def make_keeper(self, strategy: Strategy, x: Tensor) -> Keeper | None:
        """Return what keeps inputs elsewhere than in the graph, in a pass."""
        if not strategy.compresses:
            return strategy.make_keeper(x)
        tapes = Tapes(self._bits)
        self._mailbox.poll()
        # A replay of a captured step has no host to read the result.
        if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            if self._num_passes % CHECK_EVERY == 0:
                tapes.report_to(self._mailbox)
            self._num_passes += 1
        return tapes


def _nothing() -> None:
    pass


def _find_mark(tensor: Tensor, key: Any) -> Any:
    """Return what `_set_mark` has set for a key at a tensor that is near before this one."""
    nodes = [] if tensor.grad_fn is None else [tensor.grad_fn]
    node = find_node(nodes, lambda node: key in node.metadata, NUM_SEARCHED)
    return None if node is None else node.metadata[key]


def _set_mark(tensor: Tensor, key: Any, mark: Any) -> None:
    """Mark the place of a tensor in its graph."""
    node: Any = tensor.grad_fn
    if node is not None:
        node.metadata[key] = mark


def blocks_of(model: nn.Module) -> dict[str, tuple[Blocks, int]]:
    """Return the list and the index there of every reversible block of a network, by its name."""
    modules = model.named_modules()
    return {name: getattr(block, PLACE) for name, block in modules if PLACE in vars(block)}


def strategies_of(model: nn.Module) -> dict[str, str]:
    """Return the strategy of every reversible block of a network, by its name."""
    return {name: blocks.backward[index] for name, (blocks, index) in blocks_of(model).items()}


def set_strategies(model: nn.Module, backward: str | Mapping[str, str]) -> None:
    """Let the reversible blocks of a network train by strategies: one for all, or by name."""
    places = blocks_of(model)
    named = dict.fromkeys(places, backward) if isinstance(backward, str) else backward
    for name, strategy in named.items():
        if strategy != UNPLANNED:
            resolve_strategy(strategy)
        if name not in places:
            raise ValueError(f"{type(model).__name__} has no reversible block {name!r}")
    for name, strategy in named.items():
        blocks, index = places[name]
        blocks.backward[index] = strategy


class _Plain(nn.Module):
    """A block that runs by its original forward, without hooks: the caller's call runs those.

    Args:
        block: The block, before its class changes.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.wrapped = block
        self._forward: Callable[..., Any] = type(block).forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self.wrapped, *args, **kwargs)

    def split_stream(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
        """Split the stream, which is the first argument, from the others."""
        if args:
            x, args = args[0], args[1:]
        else:
            _, *params = signature(self._forward).parameters.values()
            first = params[0].name if params else ""
            if first not in kwargs:
                raise UnitError("a block takes its input as the first argument, and got none")
            if params[0].kind is Parameter.KEYWORD_ONLY:
                raise UnitError(
                    f"a block must take its input as a positional argument, and {first} is a "
                    "keyword-only one"
                )
            x, kwargs = kwargs[first], {k: v for k, v in kwargs.items() if k != first}
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise UnitError(f"the first argument of a block must be a tensor of reals, got {kind}")
        return x, args, kwargs


_ORIGINAL: dict[type, Any] = {}  # by the class that has taken its place


@cache
def _reversible_class(kind: Any) -> Any:
    """Make a subclass whose forward is reversible in training."""

    @wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        row, index = getattr(self, PLACE)
        is_training = torch.is_grad_enabled() and row.trains
        (plain,) = getattr(self, PLAIN)
        if plain.wrapped is not self:  # a shallow copy, with weights of its own
            if is_training:
                raise UnitError(
                    "nn.DataParallel and other shallow copies cannot train a reversible model; "
                    "use DistributedDataParallel"
                )
            return kind.forward(self, *args, **kwargs)
        if is_training:
            return row.run(index, args, kwargs)
        return plain(*args, **kwargs)

    def compile(self: nn.Module, **options: Any) -> None:
        """Compile what the block computes; what keeps its input is not compiled."""
        row, _ = getattr(self, PLACE)
        compile_units([*getattr(self, PLAIN)], shared=row.compiled, **options)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        """Copy and pickle by the block's own class, since this one has no name of its own."""
        reduced: Any = object.__reduce_ex__(self, protocol)
        return _revive, (kind,), *reduced[2:]

    def set_state(self: Any, state: dict[str, Any]) -> None:
        kind.__setstate__(self, state)
        row, index = getattr(self, PLACE)
        row.add(index, self)

    names = ("__module__", "__qualname__", "__doc__")
    methods = {"forward": forward, "compile": compile}
    methods |= {"__reduce_ex__": reduce, "__setstate__": set_state}
    made = type(kind.__name__, (kind,), methods | {name: getattr(kind, name) for name in names})
    _ORIGINAL[made] = kind
    return made


def _revive(kind: Any) -> Any:
    """Make an empty block of a class that is reversible."""
    block = kind.__new__(kind)
    block.__class__ = _reversible_class(kind)
    return block


def _switch_cache_off(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Build no key-value cache in training: a block that runs twice would append to it twice."""
    names = [*signature(model.forward).parameters]
    is_keyword = "use_cache" in names[len(args) :]
    if not (model.training and torch.is_grad_enabled() and is_keyword and blocks_of(model)):
        return None
    return args, {**kwargs, "use_cache": False}


def _without_cache(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace empty key-value caches of transformers by None, and refuse others."""

    def emptied(value: Any) -> Any:
        if not (hasattr(value, "get_seq_length") and hasattr(value, "update")):
            return value
        if value.get_seq_length():
            raise UnitError("a cache with earlier tokens cannot be used in training")
        return None

    kwargs = {key: emptied(value) for key, value in kwargs.items()}
    if "use_cache" in kwargs:
        kwargs["use_cache"] = False
    return tuple(map(emptied, args)), kwargs


def _refuse_checkpointing(*args: Any, **kwargs: Any) -> None:
    raise ValueError(
        "gradient checkpointing is not for a reversible model, which keeps less; call "
        "rd.make_plain(model) first, or do without"
    )
