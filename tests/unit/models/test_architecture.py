"""Reversible networks equal plain functions that follow the papers, without units or chains."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.families import IMAGES, LLAMA, PATCHES, TEXT, is_text
from support.layers import explicit_attention, layer_norm, linear, mlp, unsettled

import redivider as rd
from redivider.models.parts import DropPath


def norm(state, key, x):
    names = ("running_mean", "running_var", "weight", "bias")
    mean, var, weight, bias = (state[f"{key}.norm.{name}"].view(1, -1, 1, 1) for name in names)
    return (x - mean) / (var + 1e-5).sqrt() * weight + bias


def conv_norm(state, key, x, stride=1):
    weight = state[f"{key}.conv.weight"]
    pad = weight.shape[-1] // 2
    y = F.conv2d(x, weight, state.get(f"{key}.conv.bias"), stride=stride, padding=pad)
    return norm(state, key, y)


def revnet(state, x, depths, bottleneck, small):
    y = conv_norm(state, "stem", x, 1 if small else 2).relu()
    y = y if small else F.max_pool2d(y, 2)
    a, b = y[:, : y.shape[1] // 2], y[:, y.shape[1] // 2 :]

    def branch(key, x, stride=1):  # R, with its last ReLU
        for i in range(3 if bottleneck else 2):
            strided = i == (1 if bottleneck else 0)
            x = conv_norm(state, f"{key}.{i}", x, stride if strided else 1).relu()
        return x

    for group, depth in enumerate(depths):
        for index in range(depth):
            key, stride = f"block{group + 1}_{index + 1}", 2 if group and not index else 1
            if bottleneck and not index:
                p = conv_norm(state, f"{key}.shortcut_a", a, stride)
                q = conv_norm(state, f"{key}.shortcut_b", b, stride)
                a, b = branch(f"{key}.f", a, stride) + q, p
            elif stride == 2:
                c = conv_norm(state, f"{key}.shrink", a, 2).relu()
                q = conv_norm(state, f"{key}.shortcut", b, 2)
                a, b = conv_norm(state, f"{key}.f", c).relu() + q, c
            else:
                a, b = b + branch(f"{key}.f", a), a
    pooled = torch.cat((a, b), 1).mean((2, 3))
    return pooled @ state["head.classes.weight"].T + state["head.classes.bias"]


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize(("bottleneck", "bias"), [(False, True), (True, True), (True, False)])
def test_revnet(bottleneck, bias, small):
    depths, size = (2, 3, 1), 8 if small else 96
    options = {**IMAGES, "width": 4, "image_size": size, "depths": depths, "conv_bias": bias}
    model = unsettled("revnet50" if bottleneck else "revnet18", **options)
    x = torch.randn(3, 1, size, size).double()
    expected = revnet(model.state_dict(), x, depths, bottleneck, small)
    assert torch.allclose(model(x), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "revnet18", "revnet50"])
def test_biases_of_convolutions_change_nothing_in_training(name):
    options = {**IMAGES, "width": 4, "image_size": 16}
    model = unsettled(name, **options).train()
    plain = unsettled(name, **options, conv_bias=False).train()
    state = plain.state_dict()
    left_out = model.state_dict().keys() - state.keys()
    assert left_out and all(key.endswith("conv.bias") for key in left_out)
    plain.load_state_dict({key: model.state_dict()[key] for key in state})
    x = torch.randn(6, 1, 16, 16).double()
    factors = torch.randn_like(model(x))
    for net in (model, plain):
        (net(x) * factors).sum().backward()
    params = dict(model.named_parameters())
    for key, param in plain.named_parameters():
        assert torch.allclose(param.grad, params[key].grad, rtol=1e-8, atol=1e-8), key


def attention(state, key, x, heads, eps, causal):
    x = layer_norm(state, f"{key}.norm", x, eps)
    batch, tokens, width = x.shape
    q, k, v = linear(state, f"{key}.body.qkv", x).chunk(3, -1)
    q, k, v = (x.view(batch, tokens, heads, -1).transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) / (width // heads) ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf)
    y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, width)
    return linear(state, f"{key}.body.out", y)


def layers(state, x, depth, heads, eps, causal, approximate):
    x1 = x2 = x
    for i in range(depth):
        x1 = x1 + attention(state, f"layer{i}_attention.f", x2, heads, eps, causal)
        x2 = x2 + mlp(state, f"layer{i}_mlp.f", x1, eps, approximate)
    return x1, x2


def test_rev_vit():
    model = unsettled("rev_vit_tiny", **{**PATCHES, "depth": 3})
    state, x = model.state_dict(), torch.randn(3, 1, 8, 8).double()
    patches = F.unfold(x, 2, stride=2).transpose(1, 2)
    tokens = patches @ state["stem.patches.conv.weight"].flatten(1).T
    tokens = tokens + state["stem.patches.conv.bias"] + state["stem.positions.weight"]
    streams = layers(state, tokens, 3, 2, 1e-6, False, "none")
    pooled = layer_norm(state, "head.norm", torch.cat(streams[::-1], -1).mean(1), 1e-6)
    other = layer_norm(state, "head.norm", torch.cat(streams, -1).mean(1), 1e-6)
    matches = [torch.allclose(model(x), linear(state, "head.classes", y)) for y in (pooled, other)]
    assert matches == [True, False], "the stream that was changed last comes first"


def test_rev_gpt():
    model = unsettled("rev_gpt_nano", **{**TEXT, "depth": 3})
    state, tokens = model.state_dict(), torch.randint(256, (3, 11))
    x = state["stem.tokens.weight"][tokens] + state["stem.positions.weight"][:11]
    one, other = layers(state, x, 3, 2, 1e-5, True, "tanh")
    y = layer_norm(state, "norm.norm", (one + other) / 2, 1e-5) @ state["head.weight"].T
    assert torch.allclose(model(tokens), y, rtol=1e-9, atol=1e-9)


def rms_norm(state, key, x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * state[f"{key}.weight"]


def turn(x):
    """Rotate queries or keys of width 4 as complex numbers; 8 divides the second's frequency."""
    a, b = x.chunk(2, -1)
    slow = 500000**-0.5
    turns = 8192 * slow / (2 * math.pi)  # in the trained context: between 1 and 4
    kept = (turns - 1) / 3
    frequencies = torch.tensor([1.0, slow * (kept + (1 - kept) / 8)], dtype=torch.float64)
    angles = torch.arange(x.shape[-2])[:, None] * frequencies
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), -1)


def grouped_attention(state, key, x):
    """Attention of 4 heads of width 4, in which 2 heads share their keys and values."""
    x = rms_norm(state, f"{key}.norm", x)
    q, k, v = (x @ state[f"{key}.body.qkv.weight"].T).split((16, 8, 8), -1)
    q, k, v = (x.unflatten(-1, (-1, 4)).transpose(1, 2) for x in (q, k, v))
    k, v = (x[:, [0, 0, 1, 1]] for x in (k, v))
    y = explicit_attention(turn(q), turn(k), v, causal=True)
    return y.transpose(1, 2).flatten(2) @ state[f"{key}.body.out.weight"].T


def swiglu(state, key, x):
    gate, grow, shrink = (
        state[f"{key}.body.{name}.weight"].T for name in ("gate", "grow", "shrink")
    )
    x = rms_norm(state, f"{key}.norm", x)
    return ((x @ gate).sigmoid() * (x @ gate) * (x @ grow)) @ shrink


def test_rev_llama():
    model = unsettled("rev_llama_tiny", **{**LLAMA, "depth": 3})
    state, tokens = model.state_dict(), torch.randint(256, (3, 11))
    x1 = x2 = state["stem.tokens.weight"][tokens]
    for i in range(3):
        x1 = x1 + grouped_attention(state, f"layer{i}_attention.f", x2)
        x2 = x2 + swiglu(state, f"layer{i}_mlp.f", x1)
    y = rms_norm(state, "norm.norm", (x1 + x2) / 2) @ state["head.weight"].T
    torch.testing.assert_close(model(tokens), y, rtol=1e-5, atol=1e-5)  # angles are float32


def test_drop_path_drops_whole_samples_and_makes_up_for_them():
    drop = DropPath(0.25)
    y = drop(torch.ones(4000, 3, 2))
    assert y.unique().tolist() == pytest.approx([0, 4 / 3])
    assert (y == y[:, :1, :1]).all(), "a sample is dropped whole"
    assert y.mean().item() == pytest.approx(1.0, abs=0.05)
    assert torch.equal(drop.eval()(y), y)
    assert torch.equal(DropPath(0.0)(y), y)


def test_drop_path_rises_over_the_layers():
    model = rd.create_model("rev_vit_tiny", depth=5, drop_path=0.4, image_size=32)
    couplings: list[Any] = [unit for unit in model if isinstance(unit, rd.Coupling)]
    kept = [coupling.f.drop_path.keep.item() for coupling in couplings]
    assert kept == pytest.approx([1, 1, 0.9, 0.9, 0.8, 0.8, 0.7, 0.7, 0.6, 0.6])


def test_rev_roberta():
    model = unsettled("rev_roberta_base", **{**TEXT, "depth": 3})
    state, tokens = model.state_dict(), torch.randint(256, (3, 11))
    x = state["stem.tokens.weight"][tokens] + state["stem.positions.weight"][:11]
    one, other = layers(state, layer_norm(state, "stem.norm", x, 1e-5), 3, 2, 1e-5, False, "none")
    y = layer_norm(state, "transform.norm_streams", (one + other) / 2, 1e-5)
    y = layer_norm(state, "transform.norm", F.gelu(linear(state, "transform.dense", y)), 1e-5)
    assert torch.allclose(model(tokens), linear(state, "head", y), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny",
        "rev_vit_tiny",
        "gpt_nano",
        "rev_gpt_nano",
        "llama_tiny",
        "rev_llama_tiny",
        "roberta_base",
        "rev_roberta_base",
    ],
)
def test_dropout_is_everywhere_it_should_be_and_only_in_training(name):
    options = {**(TEXT if is_text(name) else PATCHES), "depth": 2}
    options |= {"dropout": 0.5, "attention_dropout": 0.5, "drop_path": 0.0}
    model = rd.create_model(name, **options)
    x = torch.randint(256, (2, 16)) if is_text(name) else torch.randn(2, 1, 8, 8)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))
    tokens = torch.randn(2, 9, 16)
    stem, first = model[0], model[1].f
    assert stem.dropout.p == 0.5
    for part in (stem.dropout, first.dropout, model[2].f.dropout, first.body):
        part.train()
        assert not torch.equal(part(tokens), part(tokens)), part
        part.eval()
        assert torch.equal(part(tokens), part(tokens)), part
    if "llama" not in name:
        inner = model[2].f.body.dropout
        assert inner.p == (0.0 if is_text(name) else 0.5)  # GPT-2 and RoBERTa have none there
