"""First recipe to run: a deep RevNet on digits, by four methods, in less than a minute."""

from redivider.train.recipe import Recipe


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
        optimizer="muon",
        lr=0.03,
        momentum=0.6,
        muon_scale="spectral",
        muon_rest="sgd",
        weight_decay=0.01,
        warmup=0.25,
        schedule="cosine",
        threads=1,  # its kernels are too small for more
        log_every=8,
        evaluate_every=0.25,
        probe_every=30,
    )


RECIPES = [quickstart]
