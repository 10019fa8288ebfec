"""PETRA's Table 2: ResNets and RevNets by backprop, RevNets by PETRA, on four data sets.

Rivaud et al. 2024: SGD with Nesterov momentum and micro-batches of 64. The learning rate is 0.1 for
256 samples per update; it warms up for five epochs and is divided by ten at milestones. Backprop
accumulates as many micro-batches as PETRA does, as in the authors' code.
"""

from functools import partial
from itertools import product
from typing import Literal

from redivider.train.recipe import Recipe

Data = Literal["cifar10", "cifar100", "imagenet32", "imagenet"]


def table2(model: str, data: Data, method: Literal["store", "petra"]) -> Recipe:
    """Return the recipe of one row of the table, for one data set."""
    is_cifar = data in ("cifar10", "cifar100")
    accumulate = 4 if data == "imagenet" else 2
    suffix = "petra" if method == "petra" else "backprop"
    return Recipe(
        name=f"{model}-{data}-{suffix}",
        model=model,
        data=data,
        method=method,
        microbatch=64,
        accumulate=accumulate,
        epochs=300 if is_cifar else 90,
        optimizer="sgd",
        lr=0.1 * 64 * accumulate / 256,
        weight_decay=5e-4 if is_cifar else 1e-4,
        warmup=5,
        schedule="step",
        milestones=(150, 225) if is_cifar else (30, 60, 80),
        channels_last=True,
    )


MODELS = [f"{family}{size}" for family in ("resnet", "revnet") for size in (18, 34, 50)]
METHODS: tuple[Literal["store", "petra"], ...] = ("store", "petra")
DATA: tuple[Data, ...] = ("cifar10", "cifar100", "imagenet32", "imagenet")
RECIPES = [
    partial(table2, model, data, method)
    for data, model, method in product(DATA, MODELS, METHODS)
    if model.startswith("revnet") or method == "store"
]
