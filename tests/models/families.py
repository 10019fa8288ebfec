"""Every family at a small size, with dropout and drop-path where it has them: a row for each."""

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

# name of a model, options that make it small, and the options that set its depth: odd and even
FAMILIES: list[tuple[str, dict[str, Any], tuple[dict[str, Any], ...]]] = [
    ("resnet18", {**IMAGES, "width": 4}, ({"depths": (2, 3)}, {"depths": (2, 2)})),
    ("resnet50", {**IMAGES, "width": 4}, ({"depths": (2, 3)}, {"depths": (2, 2)})),
    ("revnet18", {**IMAGES, "width": 4}, ({"depths": (2, 4)}, {"depths": (3, 3)})),
    ("revnet50", {**IMAGES, "width": 4}, ({"depths": (2, 4)}, {"depths": (3, 3)})),
    ("vit_tiny", PATCHES, ({"depth": 3}, {"depth": 2})),
    ("rev_vit_tiny", PATCHES, ({"depth": 3}, {"depth": 2})),
    ("gpt_nano", TEXT, ({"depth": 3}, {"depth": 2})),
    ("rev_gpt_nano", TEXT, ({"depth": 3}, {"depth": 2})),
]
NAMES = [name for name, _, _ in FAMILIES]
EACH_DEPTH = [(name, {**small, **depth}) for name, small, depths in FAMILIES for depth in depths]
EACH = [(name, {**small, **depths[0]}) for name, small, depths in FAMILIES]
