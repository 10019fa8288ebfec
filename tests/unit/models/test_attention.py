"""Attention, and which of torch's kernels it may take."""

from threading import Thread

import pytest
import torch
import torch.nn.functional as F
from support.families import IMAGES, SMALL_TRANSFORMER, TEXT
from support.layers import explicit_attention
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

import redivider as rd
from redivider.models import attention
from redivider.models.attention import attend
from redivider.models.catalogue import resolve

KERNELS = {
    "flash": cuda.flash_sdp_enabled,
    "efficient": cuda.mem_efficient_sdp_enabled,
    "math": cuda.math_sdp_enabled,
    "cudnn": cuda.cudnn_sdp_enabled,
}


@pytest.fixture
def seen(monkeypatch):
    """By number of keys, the kernels that are allowed while attention runs."""
    monkeypatch.setattr(attention, "_has_cudnn", lambda k: True)
    kernels: dict[int, set[str]] = {}
    original = F.scaled_dot_product_attention

    def watched(q, k, v, **keywords):
        kernels[k.shape[-2]] = {name for name, is_allowed in KERNELS.items() if is_allowed()}
        return original(q, k, v, **keywords)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    return kernels


def draw(num_keys, num_queries=None):
    torch.manual_seed(0)
    q = torch.randn(2, 3, num_queries or num_keys, 8, dtype=torch.float64)
    return q, *torch.randn(2, 2, 3, num_keys, 8, dtype=torch.float64)


@pytest.mark.parametrize("num", [16, 64, 65, 128, 192])
def test_it_is_attention(num):
    q, k, v = draw(num)
    bias = torch.randn(3, num, num, dtype=torch.float64)
    torch.testing.assert_close(attend(q, k, v), explicit_attention(q, k, v))
    torch.testing.assert_close(attend(q, k, v, bias=bias), explicit_attention(q, k, v, bias))
    torch.testing.assert_close(
        attend(q, k, v, causal=True), explicit_attention(q, k, v, causal=True)
    )
    torch.manual_seed(0)
    dropped = attend(q, k, v, dropout=0.5)
    assert not torch.equal(dropped, attend(q, k, v, dropout=0.5))


@pytest.mark.parametrize(
    ("dtype", "tolerance", "repeats"),
    [(torch.float64, 1e-12, True), (torch.float32, 1e-5, True), (torch.bfloat16, 0.02, False)],
)
def test_groups_of_heads_share_keys_and_values(dtype, tolerance, repeats, monkeypatch):
    torch.manual_seed(0)
    q = torch.randn(2, 6, 5, 8).to(dtype)
    k, v = torch.randn(2, 2, 2, 5, 8).to(dtype)
    own_k, own_v = (x[:, [0, 0, 0, 1, 1, 1]].double() for x in (k, v))
    expected = explicit_attention(q.double(), own_k, own_v, causal=True)
    original = F.scaled_dot_product_attention
    num_heads = []

    def watched(q, k, v, **keywords):
        num_heads.append(k.shape[1])
        return original(q, k, v, **keywords)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    y = attend(q, k, v, causal=True)
    assert y.dtype == dtype and num_heads == [6 if repeats else 2]
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=tolerance)


def test_cudnn_is_not_taken_where_its_gradients_may_not_be_numbers(seen):
    lengths = [1, 63, 64, 65, 127, 128, 129, 192, 256, 320]
    for num in lengths:
        attend(*draw(num, num_queries=5))
    rest = {"flash", "efficient", "math"}
    wrong = {64, 192, 320}
    assert seen == {num: rest if num in wrong else rest | {"cudnn"} for num in lengths}
    assert cuda.cudnn_sdp_enabled()


def test_kernels_that_the_user_forbids_stay_so(seen):
    for kernels in ([SDPBackend.MATH], [SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION]):
        with sdpa_kernel(kernels):
            attend(*draw(64))
        assert seen.pop(64) == {"math"}
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), pytest.raises(RuntimeError, match="No viable"):
        attend(*draw(64))  # on a CPU
    assert seen.pop(64) == {"cudnn"}


def test_threads_leave_kernels_as_they_were(seen):
    qkv = draw(64)
    wrong = []

    def run():
        for _ in range(100):
            attend(*qkv)
            wrong.extend({"cudnn"} & seen[64])

    threads = [Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and cuda.cudnn_sdp_enabled()


def test_on_other_devices_nothing_is_forbidden(monkeypatch):
    monkeypatch.setattr(attention, "sdpa_kernel", None)  # would be called
    attend(*draw(64))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rev_vit_tiny", {"image_size": 8, "patch_size": 1, "depth": 1}),
        ("rev_swin_tiny", {"image_size": 8, "patch_size": 1, "window": 8, "depths": (1,)}),
        ("rev_mvit_base", {"image_size": 16, "patch_size": 1, "pool": 2, "depths": (1,)}),
        ("rev_gpt_nano", {"context": 64, "depth": 1}),
        ("rev_llama_tiny", {"context": 64, "depth": 1}),
        ("rev_roberta_base", {"context": 64, "depth": 1}),
    ],
)
def test_so_do_all_transformers(seen, name, options):
    family = TEXT if "context" in options else {**SMALL_TRANSFORMER, **IMAGES}
    options = {**family, **options}
    rd.create_model(name, **options)(resolve(name, **options)[1].example(2))
    assert seen == {64: {"flash", "efficient", "math"}}


@pytest.mark.slow
@pytest.mark.parametrize("num", [64, 128])
def test_a_compiled_graph_chooses_in_the_same_way(num, monkeypatch):
    monkeypatch.setattr(attention, "_has_cudnn", lambda k: True)
    entered: list[torch.fx.Node] = []

    def keep(graph, example_inputs):
        entered.extend(node for node in graph.graph.nodes if "sdpa" in str(node.target))
        return aot_eager(graph, example_inputs)

    qkv = draw(num)
    compiled = torch.compile(attend, fullgraph=True, backend=keep)
    torch.testing.assert_close(compiled(*qkv), attend(*qkv))
    assert bool(entered) == (num == 64)
    assert cuda.cudnn_sdp_enabled()


@pytest.mark.slow
def test_exported_for_any_length(monkeypatch):
    monkeypatch.setattr(attention, "_has_cudnn", lambda k: True)
    options = {**TEXT, "context": 256, "depth": 1, "attention_dropout": 0.0}
    model = rd.create_model("rev_gpt_nano", backward="store", **options).eval()
    lengths = ({1: torch.export.Dim("tokens", min=2, max=256)},)
    tokens = torch.arange(200).view(2, 100)
    exported = torch.export.export(model, (tokens,), dynamic_shapes=lengths).module()
    for part in (tokens, tokens[:, :64]):
        torch.testing.assert_close(exported(part), model(part))


def test_so_is_it_by_the_compiler(monkeypatch):
    monkeypatch.setattr(attention, "_has_cudnn", lambda k: True)

    class Attention(nn.Module):
        def forward(self, x):
            return attend(x, x, x)

    x = torch.randn(2, 3, 100, 8)
    lengths = ({2: torch.export.Dim("tokens", min=2, max=256)},)
    exported = torch.export.export(Attention(), (x,), dynamic_shapes=lengths, strict=True).module()
    for part in (x, x[:, :, :64]):
        torch.testing.assert_close(exported(part), attend(part, part, part))
