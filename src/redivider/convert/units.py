"""Units of a network that exists already, made of the network's own modules.

    plain        u0 = stem(tokens)       u' = block(u)                  head(norm(u))
    couplings    a = b = stem(tokens)    (a, b)' = (b + f(a), a)        head(norm((a + b) / 2))
                                         f(a) = block(a) - a

The weights are the network's: to train the units is to train it. A model of transformers computes
masks and positions once, for all blocks. Here every block computes its own, by the same functions,
so that stages exchange nothing but the stream.

Couplings of whole blocks keep more of the network's function than couplings of attention and MLP
apart (docs/pretrained.md).
"""

from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from redivider.convert.families import FAMILIES, HEADS
from redivider.convert.reversible import PLACE
from redivider.coupling import Coupling, Streams
from redivider.junction import Fuse


def units_from(model: nn.Module, *, couplings: bool = False) -> list[nn.Module]:
    """Return the units of a network of transformers or timm, for a chain or a pipeline.

        units = rd.units_from(AutoModelForCausalLM.from_pretrained("gpt2"))
        logits = rd.Chain(units)(tokens)

    They share the network's weights. Plain units compute its function: stem, blocks, last norm and
    head. Blocks of transformers take `attention_mask` as a keyword; the stems of GPT-2, BERT and
    RoBERTa take `token_type_ids`.

    Args:
        model: A GPT-2, Llama, Qwen 3, Mistral, Gemma 3, BERT, RoBERTa, ViT or DINOv2 of
            transformers, with or without a head, or a ViT of timm.
        couplings: Make a coupling of every block. A pipeline keeps nothing of it, but it is another
            function, which has to be trained. Not for BERT and RoBERTa, whose norms follow the
            sums.
    """
    base: Any = getattr(model, "base_model", model)
    library = type(base).__module__.partition(".")[0]
    family = FAMILIES.get(f"{library}.{type(base).__name__}")
    name = type(model).__name__
    if family is None:
        raise ValueError(
            f"cannot make units of {name}; supported are {', '.join(FAMILIES)}, with or without a "
            "head; for another network, write a list of units: any modules that follow each other"
        )
    is_bare = model is base and library == "transformers"
    if not is_bare and name not in HEADS:
        raise ValueError(
            f"cannot make a unit of the head of {name}; supported are {', '.join(HEADS)}; or add a "
            "head of your own to rd.units_from(model.base_model)"
        )
    if couplings and family.norm is None:
        raise ValueError(
            f"the blocks of {name} cannot become couplings, because their norms follow the sums; "
            "use its plain units"
        )
    blocks: list[nn.Module] = list(base.get_submodule(family.blocks))
    if any(PLACE in vars(block) for block in blocks):
        raise ValueError("the model is reversible; call rd.make_plain(model) first")
    stem = family.stem(base)
    units = [TwoStreams(stem) if couplings else stem]
    for index, block in enumerate(blocks):
        context = None
        if family.is_causal is not None and _takes_mask(block):
            context = Context(base, family.is_causal, index)
        unit = Block(block, context)
        units.append(Coupling(Residual(unit), takes=unit.takes) if couplings else unit)
    if family.norm is not None:
        norm = base.get_submodule(family.norm)
        units.append(nn.Sequential(Fuse("mean"), norm) if couplings else norm)
    return units if is_bare else [*units, HEADS[name](model)]


def _takes_mask(block: nn.Module) -> bool:
    """Return whether a block takes a mask, which depends on the version of transformers."""
    params = signature(block.forward).parameters.values()
    return any(own.name == "attention_mask" or own.kind is own.VAR_KEYWORD for own in params)


class Context(nn.Module):
    """Mask and positions that a model of transformers passes to one of its blocks.

    Args:
        base: The model, without its head.
        is_causal: Whether a token sees none after it.
        index: Index of the block.
    """

    def __init__(self, base: Any, is_causal: bool, index: int) -> None:
        super().__init__()
        self.config = config = base.config
        if getattr(config, "use_bidirectional_attention", False):
            raise ValueError("use_bidirectional_attention has masks that are not supported")
        kinds = getattr(config, "layer_types", None)
        has_window = getattr(config, "sliding_window", None) is not None
        self.kind = kinds[index] if kinds else f"{'sliding' if has_window else 'full'}_attention"
        masks: Any = import_module("transformers.masking_utils")
        if not (is_causal or getattr(config, "is_decoder", False)):
            self.make_mask = masks.create_bidirectional_mask
        elif self.kind == "sliding_attention":
            self.make_mask = masks.create_sliding_window_causal_mask
        else:
            self.make_mask = masks.create_causal_mask
        self.rotary = getattr(base, "rotary_emb", None)
        kinds_of_rope = str(getattr(self.rotary, "rope_type", ""))
        if any(kind in kinds_of_rope for kind in ("dynamic", "longrope")):
            raise ValueError(
                f"RoPE of the type {kinds_of_rope} changes with the lengths that it has seen, so a "
                "block that is run again would see other positions"
            )

    def forward(self, x: Tensor, attention_mask: Tensor | None) -> dict[str, Any]:
        """Return the keywords of a block for the input x."""
        mask = self.make_mask(
            config=self.config, inputs_embeds=x, attention_mask=attention_mask, past_key_values=None
        )
        if self.rotary is None:
            return {"attention_mask": mask}
        positions = torch.arange(x.shape[1], device=x.device)[None]
        by_kind = "layer_type" in signature(self.rotary.forward).parameters
        rotation = self.rotary(x, positions, **({"layer_type": self.kind} if by_kind else {}))
        return {"attention_mask": mask, "position_embeddings": rotation}


class Block(nn.Module):
    """Residual block of a model, with what the model would pass to it.

    Args:
        block: The block.
        context: Mask and positions; None for a block that takes its input alone.
    """

    def __init__(self, block: nn.Module, context: Context | None) -> None:
        super().__init__()
        self.block, self.context = block, context
        self.takes = () if context is None else ("attention_mask",)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Any:
        return self.block(x, **(self.context(x, attention_mask) if self.context else {}))


class Residual(nn.Module):
    """Residual branch of a block, without the sum."""

    def __init__(self, unit: Block) -> None:
        super().__init__()
        self.unit = unit

    def forward(self, x: Tensor, **side: Any) -> Any:
        return self.unit(x, **side) - x


class TwoStreams(nn.Module):
    """Stem from which both streams begin. As two units, a pipeline would keep its output, too."""

    def __init__(self, stem: nn.Module) -> None:
        super().__init__()
        self.stem = stem
        self.takes = getattr(stem, "takes", ())

    def forward(self, x: Tensor, **side: Any) -> Streams:
        x = self.stem(x, **side)
        return x, x
