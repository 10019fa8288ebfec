"""The members that do not reverse are the networks of the field: same weights, same output.

transformers installs anywhere. timm and torchvision ask for a torch build of their own, so where
they are missing their tests skip; docs/models.md says when they were run.
"""

import re

import pytest
import torch
from torch import Tensor

import redivider as rd


def load(model: rd.Chain, theirs: dict[str, Tensor], rules: list[tuple[str, str]]) -> rd.Chain:
    """Give our model their weights, each key rewritten by the first rule that fits it whole."""
    state = {}
    for key, value in theirs.items():
        rule = next((rule for rule in rules if re.fullmatch(rule[0], key)), None)
        assert rule is not None, f"nothing of ours is like {key}"
        state[re.sub(rule[0], rule[1], key)] = value
    ours = model.state_dict()
    for key in ours.keys() - state.keys():
        assert key.endswith("conv.bias"), f"nothing of theirs is like {key}"
        state[key] = torch.zeros_like(ours[key])  # their convolutions have none
    model.load_state_dict({key: value.view_as(ours[key]) for key, value in state.items()})
    return model


def unsettle(model: torch.nn.Module) -> torch.nn.Module:
    """Weights and statistics off their first values, so that none can be left out unseen."""
    torch.manual_seed(0)
    with torch.no_grad():
        for key, each in model.state_dict().items():
            if each.is_floating_point():
                each.add_(
                    0.2 * torch.rand_like(each) if "var" in key else torch.randn_like(each) / 9
                )
    return model.double()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("bottleneck", [False, True])
def test_resnet_is_that_of_transformers(bottleneck, training):
    transformers = pytest.importorskip("transformers")
    kind = {"layer_type": "bottleneck" if bottleneck else "basic"}
    widths = [32, 64, 128] if bottleneck else [8, 16, 32]
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=widths, depths=[2, 1, 2], num_labels=7, **kind
    )
    theirs = unsettle(transformers.ResNetForImageClassification(config)).train(training)
    name = "resnet50" if bottleneck else "resnet18"
    ours = rd.create_model(name, width=8, depths=(2, 1, 2), num_classes=7, dtype=torch.float64)
    block = r"resnet\.encoder\.stages\.(\d)\.layers\.(\d)\."
    renamed = {
        re.sub(block, lambda m: f"block{int(m[1]) + 1}_{int(m[2]) + 1}.", key)
        .replace("convolution", "conv")
        .replace("normalization", "norm"): value
        for key, value in theirs.state_dict().items()
    }
    rules = [
        (r"resnet\.embedder\.embedder\.(.*)", r"stem.\1"),
        (r"(block\d_\d)\.layer\.(.*)", r"\1.f.\2"),
        (r"(block\d_\d)\.shortcut\.(.*)", r"\1.shortcut.\2"),
        (r"classifier\.1\.(.*)", r"head.classes.\1"),
    ]
    load(ours, renamed, rules).train(training)
    x = torch.randn(3, 3, 96, 96).double()
    assert torch.allclose(ours(x), theirs(x).logits, rtol=1e-10, atol=1e-10)


@pytest.mark.reference
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("size", [18, 34, 50, 101])
def test_resnet_is_that_of_torchvision(size, training):
    torchvision = pytest.importorskip("torchvision", exc_type=ImportError)
    theirs = unsettle(getattr(torchvision.models, f"resnet{size}")()).train(training)
    ours = rd.create_model(f"resnet{size}", dtype=torch.float64)
    block = r"layer(\d)\.(\d+)\."
    renamed = {
        re.sub(block, lambda m: f"block{m[1]}_{int(m[2]) + 1}.", key): value
        for key, value in theirs.state_dict().items()
    }
    renamed = {
        re.sub(r"(conv|bn)(\d)\.", lambda m: f"f.{int(m[2]) - 1}.{m[1]}.", key)
        .replace(".bn.", ".norm.")
        .replace("downsample.0", "shortcut.conv")
        .replace("downsample.1", "shortcut.norm"): value
        for key, value in renamed.items()
    }
    rules = [
        (r"f\.0\.bn\.(.*)", r"stem.norm.\1"),
        (r"f\.0\.(.*)", r"stem.\1"),
        (r"(block.*)", r"\1"),
        (r"fc\.(.*)", r"head.classes.\1"),
    ]
    load(ours, renamed, rules).train(training)
    x = torch.randn(2, 3, 224, 224).double()
    with torch.no_grad():
        assert torch.allclose(ours(x), theirs(x), rtol=1e-9, atol=1e-9)


def test_vit_is_that_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=40,
        image_size=12,
        patch_size=4,
        num_labels=7,
        layer_norm_eps=1e-6,
    )
    theirs = unsettle(transformers.ViTForImageClassification(config)).eval()
    ours = rd.create_model(
        "vit_tiny",
        width=24,
        depth=3,
        heads=4,
        hidden=40,
        image_size=12,
        patch_size=4,
        num_classes=7,
        dtype=torch.float64,
    )
    state = theirs.state_dict()
    for layer in range(3):
        for what in ("weight", "bias"):
            prefix = f"vit.layers.{layer}.attention."
            parts = [state.pop(f"{prefix}{each}_proj.{what}") for each in "qkv"]
            state[f"{prefix}qkv.{what}"] = torch.cat(parts)
    rules = [
        (r"vit\.embeddings\.cls_token", "stem.token.weight"),
        (r"vit\.embeddings\.position_embeddings", "stem.positions.weight"),
        (r"vit\.embeddings\.patch_embeddings\.projection\.(.*)", r"stem.patches.conv.\1"),
        (r"vit\.layers\.(\d)\.attention\.o_proj\.(.*)", r"layer\1_attention.f.body.out.\2"),
        (r"vit\.layers\.(\d)\.attention\.qkv\.(.*)", r"layer\1_attention.f.body.qkv.\2"),
        (r"vit\.layers\.(\d)\.layernorm_before\.(.*)", r"layer\1_attention.f.norm.\2"),
        (r"vit\.layers\.(\d)\.layernorm_after\.(.*)", r"layer\1_mlp.f.norm.\2"),
        (r"vit\.layers\.(\d)\.mlp\.fc1\.(.*)", r"layer\1_mlp.f.body.grow.\2"),
        (r"vit\.layers\.(\d)\.mlp\.fc2\.(.*)", r"layer\1_mlp.f.body.shrink.\2"),
        (r"vit\.layernorm\.(.*)", r"head.norm.\1"),
        (r"classifier\.(.*)", r"head.classes.\1"),
    ]
    load(ours, state, rules)
    x = torch.randn(3, 3, 12, 12).double()
    assert torch.allclose(ours(x), theirs(x).logits, rtol=1e-10, atol=1e-10)


@pytest.mark.reference
@pytest.mark.parametrize("size", ["tiny", "small", "base", "large", "huge", "giant"])
def test_vit_has_the_weights_of_timm_and_its_output(size):
    timm = pytest.importorskip("timm", exc_type=ImportError)
    patch = 14 if size in ("huge", "giant") else 16
    with torch.device("meta"):
        full = timm.create_model(f"vit_{size}_patch{patch}_224", num_classes=1000)
    ours = rd.create_model(f"vit_{size}", device="meta")
    count = [sum(each.numel() for each in model.parameters()) for model in (full, ours)]
    assert count[0] == count[1]
    if size in ("tiny", "small"):
        options = {"img_size": 64, "num_classes": 7, "depth": 3}
        theirs = unsettle(timm.create_model(f"vit_{size}_patch16_224", **options)).eval()
        rules = [
            (r"cls_token", "stem.token.weight"),
            (r"pos_embed", "stem.positions.weight"),
            (r"patch_embed\.proj\.(.*)", r"stem.patches.conv.\1"),
            (r"blocks\.(\d)\.norm1\.(.*)", r"layer\1_attention.f.norm.\2"),
            (r"blocks\.(\d)\.attn\.qkv\.(.*)", r"layer\1_attention.f.body.qkv.\2"),
            (r"blocks\.(\d)\.attn\.proj\.(.*)", r"layer\1_attention.f.body.out.\2"),
            (r"blocks\.(\d)\.norm2\.(.*)", r"layer\1_mlp.f.norm.\2"),
            (r"blocks\.(\d)\.mlp\.fc1\.(.*)", r"layer\1_mlp.f.body.grow.\2"),
            (r"blocks\.(\d)\.mlp\.fc2\.(.*)", r"layer\1_mlp.f.body.shrink.\2"),
            (r"norm\.(.*)", r"head.norm.\1"),
            (r"head\.(.*)", r"head.classes.\1"),
        ]
        small = rd.create_model(
            f"vit_{size}", image_size=64, num_classes=7, depth=3, dtype=torch.float64
        )
        load(small, theirs.state_dict(), rules)
        x = torch.randn(3, 3, 64, 64).double()
        assert torch.allclose(small(x), theirs(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tied", [False, True])
def test_gpt_is_that_of_transformers(tied):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=24,
        n_layer=3,
        n_head=4,
        vocab_size=50,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=tied,
    )
    theirs = unsettle(transformers.GPT2LMHeadModel(config)).eval()
    state = theirs.state_dict()
    for key in state:
        if ".c_" in key and key.endswith("weight"):
            state[key] = state[key].T.contiguous()
    rules = [
        (r"transformer\.wte\.weight", "stem.tokens.weight"),
        (r"transformer\.wpe\.weight", "stem.positions.weight"),
        (r"transformer\.h\.(\d)\.ln_1\.(.*)", r"layer\1_attention.f.norm.\2"),
        (r"transformer\.h\.(\d)\.attn\.c_attn\.(.*)", r"layer\1_attention.f.body.qkv.\2"),
        (r"transformer\.h\.(\d)\.attn\.c_proj\.(.*)", r"layer\1_attention.f.body.out.\2"),
        (r"transformer\.h\.(\d)\.ln_2\.(.*)", r"layer\1_mlp.f.norm.\2"),
        (r"transformer\.h\.(\d)\.mlp\.c_fc\.(.*)", r"layer\1_mlp.f.body.grow.\2"),
        (r"transformer\.h\.(\d)\.mlp\.c_proj\.(.*)", r"layer\1_mlp.f.body.shrink.\2"),
        (r"transformer\.ln_f\.(.*)", r"norm.\1"),
        (r"lm_head\.weight", "head.weight"),
    ]
    options = {"width": 24, "depth": 3, "heads": 4, "vocabulary": 50, "context": 16}
    ours = rd.create_model("gpt_nano", tied=tied, dtype=torch.float64, **options)
    load(ours, state, rules)
    assert (ours[-1].weight is ours[0].tokens.weight) == tied
    tokens = torch.randint(50, (3, 11))
    assert torch.allclose(ours(tokens), theirs(tokens).logits, rtol=1e-10, atol=1e-10)
    changed = tokens.clone()
    changed[:, 6:] = 0
    assert torch.equal(ours(tokens)[:, :6], ours(changed)[:, :6]), "it sees what comes later"
