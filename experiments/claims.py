"""Claims of the papers, and the trainings or measurements that test them.

The papers are Rivaud et al. 2024 (PETRA) and Zhu and Mangalam 2023 (PaReprop). Nothing here imports
torch, so that the list of claims prints at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from redivider.errors import no_such
from redivider.train.errors import TrainError
from redivider.train.recipe import Method, Recipe
from redivider.train.recipes import get_recipe
from redivider.train.recipes.petra import table2


@dataclass(frozen=True)
class Script:
    """A script of benchmarks/ and its arguments.

    `{out}` stands for the file of its results, and `{data}` for the folder of data. Without
    `{out}`, it prints its results.
    """

    name: str
    command: str

    @property
    def words(self) -> list[str]:
        """The command, word by word."""
        return self.command.split()


@dataclass(frozen=True)
class Claim:
    """A claim or question, and the experiment that answers it.

    Either `runs` are trained, or `measurement` names a module of this folder that measures, or
    `scripts` of benchmarks/ measure.
    """

    name: str
    statement: str
    runs: tuple[Recipe, ...] = ()
    measurement: str = ""
    scripts: tuple[Script, ...] = ()
    on_gpu: bool = True
    """Whether measurements and scripts need a GPU."""

    @property
    def names(self) -> list[str]:
        """Names of its runs or scripts."""
        return [*(run.name for run in self.runs), *(script.name for script in self.scripts)]


def short(
    method: Method,
    microbatch: int = 64,
    accumulate: int = 2,
    model: str = "revnet18",
    **changes: Any,
) -> Recipe:
    """Return PETRA's recipe for a RevNet on CIFAR-10, cut from 300 epochs to 20.

    The rate drops after half and three quarters of them, as published. The name of the run lists
    its differences from PETRA's recipe.
    """
    base = table2(model, "cifar10", "petra")
    suffixes = [] if model == "revnet18" else [model]
    if "probe_every" in changes:
        suffixes.append("probed")
    if changes.get("optimizer"):
        suffixes.append(changes["optimizer"])
    if changes.get("lookahead"):
        suffixes.append(changes["lookahead"])
    if changes.get("latency", 1) != 1:
        suffixes.append(f"latency-{changes['latency']}")
    if "stages" in changes:
        stages = changes["stages"]
        sizes = [stages] if isinstance(stages, int) else stages
        suffixes.append("-".join(map(str, ["stages", *sizes])))
    if "lr" in changes:
        suffixes.append(f"lr-{changes['lr']:g}")
    if changes.get("lr_by_delay"):
        suffixes.append("by-delay")
    if changes.get("compile"):
        suffixes.append("compiled")
    if changes.get("label_smoothing"):
        suffixes.append("smoothed")
    if "epochs" in changes and changes.get("optimizer"):
        suffixes.append(f"epochs-{changes['epochs']:g}")
    if changes.get("seed"):
        suffixes.append(f"seed-{changes['seed']}")
    return replace(
        base,
        **{
            "name": "-".join([method, f"{microbatch}x{accumulate}", *suffixes]),
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


def by_muon(method: Method, **changes: Any) -> Recipe:
    """Return the same with the optimizer and the schedule of the best recipe for RevNet-18."""
    best = get_recipe("revnet18-cifar10-best")
    names = ("optimizer", "lr", "momentum", "muon_scale", "muon_rest", "weight_decay")
    settings = {name: getattr(best, name) for name in (*names, "warmup", "schedule")}
    return short(method, **{**settings, **changes})


def fast(recipe: str, name: str, **changes: Any) -> Recipe:
    """Return a recipe of the package in bf16 and compiled, its fastest form on a GPU."""
    return replace(
        get_recipe(recipe), **{"name": name, "precision": "bf16", "compile": True, **changes}
    )


def _full() -> Iterator[Claim]:
    for size, epochs in ((18, 300.0), (34, 30.0), (50, 20.0)):
        changes = {"epochs": epochs, "milestones": (epochs / 2, epochs * 3 / 4)}
        duration = "" if epochs == 300 else f", in {epochs:g} epochs instead of 300"
        yield Claim(
            f"revnet{size}",
            f"RevNet-{size} on CIFAR-10 by PETRA is as accurate as by backprop{duration}",
            tuple(
                fast(f"revnet{size}-cifar10-{method}", method, **changes)
                for method in ("backprop", "petra")
            ),
        )


def _muon_runs(
    rates: dict[str, float], microbatch: int, accumulate: int
) -> dict[str, dict[str, Any]]:
    """Return runs by Muon: backprop, and PETRA at both latencies and with look-ahead.

    PETRA has eight stages, and with half ticks also one for every unit.
    """
    muon: dict[str, Any] = {"optimizer": "muon", "momentum": 0.95, **rates}
    sizes = {"microbatch": microbatch, "accumulate": accumulate}
    most: dict[str, Any] = {**muon, "method": "petra", **sizes}
    petra = {**most, "stages": 8}
    prefix = f"petra-{microbatch}x{accumulate}"
    name = f"{prefix}-8-stages-muon"
    return {
        "store-muon": {**muon, "method": "store"},
        name: petra,
        f"{name}-latency-0.5": {**petra, "latency": 0.5},
        f"{name}-displacement": {**petra, "lookahead": "displacement"},
        f"{prefix}-26-stages-muon-latency-0.5": {**most, "latency": 0.5},
    }


def _transformers() -> Iterator[Claim]:
    backprop: dict[str, dict[str, Any]] = {
        method: {"method": method} for method in ("store", "overlap")
    }
    # With 26 stages the gradients of the first are 50 micro-batches late. Three remedies helped on
    # smaller networks: fewer stages, lower rates where gradients are later, and less momentum.
    betas = {"betas": (0.5, 0.95)}
    careful = {"lr_by_delay": True, **betas}
    petra: dict[str, Any] = {"method": "petra", "microbatch": 16, "accumulate": 8}
    smallest = {**petra, "microbatch": 4, "accumulate": 32, "stages": 8}
    images = {
        **backprop,
        "store-betas": {"method": "store", **betas},
        "petra": petra,
        "petra-by-delay": {**petra, **careful},
        "petra-8-stages": {**petra, **careful, "stages": 8},
        "petra-4x32-8-stages": {**smallest, **careful},
        "petra-4x32-8-stages-plain": smallest,
        **_muon_runs({"lr": 1e-3, "muon_rest_lr": 2.5e-4}, 8, 16),
        **_muon_runs({"lr": 1e-3, "muon_rest_lr": 2.5e-4}, 4, 32),
    }
    yield Claim(
        "vit",
        "a Rev-ViT learns the same by overlap as by store, in less memory; and by PETRA",
        tuple(
            fast("rev_vit_small-cifar10", name, epochs=10.0, warmup=2.0, compile=False, **changes)
            for name, changes in images.items()
        ),
    )
    small = {**petra, "microbatch": 2, "accumulate": 16}
    smallest = {**smallest, "microbatch": 1}
    texts = {
        **backprop,
        "store-betas": {"method": "store", **betas},
        "petra": {"method": "petra"},
        "petra-2x16": small,
        "petra-2x16-by-delay": {**small, **careful},
        "petra-2x16-8-stages": {**small, **careful, "stages": 8},
        "petra-1x32-8-stages": {**smallest, **careful},
        "petra-1x32-8-stages-plain": smallest,
        "petra-1x32-8-stages-lead": {**smallest, "lookahead": "lead"},
        **_muon_runs({"lr": 2e-3, "muon_rest_lr": 5e-4}, 1, 32),
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


def _small() -> Claim:
    """Return a tiny Rev-GPT of 14 units, in minutes of one core: AdamW and Muon, more or less late.

    Names end in micro-batch, micro-batches of an update, and stages.
    """
    muon: dict[str, Any] = {"optimizer": "muon", "lr": 2e-3, "momentum": 0.95}
    runs: dict[str, dict[str, Any]] = {}
    for name, changes in {"adamw": {}, "adamw-lr-0.003": {"lr": 3e-3}, "muon": muon}.items():
        runs[f"store-{name}"] = {**changes, "method": "store", "microbatch": 32, "accumulate": 1}
        for microbatch, stages in ((8, 14), (2, 14), (2, 4)):
            k = 32 // microbatch
            late = {"method": "petra", "microbatch": microbatch, "accumulate": k, "stages": stages}
            runs[f"petra-{name}-{microbatch}x{k}-{stages}"] = {**changes, **late}
    half = {"latency": 0.5}
    runs["petra-muon-8x4-14-latency-0.5"] = {**runs["petra-muon-8x4-14"], **half}
    careful = {"lr_by_delay": True, "betas": (0.5, 0.95)}
    runs["petra-adamw-8x4-14-careful"] = {**runs["petra-adamw-8x4-14"], **careful}
    runs["petra-adamw-2x16-4-betas"] = {**runs["petra-adamw-2x16-4"], "betas": (0.5, 0.95)}
    return Claim(
        "small",
        "in a tiny Rev-GPT a delay costs the less the shorter it is, and least with Muon",
        tuple(
            replace(
                get_recipe("rev_gpt_nano-text"),
                name=name,
                model_options={"width": 64, "depth": 6, "heads": 2},
                context=64,
                epochs=0.5,
                warmup=0.1,
                evaluate_every=0.1,
                precision="float32",
                threads=1,
                **changes,
            )
            for name, changes in runs.items()
        ),
    )


def _sooner() -> Iterator[Claim]:
    """Yield the deep RevNets by Muon: each of them by backprop, and by PETRA with half ticks.

    PETRA has half as many samples in flight as in the paper. Backprop's accuracy does not depend
    on the micro-batch, so it takes the faster one.
    """
    smoothed = {"label_smoothing": 0.1}
    petra = {"method": "petra", "latency": 0.5, "microbatch": 32, "accumulate": 4, **smoothed}
    runs: tuple[dict[str, Any], ...] = (petra, {"method": "store", **smoothed})
    yield Claim(
        "sooner",
        "with Muon PETRA reaches in 40 epochs the accuracy that is published for 300",
        tuple(
            by_muon(**run, model=model, epochs=epochs)
            for model in ("revnet18", "revnet34")
            for epochs in (40.0, 30.0)
            for run in runs
        ),
    )
    yield Claim(
        "deeper",
        "with Muon RevNet-50 in 18 stages is as accurate by PETRA as by backprop",
        tuple(by_muon(**run, model="revnet50") for run in runs),
    )


_LATENCIES: tuple[tuple[Method, float], ...] = (("store", 1), ("petra", 1), ("petra", 0.5))
_FASTEST: dict[Method, dict[str, Any]] = {"store": {}, "petra": {"stages": 2}}
# On a GPU stages of five units take about the same time, though FLOPs would cut at four.
_FASTEST_BY_MUON: tuple[dict[str, Any], ...] = (
    {"method": "store"},
    {"method": "petra", "stages": (5, 5), "latency": 0.5},
    {"method": "petra", "stages": (5, 5)},
)
_AHEAD = (None, "displacement")
_RATES: tuple[dict[str, Any], ...] = ({}, {"lr": 0.025}, {"lr": 0.0125})
CLAIMS = (
    *_full(),
    Claim(
        "methods",
        "what delayed gradients, stored graphs and inexact inputs cost, each for itself",
        tuple(
            short(method)
            for method in (
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
            for ahead in (None, "displacement", "lead")
        ),
    ),
    Claim(
        "muon",
        "with Muon PETRA is as accurate as backprop with Muon",
        (
            *(
                by_muon(method, seed=seed, latency=latency)
                for seed in (0, 1, 2)
                for method, latency in _LATENCIES
            ),
            *(by_muon(method, lr=0.02, latency=latency) for method, latency in _LATENCIES),
            *(by_muon("petra", lookahead="displacement", latency=ticks) for ticks in (1, 0.5)),
        ),
    ),
    Claim(
        "latency",
        "what slow links cost in accuracy, and what half ticks gain",
        (
            *(short("petra", latency=ticks) for ticks in (0.5, 1, 2, 4)),
            short("petra", latency=0.5, lookahead="displacement"),
        ),
    ),
    Claim(
        "stages",
        "fewer stages, and so fewer samples in flight, cost less accuracy",
        (*(short("petra", stages=num_stages) for num_stages in (2, 4, 7)), short("petra")),
    ),
    Claim(
        "rate",
        "smaller steps win back what delay costs, but cost something themselves",
        (
            *(short(method, **changes) for changes in _RATES for method in ("petra", "store")),
            *(
                short("petra", lr_by_delay=True, lookahead=ahead)
                for ahead in (None, "displacement")
            ),
        ),
    ),
    Claim(
        "race",
        "which method is the first at 90, 93 and 94 %, each alone on the GPU",
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
            *(
                by_muon(microbatch=size, accumulate=128 // size, compile=compiled, **changes)
                for size in (64, 128)
                for compiled in (False, True)
                for changes in _FASTEST_BY_MUON
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
    *_sooner(),
    _small(),
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
    Claim(
        "finetune",
        "a pretrained network trains in 2 bits a value as accurately as plainly",
        scripts=(
            Script("memory", "reversible-finetune/run.py --out {out}"),
            Script(
                "gpt", "reversible-finetune/accuracy.py gpt --data {data} --steps 200 --out {out}"
            ),
            Script(
                "vit",
                "reversible-finetune/accuracy.py vit --data {data} --steps 1000 --out {out} "
                f"--methods {' '.join(f'{bits}/{seed}' for seed in range(12) for bits in (0, 2))} "
                "1/0 3/0 4/0 8/0",
            ),
            Script("llama", "reversible-finetune/llama.py --out {out}"),
        ),
    ),
    Claim(
        "budget",
        "a plan within a number of bytes is as fast as the best one by hand",
        scripts=(
            Script("rev_vit_large", "memory-budget/run.py --model rev_vit_large --batch 64"),
            Script("rev_gpt_small", "memory-budget/run.py --model rev_gpt_small"),
            Script("llama", "memory-budget/llama.py"),
        ),
    ),
    Claim(
        "scale",
        "PETRA keeps its speed over more stages and slower links",
        scripts=(Script("grid", "pipeline-simulation/run.py --grid --rounds 3 --out {out}"),),
        on_gpu=False,
    ),
)


def get_claim(name: str) -> Claim:
    """Return the claim with this name."""
    for claim in CLAIMS:
        if claim.name == name:
            return claim
    names = [claim.name for claim in CLAIMS]
    otherwise = "`python experiments/run.py` lists all"
    raise TrainError(no_such("claim", name, names, otherwise))
