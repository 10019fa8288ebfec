"""First recipe to run: a small RevNet on digits, by four methods, in about a minute."""

from redivider.train.recipe import Recipe


def quickstart() -> Recipe:
    """Return a recipe with six stages of one unit each: stem, four blocks, head."""
    return Recipe(
        name="quickstart",
        model="revnet18",
        model_options={"width": 16},
        depths=(2, 2),
        data="digits",
        method="petra",
        compare=("store", "checkpoint", "reverse", "petra"),
        compare_depths=(8, 32, 128),
        microbatch=16,
        accumulate=4,
        epochs=5,
        optimizer="sgd",
        lr=0.1,
        weight_decay=5e-4,
        warmup=1,
        schedule="cosine",
        threads=1,  # its kernels are too small for more
        log_every=32,
        probe_every=200,
    )


RECIPES = [quickstart]
