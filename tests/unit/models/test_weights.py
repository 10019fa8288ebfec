"""Weights of other libraries, and of the model itself, from state dicts and files.

tests/unit/models/test_reference.py compares outputs of models that were loaded from state dicts.
"""

from typing import Any

import pytest
import torch
from support.families import EACH, is_text
from support.llama import rope_parameters

import redivider as rd

TEXT: dict[str, Any] = {"vocabulary": 50, "context": 16, "width": 24, "depth": 11, "heads": 4}
# name of ours, options, class of theirs, options of their configuration
PAIRS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "resnet18": (
        {"width": 8, "depths": (2, 1), "num_classes": 7},
        "ResNetForImageClassification",
        {
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [2, 1],
            "layer_type": "basic",
            "num_labels": 7,
        },
    ),
    "vit_tiny": (
        {"width": 24, "depth": 11, "heads": 4, "hidden": 40, "image_size": 12, "patch_size": 4}
        | {"num_classes": 7},
        "ViTForImageClassification",
        {
            "hidden_size": 24,
            "num_hidden_layers": 11,
            "num_attention_heads": 4,
            "intermediate_size": 40,
            "image_size": 12,
            "patch_size": 4,
            "num_labels": 7,
            "layer_norm_eps": 1e-6,
        },
    ),
    "swin_tiny": (
        {"width": 8, "depths": (1, 2), "heads": 2, "image_size": 16, "patch_size": 2}
        | {"window": 4, "num_classes": 7},
        "SwinForImageClassification",
        {
            "embed_dim": 8,
            "depths": [1, 2],
            "num_heads": [2, 4],
            "image_size": 16,
            "patch_size": 2,
            "window_size": 4,
            "num_labels": 7,
        },
    ),
    "gpt_nano": (
        TEXT,
        "GPT2LMHeadModel",
        {"n_embd": 24, "n_layer": 11, "n_head": 4, "vocab_size": 50, "n_positions": 16}
        | {"bos_token_id": 0, "eos_token_id": 0},
    ),
    "llama_tiny": (
        {**TEXT, "kv_heads": 2, "hidden": 40, "rope_factor": 8.0},
        "LlamaForCausalLM",
        {
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 11,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 50,
            "max_position_embeddings": 16384,
            "rms_norm_eps": 1e-5,
            "rope_parameters": rope_parameters(8.0),
            "tie_word_embeddings": True,
        },
    ),
    "roberta_base": (
        TEXT,
        "RobertaForMaskedLM",
        {
            "hidden_size": 24,
            "intermediate_size": 96,
            "num_hidden_layers": 11,
            "num_attention_heads": 4,
            "vocab_size": 50,
            "max_position_embeddings": 18,
            "type_vocab_size": 1,
            "layer_norm_eps": 1e-5,
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_a_file_that_transformers_saves(name, tmp_path):
    """Names in files are not those in memory, and a tied head is not in the file."""
    transformers = pytest.importorskip("transformers")
    options, kind, config = PAIRS[name]
    configuration = getattr(transformers, f"{kind.partition('For')[0].partition('LM')[0]}Config")
    torch.manual_seed(0)
    theirs = getattr(transformers, kind)(configuration(**config)).eval()
    with torch.no_grad():
        for param in theirs.parameters():
            param.add_(torch.randn_like(param) / 9)
    theirs.save_pretrained(tmp_path)
    ours = rd.create_model(name, weights=tmp_path / "model.safetensors", **options).eval()
    x = torch.randint(2, 50, (3, 11))
    if not is_text(name):
        x = torch.randn(3, 3, *[options.get("image_size", 96)] * 2)
    torch.testing.assert_close(ours(x), theirs(x).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "suffix"),
    [(*case, ("pt", "safetensors")[number // 2 % 2]) for number, case in enumerate(EACH)],
)
def test_every_model_loads_its_own(name, options, suffix, tmp_path):
    saved = rd.create_model(name, seed=1, **options).state_dict()
    path = str(tmp_path / f"weights.{suffix}")
    if suffix == "pt":
        torch.save(saved, path)
    else:
        pytest.importorskip("safetensors.torch").save_file(saved, path)
    loaded = rd.create_model(name, weights=path, **options)
    fresh = rd.create_model(name, **options).state_dict()
    assert any(not torch.equal(fresh[key], value) for key, value in saved.items())
    assert all(torch.equal(loaded.state_dict()[key], value) for key, value in saved.items())


def test_files_of_gpt_2_may_lack_the_prefix_and_have_masks():
    small: dict[str, Any] = {"width": 8, "depth": 1, "heads": 2, "vocabulary": 20, "context": 4}
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (20, 8), "wpe.weight": (4, 8)}
    shapes |= {"h.0.attn.c_attn.weight": (8, 24)}
    shapes |= {"h.0.attn.c_attn.bias": (24,), "h.0.attn.c_proj.weight": (8, 8)}
    shapes |= {"h.0.mlp.c_fc.weight": (8, 32), "h.0.mlp.c_fc.bias": (32,)}
    shapes |= {"h.0.mlp.c_proj.weight": (32, 8), "h.0.attn.bias": (1, 1, 4, 4)}
    for name in ("h.0.attn.c_proj", "h.0.mlp.c_proj", "h.0.ln_1", "h.0.ln_2", "ln_f"):
        shapes[f"{name}.bias"] = (8,)
    for name in ("h.0.ln_1", "h.0.ln_2", "ln_f"):
        shapes[f"{name}.weight"] = (8,)
    state = {name: torch.randn(shape) for name, shape in shapes.items()}
    model = rd.create_model("gpt_nano", weights=state, **small)
    loaded = model.state_dict()
    qkv = loaded["layer0_attention.f.body.qkv.weight"]
    assert torch.equal(qkv, state["h.0.attn.c_attn.weight"].T)
    assert torch.equal(loaded["head.weight"], state["wte.weight"])
    assert model[-1].weight is not model[0].tokens.weight


SMALL: dict[str, Any] = {"width": 8, "depth": 2, "heads": 2, "image_size": 8, "patch_size": 4}


def test_what_does_not_fit_gives_one_error():
    state = rd.create_model("vit_tiny", num_classes=7, **SMALL).state_dict()
    state["extra.weight"] = torch.zeros(2)
    del state["layer1_mlp.f.norm.bias"], state["stem.token.weight"]
    with pytest.raises(ValueError) as caught:
        rd.create_model("vit_tiny", num_classes=9, weights=state, **SMALL)
    message = str(caught.value)
    assert "the weights do not fit vit_tiny" in message
    assert "missing: stem.token.weight, layer1_mlp.f.norm.bias;" in message
    assert "unknown: extra.weight;" in message
    assert "head.classes.weight is (9, 8), and (7, 8) there" in message
    assert "those of timm and transformers" in message


def test_long_lists_are_short():
    deeper = rd.create_model("vit_tiny", **{**SMALL, "depth": 3}).state_dict()
    with pytest.raises(ValueError, match=r"unknown: layer2_\S+, layer2_\S+, layer2_\S+, 9 more\."):
        rd.create_model("vit_tiny", weights=deeper, **SMALL)
    with pytest.raises(ValueError, match=r"of the whole model with its head: its own$"):
        rd.create_model("rev_vit_tiny", weights=deeper, **SMALL)


def test_a_transposed_matrix_is_of_another_shape():
    state = rd.create_model("vit_tiny", **SMALL).state_dict()
    state["layer0_mlp.f.body.grow.weight"] = state["layer0_mlp.f.body.grow.weight"].T
    with pytest.raises(ValueError, match=r"grow.weight is \(32, 8\), and \(8, 32\) there"):
        rd.create_model("vit_tiny", weights=state, **SMALL)


def test_two_weights_do_not_fit_a_tied_head():
    small: dict[str, Any] = {"width": 8, "depth": 1, "heads": 2, "vocabulary": 20, "context": 4}
    state = rd.create_model("gpt_nano", **small).state_dict()
    with pytest.raises(ValueError, match=r"not tied: stem.tokens.weight and head.weight .*tied=F"):
        rd.create_model("gpt_nano", tied=True, weights=state, **small)
    state["head.weight"] = state["stem.tokens.weight"]
    model = rd.create_model("gpt_nano", tied=True, weights=state, **small)
    assert model[-1].weight is model[0].tokens.weight


def test_what_is_no_state_dict_is_refused(tmp_path):
    with pytest.raises(ValueError, match="an entry 'epoch' that is not a tensor"):
        rd.create_model("vit_tiny", weights={"epoch": 3}, **SMALL)  # type: ignore[dict-item]
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match=r"the path of one \(.pt or .safetensors\), got list"):
        rd.create_model("vit_tiny", weights=tmp_path / "list.pt", **SMALL)
    with pytest.raises(ValueError, match="there is no file"):
        rd.create_model("vit_tiny", weights=tmp_path / "none.pt", **SMALL)
    with pytest.raises(ValueError, match="the meta device has no memory for weights"):
        rd.create_model("vit_tiny", weights={}, device="meta", **SMALL)
