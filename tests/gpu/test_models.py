"""Every family on a GPU: weights drawn as on the CPU, gradients by reversal, bf16, chunks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.families import EACH, TEXT
from support.layers import explicit_attention
from support.oracle import gradients, weigh, worst_error

import redivider as rd
from redivider.models.attention import attend
from redivider.models.catalogue import resolve
from redivider.models.summary import summarise

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(("name", "options"), EACH)
def test_weights_are_those_of_the_cpu_and_gradients_those_of_store(name, options):
    cpu = rd.create_model(name, seed=2, **options)
    models = [
        rd.create_model(name, seed=2, device="cuda", backward=backward, **options)
        for backward in ("store", "reverse", "reverse-checkpoint")
    ]
    for key, tensor in cpu.state_dict().items():
        assert torch.equal(tensor, models[0].state_dict()[key].cpu()), key
    x = resolve(name, **options)[1].example(5).cuda()
    x = x.double() if x.is_floating_point() else x
    grads = []
    for model in models:
        torch.manual_seed(1)
        weigh(model.double()(x)).backward()
        grads.append(gradients(model))
    assert worst_error(grads[1], grads[0]) <= 1e-10
    assert worst_error(grads[2], grads[0]) <= 1e-10


@pytest.mark.parametrize(("name", "options"), EACH)
def test_a_step_under_autocast_waits_for_nothing(name, options):
    model = rd.create_model(name, device="cuda", **options)
    x = resolve(name, **options)[1].example(8).cuda()
    for step in range(3):
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert loss.isfinite()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize(("name", "options"), [case for case in EACH if "swin" in case[0]])
def test_counting_on_the_meta_device_is_counting_for_real(name, options):
    options = {key: value for key, value in options.items() if "drop" not in key}
    options |= {"width": 32, "in_channels": 3}
    summary = summarise(name, batch=16, also=("checkpoint", "reverse"), **options)
    model = rd.create_model(name, device="cuda", **options)
    x = resolve(name, **options)[1].example(16).cuda()
    for model.backward, kept in summary.kept.items():
        assert kept == pytest.approx(rd.measure_memory(model, x).held / 16, rel=0.03)


def test_chunks_keep_the_logits_out_of_memory():
    options = {**TEXT, "depth": 2, "vocabulary": 50257, "context": 512}
    model = rd.create_model("rev_gpt_nano", device="cuda", **options)
    body, tokens = model[:-1], torch.randint(50257, (8, 512), device="cuda")
    chunked = rd.ChunkedCrossEntropy(model[-1], chunk=256)
    peaks, losses = [], []
    for run in (
        lambda: chunked(body(tokens), tokens),
        lambda: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()),
    ):
        torch.manual_seed(0)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = run()
        loss.backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        losses.append(loss.item())
        model.zero_grad()
        del loss
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    logits = 4 * 8 * 512 * 50257
    assert peaks[0] < 0.3 * logits < 2 * logits < peaks[1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("num", [64, 128, 192, 196])
def test_gradients_of_attention_are_numbers_where_logits_are_low(num, has_bias, compiles):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4, 6, num, 64, device="cuda").mul(0.1).bfloat16()
    q[..., 0], k[..., 0] = 1, -120 * 8  # every logit is about -120
    bias = torch.zeros(6, num, num, device="cuda", dtype=torch.bfloat16) if has_bias else None
    run = torch.compile(attend, fullgraph=True) if compiles else attend
    grads = []
    functions: list[tuple[torch.dtype, Any]]
    functions = [(torch.bfloat16, run), (torch.float64, explicit_attention)]
    for dtype, function in functions:
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (q, k, v)]
        y = function(*leaves, bias=None if bias is None else bias.to(dtype))
        y.backward(torch.linspace(-1, 1, y.numel(), device="cuda", dtype=dtype).view_as(y))
        # The first of a query's is a difference of large numbers.
        grads.append([leaves[0].grad[..., 1:].double(), *(leaf.grad.double() for leaf in leaves)])
        assert grads[-1].pop(1).isfinite().all()
    for gradient, expected in zip(*grads, strict=True):
        assert (gradient - expected).norm() <= 0.02 * expected.norm()
