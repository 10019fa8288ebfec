"""Catalogue of all models by name."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

import torch

from redivider.arithmetic import Arithmetic
from redivider.chain import Chain
from redivider.errors import did_you_mean, no_such
from redivider.initial import materialise
from redivider.models import gpt, llama, mvit, resnet, revnet, roberta, swin, vit
from redivider.models.options import OptionError
from redivider.models.parts import Units
from redivider.models.weight_names import GPT, LLAMA, MVIT, RESNET, ROBERTA, SWIN, VIT, Names
from redivider.models.weights import Weights, load_weights


@dataclass(frozen=True)
class Family:
    """Models that differ only in size; a name is the prefix followed by the size."""

    prefix: str
    units: Callable[[Any], Units]
    options: type
    sizes: Mapping[str, Mapping[str, Any]]
    names: Names | None = None
    """Names of the weights in other libraries, where there is such a network."""


FAMILIES = (
    Family("resnet", resnet.resnet, resnet.Options, resnet.SIZES, RESNET),
    Family("revnet", revnet.revnet, resnet.Options, resnet.SIZES),
    Family("vit_", vit.vit, vit.Options, vit.SIZES, VIT),
    Family("rev_vit_", vit.rev_vit, vit.Options, vit.SIZES),
    Family("swin_", swin.swin, swin.Options, swin.SIZES, SWIN),
    Family("rev_swin_", swin.rev_swin, swin.Options, swin.SIZES),
    Family("mvit_", mvit.mvit, mvit.Options, mvit.SIZES, MVIT),
    Family("rev_mvit_", mvit.rev_mvit, mvit.Options, mvit.SIZES),
    Family("gpt_", gpt.gpt, gpt.Options, gpt.SIZES, GPT),
    Family("rev_gpt_", gpt.rev_gpt, gpt.Options, gpt.SIZES),
    Family("llama_", llama.llama, llama.Options, llama.SIZES, LLAMA),
    Family("rev_llama_", llama.rev_llama, llama.Options, llama.SIZES),
    Family("roberta_", roberta.roberta, roberta.Options, roberta.SIZES, ROBERTA),
    Family("rev_roberta_", roberta.rev_roberta, roberta.Options, roberta.SIZES),
)


def list_models(pattern: str = "*") -> list[str]:
    """Return the model names that match a pattern, for example `rd.list_models("rev_*")`."""
    return [name for name in _names() if fnmatchcase(name, pattern)]


def create_model(
    name: str,
    *,
    backward: str = "reverse",
    arithmetic: str | Arithmetic = "float",
    seed: int = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    weights: Weights | None = None,
    **options: Any,
) -> Chain:
    """Create a model: a chain whose first unit takes images or tokens and whose last gives scores.

        model = rd.create_model("revnet18", num_classes=10, image_size=32)

    Args:
        name: One of `list_models()`.
        backward: As for `Chain`.
        arithmetic: As for `Chain`.
        seed: Seed of the initial weights, which depend only on it and on the names of the units.
        device: Device of the model; "meta" allocates no memory and draws no weights.
        dtype: Dtype of the weights.
        weights: A state dict or the path of one (.pt or .safetensors), of the model itself or of
            the same network in timm, torchvision or transformers; initial weights by default.
        **options: Options of the family, such as `num_classes`, `image_size`, `depth` or `dropout`.
    """
    family, resolved = resolve(name, **options)
    device = torch.get_default_device() if device is None else torch.device(device)
    if weights is not None and device.type == "meta":
        raise OptionError("the meta device has no memory for weights; leave out device or weights")
    with torch.device("meta"), _float32_by_default() as default_dtype:
        units = family.units(resolved)
        for end in ("stem", "head"):
            units[end].orthogonalise = False  # type: ignore[assignment]  # by rd.Muon
        chain = Chain(units, backward=backward, arithmetic=arithmetic)
    if device.type != "meta":
        materialise(units, seed=seed, device=device)
    chain = chain.to(dtype=dtype or default_dtype)
    if weights is not None:
        load_weights(chain, weights, name=name, names=family.names, options=resolved)
    return chain


def resolve(name: str, **options: Any) -> tuple[Family, Any]:
    """Return the family of a name and its options: those of the size, updated by the caller's."""
    names = _names()
    if name not in names:
        lists = "rd.list_models() or `redivider models` lists all"
        raise OptionError(no_such("model", name, names, lists))
    family, size = names[name]
    known = [field.name for field in fields(family.options)]
    for option in options:
        if option not in known:
            hint = did_you_mean(option, known, f"it has {', '.join(known)}")
            raise OptionError(f"{name} has no option {option!r}; {hint}")
    return family, family.options(**{**family.sizes[size], **options})


@contextmanager
def _float32_by_default() -> Iterator[torch.dtype]:
    """Build in float32 and yield the user's default dtype: other dtypes draw other numbers."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield default
    finally:
        torch.set_default_dtype(default)


def _names() -> dict[str, tuple[Family, str]]:
    return {
        f"{family.prefix}{size}": (family, size) for family in FAMILIES for size in family.sizes
    }
