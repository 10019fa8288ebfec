"""First recipe to run: a deep RevNet on digits, by four methods, in less than a minute."""

from redivider.train.recipe import Recipe
from redivider.train.recipes.best import CONVOLUTIONS


def quickstart() -> Recipe:
    """Return a recipe with twelve blocks; PETRA's settings are the best known, as in best.py."""
    return Recipe(
        name="quickstart",
        model="revnet18",
        model_options={"width": 8},
        depths=(12,),
        data="digits",
        method="petra",
        compare=("store", "checkpoint", "reverse", "petra"),
        compare_depths=(6, 12, 24, 48),
        stages=3,
        latency=0.5,
        microbatch=32,
        epochs=2,
        lr=0.03,
        warmup=0.25,
        threads=1,  # its kernels are too small for more
        log_every=8,
        evaluate_every=0.25,
        probe_every=30,
        **CONVOLUTIONS,
    )


RECIPES = [quickstart]
