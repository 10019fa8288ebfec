"""Uses that are legitimate but rare, and ways to go wrong that must not be silent."""

import copy
import gc
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.networks import MLP, Buffered, vector_chain
from support.oracle import gradients, run_plainly, weigh, worst_error
from torch import nn
from torch.utils.checkpoint import checkpoint

import redivider as rd

REPLAYING = ("reverse", "checkpoint")
BOUND = 1e-12


def compare(chain: rd.Chain, x: torch.Tensor) -> None:
    plain = copy.deepcopy(chain)
    weigh(chain(x)).backward()
    weigh(run_plainly(plain, x)).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= BOUND


HOOKS = {
    "returns others": (False, lambda _, __, out: (out[0] * 2, out[1])),
    "writes": (False, lambda _, __, out: _double(out)),
    "pre-hook returns others": (True, lambda _, args: ((args[0][0] * 2, args[0][1]), *args[1:])),
}


def _double(out):
    with torch.no_grad():
        out[0].mul_(2)


@pytest.mark.parametrize("backward", REPLAYING)
@pytest.mark.parametrize("arithmetic", ["float", "fixed"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_changes_the_streams_is_refused(hook, arithmetic, backward):
    is_pre, function = HOOKS[hook]
    chain = vector_chain(depth=4, backward=backward, arithmetic=arithmetic)
    unit = chain[3]
    (unit.register_forward_pre_hook if is_pre else unit.register_forward_hook)(function)
    with pytest.raises(ValueError, match=r"unit [34], Coupling\(MLP\): .*a hook changed them"):
        chain(torch.randn(5, 6))


@pytest.mark.parametrize("backward", REPLAYING)
def test_a_hook_that_changes_streams_is_refused(backward):
    for index in (2, 4):  # the first coupling of the row, and another one
        chain = vector_chain(depth=4, backward=backward)
        chain[index].register_forward_pre_hook(lambda _, args: ((2 * args[0][0], args[0][1]),))
        with pytest.raises(ValueError, match="a hook changed them"):
            chain(torch.randn(5, 6))


@pytest.mark.parametrize("backward", REPLAYING)
def test_a_hook_may_run_the_coupling_again(backward):
    chain = vector_chain(depth=4, backward=backward)
    same = []
    for unit in list(chain)[2:6]:
        unit.register_forward_hook(
            lambda unit, args, output: same.append(torch.equal(unit.forward(*args)[0], output[0]))
        )
    chain(torch.randn(5, 6)).sum().backward()
    assert same == [True] * 4


@pytest.mark.parametrize("backward", REPLAYING)
def test_hooks_that_look_and_hooks_of_the_backward_are_welcome(backward):
    chain = vector_chain(depth=4, backward=backward).double()
    seen = []
    plain = copy.deepcopy(chain)
    x = torch.randn(5, 6).double()
    weigh(run_plainly(plain, x)).backward()
    couplings: list[Any] = list(chain)[2:6]
    for coupling in couplings:
        coupling.register_forward_hook(lambda *_: seen.append("forward"))
        coupling.f.register_full_backward_hook(lambda *_: seen.append("backward"))
    weigh(chain(x)).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= BOUND
    assert seen == ["forward"] * 4 + ["backward"] * 4


@pytest.mark.parametrize("backward", REPLAYING)
def test_an_outside_leaf_that_becomes_trainable_later_is_refused(backward):
    scale = nn.Parameter(torch.ones(8), requires_grad=False)

    class Reaches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.get = nn.Linear(8, 8), lambda: scale

        def forward(self, x):
            return self.linear(x) * self.get()

    chain = rd.Chain([rd.Duplicate(), rd.Coupling(Reaches())], backward=backward)
    chain(torch.randn(5, 8))[0].sum().backward()
    scale.requires_grad_()
    with pytest.raises(ValueError, match=r"unit 1, Coupling\(Reaches\).*neither an argument"):
        chain(torch.randn(5, 8))[0].sum().backward()


class OwnForward(nn.BatchNorm1d):
    """A batch norm that does not heed track_running_stats."""

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, training=True)


@pytest.mark.parametrize("backward", REPLAYING)
def test_a_subclass_of_batch_norm_counts_once(backward):
    chain = vector_chain(OwnForward, 3, backward=backward).double()
    plain = copy.deepcopy(chain)
    for x in torch.randn(2, 5, 6).double():
        chain(x).sum().backward()
        run_plainly(plain, x)
    for buffer, expected in zip(chain.buffers(), plain.buffers(), strict=True):
        assert torch.equal(buffer, expected)


@pytest.mark.parametrize("inner", ["store", *REPLAYING])
@pytest.mark.parametrize("outer", REPLAYING)
def test_a_chain_with_batch_norm_inside_of_f(outer, inner):
    def make(width):
        couplings = [rd.Coupling(nn.BatchNorm1d(width // 2)) for _ in range(2)]
        return rd.Chain([rd.Split(), *couplings, rd.Fuse()], backward=inner)

    chain = vector_chain(make, 3, backward=outer).double()
    plain = copy.deepcopy(chain)
    for unit in plain:
        if isinstance(unit, rd.Coupling):
            f: Any = unit.f
            f.backward = "store"
    for x in torch.randn(2, 5, 6).double():
        weigh(chain(x)).backward()
        weigh(run_plainly(plain, x)).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= BOUND
    for (name, buffer), expected in zip(chain.named_buffers(), plain.buffers(), strict=True):
        assert torch.allclose(buffer, expected, rtol=1e-12), name


def live_bytes() -> int:
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) in (torch.Tensor, nn.Parameter)]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


@pytest.mark.slow
@pytest.mark.parametrize("backward", REPLAYING)
@pytest.mark.parametrize("arithmetic", ["float", "fixed"])
def test_one_autocast_region_around_many_steps_collects_nothing(arithmetic, backward):
    chain = vector_chain(depth=4, width=32, backward=backward, arithmetic=arithmetic, check_every=0)
    x = torch.randn(5, 6)
    sizes = []
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(4):
            chain.zero_grad()
            weigh(chain(x)).backward()
            sizes.append(live_bytes())
    assert sizes[-1] <= sizes[1]


@pytest.mark.parametrize("backward", REPLAYING)
@pytest.mark.parametrize("arithmetic", ["float", "fixed"])
def test_a_chain_under_torch_checkpoint(arithmetic, backward):
    chain = vector_chain(depth=4, backward=backward, arithmetic=arithmetic).double()
    plain = copy.deepcopy(chain)
    plain.backward = "store"
    for x in torch.randn(2, 5, 6).double():
        weigh(checkpoint(chain, x.requires_grad_(), use_reentrant=False)).backward()
        weigh(plain(x)).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= BOUND


@pytest.mark.parametrize("backward", REPLAYING)
def test_tied_weights_inside_of_f(backward):
    class Tied(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
            self.down.weight = self.up.weight

        def forward(self, x):
            return self.down(torch.tanh(self.up(x)))

    compare(vector_chain(Tied, 3, backward=backward).double(), torch.randn(5, 6).double())


@pytest.mark.parametrize("backward", REPLAYING)
@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU])
def test_recurrent_layers_inside_of_f(make, backward):
    class Recurrent(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inner = make(width, width, batch_first=True)

        def forward(self, x):
            return self.inner(x)[0]

    compare(vector_chain(Recurrent, 3, backward=backward).double(), torch.randn(5, 4, 6).double())


@pytest.mark.slow
@pytest.mark.parametrize("backward", REPLAYING)
def test_two_threads_that_share_a_chain(backward):
    chain = vector_chain(lambda w: MLP(w), 4, backward=backward).double()
    plain = copy.deepcopy(chain)
    data = torch.randn(2, 10, 5, 6).double()
    grads: dict[int, list] = {}

    parameters = list(chain.parameters())  # in a thread, one might see another's stand-ins

    def work(index: int) -> None:
        grads[index] = [torch.autograd.grad(weigh(chain(x)), parameters) for x in data[index]]

    kinds = [type(param) for param in chain.parameters()]
    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [type(param) for param in chain.parameters()] == kinds
    for index in range(2):
        for x, ours in zip(data[index], grads[index], strict=True):
            true = torch.autograd.grad(weigh(run_plainly(plain, x)), list(plain.parameters()))
            assert all(
                torch.allclose(g, t, rtol=1e-10, atol=1e-13)
                for g, t in zip(ours, true, strict=True)
            )


@pytest.mark.parametrize("backward", REPLAYING)
def test_a_cache_that_grows_with_the_input_is_replayed(backward):
    class Rotary(nn.Module):
        table: torch.Tensor

        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width)
            self.register_buffer("table", torch.zeros(0))

        def forward(self, x):
            if self.table.shape[0] < x.shape[1]:
                self.table = torch.arange(x.shape[1], device=x.device, dtype=x.dtype).cos()
            return self.linear(x) * self.table[: x.shape[1], None]

    chain = vector_chain(Rotary, 3, backward=backward).double()
    plain = copy.deepcopy(chain)
    for tokens in (3, 5, 4, 8):
        x = torch.randn(2, tokens, 6).double()
        weigh(chain(x)).backward()
        weigh(run_plainly(plain, x)).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= BOUND


def test_an_f_whose_parts_were_replaced_is_learned_anew():
    chain = vector_chain(Buffered, 2).double()
    weigh(chain(torch.randn(5, 6).double())).backward()
    chain[2].f = nn.Sequential(nn.Linear(8, 8), Buffered(8)).double()
    chain[3].f.linear = nn.Linear(8, 8).double()
    chain.zero_grad()
    compare(chain, torch.randn(5, 6).double())


@pytest.mark.parametrize("backward", ["store", *REPLAYING])
def test_shapes_on_the_meta_device(backward):
    chain = vector_chain(depth=2, backward=backward).to("meta")
    with torch.no_grad():
        assert chain(torch.empty(5, 6, device="meta")).shape == (5, 3)
    assert chain(torch.empty(5, 6, device="meta")).shape == (5, 3)


def test_a_coupling_with_a_residual_of_its_own_is_refused():
    class Scaled(rd.Coupling):
        def residual(self, a, side):
            return 2 * super().residual(a, side)

    with pytest.raises(TypeError, match=r"unit 1, Scaled, has a residual of its own.*forward of f"):
        rd.Chain([rd.Duplicate(), Scaled(MLP(8))])


def test_a_compiled_coupling_is_refused():
    compiled: Any = torch.compile(rd.Coupling(MLP(8)), backend="aot_eager")
    with pytest.raises(TypeError, match=r"unit 1 is a compiled coupling.*f\.compile"):
        rd.Chain([rd.Duplicate(), compiled])


def test_the_checker_refuses_what_training_refuses():
    class Grows(nn.Module):
        def forward(self, x):
            return x * 3

    couplings = [rd.Coupling(Grows()) for _ in range(9)]
    chain = rd.Chain([rd.Duplicate(), *couplings], arithmetic="fixed")
    with pytest.raises(ValueError, match=r"unit [1-9], Coupling\(Grows\).*left the range"):
        rd.check_reversible(chain, torch.ones(3))


def test_checking_between_a_forward_and_its_backward():
    chain = vector_chain(Buffered, 3)
    x = torch.randn(5, 6)
    y = chain(x)
    rd.check_gradients(chain, x)
    y.sum().backward()


def test_a_checker_with_nothing_to_compare_says_so():
    chain = vector_chain(depth=1).requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to compare"):
        rd.check_gradients(chain, torch.randn(5, 6))


def test_complex_streams():
    class Turn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.angle = nn.Parameter(torch.randn(8, dtype=torch.complex128))

        def forward(self, x):
            return x * self.angle

    chain = rd.Chain([rd.Duplicate(), *(rd.Coupling(Turn()) for _ in range(3)), rd.Fuse("mean")])
    plain = copy.deepcopy(chain)
    x = torch.randn(5, 8, dtype=torch.complex128)
    chain(x).abs().sum().backward()
    run_plainly(plain, x).abs().sum().backward()
    for param, expected in zip(chain.parameters(), plain.parameters(), strict=True):
        assert param.grad is not None and expected.grad is not None
        assert torch.allclose(param.grad, expected.grad, rtol=1e-12)


def test_the_first_coupling_does_not_rebuild_an_input_that_nobody_wants():
    """Its subtraction is skipped, and f is not run at all where nothing flows through it."""

    class Counted(MLP):
        runs = 0

        def forward(self, x):
            Counted.runs += 1
            return super().forward(x)

    couplings = [rd.Coupling(Counted(8)), rd.Coupling(MLP(8))]
    chain = rd.Chain([nn.Linear(6, 8), rd.Duplicate(), *couplings], check_every=0)
    _, a = chain(torch.randn(5, 6))  # a is the output of the first coupling
    a.sum().backward()
    assert Counted.runs == 2
    Counted.runs = 0
    single = rd.Chain([nn.Linear(6, 8), rd.Duplicate(), couplings[0]], check_every=0)
    _, a = single(torch.randn(5, 6))
    a.sum().backward()
    assert Counted.runs == 1
