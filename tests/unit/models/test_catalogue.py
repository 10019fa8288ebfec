"""Models by name, and errors for wrong options and inputs."""

import pytest
import torch
from support.families import TEXT

import redivider as rd


def test_names():
    names = rd.list_models()
    assert len(names) == len(set(names)) == 54
    for name in (
        "revnet18",
        "resnet101",
        "vit_tiny",
        "rev_vit_giant",
        "rev_swin_giant",
        "rev_mvit_base",
        "llama_8b",
    ):
        assert name in names
    assert rd.list_models("rev_gpt_*") == [
        "rev_gpt_nano",
        "rev_gpt_small",
        "rev_gpt_medium",
        "rev_gpt_large",
    ]
    assert rd.list_models("nothing*") == []


@pytest.mark.slow
@pytest.mark.parametrize("name", rd.list_models())
def test_every_model_builds_without_memory(name):
    model = rd.create_model(name, device="meta", backward="checkpoint", arithmetic="fixed")
    assert isinstance(model, rd.Chain) and model.backward == "checkpoint"
    assert model.arithmetic.exact
    assert all(param.is_meta for param in model.parameters())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("revnat18", {}, r"there is no model 'revnat18'; did you mean 'revnet18'\?"),
        ("xyz", {}, r"no model 'xyz'; rd.list_models\(\) or `redivider models` lists all"),
        ("vit_small", {"imagesize": 32}, r"no option 'imagesize'; did you mean 'image_size'\?"),
        ("revnet18", {"qqq": 1}, r"no option 'qqq'; it has num_classes, image_size, .*"),
        ("vit_small", {"image_size": 30}, "30 is not divisible by patch_size 16"),
        ("rev_vit_small", {"width": 33}, "width 33 cannot be divided among 6 heads"),
        ("gpt_nano", {"heads": 5}, "width 384 cannot be divided among 5 heads"),
        ("gpt_nano", {"dropout": 1.0}, r"dropout must be a number in \[0, 1\), got 1.0"),
        ("gpt_nano", {"vocabulary": 0}, "vocabulary must be a whole number, 1 or more, got 0"),
        ("gpt_nano", {"drop_path": "0.1"}, "drop_path must be a number in .* got '0.1'"),
        ("llama_1b", {"kv_heads": 5}, "32 heads cannot share 5 heads of keys and values"),
        ("llama_1b", {"width": 96}, "head width 3 is odd.* make width 96 a multiple of 64"),
        ("llama_1b", {"rope_factor": 0.5}, "rope_factor must be a number, 1 or more, got 0.5"),
        ("llama_1b", {"rope_theta": "1e4"}, "rope_theta must be a number, .* got '1e4'"),
        ("gpt_nano", {"tied": "no"}, "tied must be True or False, got 'no'"),
        ("revnet18", {"image_size": True}, "image_size must be a whole number, .* got True"),
        ("revnet18", {"depths": (2, 0)}, r"depths must be a tuple, 1 or more .* got \(2, 0\)"),
        ("revnet18", {"depths": 2}, "depths must be a tuple, 1 or more .* got 2"),
        ("revnet18", {"bottleneck": "no"}, "bottleneck must be True or False, got 'no'"),
        ("vit", {}, "there is no model 'vit'; did you mean 'vit_"),
        (18, {}, "there is no model 18; did you mean 'resnet18'"),
        ("revnet18", {"width": 2.5}, "width must be a whole number, 1 or more, got 2.5"),
        ("revnet18", {"backward": "rev"}, "backward must be one of 'store', .* got 'rev'"),
    ],
)
def test_what_cannot_be_says_why(name, options, message):
    with pytest.raises(ValueError, match=message):
        rd.create_model(name, **options)


def test_inputs_that_do_not_fit_say_so():
    vit = rd.create_model("vit_tiny", image_size=32, patch_size=8, depth=1)
    with pytest.raises(
        ValueError, match=r"made for batches of images of 3 x 32 x 32, got \(2, 3, 16"
    ):
        vit(torch.randn(2, 3, 16, 16))
    for name in ("gpt_nano", "llama_tiny"):
        model = rd.create_model(name, **{**TEXT, "depth": 1})
        with pytest.raises(ValueError, match="17 tokens exceed the limit of 16"):
            model(torch.zeros(1, 17, dtype=torch.long))
        with pytest.raises(ValueError, match=r"must have shape \(batch, tokens\), got 1 dim"):
            model(torch.zeros(8, dtype=torch.long))


def test_numbers_of_other_libraries_are_numbers():
    numpy = pytest.importorskip("numpy")
    model = rd.create_model("revnet18", depths=(1,), width=4, num_classes=numpy.int64(7))
    assert model[-1].classes.out_features == 7


def test_a_device_is_where_the_model_goes(monkeypatch):
    seen = []

    def to(self, *args, **kwargs):
        seen.append((args, kwargs))
        return self

    monkeypatch.setattr(torch.nn.Module, "to", to)
    rd.create_model("revnet18", depths=(1,), width=4, device="cpu:0")
    assert ((torch.device("cpu:0"),), {}) in seen


def test_device_and_dtype():
    model = rd.create_model("revnet18", depths=(1, 1), width=4, dtype=torch.bfloat16)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    torch.set_default_dtype(torch.float64)
    try:
        double = rd.create_model("revnet18", depths=(1, 1), width=4)
    finally:
        torch.set_default_dtype(torch.float32)
    single = rd.create_model("revnet18", depths=(1, 1), width=4)
    for key, value in double.state_dict().items():
        assert torch.equal(value, single.state_dict()[key].to(value.dtype)), key
    assert double[0].conv.weight.dtype == torch.float64
    with torch.device("meta"):
        assert all(param.is_meta for param in rd.create_model("revnet18").parameters())
