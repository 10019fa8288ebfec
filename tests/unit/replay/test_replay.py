"""The second run of f gives the numbers of the first, whatever happened in between."""

import copy

import pytest
import torch
from support.networks import MLP, Buffered, ConvNorm, vector_chain
from support.oracle import gradients, run_plainly, weigh, worst_error
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import redivider as rd
from redivider.replay.statistics import counted_later, statistics_counted, statistics_untouched

REPLAYING = ("reverse", "checkpoint")


def dropout_chain(backward: str, depth: int = 4) -> rd.Chain:
    return vector_chain(lambda w: MLP(w, dropout=0.5), depth, backward=backward).double()


@pytest.mark.parametrize("backward", REPLAYING)
def test_dropout_masks_are_the_same_in_both_runs(backward):
    chain = dropout_chain(backward)
    seen: dict[nn.Module, list[torch.Tensor]] = {}
    for module in chain.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda m, _, y: seen.setdefault(m, []).append(y == 0))
    weigh(chain(torch.randn(64, 6).double())).backward()
    assert len(seen) == 4
    masks = list(seen.values())
    assert all(len(runs) == 2 and torch.equal(*runs) for runs in masks)
    assert not torch.equal(masks[0][0], masks[1][0]), "and other ones in every coupling"


@pytest.mark.parametrize("backward", REPLAYING)
def test_the_backward_leaves_the_random_state_alone_and_seeds_reproduce_a_run(backward):
    chain, x = dropout_chain(backward), torch.randn(5, 6).double()
    outputs = []
    for _ in range(2):
        torch.manual_seed(7)
        y = chain(x)
        torch.rand(3)  # the caller draws between forward and backward
        state = torch.get_rng_state()
        weigh(y).backward()
        assert torch.equal(torch.get_rng_state(), state)
        outputs.append(y)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("backward", REPLAYING)
def test_two_forwards_before_one_backward(backward):
    chain = dropout_chain(backward)
    plain = copy.deepcopy(chain)
    first, second = torch.randn(2, 5, 6).double()
    losses = []
    for run in (chain, lambda x: run_plainly(plain, x)):
        torch.manual_seed(1)
        y = weigh(run(first)) + 3 * weigh(run(second))
        y.backward()
        losses.append(y.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-14)
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12


@pytest.mark.parametrize("backward", REPLAYING)
def test_one_module_used_twice(backward):
    shared = rd.Coupling(MLP(8, dropout=0.5))
    f = shared.f
    couplings = [shared, rd.Coupling(Buffered(8)), shared, rd.Coupling(f), shared]
    chain = rd.Chain([rd.Duplicate(), *couplings, rd.Fuse()], backward=backward).double()
    plain = copy.deepcopy(chain)
    x = torch.randn(5, 8).double()
    torch.manual_seed(1)
    weigh(chain(x)).backward()
    torch.manual_seed(1)
    weigh(run_plainly(plain, x)).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12


@pytest.mark.parametrize("backward", REPLAYING)
@pytest.mark.parametrize("make", [lambda w: MLP(w, dropout=0.5), nn.BatchNorm1d])
def test_eval_between_forward_and_backward_changes_nothing(make, backward):
    chain = vector_chain(make, 4, backward=backward).double()
    plain = copy.deepcopy(chain)
    x = torch.randn(5, 6).double()
    torch.manual_seed(1)
    y = chain(x)
    chain.eval()
    weigh(y).backward()
    assert not any(module.training for module in chain.modules())
    torch.manual_seed(1)
    weigh(run_plainly(plain, x)).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12


@pytest.mark.parametrize("backward", REPLAYING)
def test_parts_in_evaluation_mode_stay_so(backward):
    """A frozen batch norm normalises by its running statistics, in both runs."""
    chain = vector_chain(nn.BatchNorm1d, 3, backward=backward).double()
    chain[3].eval()
    chain[3].f.running_mean.add_(0.5)
    plain = copy.deepcopy(chain)
    x = torch.randn(5, 6).double()
    y = chain(x)
    chain.train()
    weigh(y).backward()
    weigh(run_plainly(plain, x)).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12
    assert torch.equal(chain[3].f.running_mean, plain[3].f.running_mean)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p),
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
}


@pytest.mark.parametrize("backward", REPLAYING)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_changed_between_forward_and_backward_raise(optimizer, backward):
    # Without a stem and a head of its own: they would raise first, by themselves.
    couplings = [rd.Coupling(MLP(6)) for _ in range(3)]
    chain, x = (
        rd.Chain([rd.Duplicate(), *couplings, rd.Fuse()], backward=backward),
        torch.randn(5, 6),
    )
    chain(x).sum().backward()
    step = OPTIMIZERS[optimizer](chain.parameters())
    y = chain(x)
    step.step()
    with pytest.raises(RuntimeError, match=r"unit [0-9], .*weights.*inplace operation"):
        y.sum().backward()
    step.zero_grad()
    chain(x).sum().backward()  # and the next step is as good as ever
    step.step()


@pytest.mark.parametrize("backward", REPLAYING)
def test_frozen_weights_changed_in_between_raise_too(backward):
    chain = vector_chain(depth=3, backward=backward)
    chain[3].requires_grad_(False)
    y = chain(torch.randn(5, 6))
    with torch.no_grad():
        chain[3].f[1].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"unit 3, Coupling\(MLP\).*inplace operation"):
        y.sum().backward()


class Spectral(nn.Sequential):
    def __init__(self, width: int = 8) -> None:
        super().__init__(spectral_norm(nn.Linear(width, width)), nn.Tanh())


@pytest.mark.parametrize("backward", REPLAYING)
def test_spectral_norm_is_replayed_from_the_vectors_it_had(backward):
    chain = vector_chain(Spectral, 4, backward=backward).double()
    plain = copy.deepcopy(chain)
    first, second = torch.randn(2, 5, 6).double()
    (weigh(chain(first)) + weigh(chain(second))).backward()
    (weigh(run_plainly(plain, first)) + weigh(run_plainly(plain, second))).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12
    for (name, buffer), expected in zip(chain.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(buffer, expected), name


@pytest.mark.parametrize("backward", REPLAYING)
def test_buffers_that_are_replaced_instead_of_written_to_are_replayed_too(backward):
    class Replaces(nn.Module):
        mean: torch.Tensor

        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width)
            self.register_buffer("mean", torch.zeros(width))

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return torch.tanh(self.linear(x - self.mean))

    chain = vector_chain(Replaces, 4, backward=backward).double()
    plain = copy.deepcopy(chain)
    for x in torch.randn(3, 5, 6).double():
        weigh(chain(x)).backward()
        weigh(run_plainly(plain, x)).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12
    for buffer, expected in zip(chain.buffers(), plain.buffers(), strict=True):
        assert torch.allclose(buffer, expected, rtol=1e-14)


@pytest.mark.parametrize("backward", REPLAYING)
def test_a_buffer_changed_by_the_caller_in_between_raises(backward):
    chain = vector_chain(Buffered, 3, backward=backward)
    y = chain(torch.randn(5, 6))
    chain[4].f.scale.mul_(2)
    with pytest.raises(RuntimeError, match=r"unit 4, Coupling\(Buffered\).*'scale'.*changed"):
        y.sum().backward()


@pytest.mark.parametrize("backward", REPLAYING)
def test_a_buffer_that_f_begins_to_change_later_is_refused(backward):
    class Late(Buffered):
        scale: torch.Tensor
        late = False

        def forward(self, x):
            if Late.late:
                self.scale.mul_(2)
            return super().forward(x)

    chain = vector_chain(Late, 3, backward=backward)
    chain(torch.randn(5, 6)).sum().backward()
    Late.late = True
    with pytest.raises(ValueError, match=r"unit 2, Coupling\(Late\).*'scale'"):
        chain(torch.randn(5, 6))


def test_which_buffers_change_is_learned_for_training_and_evaluation_apart():
    chain = vector_chain(Spectral, 2).double()
    chain.eval()(torch.randn(5, 6).double()).sum().backward()
    plain = copy.deepcopy(chain.train())
    plain.zero_grad()
    chain.zero_grad()
    x = torch.randn(5, 6).double()
    weigh(chain(x)).backward()
    weigh(run_plainly(plain, x)).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12


class Normed(nn.Sequential):
    def __init__(self, width: int, **options) -> None:
        super().__init__(nn.Linear(width, width), nn.BatchNorm1d(width, **options), nn.ReLU())


class InstanceNormed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(width, track_running_stats=True, affine=True)

    def forward(self, x):
        return self.norm(x.view(-1, x.shape[1], 1).expand(-1, -1, 2) * torch.tensor([1.0, 2.0]))[
            ..., 0
        ]


class OwnNorm(nn.Module):
    """Calls batch norm's operator on buffers of its own, which no version counter notices."""

    mean: torch.Tensor
    var: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))

    def forward(self, x):
        return nn.functional.batch_norm(x, self.mean, self.var, self.scale, training=True)


@pytest.mark.parametrize("backward", ["store", *REPLAYING])
@pytest.mark.parametrize(
    "make", [Normed, lambda w: Normed(w, momentum=None), InstanceNormed, OwnNorm]
)
def test_running_statistics_are_those_of_the_plain_model(make, backward):
    chain = vector_chain(make, 3, backward=backward).double()
    plain = copy.deepcopy(chain)
    for x in torch.randn(3, 5, 6).double():
        chain(x).sum().backward()
        run_plainly(plain, x)
    buffers = dict(plain.named_buffers())
    assert buffers
    for name, buffer in chain.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


@pytest.mark.parametrize("backward", REPLAYING)
def test_statistics_of_images_and_of_junctions(backward):
    couplings = [rd.Coupling(ConvNorm(4)) for _ in range(3)]
    units = [nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), rd.Split(dim=1), *couplings, rd.Fuse(dim=1)]
    chain = rd.Chain(units, backward=backward).double()
    plain = copy.deepcopy(chain)
    x = torch.randn(4, 3, 5, 5).double()
    y = chain(x)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    run_plainly(plain, x)
    assert int(chain[1].num_batches_tracked) == 1
    for buffer, expected in zip(chain.buffers(), plain.buffers(), strict=True):
        assert torch.equal(buffer, expected)


class _Layers(nn.Sequential):
    def __init__(self, *momentums):
        super().__init__(*(nn.BatchNorm1d(3, momentum=momentum) for momentum in momentums))


def test_batches_are_counted_in_all_layers_and_averages_without_momentum_are_right():
    torch.manual_seed(0)
    module = _Layers(0.1, None, 0.5)
    plain = copy.deepcopy(module)
    for number in range(1, 5):
        x = torch.randn(6, 3)
        with statistics_counted(list(module.modules())):
            y = module(x)
        assert torch.equal(y, plain(x))
        for ours, theirs in zip(module.buffers(), plain.buffers(), strict=True):
            assert torch.equal(ours, theirs)
        assert all(layer.num_batches_tracked == number for layer in module)


def test_a_layer_that_insists_on_its_counter_keeps_it():
    module = nn.Sequential(nn.SyncBatchNorm(3), nn.BatchNorm1d(3))
    with statistics_counted(list(module.modules())):
        assert module[0].num_batches_tracked is not None
        assert module[1].num_batches_tracked is None


def test_counters_that_are_left_for_later_are_handed_out():
    module = _Layers(0.1, 0.1)
    with counted_later() as counters, statistics_counted(list(module.modules())):
        module(torch.randn(6, 3))
    assert [id(counter) for counter in counters] == [
        id(layer.num_batches_tracked) for layer in module
    ]
    assert all(counter == 0 for counter in counters)


def test_what_is_not_to_be_touched_is_not_counted_inside_either():
    module = _Layers(0.1)
    modules = list(module.modules())
    before = [buffer.clone() for buffer in module.buffers()]
    with statistics_untouched(modules), statistics_counted(modules):
        module(torch.randn(6, 3))
    assert all(torch.equal(a, b) for a, b in zip(module.buffers(), before, strict=True))
