"""First weights depend on the seed and the unit's name alone."""

from typing import Any

import pytest
import torch
from support.families import EACH, REVERSIBLE, is_text
from torch import nn

import redivider as rd
from redivider.initial import materialise
from redivider.models.catalogue import resolve


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), REVERSIBLE)
def test_a_subset_of_units_gets_the_weights_of_the_whole(name, options):
    whole = rd.create_model(name, seed=3, **options)
    family, resolved = resolve(name, **options)
    torch.manual_seed(5)  # the caller's generator has no part in it
    with torch.device("meta"):
        units = family.units(resolved)
    subset = dict(list(units.items())[1::2])
    assert all(param.is_meta for unit in subset.values() for param in unit.parameters())
    state = torch.get_rng_state()
    materialise(subset, seed=3)
    assert torch.equal(state, torch.get_rng_state())
    for key, unit in subset.items():
        for inner, tensor in unit.state_dict().items():
            assert torch.equal(tensor, whole.state_dict()[f"{key}.{inner}"]), (key, inner)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), REVERSIBLE)
def test_another_seed_gives_other_weights_and_units_differ(name, options):
    one, same, other = (rd.create_model(name, seed=seed, **options) for seed in (0, 0, 1))
    for key, param in one.named_parameters():
        assert torch.equal(param, same.get_parameter(key))
        constant = param.min() == param.max()
        assert constant or not torch.equal(param, other.get_parameter(key)), key
        assert param.isfinite().all()
    drawn = [param.flatten()[:4] for param in one.parameters() if param.min() != param.max()]
    assert len({tuple(row.tolist()) for row in drawn}) == len(drawn), "two have the same numbers"


def test_depth_does_not_change_the_units_that_stay():
    options = dict(EACH)["rev_vit_tiny"]
    short, long = (rd.create_model("rev_vit_tiny", **{**options, "depth": d}) for d in (2, 5))
    for key, tensor in short.state_dict().items():
        assert torch.equal(tensor, long.state_dict()[key]), key


def test_a_tie_outlives_the_meta_device():
    options = dict(EACH)["gpt_nano"]
    model = rd.create_model("gpt_nano", tied=True, **options)
    assert model[-1].weight is model[0].tokens.weight
    assert not model[-1].weight.is_meta
    with pytest.raises(ValueError, match=r"'head.weight' of stage 1 is also 'stem.tokens.weight'"):
        rd.Pipeline(
            model, stages=2, loss=nn.MSELoss(), optimizer=lambda s: torch.optim.SGD(s.parameters())
        )


def test_weights_without_a_way_to_set_them_are_refused():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

    with pytest.raises(
        rd.UnitError, match=r"unit a: inner \(Bare\) has weights .* reset_parameters"
    ):
        unit = nn.Module()
        unit.inner = Bare()
        materialise({"a": unit}, seed=0)


def test_units_of_a_chain_and_modules_of_torch():
    model = rd.create_model("rev_gpt_nano", device="meta", **dict(EACH)["rev_gpt_nano"])
    materialise(model, seed=3)
    whole = rd.create_model("rev_gpt_nano", seed=3, **dict(EACH)["rev_gpt_nano"])
    assert all(torch.equal(v, whole.state_dict()[k]) for k, v in model.state_dict().items())
    attention = nn.MultiheadAttention(4, 2)
    materialise({"a": attention}, seed=0)
    assert attention.in_proj_bias.eq(0).all()
    with pytest.raises(TypeError, match="seed must be a whole number, got None"):
        rd.create_model("revnet18", seed=None)  # type: ignore[arg-type]


def test_a_parent_may_correct_what_its_children_drew():
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = nn.Linear(2, 2)

        def reset_parameters(self):
            nn.init.constant_(self.child.weight, 7)

    parent = Parent()
    materialise({"a": parent}, seed=0)
    assert parent.child.weight.eq(7).all() and not parent.child.bias.eq(7).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pattern", "std"),
    [
        ("vit_small", "head.classes.weight", 0.02),
        ("vit_small", "layer1_mlp.f.body.grow.weight", (2 / (384 + 1536)) ** 0.5),
        ("vit_small", "stem.patches.conv.weight", (2 / (768 + 384)) ** 0.5),
        ("rev_vit_small", "stem.positions.weight", 0.02),
        ("rev_vit_small", "head.classes.weight", 0.02),
        ("rev_gpt_small", "stem.tokens.weight", 0.02),
        ("rev_gpt_small", "layer0_attention.f.body.qkv.weight", 0.02),
        ("rev_gpt_small", "layer0_attention.f.body.out.weight", 0.02 / 4**0.5),
        ("gpt_small", "layer1_mlp.f.body.shrink.weight", 0.02 / 4**0.5),
        ("gpt_small", "head.weight", 0.02),
        ("llama_tiny", "layer0_attention.f.body.qkv.weight", 0.02),
        ("rev_llama_tiny", "layer1_attention.f.body.out.weight", 0.02 / 4**0.5),
        ("rev_llama_tiny", "layer0_mlp.f.body.gate.weight", 0.02),
        ("llama_tiny", "layer0_mlp.f.body.shrink.weight", 0.02 / 4**0.5),
        ("rev_swin_tiny", "layer0_attention.f.body.qkv.weight", 0.02),
        ("rev_swin_tiny", "layer1_attention.f.body.bias.table", 0.02),
        ("rev_swin_tiny", "merge1.fuse.mix.weight", 0.02),
        ("swin_tiny", "merge1.reduce.weight", 0.02),
        ("swin_tiny", "layer1_mlp.f.body.shrink.weight", 0.02),
        ("mvit_base", "layer1_attention.body.qkv.weight", 0.02),
        ("mvit_base", "stem.token.weight", 0.02),
        ("rev_mvit_base", "layer0_mlp.f.body.grow.weight", 0.02),
        ("rev_roberta_base", "layer1_attention.f.body.out.weight", 0.02),
        ("roberta_base", "transform.dense.weight", 0.02),
        ("rev_roberta_base", "head.bias", 0.0),
        ("rev_vit_small", "layer1_mlp.f.body.grow.bias", 0.0),
        ("rev_vit_small", "stem.patches.conv.bias", 0.0),
    ],
)
def test_how_large_first_weights_are(name, pattern, std):
    has_depths = "swin" in name or "mvit" in name
    options: dict[str, Any] = {"depths": (1, 1)} if has_depths else {"depth": 2}
    options |= {"vocabulary": 999} if is_text(name) else {}
    param = rd.create_model(name, **options).get_parameter(pattern)
    assert param.std().item() == pytest.approx(std, rel=0.05 if len(param) > 96 else 0.2)
