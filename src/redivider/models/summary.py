"""What a model costs, counted on the meta device: nothing is allocated, however large it is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from redivider.coupling import Coupling
from redivider.footprint import Live
from redivider.models.catalogue import create_model, list_models, resolve
from redivider.models.options import OptionError


@dataclass(frozen=True)
class Summary:
    """Of one sample, in a batch of several."""

    parameters: int
    flops: float
    """Of a forward; torch counts a multiplication and an addition as two."""
    kept: dict[str, float]
    """Bytes of activations between forward and backward, by the chain's `backward`."""


def summarise(
    name: str, *, batch: int = 8, also: Sequence[str] = ("reverse",), **options: Any
) -> Summary:
    """Count parameters, work, and what autograd keeps of a batch, divided by its size.

    Args:
        name: Of the model.
        batch: How many samples.
        also: Ways of a backward to count the memory of, beside "store"; to reverse only where there
            are couplings.
        **options: Of the model.
    """
    model = create_model(name, device="meta", **options)
    x = resolve(name, **options)[1].example(batch).to("meta")
    model.check_every = 0
    kept: dict[str, float] = {}
    reversible = any(isinstance(each, Coupling) for each in model)
    with Fused():
        for model.backward in ("store", *also):
            if model.backward.startswith("reverse") and not reversible:
                continue
            with _Counter() as counter:
                y = model(x)
                kept[model.backward] = counter.bytes / batch
                del y  # not before
    parameters = sum(each.numel() for each in model.parameters())
    return Summary(parameters, counter.flops / batch, kept)


class _Counter(Live):  # type: ignore[no-untyped-call]
    """Counts FLOPs beside bytes, by the formulas of torch's flop counter and half its time."""

    flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """As before, for what is like before: torch takes long over what comes out on meta."""
        if not _is_new(func):
            return super()._run(func, args, kwargs)
        key = (func, repr(_outline((args, tuple(kwargs.items())))))  # where 2 is not 2.0
        if key not in _known:
            result = super()._run(func, args, kwargs)
            if not all(each.is_meta for each in _tensors((args, kwargs, result))):
                return result
            _known[key] = _outline(result)
        return _filled(_known[key])


@dataclass(frozen=True)
class _Outline:
    """What can be seen of a tensor without values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


_known: dict[Any, Any] = {}  # by function and arguments: what comes out


def _outline(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return _Outline(tree.shape, tree.stride(), tree.dtype, tree.device)
    return tuple(map(_outline, tree)) if isinstance(tree, list | tuple) else tree


def _filled(tree: Any) -> Any:
    if isinstance(tree, _Outline):
        return torch.empty_strided(tree.shape, tree.stride, dtype=tree.dtype, device=tree.device)
    return tuple(map(_filled, tree)) if isinstance(tree, tuple) else tree


@cache
def _is_new(func: Any) -> bool:
    """Whether what comes out has memory of its own, and nothing is written."""
    schema = func._schema
    return not schema.is_mutable and all(each.alias_info is None for each in schema.returns)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (each for each in tree_leaves(tree) if isinstance(each, Tensor))


class Fused(TorchFunctionMode):
    """Attention by a fused kernel, as on any real device; on meta it would keep all its weights."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _fused_attention(*args, **kwargs)
        return func(*args, **kwargs)


def _fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
) -> Any:
    if attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]
    with_bias = torch.ops.aten._scaled_dot_product_efficient_attention
    bias = attn_mask.expand(*q.shape[:-1], k.shape[-2])
    return with_bias(q, k, v, bias, torch.is_grad_enabled(), dropout_p, is_causal)[0]


def print_models(patterns: Sequence[str]) -> None:
    """Print a row for each model that matches a pattern, or begins so if none does."""
    found = {each: list_models(each) or list_models(f"{each}*") for each in patterns}
    names = [name for each in found.values() for name in each]
    unmatched = [pattern for pattern, each in found.items() if not each]
    if unmatched:
        raise OptionError(
            f"no model matches {' or '.join(unmatched)}; there are {', '.join(list_models())}"
        )
    print(f"{'':18}{'':>15}{'':>10}   activations of a sample, MiB")
    print(f"{'model':18}{'parameters':>15}{'GFLOPs':>10}{'stored':>12}{'reversed':>12}")
    for name in dict.fromkeys(names):
        row = summarise(name)
        stored, rebuilt = (
            f"{row.kept[way] / 2**20:.1f}" if way in row.kept else "-"
            for way in ("store", "reverse")
        )
        print(
            f"{name:18}{row.parameters:>15,}{row.flops / 1e9:>10.1f}{stored:>12}{rebuilt:>12}",
            flush=True,
        )
    print(
        "\nFLOPs of a forward, two for a multiplication with addition; activations that autograd"
        "\nkeeps until the backward, float32, a batch of 8; images of 224 pixels, full contexts."
    )
