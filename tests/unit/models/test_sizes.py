"""Counts of parameters, FLOPs and units equal the published ones."""

import pytest
import torch
from support.families import EACH
from support.llama import CONFIGURATIONS
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import redivider as rd
from redivider.models.catalogue import FAMILIES, resolve
from redivider.models.summary import summarise, summarise_by_layer, summarise_units

pytestmark = pytest.mark.slow


def num_parameters(name, **options):
    model = rd.create_model(name, device="meta", **options)
    return sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize(
    ("name", "imagenet", "cifar10"),
    [  # of PETRA's own networks
        ("revnet18", 12_215_912, 11_185_802),
        ("revnet34", 22_327_784, 21_297_674),
        ("revnet50", 30_421_608, 26_350_218),
        ("revnet101", 49_439_848, 45_368_458),
        ("resnet18", 11_694_312, 11_178_762),
        ("resnet50", 25_583_592, 23_547_402),
        # torchvision's 21,797,672 and 44,549,160, and the biases of all convolutions
        ("resnet34", 21_797_672 + 8_512, 21_290_634),
        ("resnet101", 44_549_160 + 52_672, 42_565_642),
    ],
)
def test_residual_networks(name, imagenet, cifar10):
    assert num_parameters(name) == imagenet
    assert num_parameters(name, image_size=32, num_classes=10) == cifar10


@pytest.mark.parametrize(("size", "published"), [(18, 11_689_512), (50, 25_557_032)])
def test_without_biases_resnets_are_those_of_torchvision(size, published):
    assert num_parameters(f"resnet{size}", conv_bias=False) == published


@pytest.mark.parametrize(
    ("size", "plain"),
    [  # timm's, patches of 16 (huge and giant: 14), 224 pixels, 1,000 classes
        ("tiny", 5_717_416),
        ("small", 22_050_664),
        ("base", 86_567_656),
        ("large", 304_326_632),
        ("huge", 632_045_800),
        ("giant", 1_012_611_432),
    ],
)
def test_vision_transformers(size, plain):
    assert num_parameters(f"vit_{size}") == plain
    width = resolve(f"vit_{size}")[1].width
    # no class token and no position of it; a norm and a head twice as wide
    assert num_parameters(f"rev_vit_{size}") == plain - 2 * width + 2 * width + 1000 * width


@pytest.mark.parametrize(
    ("size", "tied"),
    [("small", 124_439_808), ("medium", 354_823_168), ("large", 774_030_080)],  # GPT-2's
)
def test_language_models(size, tied):
    for prefix in ("gpt", "rev_gpt"):
        name = f"{prefix}_{size}"
        assert num_parameters(name, tied=True) == tied
        assert num_parameters(name) == tied + 50_257 * resolve(name)[1].width
        assert num_parameters(name, vocabulary=256) < tied


@pytest.mark.parametrize(
    ("size", "plain", "published"),
    [  # published: Swin's own up to large; millions of the reversible ones, as minREV builds them
        ("tiny", 28_288_354, 30.2),
        ("small", 49_606_258, 51.5),
        ("base", 87_768_224, 90.9),
        ("large", 196_532_476, 202.7),
        ("huge", 657_630_648, 676),
        ("giant", 2_598_018_248, 2640),
    ],
)
def test_swin(size, plain, published):
    assert num_parameters(f"swin_{size}") == plain
    width = resolve(f"swin_{size}")[1].width
    fusions = sum(6 * c**2 + 3 * c for c in (width, 2 * width, 4 * width))
    head = 8 * width * (1000 + 2)
    assert num_parameters(f"rev_swin_{size}") == plain + fusions + head
    assert (plain + fusions + head) / 1e6 == pytest.approx(published, rel=0.002)


def test_mvit():
    assert num_parameters("mvit_base") == 35_045_224
    fusions = sum(6 * c**2 + 3 * c for c in (96, 192, 384))
    # no class token and no position of it; a norm and a head twice as wide
    assert num_parameters("rev_mvit_base") == 35_045_224 + fusions - 2 * 96 + 768 * (1000 + 2)


@pytest.mark.parametrize(
    ("size", "published"),
    [("1b", 1_235_814_400), ("3b", 3_212_749_824), ("8b", 8_030_261_248)],
)
def test_llama(size, published):
    """transformers builds as many from the published configuration."""
    transformers = pytest.importorskip("transformers")
    options = resolve(f"llama_{size}")[1]
    config = transformers.LlamaConfig(**CONFIGURATIONS[size])
    with torch.device("meta"):
        theirs = transformers.LlamaForCausalLM(config)
    assert sum(param.numel() for param in theirs.parameters()) == published
    assert options.context == config.max_position_embeddings
    for prefix in ("llama", "rev_llama"):
        assert num_parameters(f"{prefix}_{size}") == published
    assert options.tied == config.tie_word_embeddings


@pytest.mark.parametrize(("size", "published"), [("base", 124_697_433), ("large", 355_412_057)])
def test_masked_language_models(size, published):
    """transformers' RobertaForMaskedLM has two places more, and a type of token."""
    width = resolve(f"roberta_{size}")[1].width
    assert num_parameters(f"roberta_{size}", tied=True) == published - 3 * width
    assert num_parameters(f"rev_roberta_{size}", tied=True) == published - 3 * width + 2 * width


@pytest.mark.parametrize(
    ("name", "gigamacs"), [("revnet18", 1.93), ("revnet34", 3.78), ("revnet50", 4.57)]
)
def test_work_of_revnets_is_the_published(name, gigamacs):
    assert summarise(name, also=()).flops / 2e9 == pytest.approx(gigamacs, abs=0.006)


@pytest.mark.parametrize(("name", "stages"), [("revnet18", 10), ("revnet34", 18), ("revnet50", 18)])
def test_a_revnet_has_the_stages_of_the_paper(name, stages):
    model = rd.create_model(name, device="meta")
    assert len(list(model.units())) == stages
    junctions = sum(not isinstance(unit, rd.Coupling) for unit in model)
    assert junctions == (6 if name == "revnet50" else 5)


@pytest.mark.parametrize(
    ("name", "options"), [case for case in EACH if case[0].startswith(("rev", "resnet18", "vit"))]
)
def test_counting_on_the_meta_device_is_counting_for_real(name, options):
    options = {key: value for key, value in options.items() if "drop" not in key}
    summary = summarise(name, batch=4, also=("checkpoint", "reverse"), **options)
    model = rd.create_model(name, **options)
    x = resolve(name, **options)[1].example(4)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(x)  # the CPU's own kernel is not in torch's table
    assert summary.parameters == num_parameters(name, **options)
    assert ("reverse" in summary.kept) == name.startswith("rev")
    # The CPU has no fused kernel of attention with a bias that learns: tests/gpu does that.
    for model.backward, kept in () if "swin" in name else summary.kept.items():
        assert kept == pytest.approx(rd.measure_memory(model, x).held / 4, rel=0.01)
    assert summary.flops == counter.get_total_flops() / 4


@pytest.mark.parametrize(
    "family",
    [family for family in FAMILIES if family.prefix.startswith(("rev", "resnet"))],
    ids=lambda family: family.prefix,
)
def test_a_copy_with_few_layers_tells_what_the_whole_costs(family):
    names = [f"{family.prefix}{size}" for size in family.sizes]
    deep = [name for name in names if sum(depths_of(name)) >= 6]
    for name in {deep[0], *(name for name in deep if name.endswith("50"))}:  # with bottlenecks
        assert summarise_by_layer(name) == summarise(name)


def depths_of(name):
    options = resolve(name)[1]
    return getattr(options, "depths", None) or (options.depth,)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["revnet18", "rev_vit_tiny"])
def test_units_cost_what_the_model_costs(name):
    units, whole = summarise_units(name), summarise(name, also=())
    assert sum(unit.weights for unit in units) == 4 * whole.parameters
    assert sum(unit.flops for unit in units) == pytest.approx(whole.flops)
    assert sum(unit.graph for unit in units) == pytest.approx(whole.kept["store"], rel=0.05)
    model = rd.create_model(name, device="meta")
    is_coupling = [isinstance(unit, rd.Coupling) for unit in model]
    assert [unit.kept == 0 for unit in units] == is_coupling
