"""Swin and MViT equal plain functions without windows, units or chains."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.families import IMAGES, MVIT, SWIN
from support.layers import layer_norm, linear, mlp, unsettled
from support.oracle import gradients, weigh, worst_error

import redivider as rd
from redivider.models.mvit import PooledAttention, on_map
from redivider.models.swin import WindowAttention


def attend(q, k, v, heads, bias=0.0):
    """Attend in (batch, tokens, width), head by head; `bias` is (heads, tokens, tokens)."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def window_bias(table, side, window, shift):
    """Return (heads, tokens, tokens) for all pairs of a map; -inf where they do not attend."""
    num = side * side
    bias = torch.full((table.shape[1], num, num), -torch.inf, dtype=table.dtype)
    for p in range(num):
        for q in range(num):
            (i, j), (k, m) = divmod(p, side), divmod(q, side)
            if (i < shift) != (k < shift) or (j < shift) != (m < shift):
                continue  # from opposite edges
            i, j, k, m = ((x - shift) % side for x in (i, j, k, m))
            if i // window == k // window and j // window == m // window:
                row, column = i - k + window - 1, j - m + window - 1
                bias[:, p, q] = table[row * (2 * window - 1) + column]
    return bias


def window_attention(state, key, x, heads, window, shift):
    side = x.shape[1]
    bias = window_bias(state[f"{key}.bias.table"].view(-1, heads), side, window, shift)
    q, k, v = linear(state, f"{key}.qkv", x.flatten(1, 2)).chunk(3, -1)
    return linear(state, f"{key}.out", attend(q, k, v, heads, bias)).view_as(x)


def fuse(state, key, a, b):
    return linear(
        state, f"{key}.shrink", F.gelu(linear(state, f"{key}.mix", torch.cat((a, b), -1)))
    )


def merge(state, key, x):
    four = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
    x = layer_norm(state, f"{key}.norm", torch.cat(four, -1), 1e-5)
    return x @ state[f"{key}.reduce.weight"].T


@pytest.mark.slow
@pytest.mark.parametrize(("window", "shift"), [(4, 2), (2, 1), (8, 0), (5, 2)])
def test_rev_swin(window, shift):
    size = 10 if window == 5 else 8
    options = {**SWIN, "depths": (3, 2), "window": window, "image_size": size}
    model = unsettled("rev_swin_tiny", **options)
    assert [model[n].f.body.shift for n in (1, 3, 5)] == [0, shift, 0]
    state, x = model.state_dict(), torch.randn(3, 1, size, size).double()
    tokens = x.permute(0, 2, 3, 1) @ state["stem.patches.conv.weight"].flatten(1).T
    y = layer_norm(state, "stem.norm", tokens + state["stem.patches.conv.bias"], 1e-5)
    x1, x2, layer = y, y, 0
    for stage, depth in enumerate((3, 2)):
        if stage:
            y = merge(state, "merge1.merge", fuse(state, "merge1.fuse", x2, x1))
        side, x1, x2 = y.shape[1], y, y
        for index in range(depth):
            here = min(window, side)
            shift = here // 2 if index % 2 and here < side else 0
            key = f"layer{layer}_attention.f"
            x1 = x1 + window_attention(
                state,
                f"{key}.body",
                layer_norm(state, f"{key}.norm", x2, 1e-5),
                2 * 2**stage,
                here,
                shift,
            )
            x2 = x2 + mlp(state, f"layer{layer}_mlp.f", x1, 1e-5, "none")
            layer += 1
    both = layer_norm(state, "head.norm", torch.cat((x2, x1), -1), 1e-5)
    expected = linear(state, "head.classes", both.mean((1, 2)))
    assert torch.allclose(model(x), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shift", [0, 2])
def test_gradients_of_attention_in_windows(shift):
    """Also that of the offset table, which fused kernels may not compute."""
    attention = WindowAttention(8, 2, side=8, window=4, shift=shift).double()
    state = dict(attention.named_parameters())
    x = torch.randn(3, 8, 8, 8).double().requires_grad_()
    wanted = [x, *state.values()]
    named = {f"it.{key}": param for key, param in state.items()}
    outputs = attention(x), window_attention(named, "it", x, 2, 4, shift)
    weights = torch.randn_like(outputs[0])
    ours, plain = (torch.autograd.grad((y * weights).sum(), wanted) for y in outputs)
    for one, other in zip(ours, plain, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-10)


DROPS = {"dropout": 0.0, "attention_dropout": 0.0, "drop_path": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["swin_tiny", "rev_swin_tiny", "mvit_base", "rev_mvit_base"])
def test_dropout_is_everywhere_it_should_be_and_only_in_training(name):
    options: dict[str, Any] = {**(SWIN if "swin" in name else MVIT), "depths": (2, 2)}
    x = torch.randn(2, 1, 8, 8)

    def changes(part, inputs):
        part.train()
        is_random = not torch.equal(part(inputs), part(inputs))
        part.eval()
        assert torch.equal(part(inputs), part(inputs))
        return is_random

    model = rd.create_model(name, **{**options, **DROPS})
    assert not changes(model, x)
    model = rd.create_model(name, **{**options, **DROPS, "attention_dropout": 0.5})
    bodies: list[Any] = [part for part in model.modules() if isinstance(part, PooledAttention)]
    bodies += [part for part in model.modules() if isinstance(part, WindowAttention)]
    assert [part.dropout for part in bodies] == [0.5] * 4 and changes(model, x)
    tokens = torch.randn(2, 8, 8, 8) if "swin" in name else torch.randn(2, 65, 8)
    tokens = tokens if "swin" in name or not name.startswith("rev") else tokens[:, 1:]
    assert changes(bodies[0], tokens)
    model = rd.create_model(name, **{**options, **DROPS, "dropout": 0.5})
    parts = [part for part in model.modules() if isinstance(part, torch.nn.Dropout)]
    assert len(parts) == 1 + 4 + 2 * 4  # stem, attention, inside of the MLP and after it
    assert all(part.p == 0.5 for part in parts)
    for part in parts:
        model.eval()
        seen: list[int] = []
        hook = part.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        model(x)
        hook.remove()
        assert seen, part


def test_a_shrinking_layer_drops_its_attention_for_whole_samples():
    options: dict[str, Any] = {**MVIT, **DROPS, "depths": (1, 1), "drop_path": 0.5}
    shrink = rd.create_model("mvit_base", **options)[3]
    x = torch.randn(64, 65, 8)
    for part in shrink.body.parameters():
        torch.nn.init.normal_(part)
    y = shrink(x)
    kept = on_map(shrink.pool, shrink.shortcut(shrink.norm(x)), 8, 1)
    dropped = (y == kept).flatten(1).all(1)
    assert 15 < int(dropped.sum()) < 49
    twice = kept + 2 * shrink.body(shrink.norm(x))
    assert torch.allclose(y[~dropped], twice[~dropped], atol=1e-5)


@pytest.mark.parametrize("name", ["swin_tiny", "mvit_base"])
def test_autocast_does_not_narrow_the_stream(name):
    small: dict[str, Any] = {**(SWIN if "swin" in name else MVIT), "depths": (1, 1)}
    unit = rd.create_model(name, **small)[3]
    x = torch.randn(2, 8, 8, 8) if "swin" in name else torch.randn(2, 65, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert unit(x).dtype == torch.float32


@pytest.mark.parametrize("name", ["swin_tiny", "rev_mvit_base"])
def test_numbers_of_other_libraries_are_numbers(name):
    numpy = pytest.importorskip("numpy")
    numbers = {"width": numpy.uint8(8), "depths": [numpy.int64(1), 1], "patch_size": numpy.int8(1)}
    options = {**(SWIN if "swin" in name else MVIT), **numbers, "image_size": numpy.int64(8)}
    model = rd.create_model(name, **options)
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 10)


def pool(state, key, x, heads, side, stride, extra):
    """Pool each head of (batch, tokens, width) as a map, with one filter, and normalise it."""
    batch, _, width = x.shape
    pooled = []
    for head in x.split(width // heads, -1):
        maps = head[:, extra:].transpose(1, 2).reshape(batch, -1, side, side)
        weight = state[f"{key}.conv.weight"]
        maps = F.conv2d(maps, weight, stride=stride, padding=1, groups=len(weight))
        tokens = torch.cat((head[:, :extra], maps.flatten(2).transpose(1, 2)), 1)
        pooled.append(layer_norm(state, f"{key}.norm", tokens, 1e-6))
    return torch.cat(pooled, -1)


def pooled_attention(state, key, x, heads, side, stride, extra, shrinks):
    q, k, v = linear(state, f"{key}.qkv", x).chunk(3, -1)
    if shrinks:
        q = pool(state, f"{key}.pool_q", q, heads, side, 2, extra)
    k = pool(state, f"{key}.pool_k", k, heads, side, stride, extra)
    v = pool(state, f"{key}.pool_v", v, heads, side, stride, extra)
    return linear(state, f"{key}.out", attend(q, k, v, heads))


def shrink(state, key, x, heads, side, stride, extra):
    x = layer_norm(state, f"{key}.norm", x, 1e-6)
    kept = linear(state, f"{key}.shortcut", x)
    maps = kept[:, extra:].transpose(1, 2).unflatten(2, (side, side))
    maps = F.max_pool2d(maps, 3, stride=2, padding=1).flatten(2).transpose(1, 2)
    kept = torch.cat((kept[:, :extra], maps), 1)
    return kept + pooled_attention(state, f"{key}.body", x, heads, side, stride, extra, True)


def mvit(state, x, depths, stride, heads, extra):
    """Return both streams, or the only one twice."""
    size = state["stem.patches.conv.weight"].shape[-1] // 2 + 1
    weight, bias = state["stem.patches.conv.weight"], state["stem.patches.conv.bias"]
    y = F.conv2d(x, weight, bias, stride=size, padding=size - 1)
    side, y = y.shape[-1], y.flatten(2).transpose(1, 2)
    if extra:
        y = torch.cat((state["stem.token.weight"].expand(len(x), 1, -1), y), 1)
    x1 = x2 = y + state["stem.positions.weight"]
    layer = 0
    for stage, depth in enumerate(depths):
        for index in range(depth):
            at = {"heads": heads * 2**stage, "stride": max(1, stride >> stage), "extra": extra}
            key = f"layer{layer}_attention"
            if stage and not index:
                y = x1 if extra else fuse(state, f"{key}.fuse", x2, x1)
                y = shrink(state, key if extra else f"{key}.shrink", y, side=side, **at)
                key = f"layer{layer}_mlp.f" if extra else f"layer{layer}_mlp.mlp.f"
                x1 = x2 = y + mlp(state, key, y, 1e-6, "none")
                side //= 2
            else:
                norm = layer_norm(state, f"{key}.f.norm", x2, 1e-6)
                x1 = x1 + pooled_attention(
                    state, f"{key}.f.body", norm, side=side, shrinks=False, **at
                )
                x2 = (x1 if extra else x2) + mlp(state, f"layer{layer}_mlp.f", x1, 1e-6, "none")
                x1 = x2 if extra else x1
            layer += 1
    return x1, x2


DEPTHS = [((2, 3), 8, 1), ((1, 2, 2), 16, 2)]  # of stages; image, patch


@pytest.mark.parametrize("name", ["mvit_base", "rev_mvit_base"])
@pytest.mark.parametrize(("depths", "size", "patch"), DEPTHS)
def test_mvit(name, depths, size, patch):
    options = {**MVIT, "depths": depths, "image_size": size, "patch_size": patch}
    model = unsettled(name, **options)
    state, x = model.state_dict(), torch.randn(3, 1, size, size).double()
    if name == "mvit_base":
        y = layer_norm(state, "head.norm", mvit(state, x, depths, 2, 2, 1)[0], 1e-6)[:, 0]
    else:
        x1, x2 = mvit(state, x, depths, 2, 2, 0)
        y = layer_norm(state, "head.norm", torch.cat((x2, x1), -1).mean(1), 1e-6)
    assert torch.allclose(model(x), linear(state, "head.classes", y), rtol=1e-9, atol=1e-9)


def test_rev_mvit_reverses_where_several_layers_follow_each_other():
    """The published code does not: its F has another input forwards than backwards."""
    options: dict[str, Any] = {**MVIT, "drop_path": 0.3, "depths": (3, 5)}
    models = [
        rd.create_model("rev_mvit_base", dtype=torch.float64, backward=backward, **options)
        for backward in ("store", "reverse")
    ]
    x = torch.randn(4, 1, 8, 8).double()
    grads = []
    for model in models:
        torch.manual_seed(1)
        weigh(model(x)).backward()
        grads.append(gradients(model))
    assert worst_error(grads[1], grads[0]) <= 1e-10
    longest = max(len(units) for in_row, units in models[1].segments() if in_row)
    assert longest == 8
    report = rd.check_reversible(models[1], x, tolerance=1e-12)
    assert len(report.errors) == 6 + 8


def test_pooled_attention_of_a_token_alone_is_not_pooled():
    """Extra tokens are seen by all, and do not enter the filters."""
    attention = PooledAttention(8, 8, 2, side=4, query_stride=2, stride=2, num_extra=1).double()
    x = torch.randn(2, 17, 8).double()
    with torch.no_grad():
        attention.pool_k.conv.weight.zero_()
        attention.pool_v.conv.weight.zero_()
    y = attention(x)
    assert y.shape == (2, 5, 8)
    moved = x.clone()
    moved[:, 1:] += 1  # through filters of zeros nothing of the map is seen but in queries
    assert torch.allclose(attention(moved)[:, 0], y[:, 0])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "swin_tiny",
            {"image_size": 200},
            "200 is not divisible by 32: patches of 4, halved 3 times; change",
        ),
        ("rev_swin_tiny", {"window": 5}, "windows of 5 do not cover the 56 x 56 tokens of stage 1"),
        ("swin_tiny", {"heads": 5}, "width 96 cannot be divided among 5 heads"),
        ("swin_tiny", {"depths": ()}, r"depths must be a tuple, 1 or more blocks for each stage"),
        ("swin_tiny", {"window": 0}, "window must be a whole number, 1 or more, got 0"),
        ("mvit_base", {"image_size": 100}, "image_size 100 is not divisible by 32"),
        ("rev_mvit_base", {"pool": 0}, "pool must be a whole number, 1 or more, got 0"),
        ("rev_mvit_base", {"drop_path": 2}, r"drop_path must be a number in \[0, 1\), got 2"),
    ],
)
def test_what_cannot_be_says_why(name, options, message):
    with pytest.raises(ValueError, match=message):
        rd.create_model(name, **options)


@pytest.mark.parametrize("name", ["swin_tiny", "mvit_base"])
def test_images_of_other_sizes_are_refused(name):
    small: dict[str, Any] = {**(SWIN if "swin" in name else MVIT), "depths": (1, 1)}
    model = rd.create_model(name, **small)
    with pytest.raises(ValueError, match="made for batches of images of 1 x 8 x 8, got"):
        model(torch.randn(2, 1, 16, 16))


@pytest.mark.parametrize("name", ["rev_swin_tiny", "rev_mvit_base"])
def test_drop_path_rises_over_all_stages(name):
    model = rd.create_model(name, depths=(1, 4), drop_path=0.4, device="cpu", **_small(name))
    parts: list[Any] = [p for p in model.modules() if type(p).__name__ == "DropPath"]
    kept = [part.keep.item() for part in parts]
    assert kept == pytest.approx([1, 1, 0.9, 0.9, 0.8, 0.8, 0.7, 0.7, 0.6, 0.6])


def _small(name):
    special = {"window": 4} if "swin" in name else {"pool": 2}
    return {**IMAGES, "width": 8, "heads": 2, "patch_size": 1, **special}
