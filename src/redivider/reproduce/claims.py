"""What the papers claim, and the trainings or measurements that show whether it is so.

Rivaud et al. 2024 (PETRA) and Zhu and Mangalam 2023 (PaReprop). Nothing here imports torch, so that
claims are listed at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from redivider.train.errors import TrainError, hint
from redivider.train.recipe import Method, Recipe
from redivider.train.recipes import get_recipe
from redivider.train.recipes.petra import table2


@dataclass(frozen=True)
class Claim:
    """What is claimed or asked, and how it is answered.

    Either `runs` are trained, or a `measurement` is made, by a module of this package.
    """

    name: str
    says: str
    runs: tuple[Recipe, ...] = ()
    measurement: str = ""


def short(method: Method, microbatch: int = 64, accumulate: int = 2, **changes: Any) -> Recipe:
    """RevNet-18 on CIFAR-10 for 20 epochs instead of 300: rates fall after half and three quarters.

    The name of the run tells what is not as in PETRA's recipe.
    """
    base = table2("revnet18", "cifar10", "petra")
    told = []
    if "probe_every" in changes:
        told.append("probed")
    if changes.get("lookahead"):
        told.append("ahead")
    if changes.get("latency", 1) > 1:
        told.append(f"latency-{changes['latency']}")
    if "stages" in changes:
        told.append(f"stages-{changes['stages']}")
    if "lr" in changes:
        told.append(f"lr-{changes['lr']:g}")
    if changes.get("lr_by_delay"):
        told.append("by-delay")
    if changes.get("compile"):
        told.append("compiled")
    return replace(
        base,
        **{
            "name": "-".join([method, f"{microbatch}x{accumulate}", *told]),
            "method": method,
            "microbatch": microbatch,
            "accumulate": accumulate,
            "lr": 0.1 * microbatch * accumulate / 256,
            "epochs": 20.0,
            "milestones": (10.0, 15.0),
            "precision": "bf16",
            **changes,
        },
    )


def fast(recipe: str, name: str, **changes: Any) -> Recipe:
    """A recipe of the project as it runs fastest on a GPU."""
    return replace(
        get_recipe(recipe), **{"name": name, "precision": "bf16", "compile": True, **changes}
    )


def _full() -> Iterator[Claim]:
    for size, epochs in ((18, 300.0), (34, 30.0), (50, 20.0)):
        changes = {"epochs": epochs, "milestones": (epochs / 2, epochs * 3 / 4)}
        how_long = "" if epochs == 300 else f", in {epochs:g} epochs instead of 300"
        yield Claim(
            f"revnet{size}",
            f"RevNet-{size} on CIFAR-10 by PETRA is as accurate as by backprop{how_long}",
            tuple(
                fast(f"revnet{size}-cifar10-{how}", how, **changes) for how in ("backprop", "petra")
            ),
        )


def _transformers() -> Iterator[Claim]:
    backprop: dict[str, dict[str, Any]] = {each: {"method": each} for each in ("store", "overlap")}
    # 26 stages: the first gradients are 50 micro-batches late. What helps against that (fewer
    # stages, lower rates where gradients are later, a momentum that adds less to it) was tried on
    # smaller networks.
    betas = {"betas": (0.5, 0.95)}
    careful = {"lr_by_delay": True, **betas}
    few: dict[str, Any] = {"method": "petra", "microbatch": 16, "accumulate": 8}
    fewest = {**few, "microbatch": 4, "accumulate": 32, "stages": 8}
    images = {
        **backprop,
        "store-betas": {"method": "store", **betas},
        "petra": few,
        "petra-by-delay": {**few, **careful},
        "petra-8-stages": {**few, **careful, "stages": 8},
        "petra-4x32-8-stages": {**fewest, **careful},
        "petra-4x32-8-stages-plain": fewest,
    }
    yield Claim(
        "vit",
        "a Rev-ViT learns the same by overlap as by store, in less memory; and by PETRA",
        tuple(
            fast("rev_vit_small-cifar10", name, epochs=10.0, warmup=2.0, compile=False, **changes)
            for name, changes in images.items()
        ),
    )
    fewer = {**few, "microbatch": 2, "accumulate": 16}
    fewest = {**fewest, "microbatch": 1}
    texts = {
        **backprop,
        "store-betas": {"method": "store", **betas},
        "petra": {"method": "petra"},
        "petra-2x16": fewer,
        "petra-2x16-by-delay": {**fewer, **careful},
        "petra-2x16-8-stages": {**fewer, **careful, "stages": 8},
        "petra-1x32-8-stages": {**fewest, **careful},
        "petra-1x32-8-stages-plain": fewest,
    }
    yield Claim(
        "gpt",
        "so does a Rev-GPT on text",
        tuple(
            fast(
                "rev_gpt_small-text",
                name,
                epochs=1.0,
                evaluate_every=0.1,
                compile=False,
                **changes,
            )
            for name, changes in texts.items()
        ),
    )


_FASTEST: dict[Method, dict[str, Any]] = {"store": {}, "petra": {"stages": 2}}
_RATES: tuple[dict[str, Any], ...] = ({}, {"lr": 0.025}, {"lr": 0.0125})
CLAIMS = (
    *_full(),
    Claim(
        "methods",
        "what delayed gradients, stored graphs and inexact inputs cost, each for itself",
        tuple(
            short(each)
            for each in (
                "store",
                "reverse",
                "petra",
                "dsp",
                "delayed",
                "exact-inverse",
                "approximate-input",
            )
        ),
    ),
    Claim(
        "microbatch",
        "fewer samples in flight, at 128 an update, cost less accuracy",
        tuple(
            short(method, size, 128 // size)
            for size in (4, 8, 16, 32, 64)
            for method in ("petra", "store")
        ),
    ),
    Claim(
        "accumulate",
        "accuracy by the number of micro-batches in an update",
        tuple(short(method, 64, k) for k in (1, 2, 4, 8, 16, 32) for method in ("petra", "store")),
    ),
    Claim(
        "lookahead",
        "forwards by predicted weights win back some of it",
        tuple(
            short("petra", size, 128 // size, lookahead=ahead)
            for size in (64, 16)
            for ahead in (None, "momentum")
        ),
    ),
    Claim(
        "latency",
        "what slow links cost in accuracy",
        tuple(short("petra", latency=ticks) for ticks in (1, 2, 4)),
    ),
    Claim(
        "stages",
        "fewer stages, and so fewer samples in flight, cost less accuracy",
        (*(short("petra", stages=num) for num in (2, 4, 7)), short("petra")),
    ),
    Claim(
        "rate",
        "smaller steps win back what delay costs, but cost something themselves",
        (
            *(short(method, **changes) for changes in _RATES for method in ("petra", "store")),
            *(short("petra", lr_by_delay=True, lookahead=how) for how in (None, "momentum")),
        ),
    ),
    Claim(
        "race",
        "which method is the first at 90 %, each alone on the GPU",
        (
            *(
                short(method, size, 128 // size)
                for size in (64, 16)
                for method in ("store", "reverse", "petra")
            ),
            short("store", 128, 1),
            short("petra", stages=2),
            short("petra", 128, 1, stages=2),
            *(
                short(method, size, 128 // size, compile=True, **changes)
                for size in (64, 128)
                for method, changes in _FASTEST.items()
            ),
        ),
    ),
    Claim(
        "quality",
        "gradients of PETRA point where those of backprop do, stage by stage",
        tuple(
            short("petra", 64, k, epochs=5.0, milestones=(2.5, 3.75), warmup=1.0, probe_every=391)
            for k in (1, 4, 16)
        ),
    ),
    *_transformers(),
    Claim(
        "overlap",
        "PaReprop: recomputation beside the backward is up to 20 % faster than before it",
        measurement="sweep",
    ),
    Claim(
        "limits",
        "the largest batch and the largest depth that fit on a card",
        measurement="limits",
    ),
)


def get_claim(name: str) -> Claim:
    """A claim by its name."""
    for each in CLAIMS:
        if each.name == name:
            return each
    names = [each.name for each in CLAIMS]
    otherwise = "`redivider reproduce` lists all"
    raise TrainError(f"there is no claim {name!r}; {hint(name, names, otherwise)}")
