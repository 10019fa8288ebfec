"""Every model family at a small size, with dropout and drop-path where it has them."""

from typing import Any

SMALL_TRANSFORMER: dict[str, Any] = {
    "width": 16,
    "heads": 2,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "drop_path": 0.3,
}
IMAGES = {"image_size": 8, "in_channels": 1, "num_classes": 10}
PATCHES = {**SMALL_TRANSFORMER, **IMAGES, "patch_size": 2}
TEXT = {**SMALL_TRANSFORMER, "vocabulary": 256, "context": 16}
LLAMA = {**TEXT, "heads": 4, "kv_heads": 2, "hidden": 24, "rope_factor": 8.0}
MAPS = {**SMALL_TRANSFORMER, **IMAGES, "width": 8, "patch_size": 1}  # of 8 tokens, then 4
SWIN = {**MAPS, "window": 4}
MVIT = {**MAPS, "pool": 2}

# name of a model, options that make it small, and the options that set its depth: odd and even
FAMILIES: list[tuple[str, dict[str, Any], tuple[dict[str, Any], ...]]] = [
    ("resnet18", {**IMAGES, "width": 4}, ({"depths": (2, 3)}, {"depths": (2, 2)})),
    ("resnet50", {**IMAGES, "width": 4}, ({"depths": (2, 3)}, {"depths": (2, 2)})),
    ("revnet18", {**IMAGES, "width": 4}, ({"depths": (2, 4)}, {"depths": (3, 3)})),
    ("revnet50", {**IMAGES, "width": 4}, ({"depths": (2, 4)}, {"depths": (3, 3)})),
    ("vit_tiny", PATCHES, ({"depth": 3}, {"depth": 2})),
    ("rev_vit_tiny", PATCHES, ({"depth": 3}, {"depth": 2})),
    ("swin_tiny", SWIN, ({"depths": (3, 2)}, {"depths": (2, 2)})),
    ("rev_swin_tiny", SWIN, ({"depths": (3, 2)}, {"depths": (2, 2)})),
    ("mvit_base", MVIT, ({"depths": (1, 4)}, {"depths": (2, 3)})),
    ("rev_mvit_base", MVIT, ({"depths": (1, 4)}, {"depths": (2, 3)})),
    ("gpt_nano", TEXT, ({"depth": 3}, {"depth": 2})),
    ("rev_gpt_nano", TEXT, ({"depth": 3}, {"depth": 2})),
    ("llama_tiny", LLAMA, ({"depth": 3}, {"depth": 2})),
    ("rev_llama_tiny", LLAMA, ({"depth": 3}, {"depth": 2})),
    ("roberta_base", TEXT, ({"depth": 3}, {"depth": 2})),
    ("rev_roberta_base", TEXT, ({"depth": 3}, {"depth": 2})),
]
NAMES = [name for name, _, _ in FAMILIES]
EACH_DEPTH = [(name, {**small, **depth}) for name, small, depths in FAMILIES for depth in depths]
EACH = [(name, {**small, **depths[0]}) for name, small, depths in FAMILIES]
REVERSIBLE = [(name, options) for name, options in EACH if name.startswith("rev")]


def is_text(name: str) -> bool:
    """Return whether a model takes tokens."""
    return any(family in name for family in ("gpt", "llama", "roberta"))
