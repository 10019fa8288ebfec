"""Cross-entropy in chunks is cross-entropy, without the logits."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support.families import TEXT
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import redivider as rd
from redivider.checks.memory import Live


def setting(bias=True, tokens=(3, 7), width=5, words=11):
    torch.manual_seed(0)
    head = nn.Linear(width, words, bias=bias).double()
    x = torch.randn(*tokens, width, dtype=torch.float64, requires_grad=True)
    return head, x, torch.randint(words, tokens)


def plain(head, x, targets, **options):
    return F.cross_entropy(head(x).flatten(0, -2), targets.flatten(), **options)


@pytest.mark.parametrize("chunk", [1, 4, 7, 21, 1000])
@pytest.mark.parametrize("bias", [True, False])
def test_value_and_gradients_are_those_of_the_plain_one(bias, chunk):
    head, x, targets = setting(bias)
    targets[1, :5] = -100
    loss = rd.ChunkedCrossEntropy(head, chunk=chunk)
    wanted = [x, *head.parameters()]
    value, true = loss(x, targets), plain(head, x, targets)
    assert torch.allclose(value, true, rtol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(3 * value, wanted), torch.autograd.grad(3 * true, wanted), strict=True
    ):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)


def test_ignored_targets_and_frozen_parts():
    head, x, targets = setting()
    targets[0] = 4
    loss = rd.ChunkedCrossEntropy(head, chunk=4, ignore_index=4)
    assert torch.allclose(loss(x, targets), plain(head, x, targets, ignore_index=4), rtol=1e-12)
    head.requires_grad_(False)
    (grad,) = torch.autograd.grad(loss(x, targets), x)
    (true,) = torch.autograd.grad(plain(head, x, targets, ignore_index=4), x)
    assert torch.allclose(grad, true, rtol=1e-12)
    head.requires_grad_(True)
    loss(x.detach(), targets).backward()
    true = torch.autograd.grad(plain(head, x, targets, ignore_index=4), head.weight)[0]
    assert torch.allclose(head.weight.grad, true, rtol=1e-12)
    with torch.no_grad():
        assert not loss(x, targets).requires_grad
    assert rd.ChunkedCrossEntropy(head)(x, torch.full_like(targets, -100)).isnan(), (
        "as the plain one"
    )


def test_low_precision_is_as_exact_as_the_plain_one():
    head, x, targets = setting(tokens=(4, 64), width=16, words=50)
    wanted = [x, *head.parameters()]
    true = torch.autograd.grad(plain(head, x, targets), wanted)
    for low in (True, False):
        errors = []
        head_low = copy.deepcopy(head).to(torch.bfloat16 if low else torch.float32)
        x_low = x.detach().to(head_low.weight.dtype).requires_grad_()
        for loss in (lambda *a: plain(*a), lambda h, *a: rd.ChunkedCrossEntropy(h, chunk=50)(*a)):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not low):
                value = loss(head_low, x_low, targets)
            grads = torch.autograd.grad(value, [x_low, *head_low.parameters()])
            assert [grad.dtype for grad in grads] == [head_low.weight.dtype] * 3
            errors.append(
                [float((g - t).norm() / t.norm()) for g, t in zip(grads, true, strict=True)]
            )
        for ours, theirs in zip(errors[1], errors[0], strict=True):
            assert ours < 1.5 * theirs + 1e-3


def test_a_scaled_loss_in_half_precision_loses_nothing():
    """As with a GradScaler: its factor enters in the backward, so small numbers must survive."""
    head, x, targets = setting(tokens=(64, 512), width=16, words=50)
    true = torch.autograd.grad(plain(head, x, targets), [x, *head.parameters()])
    head, x = head.float(), x.detach().float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = rd.ChunkedCrossEntropy(head)(x, targets) * 2.0**16
    grads = torch.autograd.grad(loss, [x, *head.parameters()])
    for one, other in zip(grads, true, strict=True):
        assert (one / 2.0**16 - other).norm() < 5e-3 * other.norm()


def test_one_autocast_region_around_many_losses_collects_nothing():
    head, x, targets = setting(tokens=(4, 16), width=32, words=100)
    head, x = head.float(), x.detach().float().requires_grad_()
    loss, held = rd.ChunkedCrossEntropy(head, chunk=16), []
    with torch.autocast("cpu", dtype=torch.bfloat16), Live() as live:
        for _ in range(4):
            torch.autograd.grad(loss(x, targets), [x, *head.parameters()])
            held.append(live.bytes)
    assert held == [held[0]] * 4


def test_shapes_on_the_meta_device():
    head = nn.Linear(5, 11, device="meta")
    x, targets = torch.empty(3, 7, 5, device="meta"), torch.empty(3, 7, device="meta").long()
    assert rd.ChunkedCrossEntropy(head)(x, targets).shape == ()


def test_without_grad_nothing_is_computed_for_it():
    head, x, targets = setting(tokens=(4, 16))
    loss = rd.ChunkedCrossEntropy(head, chunk=16)
    expected = plain(head, x, targets)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        assert torch.allclose(loss(x, targets), expected, rtol=1e-12)
    assert counter.get_total_flops() == 2 * 64 * 5 * 11, "the product of the forward alone"
    with torch.inference_mode():
        assert torch.allclose(loss(x, targets), expected, rtol=1e-12)


class Largest(TorchDispatchMode):
    """Mode that finds the most rows of `words` numbers that one tensor holds."""

    def __init__(self, words):
        super().__init__()
        self.words, self.rows = words, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[-1] == self.words:
                self.rows = max(self.rows, leaf.numel() // self.words)
        return out


def test_there_are_never_more_logits_than_a_chunk():
    head, x, targets = setting(tokens=(8, 32), words=101)
    with Largest(101) as seen:
        rd.ChunkedCrossEntropy(head, chunk=16)(x, targets).backward()
    assert seen.rows == 16
    with Largest(101) as seen:
        plain(head, x, targets).backward()
    assert seen.rows == 256, "the control"
    chunked = nn.ModuleList([rd.ChunkedCrossEntropy(head, chunk=16)])
    chunked.forward = lambda x: chunked[0](x, targets)
    memory = rd.measure_memory(chunked, x)
    logits = 8 * 101 * 256  # bytes
    assert memory.peak < 0.3 * logits, memory


def test_wrong_shapes_and_heads_are_refused():
    head, x, targets = setting()
    loss = rd.ChunkedCrossEntropy(head)
    with pytest.raises(
        ValueError, match=r"targets of shape \(21,\) do not fit tokens of .* \(3, 7\)"
    ):
        loss(x, targets.flatten())
    with pytest.raises(TypeError, match=r"must be a torch.nn.Linear .* got Sequential"):
        rd.ChunkedCrossEntropy(nn.Sequential(head))  # type: ignore[arg-type]
    head.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="the head has hooks"):
        loss(x, targets)
    head._forward_hooks.clear()

    class Lora(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    with pytest.raises(TypeError, match=r"forward is not overridden, got Lora"):
        rd.ChunkedCrossEntropy(Lora(5, 11))
    with pytest.raises(ValueError, match="chunk must be a number of tokens, 1 or more, got 0"):
        rd.ChunkedCrossEntropy(head, chunk=0)
    once = loss(x, targets)
    with pytest.raises(RuntimeError, match="create_graph=True needs the graph of the logits"):
        torch.autograd.grad(once, x, create_graph=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_nano", "rev_gpt_nano"])
def test_as_the_loss_of_a_pipeline_it_trains_the_model_s_own_head(name):
    options = {**TEXT, "depth": 2, "dropout": 0.0, "attention_dropout": 0.0, "drop_path": 0.0}
    models = [rd.create_model(name, dtype=torch.float64, **options) for _ in range(2)]
    chunked = rd.ChunkedCrossEntropy(models[1][-1], chunk=5)
    losses = []
    for body, loss in (
        (models[0], lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten())),
        (models[1][:-1], chunked),
    ):
        pipe = rd.Pipeline(
            body,
            stages=[1, 2, 2, len(body) - 5],
            loss=loss,
            optimizer=lambda stage: torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9),
            accumulate=2,
        )
        torch.manual_seed(0)
        ticks = [pipe.step(t := torch.randint(256, (2, 16)), t.roll(-1, 1)) for _ in range(12)]
        ticks += pipe.flush(update=True)
        losses.append([tick.loss.item() for tick in ticks if tick.loss is not None])
    assert len(losses[0]) == 12
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    for key, value in models[0].state_dict().items():
        assert torch.allclose(value, models[1].state_dict()[key], rtol=1e-10, atol=1e-12), key
