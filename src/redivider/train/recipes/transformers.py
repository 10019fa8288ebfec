"""Reversible transformers on CIFAR-10 and text."""

from functools import partial

from redivider.train.recipe import Recipe


def vit_cifar10(model: str) -> Recipe:
    """A small (Rev-)ViT on images of 32 pixels, in patches of 4."""
    return Recipe(
        name=f"{model}-cifar10",
        model=model,
        model_options={"patch_size": 4, "drop_path": 0.1},
        data="cifar10",
        method="reverse" if model.startswith("rev") else "store",
        microbatch=128,
        epochs=100,
        optimizer="adamw",
        lr=1e-3,
        weight_decay=0.05,
        warmup=5,
        schedule="cosine",
        clip_norm=1.0,
        label_smoothing=0.1,
        precision="bf16",
    )


def gpt_text(model: str, context: int, microbatch: int) -> Recipe:
    """A (Rev-)GPT on bytes of text."""
    return Recipe(
        name=f"{model}-text",
        model=model,
        data="text",
        context=context,
        tokens="bytes",
        method="reverse" if model.startswith("rev") else "store",
        microbatch=microbatch,
        accumulate=4,
        epochs=10,
        optimizer="adamw",
        lr=1e-3,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        warmup=0.2,
        schedule="cosine",
        clip_norm=1.0,
        precision="bf16",
    )


RECIPES = [
    partial(vit_cifar10, "vit_small"),
    partial(vit_cifar10, "rev_vit_small"),
    partial(gpt_text, "gpt_nano", 256, 16),
    partial(gpt_text, "rev_gpt_nano", 256, 16),
    partial(gpt_text, "gpt_small", 1024, 8),
    partial(gpt_text, "rev_gpt_small", 1024, 8),
]
