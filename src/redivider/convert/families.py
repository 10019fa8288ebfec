"""Families of networks: where stem, blocks, norm and head of a network are."""

from collections.abc import Callable
from copy import copy
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class GPT2Stem(nn.Module):
    """Embedding of GPT-2, which embeds token types as it does tokens."""

    takes = ("token_type_ids",)

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = base.wte, base.wpe, base.drop

    def forward(self, tokens: Tensor, token_type_ids: Tensor | None = None) -> Any:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device)[None])
        return self.drop(x if token_type_ids is None else x + self.wte(token_type_ids))


class BertStem(nn.Module):
    """Embedding of BERT and RoBERTa."""

    takes = ("token_type_ids",)

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.embeddings = base.embeddings

    def forward(self, tokens: Tensor, **side: Any) -> Any:
        return self.embeddings(tokens, **side)


class Pool(nn.Module):
    """Features of an image: the class token, and the mean over patches if `with_mean`."""

    def __init__(self, *, with_mean: bool) -> None:
        super().__init__()
        self.with_mean = with_mean

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, 0], x[:, 1:].mean(dim=1)], dim=1) if self.with_mean else x[:, 0]


class Softcap(nn.Module):
    """Bound on logits: x -> cap tanh(x / cap)."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x / self.cap) * self.cap


class TimmPart(nn.Module):
    """One method of a model of timm, run on a shallow copy without the modules of other parts."""

    def __init__(self, model: Any, method: str, modules: dict[str, Any], params: Any) -> None:
        super().__init__()
        part = copy(model)
        part._modules, part._parameters, part.grad_checkpointing = modules, params, False
        self.part, self.method = part, method

    def forward(self, x: Tensor) -> Any:
        return getattr(self.part, self.method)(x)


TIMM_STEM = ("patch_embed", "pos_drop", "patch_drop", "norm_pre")


def timm_stem(model: Any) -> nn.Module:
    """Return what precedes the blocks."""
    modules = {name: model._modules[name] for name in TIMM_STEM}
    without = {"blocks": nn.Sequential(), "norm": nn.Identity()}
    return TimmPart(model, "forward_features", modules | without, model._parameters)


def timm_head(model: Any) -> nn.Module:
    """Return what follows the last norm."""
    others = (*TIMM_STEM, "blocks", "norm")
    modules = {name: child for name, child in model._modules.items() if name not in others}
    return TimmPart(model, "forward_head", modules, {})


def language_head(model: Any) -> nn.Module:
    """Return the head of a causal language model."""
    cap = getattr(model.config, "final_logit_softcapping", None)
    return model.lm_head if cap is None else nn.Sequential(model.lm_head, Softcap(cap))


class Family(NamedTuple):
    """Places of the parts of a network, without its head."""

    stem: Callable[[Any], nn.Module]
    blocks: str
    norm: str | None
    """Norm after the last block; None if the norms of a block follow its sums."""
    is_causal: bool | None
    """Whether a token sees none after it; None if blocks take no mask."""


LLAMA = Family(attrgetter("embed_tokens"), "layers", "norm", is_causal=True)
BERT = Family(BertStem, "encoder.layer", None, is_causal=False)
VIT = Family(attrgetter("embeddings"), "layers", "layernorm", is_causal=False)

FAMILIES = {
    "transformers.GPT2Model": Family(GPT2Stem, "h", "ln_f", is_causal=True),
    "transformers.LlamaModel": LLAMA,
    "transformers.Qwen3Model": LLAMA,
    "transformers.MistralModel": LLAMA,
    "transformers.Gemma3TextModel": LLAMA,
    "transformers.BertModel": BERT,
    "transformers.RobertaModel": BERT,
    "transformers.ViTModel": VIT,
    "transformers.Dinov2Model": VIT._replace(blocks="encoder.layer"),
    "timm.VisionTransformer": Family(timm_stem, "blocks", "norm", is_causal=None),
}

HEADS: dict[str, Callable[[Any], nn.Module]] = {
    "GPT2LMHeadModel": language_head,
    "LlamaForCausalLM": language_head,
    "Qwen3ForCausalLM": language_head,
    "MistralForCausalLM": language_head,
    "Gemma3ForCausalLM": language_head,
    "BertForMaskedLM": attrgetter("cls"),
    "BertForSequenceClassification": lambda model: nn.Sequential(
        model.bert.pooler, model.dropout, model.classifier
    ),
    "RobertaForMaskedLM": attrgetter("lm_head"),
    "RobertaForSequenceClassification": attrgetter("classifier"),
    "ViTForImageClassification": lambda model: nn.Sequential(
        Pool(with_mean=False), model.classifier
    ),
    "Dinov2ForImageClassification": lambda model: nn.Sequential(
        Pool(with_mean=True), model.classifier
    ),
    "VisionTransformer": timm_head,
}
