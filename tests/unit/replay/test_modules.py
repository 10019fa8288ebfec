"""Modules with side effects: both runs have the same ones, and they count once."""

import copy

import pytest
import torch
from support.networks import vector_chain
from support.oracle import gradients, run_plainly, weigh, worst_error
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import redivider as rd

REPLAYING = ("reverse", "checkpoint", "reverse-checkpoint")
replaying = pytest.mark.parametrize("backward", REPLAYING)


class Attend(nn.Module):
    """Attention that drops parts of its input and returns a result in another memory layout."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        x = self.drop(x)
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("backward", ["store", *REPLAYING])
@pytest.mark.parametrize(
    "spread",
    [lambda q: q.expand(3, -1, -1), lambda q: q[:3, None].expand(-1, 5, -1)],
    ids=["samples", "tokens"],
)
def test_expanded_streams_are_dropped_by_the_same_masks(spread, backward):
    """Expand as learned queries are: the strides do not tell which dimension comes first."""
    torch.manual_seed(0)
    couplings = [rd.Coupling(Attend()) for _ in range(3)]
    chain = rd.Chain([rd.Duplicate(), *couplings, rd.Fuse()], backward=backward).double()
    plain = copy.deepcopy(chain)
    ours, theirs = (torch.randn(5, 8).double().requires_grad_() for _ in range(2))
    theirs.data.copy_(ours)
    torch.manual_seed(1)
    weigh(chain(spread(ours))).backward()
    torch.manual_seed(1)
    a, b = (spread(theirs).clone() for _ in range(2))
    weigh(run_plainly(list(plain)[1:], (a, b))).backward()
    assert worst_error(gradients(chain, ours), gradients(plain, theirs)) <= 1e-12


class Renorm(nn.BatchNorm1d):
    """Batch renormalisation (Ioffe 2017), which reads the running statistics in training."""

    running_mean: torch.Tensor
    running_var: torch.Tensor
    num_batches_tracked: torch.Tensor

    def forward(self, x):
        mean, std = x.mean(0), (x.var(0, unbiased=False) + self.eps).sqrt()
        usual = (self.running_var + self.eps).sqrt()
        r = (std / usual).detach().clamp(0.3, 3)
        d = ((mean - self.running_mean) / usual).detach().clamp(-5, 5)
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean, 0.1)
            self.running_var.lerp_(std**2, 0.1)
        return ((x - mean) / std * r + d) * self.weight + self.bias


@replaying
def test_statistics_that_are_read_are_those_of_the_first_run(backward):
    torch.manual_seed(0)
    chain = vector_chain(
        lambda w: nn.Sequential(nn.Linear(w, w), Renorm(w), nn.Tanh()), 4, backward=backward
    ).double()
    plain = copy.deepcopy(chain)
    for x in torch.randn(3, 16, 6).double() + 1:
        chain.zero_grad()
        plain.zero_grad()
        weigh(chain(x)).backward()
        weigh(run_plainly(plain, x)).backward()
        assert worst_error(gradients(chain), gradients(plain)) <= 1e-11
    for buffer, expected in zip(chain.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected, rtol=1e-12, atol=1e-12)


class Encode(nn.Module):
    """Torch's encoder, which has a fast path for evaluation without gradients."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, x, pad):
        return self.encoder(x, src_key_padding_mask=pad)


@replaying
@pytest.mark.parametrize("whole", [True, False], ids=["all", "a part"])
@pytest.mark.parametrize("fuse", [[rd.Fuse()], [rd.Fuse("second")]], ids=["both", "second"])
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning", "ignore::redivider.SkipWarning")
def test_in_evaluation_the_first_run_goes_the_way_of_the_second(fuse, whole, backward):
    torch.manual_seed(0)
    couplings = [rd.Coupling(Encode(), takes=("pad",)) for _ in range(2)]
    chain = rd.Chain([rd.Duplicate(), *couplings, *fuse], backward=backward).double()
    (chain.eval() if whole else chain[1].f.encoder.eval())
    plain = copy.deepcopy(chain)
    pad = torch.zeros(3, 6, dtype=torch.bool)
    pad[:2, 4:] = True
    for x in torch.randn(3, 3, 6, 8).double():
        y, true = chain(x, pad=pad), run_plainly(plain, x, pad=pad)
        torch.testing.assert_close(y, true, rtol=1e-12, atol=1e-12)
        chain.zero_grad()
        plain.zero_grad()
        weigh(y).backward()
        weigh(true).backward()
        assert worst_error(gradients(chain), gradients(plain)) <= 1e-11


@replaying
def test_a_buffer_may_be_written_without_being_changed(backward):
    """The vector of one number that spectral norm keeps is 1 or -1 for ever."""

    def make(width):
        return nn.Sequential(spectral_norm(nn.Linear(width, 1)), nn.Tanh(), nn.Linear(1, width))

    torch.manual_seed(0)
    chain = vector_chain(make, backward=backward).double()
    plain = copy.deepcopy(chain)
    for x in torch.randn(3, 5, 6).double():
        weigh(chain(x)).backward()
        weigh(run_plainly(plain, x)).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12


class Counting(nn.Module):
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x * self.count


@replaying
def test_a_part_that_is_put_in_later_may_change_its_buffers(backward):
    chain = vector_chain(lambda w: nn.Sequential(nn.Linear(w, w), nn.Identity()), backward=backward)
    chain.double()(torch.randn(5, 6).double()).sum().backward()
    for coupling in chain[2:5]:
        coupling.f[1] = Counting().double()
    chain.zero_grad()
    plain = copy.deepcopy(chain)
    for x in torch.randn(2, 5, 6).double():
        weigh(chain(x)).backward()
        weigh(run_plainly(plain, x)).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12
    assert [coupling.f[1].count for coupling in chain[2:5]] == [2, 2, 2]


class Field(nn.Module):
    """The gradient of an energy."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


@replaying
@pytest.mark.parametrize("arithmetic", ["float", "fixed"])
def test_f_may_ask_for_gradients_itself(arithmetic, backward):
    torch.manual_seed(0)
    chain = vector_chain(Field, backward=backward, arithmetic=arithmetic).double()
    plain = copy.deepcopy(chain)
    plain.backward = "store"
    for x in torch.randn(3, 5, 6).double():
        weigh(chain(x)).backward()
        weigh(plain(x)).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-11


class Quantised(nn.Parameter):
    scale: float


class Adapted(nn.Module):
    """A frozen weight of a class with an attribute of its own, and an adapter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = Quantised(
            torch.randint(-8, 8, (width, width), dtype=torch.int8), requires_grad=False
        )
        self.weight.scale = 0.05
        self.adapter = nn.Linear(width, width)

    def forward(self, x):
        assert isinstance(self.weight, Quantised)
        return x @ (self.weight.to(x) * self.weight.scale) + self.adapter(x)


@replaying
def test_frozen_weights_are_those_of_the_module(backward):
    torch.manual_seed(0)
    chain, plain = (vector_chain(Adapted, backward=strategy) for strategy in (backward, "store"))
    plain.load_state_dict(chain.state_dict())
    for x in torch.randn(3, 5, 6):
        weigh(chain(x)).backward()
        weigh(plain(x)).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-5
