"""Models without couplings equal those of other libraries: same weights, same output.

transformers installs anywhere. timm and torchvision ask for a torch build of their own, so where
they are missing their tests skip; docs/models.md says when they were run.
"""

import re
from typing import Any

import pytest
import torch
from support.llama import rope_parameters
from torch import Tensor

import redivider as rd

pytestmark = pytest.mark.slow


def load(model: rd.Chain, theirs: dict[str, Tensor], rules: list[tuple[str, str]]) -> rd.Chain:
    """Load their weights into our model; the first rule that matches a key renames it."""
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
    """Move weights and statistics off their initial values, so that none can be missed."""
    torch.manual_seed(0)
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if value.is_floating_point():
                value.add_(
                    0.2 * torch.rand_like(value) if "var" in key else torch.randn_like(value) / 9
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
            parts = [state.pop(f"{prefix}{kind}_proj.{what}") for kind in "qkv"]
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
    count = [sum(param.numel() for param in model.parameters()) for model in (full, ours)]
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
    options: dict[str, Any] = {"width": 24, "depth": 3, "heads": 4, "vocabulary": 50, "context": 16}
    ours = rd.create_model("gpt_nano", tied=tied, dtype=torch.float64, **options)
    load(ours, state, rules)
    assert (ours[-1].weight is ours[0].tokens.weight) == tied
    tokens = torch.randint(50, (3, 11))
    assert torch.allclose(ours(tokens), theirs(tokens).logits, rtol=1e-10, atol=1e-10)
    changed = tokens.clone()
    changed[:, 6:] = 0
    assert torch.equal(ours(tokens)[:, :6], ours(changed)[:, :6]), "it sees what comes later"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tied", [False, True])
def test_llama_is_that_of_transformers(tied, dtype):
    """Outputs and gradients agree, with grouped queries and scaled rotary positions."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters=rope_parameters(8.0),
        tie_word_embeddings=tied,
    )
    theirs = unsettle(transformers.LlamaForCausalLM(config)).eval().to(dtype)
    if dtype == torch.float64:
        _norm_in_float64(theirs, 32)  # theirs rounds to float32
    options: dict[str, Any] = {"width": 32, "hidden": 40, "heads": 4, "kv_heads": 2, "depth": 3}
    options |= {"vocabulary": 50, "context": 64, "rope_factor": 8.0, "tied": tied}
    ours = rd.create_model("llama_tiny", dtype=dtype, **options)
    load(ours, _llama_state(theirs.state_dict()), LLAMA)
    assert (ours[-1].weight is ours[0].tokens.weight) == tied
    tokens = torch.randint(50, (3, 61))
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    logits = ours(tokens), theirs(tokens).logits
    torch.testing.assert_close(*logits, rtol=tolerance, atol=tolerance)
    for y in logits:
        (y * torch.linspace(-1, 1, y.numel(), dtype=dtype).view_as(y)).sum().backward()
    gradients = {key: param.grad for key, param in theirs.named_parameters(remove_duplicate=False)}
    expected = rd.create_model("llama_tiny", dtype=dtype, **options)
    load(expected, _llama_state(gradients), LLAMA)
    for key, param in ours.named_parameters():
        assert param.grad is not None, key
        gradient = expected.get_parameter(key).detach()
        assert (param.grad - gradient).norm() <= tolerance * gradient.norm(), key


LLAMA = [
    (r"model\.embed_tokens\.weight", "stem.tokens.weight"),
    (r"model\.layers\.(\d)\.input_layernorm\.(.*)", r"layer\1_attention.f.norm.\2"),
    (r"model\.layers\.(\d)\.self_attn\.qkv\.(.*)", r"layer\1_attention.f.body.qkv.\2"),
    (r"model\.layers\.(\d)\.self_attn\.o_proj\.(.*)", r"layer\1_attention.f.body.out.\2"),
    (r"model\.layers\.(\d)\.post_attention_layernorm\.(.*)", r"layer\1_mlp.f.norm.\2"),
    (r"model\.layers\.(\d)\.mlp\.gate_proj\.(.*)", r"layer\1_mlp.f.body.gate.\2"),
    (r"model\.layers\.(\d)\.mlp\.up_proj\.(.*)", r"layer\1_mlp.f.body.grow.\2"),
    (r"model\.layers\.(\d)\.mlp\.down_proj\.(.*)", r"layer\1_mlp.f.body.shrink.\2"),
    (r"model\.norm\.(.*)", r"norm.\1"),
    (r"lm_head\.weight", "head.weight"),
]


def _llama_state(state: dict[str, Any]) -> dict[str, Any]:
    """Join queries, keys and values of a layer."""
    state = dict(state)
    for key in [key for key in state if ".q_proj." in key]:
        parts = [state.pop(key.replace("q_proj", f"{kind}_proj")) for kind in "qkv"]
        state[key.replace("q_proj", "qkv")] = torch.cat(parts)
    return state


def _norm_in_float64(model: torch.nn.Module, width: int) -> None:
    """Replace norms that compute in float32, whatever their weights are."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name.endswith("norm"):
                norm = torch.nn.RMSNorm(width, eps=1e-5, dtype=torch.float64)
                norm.load_state_dict(child.state_dict())
                setattr(module, name, norm)


def test_swin_is_that_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=8,
        depths=[2, 3, 1],
        num_heads=[2, 4, 8],
        window_size=4,
        num_labels=7,
    )
    theirs = unsettle(transformers.SwinForImageClassification(config)).eval()
    options: dict[str, Any] = {"image_size": 32, "patch_size": 2, "width": 8, "heads": 2}
    options["window"] = 4
    ours = rd.create_model(
        "swin_tiny", depths=(2, 3, 1), num_classes=7, dtype=torch.float64, **options
    )
    layers = [(stage, block) for stage, depth in enumerate((2, 3, 1)) for block in range(depth)]
    state = {}
    for key, value in theirs.state_dict().items():
        match = re.fullmatch(r"swin\.encoder\.layers\.(\d)\.blocks\.(\d)\.(.*)", key)
        if match:
            key = f"block{layers.index((int(match[1]), int(match[2])))}.{match[3]}"
        match = re.fullmatch(r"swin\.encoder\.layers\.(\d)\.downsample\.(.*)", key)
        if match:
            key = f"downsample{int(match[1]) + 1}.{match[2]}"
        state[key] = value
    for layer in range(len(layers)):
        for what in ("weight", "bias"):
            parts = [state.pop(f"block{layer}.attention.{kind}_proj.{what}") for kind in "qkv"]
            state[f"block{layer}.attention.qkv.{what}"] = torch.cat(parts)
    rules = [
        (r"swin\.embeddings\.patch_embeddings\.projection\.(.*)", r"stem.patches.conv.\1"),
        (r"swin\.embeddings\.norm\.(.*)", r"stem.norm.\1"),
        (r"block(\d)\.layernorm_before\.(.*)", r"layer\1_attention.f.norm.\2"),
        (r"block(\d)\.attention\.qkv\.(.*)", r"layer\1_attention.f.body.qkv.\2"),
        (
            r"block(\d)\.attention\.relative_position_bias\.relative_position_bias_table",
            r"layer\1_attention.f.body.bias.table",
        ),
        (r"block(\d)\.attention\.o_proj\.(.*)", r"layer\1_attention.f.body.out.\2"),
        (r"block(\d)\.layernorm_after\.(.*)", r"layer\1_mlp.f.norm.\2"),
        (r"block(\d)\.mlp\.fc1\.(.*)", r"layer\1_mlp.f.body.grow.\2"),
        (r"block(\d)\.mlp\.fc2\.(.*)", r"layer\1_mlp.f.body.shrink.\2"),
        (r"downsample(\d)\.norm\.(.*)", r"merge\1.norm.\2"),
        (r"downsample(\d)\.reduction\.(.*)", r"merge\1.reduce.\2"),
        (r"swin\.layernorm\.(.*)", r"head.norm.\1"),
        (r"classifier\.(.*)", r"head.classes.\1"),
    ]
    load(ours, state, rules)
    x = torch.randn(3, 3, 32, 32).double()
    assert torch.allclose(ours(x), theirs(x).logits, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tied", [False, True])
def test_roberta_is_that_of_transformers(tied):
    transformers = pytest.importorskip("transformers")
    config = transformers.RobertaConfig(
        vocab_size=50,
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=18,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        tie_word_embeddings=tied,
    )
    theirs = unsettle(transformers.RobertaForMaskedLM(config)).eval()
    state = {
        key.removeprefix("roberta."): value
        for key, value in theirs.state_dict().items()
        if key != "lm_head.bias"  # which is the decoder's
    }
    # Their places begin at 2, and every token has the one type there is.
    kind = state.pop("embeddings.token_type_embeddings.weight")
    places = state.pop("embeddings.position_embeddings.weight")
    state["embeddings.positions"] = places[2:] + kind
    for layer in range(3):
        for what in ("weight", "bias"):
            parts = [
                state.pop(f"encoder.layer.{layer}.attention.self.{kind}.{what}")
                for kind in ("query", "key", "value")
            ]
            state[f"encoder.layer.{layer}.attention.qkv.{what}"] = torch.cat(parts)
    block = r"encoder\.layer\.(\d)\."
    rules = [
        (r"embeddings\.word_embeddings\.weight", "stem.tokens.weight"),
        (r"embeddings\.positions", "stem.positions.weight"),
        (r"embeddings\.LayerNorm\.(.*)", r"stem.norm.\1"),
        (block + r"attention\.qkv\.(.*)", r"layer\1_attention.f.body.qkv.\2"),
        (block + r"attention\.output\.dense\.(.*)", r"layer\1_attention.f.body.out.\2"),
        (block + r"attention\.output\.LayerNorm\.(.*)", r"layer\1_attention.norm.\2"),
        (block + r"intermediate\.dense\.(.*)", r"layer\1_mlp.f.body.grow.\2"),
        (block + r"output\.dense\.(.*)", r"layer\1_mlp.f.body.shrink.\2"),
        (block + r"output\.LayerNorm\.(.*)", r"layer\1_mlp.norm.\2"),
        (r"lm_head\.dense\.(.*)", r"transform.dense.\1"),
        (r"lm_head\.layer_norm\.(.*)", r"transform.norm.\1"),
        (r"lm_head\.decoder\.(.*)", r"head.\1"),
    ]
    options: dict[str, Any] = {"width": 24, "depth": 3, "heads": 4, "vocabulary": 50, "context": 16}
    ours = rd.create_model("roberta_base", tied=tied, dtype=torch.float64, **options)
    load(ours, state, rules)
    assert (ours[-1].weight is ours[0].tokens.weight) == tied
    tokens = torch.randint(2, 50, (3, 11))  # 1 is padding there
    assert torch.allclose(ours(tokens), theirs(tokens).logits, rtol=1e-10, atol=1e-10)


@pytest.mark.reference
def test_mvit_is_that_of_torchvision():
    """Theirs is for videos: one picture of an image is the same network."""
    video = pytest.importorskip("torchvision.models.video.mvit", exc_type=ImportError)
    settings = []
    for layer, (width, heads, stride) in enumerate(
        [(12, 1, 4), (24, 2, 2), (24, 2, 2), (48, 4, 1), (48, 4, 1)]
    ):
        shrinks = layer in (1, 3)
        settings.append(
            video.MSBlockConfig(
                num_heads=heads,
                input_channels=width // 2 if shrinks else width,
                output_channels=width,
                kernel_q=[1, 3, 3] if shrinks else [],
                kernel_kv=[1, 3, 3],
                stride_q=[1, 2, 2] if shrinks else [],
                stride_kv=[1, stride, stride],
            )
        )
    theirs = video.MViT(
        spatial_size=(64, 64),
        temporal_size=1,
        block_setting=settings,
        residual_pool=False,
        residual_with_cls_embed=False,
        rel_pos_embed=False,
        proj_after_attn=True,
        num_classes=7,
        patch_embed_kernel=(1, 7, 7),
        patch_embed_stride=(1, 4, 4),
        patch_embed_padding=(0, 3, 3),
    )
    theirs = unsettle(theirs).eval()
    state = theirs.state_dict()
    places = [state.pop(f"pos_encoding.{kind}_pos") for kind in ("class", "spatial", "temporal")]
    state["positions"] = torch.cat((places[0][None], places[1] + places[2]))
    for key, value in state.items():
        if value.dim() == 5:
            state[key] = value[:, :, 0]
    block, shrink = r"blocks\.(\d)\.", r"blocks\.([13])\."
    attention = [
        (r"norm1\.(.*)", r"norm.\2"),
        (r"attn\.qkv\.(.*)", r"body.qkv.\2"),
        (r"attn\.project\.0\.(.*)", r"body.out.\2"),
        (r"attn\.pool_(.)\.pool\.(.*)", r"body.pool_\2.conv.\3"),
        (r"attn\.pool_(.)\.norm_act\.0\.(.*)", r"body.pool_\2.norm.\3"),
    ]
    rules = [
        (r"conv_proj\.(.*)", r"stem.patches.conv.\1"),
        (r"pos_encoding\.class_token", "stem.token.weight"),
        (r"positions", "stem.positions.weight"),
        *((shrink + theirs, rf"layer\1_attention.{ours}") for theirs, ours in attention),
        (shrink + r"project\.(.*)", r"layer\1_attention.shortcut.\2"),
        *((block + theirs, rf"layer\1_attention.f.{ours}") for theirs, ours in attention),
        (block + r"norm2\.(.*)", r"layer\1_mlp.f.norm.\2"),
        (block + r"mlp\.0\.(.*)", r"layer\1_mlp.f.body.grow.\2"),
        (block + r"mlp\.3\.(.*)", r"layer\1_mlp.f.body.shrink.\2"),
        (r"norm\.(.*)", r"head.norm.\1"),
        (r"head\.1\.(.*)", r"head.classes.\1"),
    ]
    ours = rd.create_model(
        "mvit_base",
        image_size=64,
        num_classes=7,
        width=12,
        heads=1,
        depths=(1, 2, 2),
        dtype=torch.float64,
    )
    load(ours, state, rules)
    x = torch.randn(3, 3, 64, 64).double()
    assert torch.allclose(ours(x), theirs(x[:, :, None]), rtol=1e-9, atol=1e-9)
