"""Transformers, reversible and plain, on CIFAR-10 and text."""

from dataclasses import replace
from functools import partial
from typing import Any

from redivider.train.recipe import Recipe


def cifar10(model: str, depths: tuple[int, ...] = (), **options: Any) -> Recipe:
    """Return a recipe for a vision transformer on images of 32 pixels."""
    return Recipe(
        name=f"{model}-cifar10",
        model=model,
        model_options={"drop_path": 0.1, **options},
        depths=depths,
        data="cifar10",
        method="reverse" if model.startswith("rev") else "store",
        microbatch=128,
        epochs=100,
        optimizer="adamw",
        lr=2.5e-4,
        weight_decay=0.05,
        warmup=5,
        schedule="cosine",
        clip_norm=1.0,
        label_smoothing=0.1,
        precision="bf16",
    )


def text(model: str, context: int, microbatch: int, lr: float, **options: Any) -> Recipe:
    """Return a recipe for a language model on the bytes of a text."""
    return Recipe(
        name=f"{model}-text",
        model=model,
        model_options=options,
        data="text",
        context=context,
        tokens="bytes",
        method="reverse" if model.startswith("rev") else "store",
        microbatch=microbatch,
        accumulate=4,
        epochs=10,
        optimizer="adamw",
        lr=lr,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        warmup=0.2,
        schedule="cosine",
        clip_norm=1.0,
        precision="bf16",
    )


def finetune(model: str, context: int, microbatch: int) -> Recipe:
    """Return a recipe that trains a finished run of `text` further, on another text."""
    recipe = text(model, context, microbatch, 1e-4)
    return replace(
        recipe,
        name=f"{model}-text-finetune",
        model_options={"weights": f"runs/{recipe.name}/model.safetensors"},
        method="compress",
        epochs=1,
        warmup=0.05,
    )


SWIN: dict[str, Any] = {"depths": (2, 6, 2), "patch_size": 2, "window": 4}  # maps of 16, 8, 4
MVIT: dict[str, Any] = {"depths": (1, 4, 2), "patch_size": 2, "pool": 2}
ROBERTA = {"width": 384, "depth": 6, "heads": 6}  # the size of GPT nano

RECIPES = [
    partial(cifar10, "vit_small", patch_size=4),
    partial(cifar10, "rev_vit_small", patch_size=4),
    partial(cifar10, "swin_tiny", **SWIN),
    partial(cifar10, "rev_swin_tiny", **SWIN),
    partial(cifar10, "mvit_base", **MVIT),
    partial(cifar10, "rev_mvit_base", **MVIT),
    partial(text, "gpt_nano", 256, 16, 1e-3),
    partial(text, "rev_gpt_nano", 256, 16, 1e-3),
    partial(text, "gpt_small", 1024, 8, 3e-4),
    partial(text, "rev_gpt_small", 1024, 8, 3e-4),
    partial(finetune, "gpt_nano", 256, 16),
    partial(finetune, "gpt_small", 1024, 8),
    partial(text, "roberta_base", 256, 16, 1e-3, **ROBERTA),
    partial(text, "rev_roberta_base", 256, 16, 1e-3, **ROBERTA),
]
