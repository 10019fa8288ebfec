"""Models without couplings equal those of other libraries: same weights, same output.

transformers installs anywhere. timm and torchvision ask for a torch build of their own, so where
they are missing their tests skip; docs/models.md says when they were run.
"""

from typing import Any

import pytest
import torch
from support.llama import rope_parameters

import redivider as rd

pytestmark = pytest.mark.slow


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
    ours = rd.create_model(
        name,
        width=8,
        depths=(2, 1, 2),
        num_classes=7,
        dtype=torch.float64,
        weights=theirs.state_dict(),
    ).train(training)
    x = torch.randn(3, 3, 96, 96).double()
    assert torch.allclose(ours(x), theirs(x).logits, rtol=1e-10, atol=1e-10)


@pytest.mark.reference
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("size", [18, 34, 50, 101])
def test_resnet_is_that_of_torchvision(size, training):
    torchvision = pytest.importorskip("torchvision", exc_type=ImportError)
    theirs = unsettle(getattr(torchvision.models, f"resnet{size}")()).train(training)
    ours = rd.create_model(f"resnet{size}", dtype=torch.float64, weights=theirs.state_dict())
    ours.train(training)
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
        weights=theirs.state_dict(),
    )
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
        small = rd.create_model(
            f"vit_{size}",
            image_size=64,
            num_classes=7,
            depth=3,
            dtype=torch.float64,
            weights=theirs.state_dict(),
        )
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
    options: dict[str, Any] = {"width": 24, "depth": 3, "heads": 4, "vocabulary": 50, "context": 16}
    options |= {"tied": tied, "weights": theirs.state_dict()}
    ours = rd.create_model("gpt_nano", dtype=torch.float64, **options)
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
    ours = rd.create_model("llama_tiny", dtype=dtype, weights=theirs.state_dict(), **options)
    assert (ours[-1].weight is ours[0].tokens.weight) == tied
    tokens = torch.randint(50, (3, 61))
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    logits = ours(tokens), theirs(tokens).logits
    torch.testing.assert_close(*logits, rtol=tolerance, atol=tolerance)
    for y in logits:
        (y * torch.linspace(-1, 1, y.numel(), dtype=dtype).view_as(y)).sum().backward()
    gradients: Any = {
        key: param.grad for key, param in theirs.named_parameters(remove_duplicate=False)
    }
    expected = rd.create_model("llama_tiny", dtype=dtype, weights=gradients, **options)
    for key, param in ours.named_parameters():
        assert param.grad is not None, key
        gradient = expected.get_parameter(key).detach()
        assert (param.grad - gradient).norm() <= tolerance * gradient.norm(), key


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
    options |= {"depths": (2, 3, 1), "num_classes": 7, "weights": theirs.state_dict()}
    ours = rd.create_model("swin_tiny", dtype=torch.float64, **options)
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
    options: dict[str, Any] = {"width": 24, "depth": 3, "heads": 4, "vocabulary": 50, "context": 16}
    options |= {"tied": tied, "weights": theirs.state_dict()}
    ours = rd.create_model("roberta_base", dtype=torch.float64, **options)
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
    ours = rd.create_model(
        "mvit_base",
        image_size=64,
        num_classes=7,
        width=12,
        heads=1,
        depths=(1, 2, 2),
        dtype=torch.float64,
        weights=theirs.state_dict(),
    )
    x = torch.randn(3, 3, 64, 64).double()
    assert torch.allclose(ours(x), theirs(x[:, :, None]), rtol=1e-9, atol=1e-9)
