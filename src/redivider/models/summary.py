"""Parameters, FLOPs and activation memory of a model, counted on meta without allocating."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from redivider.chain import Chain
from redivider.checks.memory import Live
from redivider.coupling import Coupling
from redivider.models.catalogue import create_model, resolve
from redivider.tree import tensors_of


@dataclass(frozen=True)
class Summary:
    """Costs of a model per sample."""

    parameters: int
    flops: float
    """FLOPs of a forward; torch counts a multiplication and an addition as two."""
    kept: dict[str, float]
    """Bytes of activations between forward and backward, by the chain's `backward`."""


def summarise(
    name: str, *, batch: int = 8, also: Sequence[str] = ("reverse",), **options: Any
) -> Summary:
    """Count parameters, and FLOPs and activation bytes of a batch divided by its size.

    Args:
        name: Name of the model.
        batch: Number of samples.
        also: Backward modes to measure besides "store"; those that reverse are skipped for models
            without couplings.
        **options: Options of the model.
    """
    model, x = build(name, batch, options)
    kept: dict[str, float] = {}
    for backward in ("store", *also):
        if backward.startswith("reverse") and not _is_reversible(model):
            continue
        kept[backward], flops = _count(model, x, backward)
    parameters = sum(param.numel() for param in model.parameters())
    return Summary(parameters, flops, kept)


def summarise_by_layer(name: str, *, batch: int = 8) -> Summary:
    """Return what `summarise` does, from a copy with at most three layers per stage.

    From its third layer on, all layers of a stage cost the same, and couplings keep nothing. In a
    model without stages all layers cost the same, and one is enough.
    """
    options = resolve(name)[1]
    has_stages = hasattr(options, "depths")
    depths = options.depths if has_stages else (options.depth,)
    shallow = [min(depth, 3 if has_stages else 1) for depth in depths]
    built = {"depths": shallow} if has_stages else {"depth": shallow[0]}
    model, x = build(name, batch, built)
    units = _walk(model, x)
    parameters = sum(param.numel() for param in model.parameters())
    flops, stored = sum(unit.flops for unit in units), sum(unit.graph for unit in units)
    layers = [unit for unit in units if unit.name.startswith(("layer", "block"))]
    per_layer, end = len(layers) // sum(shallow), 0
    for depth, num_built in zip(depths, shallow, strict=True):
        end += num_built * per_layer
        for unit in layers[end - per_layer : end]:
            parameters += (depth - num_built) * unit.parameters
            flops += (depth - num_built) * unit.flops
            stored += (depth - num_built) * unit.graph
    kept = {"store": stored}
    if _is_reversible(model):
        kept["reverse"], _ = _count(model, x, "reverse")
    return Summary(parameters, flops, kept)


@dataclass(frozen=True)
class UnitSummary:
    """Costs of one unit per sample."""

    name: str
    parameters: int
    flops: float
    """FLOPs of a forward."""
    kept: int
    """Bytes of its input, if it is a junction."""
    graph: float
    """Bytes that plain autograd keeps; negative where it frees more than that of its input."""
    output: int
    """Bytes of its output."""
    weights: int
    """Bytes of its parameters."""


def summarise_units(name: str, *, batch: int = 8, **options: Any) -> list[UnitSummary]:
    """Count FLOPs and bytes of every unit of a model, per sample."""
    return _walk(*build(name, batch, options))


def _walk(model: Chain, x: Tensor) -> list[UnitSummary]:
    """Run the units one by one, by plain autograd, and count what each adds."""
    model.backward = "store"
    units, batch, y = [], len(x), x
    with Fused(), _Counter() as counter:
        for name, unit in model.named_children():
            flops, held, kept = counter.flops, counter.bytes, _num_bytes(y)
            y = unit(y)
            units.append(
                UnitSummary(
                    name,
                    sum(param.numel() for param in unit.parameters()),
                    (counter.flops - flops) / batch,
                    0 if isinstance(unit, Coupling) else kept // batch,
                    (counter.bytes - held) / batch,
                    _num_bytes(y) // batch,
                    sum(param.nbytes for param in unit.parameters()),
                )
            )
    return units


def _count(model: Chain, x: Tensor, backward: str) -> tuple[float, float]:
    """Return bytes and FLOPs of a forward per sample, with a kind of backward."""
    model.backward = backward
    with Fused(), _Counter() as counter:
        y = model(x)
        size = counter.bytes
        del y  # only now: it holds the graph with all that autograd keeps
    return size / len(x), counter.flops / len(x)


def _is_reversible(model: Chain) -> bool:
    return any(isinstance(unit, Coupling) for unit in model)


def _num_bytes(tree: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(tree))


def build(name: str, batch: int, options: dict[str, Any]) -> tuple[Chain, Tensor]:
    """Return a model and a batch for it, on the meta device."""
    model = create_model(name, device="meta", **options)
    model.check_every = 0
    with torch.device("meta"):
        return model, resolve(name, **options)[1].example(batch)


class _Counter(Live):  # type: ignore[no-untyped-call]
    """Counter of live bytes and FLOPs, by torch's FLOP formulas."""

    flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


class Fused(TorchFunctionMode):
    """Mode with fused attention, as on real devices; on meta torch keeps all attention weights."""

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
    enable_gqa: bool = False,
) -> Any:
    if attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]
    # The flash kernel takes no bias.
    with_bias = torch.ops.aten._scaled_dot_product_efficient_attention
    bias = attn_mask.expand(*q.shape[:-1], k.shape[-2])
    return with_bias(q, k, v, bias, torch.is_grad_enabled(), dropout_p, is_causal)[0]


def print_models(names: Sequence[str]) -> None:
    """Print a row per model."""
    print(f"{'':18}{'':>15}{'':>12}   activations of a sample, MiB")
    print(f"{'model':18}{'parameters':>15}{'GFLOPs':>12}{'stored':>12}{'reversed':>12}")
    for name in names:
        summary = summarise_by_layer(name)
        stored, reversed_ = (
            f"{summary.kept[backward] / 2**20:.1f}" if backward in summary.kept else "-"
            for backward in ("store", "reverse")
        )
        costs = f"{summary.parameters:>15,}{summary.flops / 1e9:>12.1f}"
        print(f"{name:18}{costs}{stored:>12}{reversed_:>12}", flush=True)
    print(
        "\nFLOPs of a forward, two for a multiplication with addition; activations that autograd"
        "\nkeeps until the backward, float32, a batch of 8; images of 224 pixels, full contexts."
    )
