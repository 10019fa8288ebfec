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
    model, x = _build(name, batch, options)
    kept: dict[str, float] = {}
    reversible = any(isinstance(unit, Coupling) for unit in model)
    with Fused():
        for model.backward in ("store", *also):
            if model.backward.startswith("reverse") and not reversible:
                continue
            with _Counter() as counter:
                y = model(x)
                kept[model.backward] = counter.bytes / batch
                del y  # only now: it holds the graph with all that autograd keeps
    parameters = sum(param.numel() for param in model.parameters())
    return Summary(parameters, counter.flops / batch, kept)


def summarise_by_layer(name: str, *, batch: int = 8) -> Summary:
    """Return what `summarise` does, from a copy with at most three layers per stage.

    From its third layer on, all layers of a stage cost the same, and couplings keep nothing. In a
    model without stages all layers cost the same, and one is enough.
    """
    options = resolve(name)[1]
    field = "depths" if hasattr(options, "depths") else "depth"
    depths = options.depths if field == "depths" else (options.depth,)
    shallow = [min(depth, 3 if field == "depths" else 1) for depth in depths]
    model, x = _build(name, batch, {field: shallow if field == "depths" else shallow[0]})
    layers: list[tuple[int, int, int]] = []  # parameters, FLOPs and bytes of their units
    model.backward = "store"
    with Fused(), _Counter() as counter:
        y = x
        for unit_name, unit in model.named_children():
            flops, size = counter.flops, counter.bytes
            y = unit(y)
            if unit_name.startswith(("layer", "block")):
                num = sum(param.numel() for param in unit.parameters())
                layers.append((num, counter.flops - flops, counter.bytes - size))
        flops, size = counter.flops, counter.bytes
        del y
    parameters = sum(param.numel() for param in model.parameters())
    num_units, end = len(layers) // sum(shallow), 0  # per layer
    for depth, num_built in zip(depths, shallow, strict=True):
        end += num_built * num_units
        for layer in layers[end - num_units : end]:
            more = [(depth - num_built) * cost for cost in layer]
            parameters, flops, size = parameters + more[0], flops + more[1], size + more[2]
    kept = {"store": size / batch}
    if any(isinstance(unit, Coupling) for unit in model):
        model.backward = "reverse"
        with Fused(), _Counter() as counter:
            y = model(x)
            kept["reverse"] = counter.bytes / batch
            del y
    return Summary(parameters, flops / batch, kept)


@dataclass(frozen=True)
class UnitSummary:
    """Costs of one unit per sample."""

    flops: float
    """FLOPs of a forward."""
    kept: int
    """Bytes of its input, if it is a junction."""
    graph: int
    """Bytes that plain autograd keeps."""
    output: int
    """Bytes of its output."""
    weights: int
    """Bytes of its parameters."""


def summarise_units(name: str, *, batch: int = 8, **options: Any) -> list[UnitSummary]:
    """Count FLOPs and bytes of every unit of a model, per sample."""
    model, x = _build(name, batch, options)
    model.backward = "store"
    units, size = [], _num_bytes(x) // batch
    with Fused(), _Counter() as counter:
        y = x
        for unit in model:
            flops, held, kept = counter.flops, counter.bytes, size
            y = unit(y)
            size = _num_bytes(y) // batch
            units.append(
                UnitSummary(
                    (counter.flops - flops) / batch,
                    0 if isinstance(unit, Coupling) else kept,
                    max(counter.bytes - held, 0) // batch,
                    size,
                    sum(param.nbytes for param in unit.parameters()),
                )
            )
    return units


def _num_bytes(tree: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(tree))


def _build(name: str, batch: int, options: dict[str, Any]) -> tuple[Chain, Tensor]:
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
