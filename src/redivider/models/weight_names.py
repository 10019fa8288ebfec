"""Names that the weights of a family have in other libraries: a table per family.

A table maps the name of a tensor, or of a module, to its sources: names in timm, torchvision or
transformers, in the order in which they are tried. Words in braces stand for numbers and letters.
Two names of transformers are those in files, and those in memory from its version 5 on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Derived:
    """Tensor that a function computes from the tensors with these names."""

    function: Callable[..., Tensor]
    names: tuple[str, ...]


Source = str | Derived
Places = Callable[[Any, dict[str, str]], Mapping[str, Any]]


@dataclass(frozen=True)
class Names:
    """Table of a family.

    Args:
        table: Sources by name.
        libraries: Libraries whose names these are.
        prefixes: Prefixes of their names, which are left out in the table.
        ignored: Parts of names that are of no use here.
        zero: Ends of names that other libraries lack, and that are 0 there.
        places: Function from the options and the words in our name to those in theirs.
    """

    table: Mapping[str, Sequence[Source]]
    libraries: str
    prefixes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    zero: tuple[str, ...] = ()
    places: Places = field(default=lambda options, words: words)


def joined(name: str, *kinds: str) -> Derived:
    """Join tensors along their first dimension; `name` has a `*` where their names differ."""
    return Derived(
        lambda *parts: torch.cat(parts), tuple(name.replace("*", kind) for kind in kinds)
    )


def transposed(name: str) -> Derived:
    """Transpose a matrix; a bias stays."""
    return Derived(lambda x: x.T if x.dim() == 2 else x, (name,))


def flat(name: str) -> Derived:
    """Flatten a tensor."""
    return Derived(Tensor.flatten, (name,))


def first_picture(name: str) -> Derived:
    """Take the first picture of a filter for videos."""
    return Derived(lambda x: x[:, :, 0] if x.dim() == 5 else x, (name,))


QKV = ("q_proj", "k_proj", "v_proj")
WORDS = ("query", "key", "value")
ATTENTION, MLP = "layer{layer}_attention", "layer{layer}_mlp"


def _groups(options: Any, words: dict[str, str]) -> dict[str, Any]:
    if "group" not in words:
        return {}
    group, block = int(words["group"]), int(words["block"])
    return {"group": group, "stage": group - 1, "block": block - 1}


def _resnet() -> Iterator[tuple[str, Sequence[Source]]]:
    yield "stem.conv", ["conv1", "embedder.embedder.convolution"]
    yield "stem.norm", ["bn1", "embedder.embedder.normalization"]
    block = "block{group}_{block}"
    vision, hf = "layer{group}.{block}", "encoder.stages.{stage}.layers.{block}"
    for n in range(3):
        yield f"{block}.f.{n}.conv", [f"{vision}.conv{n + 1}", f"{hf}.layer.{n}.convolution"]
        yield f"{block}.f.{n}.norm", [f"{vision}.bn{n + 1}", f"{hf}.layer.{n}.normalization"]
    yield f"{block}.shortcut.conv", [f"{vision}.downsample.0", f"{hf}.shortcut.convolution"]
    yield f"{block}.shortcut.norm", [f"{vision}.downsample.1", f"{hf}.shortcut.normalization"]
    yield "head.classes", ["fc", "classifier.1"]


RESNET = Names(
    dict(_resnet()),
    libraries="torchvision and transformers",
    prefixes=("resnet.",),
    zero=("conv.bias",),
    places=_groups,
)

_BLOCK, _LAYER, _OLD = "blocks.{layer}", "layers.{layer}", "encoder.layer.{layer}"
VIT = Names(
    {
        "stem.token.weight": ["cls_token", "embeddings.cls_token"],
        "stem.positions.weight": ["pos_embed", "embeddings.position_embeddings"],
        "stem.patches.conv": ["patch_embed.proj", "embeddings.patch_embeddings.projection"],
        f"{ATTENTION}.f.norm": [
            f"{_BLOCK}.norm1",
            f"{_LAYER}.layernorm_before",
            f"{_OLD}.layernorm_before",
        ],
        f"{ATTENTION}.f.body.qkv": [
            f"{_BLOCK}.attn.qkv",
            joined(f"{_LAYER}.attention.*", *QKV),
            joined(f"{_OLD}.attention.attention.*", *WORDS),
        ],
        f"{ATTENTION}.f.body.out": [
            f"{_BLOCK}.attn.proj",
            f"{_LAYER}.attention.o_proj",
            f"{_OLD}.attention.output.dense",
        ],
        f"{MLP}.f.norm": [
            f"{_BLOCK}.norm2",
            f"{_LAYER}.layernorm_after",
            f"{_OLD}.layernorm_after",
        ],
        f"{MLP}.f.body.grow": [
            f"{_BLOCK}.mlp.fc1",
            f"{_LAYER}.mlp.fc1",
            f"{_OLD}.intermediate.dense",
        ],
        f"{MLP}.f.body.shrink": [
            f"{_BLOCK}.mlp.fc2",
            f"{_LAYER}.mlp.fc2",
            f"{_OLD}.output.dense",
        ],
        "head.norm": ["norm", "layernorm"],
        "head.classes": ["head", "classifier"],
    },
    libraries="timm and transformers",
    prefixes=("vit.",),
    ignored=("pooler.",),
)


def _stages(options: Any, words: dict[str, str]) -> dict[str, Any]:
    if "merge" in words:
        return {"stage": int(words["merge"]) - 1}
    if "layer" not in words:
        return {}
    places = [(stage, n) for stage, depth in enumerate(options.depths) for n in range(depth)]
    stage, block = places[int(words["layer"])]
    return {"stage": stage, "block": block}


_SWIN_BLOCK = "encoder.layers.{stage}.blocks.{block}"
_SWIN_MERGE = "encoder.layers.{stage}.downsample"
_TABLE = "relative_position_bias_table"
SWIN = Names(
    {
        "stem.patches.conv": ["embeddings.patch_embeddings.projection"],
        "stem.norm": ["embeddings.norm"],
        f"{ATTENTION}.f.norm": [f"{_SWIN_BLOCK}.layernorm_before"],
        f"{ATTENTION}.f.body.qkv": [
            joined(f"{_SWIN_BLOCK}.attention.*", *QKV),
            joined(f"{_SWIN_BLOCK}.attention.self.*", *WORDS),
        ],
        f"{ATTENTION}.f.body.bias.table": [
            flat(f"{_SWIN_BLOCK}.attention.relative_position_bias.{_TABLE}"),
            flat(f"{_SWIN_BLOCK}.attention.self.{_TABLE}"),
        ],
        f"{ATTENTION}.f.body.out": [
            f"{_SWIN_BLOCK}.attention.o_proj",
            f"{_SWIN_BLOCK}.attention.output.dense",
        ],
        f"{MLP}.f.norm": [f"{_SWIN_BLOCK}.layernorm_after"],
        f"{MLP}.f.body.grow": [f"{_SWIN_BLOCK}.mlp.fc1", f"{_SWIN_BLOCK}.intermediate.dense"],
        f"{MLP}.f.body.shrink": [f"{_SWIN_BLOCK}.mlp.fc2", f"{_SWIN_BLOCK}.output.dense"],
        "merge{merge}.norm": [f"{_SWIN_MERGE}.norm"],
        "merge{merge}.reduce": [f"{_SWIN_MERGE}.reduction"],
        "head.norm": ["layernorm"],
        "head.classes": ["classifier"],
    },
    libraries="transformers",
    prefixes=("swin.",),
    ignored=("relative_position_index",),
    places=_stages,
)


def _mvit() -> Iterator[tuple[str, Sequence[Source]]]:
    yield "stem.patches.conv", [first_picture("conv_proj")]
    yield "stem.token.weight", ["pos_encoding.class_token"]
    kinds = tuple(f"pos_encoding.{kind}_pos" for kind in ("class", "spatial", "temporal"))
    places = Derived(lambda token, where, when: torch.cat((token[None], where + when)), kinds)
    yield "stem.positions.weight", [places]
    pool = f"{_BLOCK}.attn.pool_{{input}}"  # of q, k or v
    for layer in (ATTENTION, f"{ATTENTION}.f"):  # the first layer of a stage has no f
        yield f"{layer}.norm", [f"{_BLOCK}.norm1"]
        yield f"{layer}.body.qkv", [f"{_BLOCK}.attn.qkv"]
        yield f"{layer}.body.out", [f"{_BLOCK}.attn.project.0"]
        yield f"{layer}.body.pool_{{input}}.conv", [first_picture(f"{pool}.pool")]
        yield f"{layer}.body.pool_{{input}}.norm", [f"{pool}.norm_act.0"]
    yield f"{ATTENTION}.shortcut", [f"{_BLOCK}.project"]
    yield f"{MLP}.f.norm", [f"{_BLOCK}.norm2"]
    yield f"{MLP}.f.body.grow", [f"{_BLOCK}.mlp.0"]
    yield f"{MLP}.f.body.shrink", [f"{_BLOCK}.mlp.3"]
    yield "head.norm", ["norm"]
    yield "head.classes", ["head.1"]


MVIT = Names(dict(_mvit()), libraries="torchvision (its MViT for videos of one picture)")

GPT = Names(
    {
        "stem.tokens.weight": ["wte.weight"],
        "stem.positions.weight": ["wpe.weight"],
        f"{ATTENTION}.f.norm": ["h.{layer}.ln_1"],
        f"{ATTENTION}.f.body.qkv": [transposed("h.{layer}.attn.c_attn")],
        f"{ATTENTION}.f.body.out": [transposed("h.{layer}.attn.c_proj")],
        f"{MLP}.f.norm": ["h.{layer}.ln_2"],
        f"{MLP}.f.body.grow": [transposed("h.{layer}.mlp.c_fc")],
        f"{MLP}.f.body.shrink": [transposed("h.{layer}.mlp.c_proj")],
        "norm": ["ln_f"],
        "head.weight": ["lm_head.weight", "wte.weight"],
    },
    libraries="transformers",
    prefixes=("transformer.",),
    ignored=(".attn.bias", ".attn.masked_bias"),
)

LLAMA = Names(
    {
        "stem.tokens.weight": ["embed_tokens.weight"],
        f"{ATTENTION}.f.norm": [f"{_LAYER}.input_layernorm"],
        f"{ATTENTION}.f.body.qkv": [joined(f"{_LAYER}.self_attn.*", *QKV)],
        f"{ATTENTION}.f.body.out": [f"{_LAYER}.self_attn.o_proj"],
        f"{MLP}.f.norm": [f"{_LAYER}.post_attention_layernorm"],
        f"{MLP}.f.body.gate": [f"{_LAYER}.mlp.gate_proj"],
        f"{MLP}.f.body.grow": [f"{_LAYER}.mlp.up_proj"],
        f"{MLP}.f.body.shrink": [f"{_LAYER}.mlp.down_proj"],
        "norm": ["norm"],
        "head.weight": ["lm_head.weight", "embed_tokens.weight"],
    },
    libraries="transformers",
    prefixes=("model.",),
    ignored=("rotary_emb.inv_freq",),
)

_EMBEDDED = "embeddings.word_embeddings.weight"
# Positions begin at 2 in transformers, and every token has the only type.
_POSITIONS = Derived(
    lambda positions, types: positions[2:] + types,
    ("embeddings.position_embeddings.weight", "embeddings.token_type_embeddings.weight"),
)
ROBERTA = Names(
    {
        "stem.tokens.weight": [_EMBEDDED],
        "stem.positions.weight": [_POSITIONS],
        "stem.norm": ["embeddings.LayerNorm"],
        f"{ATTENTION}.f.body.qkv": [joined(f"{_OLD}.attention.self.*", *WORDS)],
        f"{ATTENTION}.f.body.out": [f"{_OLD}.attention.output.dense"],
        f"{ATTENTION}.norm": [f"{_OLD}.attention.output.LayerNorm"],
        f"{MLP}.f.body.grow": [f"{_OLD}.intermediate.dense"],
        f"{MLP}.f.body.shrink": [f"{_OLD}.output.dense"],
        f"{MLP}.norm": [f"{_OLD}.output.LayerNorm"],
        "transform.dense": ["lm_head.dense"],
        "transform.norm": ["lm_head.layer_norm"],
        "head.weight": ["lm_head.decoder.weight", _EMBEDDED],
        "head.bias": ["lm_head.decoder.bias", "lm_head.bias"],
    },
    libraries="transformers",
    prefixes=("roberta.",),
    ignored=("position_ids", "pooler."),
)
