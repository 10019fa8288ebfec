"""All models by name."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch

from redivider.arithmetic import Arithmetic
from redivider.chain import Chain
from redivider.initial import materialise
from redivider.models import gpt, mvit, resnet, revnet, roberta, swin, vit
from redivider.models.options import OptionError
from redivider.models.parts import Units


@dataclass(frozen=True)
class Family:
    """Models that differ in size alone: `create_model` knows them by prefix and size."""

    prefix: str
    units: Callable[[Any], Units]
    options: type
    sizes: Mapping[str, Mapping[str, Any]]


FAMILIES = (
    Family("resnet", resnet.resnet, resnet.Options, resnet.SIZES),
    Family("revnet", revnet.revnet, resnet.Options, resnet.SIZES),
    Family("vit_", vit.vit, vit.Options, vit.SIZES),
    Family("rev_vit_", vit.rev_vit, vit.Options, vit.SIZES),
    Family("swin_", swin.swin, swin.Options, swin.SIZES),
    Family("rev_swin_", swin.rev_swin, swin.Options, swin.SIZES),
    Family("mvit_", mvit.mvit, mvit.Options, mvit.SIZES),
    Family("rev_mvit_", mvit.rev_mvit, mvit.Options, mvit.SIZES),
    Family("gpt_", gpt.gpt, gpt.Options, gpt.SIZES),
    Family("rev_gpt_", gpt.rev_gpt, gpt.Options, gpt.SIZES),
    Family("roberta_", roberta.roberta, roberta.Options, roberta.SIZES),
    Family("rev_roberta_", roberta.rev_roberta, roberta.Options, roberta.SIZES),
)


def list_models(pattern: str = "*") -> list[str]:
    """The names that `create_model` knows and that match a pattern: `rd.list_models("rev_*")`."""
    return [name for name in _names() if fnmatchcase(name, pattern)]


def create_model(
    name: str,
    *,
    backward: str = "reverse",
    arithmetic: str | Arithmetic = "float",
    seed: int = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Chain:
    """Make a model: a chain whose first unit takes images or tokens and whose last gives scores.

        model = rd.create_model("revnet18", num_classes=10, image_size=32)

    Args:
        name: One of `list_models()`.
        backward: As for `Chain`.
        arithmetic: As for `Chain`.
        seed: Of the first weights, which depend on it and on the names of the units alone.
        device: Where the model is to be; "meta" leaves it without memory and weights.
        dtype: Of its weights.
        **options: Those of its family, such as `num_classes`, `image_size`, `depth` or `dropout`.
    """
    family, resolved = resolve(name, **options)
    device = torch.get_default_device() if device is None else torch.device(device)
    with torch.device("meta"), _drawn_in_float32() as default_dtype:
        units = family.units(resolved)
        chain = Chain(units, backward=backward, arithmetic=arithmetic)
    if device.type != "meta":
        materialise(units, seed=seed, device=device)
    return chain.to(dtype=dtype or default_dtype)


def resolve(name: str, **options: Any) -> tuple[Family, Any]:
    """The family of a name, and its options: those of the size, changed by the caller's."""
    names = _names()
    if name not in names:
        close = get_close_matches(str(name), names, 1) or [n for n in names if str(name) in n]
        hint = (
            f"did you mean {close[0]!r}?"
            if close
            else "rd.list_models() or `redivider models` lists all"
        )
        raise OptionError(f"there is no model {name!r}; {hint}")
    family, size = names[name]
    known = [field.name for field in fields(family.options)]
    for option in options:
        if option not in known:
            close = get_close_matches(option, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known)}"
            raise OptionError(f"{name} has no option {option!r}; {hint}")
    return family, family.options(**{**family.sizes[size], **options})


@contextmanager
def _drawn_in_float32() -> Iterator[torch.dtype]:
    """Build in float32, whatever the default is: other dtypes draw other numbers."""
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
