"""Small models of transformers, made from configurations, with random weights and batches."""

from importlib import import_module
from typing import Any

import torch

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
TEXT: dict[str, Any] = {**SMALL, "vocab_size": 50, "pad_token_id": 0, "max_position_embeddings": 40}
DECODER: dict[str, Any] = {
    **TEXT,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGE: dict[str, Any] = {**SMALL, "image_size": 16, "patch_size": 4}
GPT2: dict[str, Any] = {
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "vocab_size": 50,
    "n_positions": 40,
}
# family: class of the model, options of its configuration, name of its blocks
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "GPT2": ("GPT2LMHeadModel", {**GPT2, "bos_token_id": 1, "eos_token_id": 2}, "transformer.h"),
    "Llama": ("LlamaForCausalLM", DECODER, "model.layers"),
    "Qwen3": ("Qwen3ForCausalLM", DECODER, "model.layers"),
    "Mistral": ("MistralForCausalLM", {**DECODER, "sliding_window": 6}, "model.layers"),
    # Every second layer sees a window only: masks and positions differ by layer.
    "Gemma3Text": (
        "Gemma3ForCausalLM",
        {**DECODER, "sliding_window": 4, "sliding_window_pattern": 2},
        "model.layers",
    ),
    "Bert": ("BertForMaskedLM", TEXT, "bert.encoder.layer"),
    "Roberta": ("RobertaForMaskedLM", TEXT, "roberta.encoder.layer"),
    "ViT": ("ViTForImageClassification", {**IMAGE, "hidden_dropout_prob": 0.1}, "vit.layers"),
    "Dinov2": (
        "Dinov2ForImageClassification",
        {**IMAGE, "mlp_ratio": 2, "drop_path_rate": 0.2},
        "dinov2.encoder.layer",
    ),
}
CAUSAL = ("GPT2", "Llama", "Qwen3", "Mistral", "Gemma3Text")


def make(family: str, **options: Any) -> Any:
    """Return a small model, with weights large enough that layers matter."""
    transformers = import_module("transformers")
    name, defaults, _ = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(**{**defaults, **options})
    torch.manual_seed(0)
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.normal_(std=0.1)
    return model


def batch(family: str, number: int = 0) -> dict[str, Any]:
    """Return the keywords of a call, with labels; a text in it is padded."""
    generator = torch.Generator().manual_seed(number)
    if family in ("ViT", "Dinov2"):
        pixels = torch.randn(3, 3, 16, 16, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(2, (3,), generator=generator)}
    tokens = torch.randint(3, 50, (3, 12), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, 8:] = 0  # padding
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, -100),
    }
