"""The second run of a unit stops once its graph is complete, and gives the same gradients."""

import copy
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import redivider as rd
from redivider.checks.memory import Live

WIDTH = 6
STRATEGIES = ("checkpoint", "save")


class MLP(nn.Module):
    """A residual block that ends with a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Late(MLP):
    """A block whose product is needed: what follows it saves a tensor."""

    def forward(self, x):
        return torch.sin(super().forward(x))


class Bare(nn.Module):
    """A product of its input alone."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.product(x)


class Factors(nn.Module):
    """A product and a sum, in which a weight takes part."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return torch.tanh(torch.addmm(x, x, self.weight)) @ self.weight + self.bias


class Sum(nn.Module):
    """A unit whose graph saves nothing."""

    def forward(self, x):
        return (x + 1).mean(0, keepdim=True) + x


class Several(MLP):
    """Two outputs, of which one is not used."""

    def forward(self, x):
        return super().forward(x), self.down(self.up(x))


class First(nn.Module):
    def forward(self, pair):
        return pair[0]


class Scaled(nn.Module):
    """A branch with an argument that gets a gradient, beside the input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, scale):
        return self.down(self.up(x) * scale)


class Guarded(MLP):
    """A block that catches errors."""

    def forward(self, x):
        try:
            return super().forward(x)
        except Exception:
            return x


class Products(TorchDispatchMode):
    """Counts operations."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket] += 1
        return func(*args, **(kwargs or {}))


def chain(*units, backward) -> Any:
    torch.manual_seed(0)
    return rd.Chain([unit() for unit in units], backward=backward).double()


def inputs():
    return torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)


def grads_of(model, x, **side):
    loss = model(x, **side).square().sum()
    params = [x, *side.values(), *model.parameters()]
    return torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True)


def count_products(model, x):
    """Return the matrix products of a forward and backward."""
    with Products() as products:
        grads_of(model, x)
    return sum(products.counts[own] for own in (torch.ops.aten.addmm, torch.ops.aten.mm))


@pytest.mark.parametrize("backward", STRATEGIES)
@pytest.mark.parametrize(
    "units", [[MLP, MLP], [Late, Late], [Bare], [Sum, Bare], [Several, First], [Guarded]]
)
def test_gradients_are_those_of_autograd(units, backward):
    model, plain = chain(*units, backward=backward), chain(*units, backward="store")
    for _ in range(3):
        x = inputs()
        for own, other in zip(grads_of(model, x), grads_of(plain, x), strict=True):
            assert torch.equal(own, other)


@pytest.mark.parametrize("backward", ["checkpoint", "compress", "reverse-checkpoint"])
@pytest.mark.parametrize(
    "units, again", [([MLP], 1), ([Late], 2), ([Bare], 0), ([Guarded], 1), ([Factors], 1)]
)
def test_the_last_product_is_not_run_again(units, again, backward):
    """It is not in the first step, nor in later ones."""
    model, plain = chain(*units, backward=backward), chain(*units, backward="store")
    for _ in range(3):
        assert count_products(model, inputs()) == count_products(plain, inputs()) + again


def test_arguments_get_their_gradient():
    def make(backward):
        torch.manual_seed(0)
        units = [rd.Duplicate(), rd.Coupling(Scaled(), takes=("scale",)), rd.Fuse("add")]
        return rd.Chain(units, backward=backward).double()

    model, plain = make("checkpoint"), make("store")
    for _ in range(2):
        x, scale = inputs(), torch.rand(2 * WIDTH, dtype=torch.float64, requires_grad=True)
        expected = grads_of(plain, x, scale=scale)
        for own, other in zip(grads_of(model, x, scale=scale), expected, strict=True):
            torch.testing.assert_close(own, other)


def test_a_backward_may_run_twice():
    model = chain(MLP, MLP, backward="checkpoint")
    for _ in range(2):
        loss = model(inputs()).square().sum()
        first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        second = torch.autograd.grad(loss, list(model.parameters()))
        for own, other in zip(first, second, strict=True):
            assert torch.equal(own, other)


class Force(MLP):
    """The gradient of an energy, which the forward computes; later, or at once."""

    num_runs: Any

    def __init__(self, after=0) -> None:
        super().__init__()
        self.after, self.scale = after, nn.Parameter(torch.ones(()))
        self.register_buffer("num_runs", torch.zeros(()))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        self.num_runs += 1
        x = self.dropout(x)
        if self.num_runs <= self.after:
            return super().forward(x)
        with torch.enable_grad():
            if not x.requires_grad:
                x = x.detach().requires_grad_()
            energy = self.down(torch.tanh(self.up(x))).sum()
            return self.scale * torch.autograd.grad(energy, x, create_graph=True)[0]


def test_a_module_may_compute_gradients_inside():
    """Its first run is undone then: buffers and random numbers are those of one run."""
    model, plain = chain(Force, backward="checkpoint"), chain(Force, backward="store")
    for step in range(3):
        x = inputs()
        results = []
        for own in (model, plain):
            torch.manual_seed(step)
            results.append((grads_of(own, x), torch.rand(3)))
            assert own[0].num_runs == step + 1
        (grads, noise), (expected, expected_noise) = results
        assert torch.equal(noise, expected_noise)
        for one, other in zip(grads, expected, strict=True):
            assert torch.equal(one, other)


def test_gradients_inside_of_later_forwards_alone_are_refused():
    model = rd.Chain([Force(after=1)], backward="checkpoint").double()
    grads_of(model, inputs())
    with pytest.raises(rd.UnitError, match="unit 0, Force: it computes gradients inside"):
        grads_of(model, inputs())
    grads_of(model, inputs())  # from now on it may


class Drifting(nn.Module):
    """A module whose runs differ in the shapes of what they save, or in how much."""

    def __init__(self, kind):
        super().__init__()
        self.product, self.kind = nn.Linear(WIDTH, WIDTH), kind
        self.num_runs = 0

    def forward(self, x):
        self.num_runs += 1
        is_again = self.num_runs % 2 == 0
        if (self.kind == "more" and is_again) or (self.kind == "fewer" and not is_again):
            x = x.exp().log()
        if self.kind == "shape":
            rows = len(x) - 1 if is_again else len(x)
            x = torch.cat([x[:rows].exp(), x[rows:].exp()])
        return self.product(x.tanh())


@pytest.mark.parametrize("kind", ["more", "fewer", "shape"])
def test_a_run_unlike_the_first_is_completed(kind):
    """Its own graph gives the gradients then, as always."""
    torch.manual_seed(0)
    unit = Drifting(kind)
    model = rd.Chain([unit], backward="checkpoint").double()
    for _ in range(3):
        unit.num_runs, x = 0, inputs()
        y = unit.product((x.exp() if kind == "shape" else x).tanh())
        expected = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
        with Products() as operations:
            grads = grads_of(model, x)
        for own, other in zip(grads, expected, strict=True):
            torch.testing.assert_close(own, other)
    assert operations.counts[torch.ops.aten.tanh] == 2  # after the first step it is not tried


def test_gradients_that_would_be_lost_are_refused():
    """Those of a tensor inside of the module, with and without tensors on the way."""
    for operation in (torch.sin, torch.neg):

        class Leaking(MLP):
            def forward(self, x, operation=operation):
                self.leaked = operation(x)
                return super().forward(x)

        unit = Leaking()
        model = rd.Chain([unit], backward="checkpoint").double()
        for _ in range(2):
            loss = model(inputs()).sum()
            with pytest.raises(rd.UnitError, match="unit 0, Leaking: a gradient reached a tensor"):
                unit.leaked.sum().backward()
            loss.backward()


def test_a_saved_tensor_that_is_changed_is_an_error():
    class Changing(MLP):
        def forward(self, x):
            hidden = torch.exp(self.up(x))  # which its backward needs
            return self.down(hidden.add_(1))

    model = rd.Chain([Changing()], backward="checkpoint").double()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"unit 0, Changing.*inplace operation"):
            model(inputs()).sum().backward()


class Pair(nn.Module):
    """Two linear layers, with something between them."""

    def __init__(self, between=torch.tanh, width=WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.between = between

    def forward(self, x):
        return self.down(self.between(self.up(x)))


@pytest.mark.parametrize("backward", ["checkpoint", "offload"])
def test_inputs_in_another_order_in_memory_change_no_gradient(backward):
    """A product of a sliced input saves its factors the other way round; here they are square."""
    torch.manual_seed(0)
    units = [rd.Split(), *[rd.Coupling(Pair()) for _ in range(4)], rd.Fuse("concat")]
    model = rd.Chain(units, backward=backward).double()
    plain = copy.deepcopy(model)
    plain.backward = "store"
    for _ in range(3):
        x = torch.randn(2, 3, 2 * WIDTH, dtype=torch.float64, requires_grad=True)
        # Hooks, as those that move tensors to the host, may return others than those of the graph.
        with saved_tensors_hooks(Tensor.contiguous, Tensor.detach):
            loss = model(x).square().sum()
        grads = torch.autograd.grad(loss, [x, *model.parameters()])
        for own, other in zip(grads, grads_of(plain, x), strict=True):
            torch.testing.assert_close(own, other)


class Square(torch.autograd.Function):
    """A function that holds its input in its node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.x * grad


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(1, 1)

    def forward(self, x):
        return self.product(Square.apply(x))


def test_functions_may_hold_tensors_of_their_own():
    """Then the second run builds its own graph, so that they are not held meanwhile."""
    model, plain = (chain(Squared, Squared, backward=name) for name in ("checkpoint", "store"))
    for _ in range(2):
        x = torch.randn(5, 1, dtype=torch.float64, requires_grad=True)
        with Live() as live:
            loss = model(x).sum()
            assert live.bytes == loss.nbytes + x.nbytes  # the input of the second unit
            del loss
        for own, other in zip(grads_of(model, x), grads_of(plain, x), strict=True):
            assert torch.equal(own, other)


def test_a_module_may_hold_its_input():
    class Holding(Pair):
        def forward(self, x):
            self.last = x
            hidden = self.up(x).tanh()
            hidden.register_hook(lambda grad: grad * x.abs())
            return self.down(hidden)

    unit = Holding()
    model = rd.Chain([nn.Linear(WIDTH, WIDTH), unit], backward="checkpoint").double()
    plain = copy.deepcopy(model)
    plain.backward = "store"
    for _ in range(2):
        x = inputs()
        for own, other in zip(grads_of(model, x), grads_of(plain, x), strict=True):
            assert torch.equal(own, other)
        assert unit.last.shape == (5, WIDTH)


def to_script(x: Tensor) -> Tensor:
    a = torch.sin(x * x)
    b = torch.exp(a * 0.1) * torch.tanh(x)
    return torch.cos(b) * a


class Finally(Pair):
    def forward(self, x):
        try:
            y = self.down(self.up(x).tanh())
        finally:
            self.norm = float(y.detach().norm())
        return y


class Renaming(Pair):
    def forward(self, x):
        try:
            return super().forward(x)
        except BaseException as error:
            raise RuntimeError("layer failed") from error


def nested(x):
    ragged = torch.nested.as_nested_tensor([x[:2], x[2:]], layout=torch.strided)
    return torch.cat(torch.relu(ragged).unbind())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "unit",
    [
        lambda: Pair(torch.jit.script(to_script)),
        lambda: torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())),
        Finally,
        Renaming,
        lambda: Pair(nested),
        lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)),
    ],
    ids=["scripted function", "scripted module", "finally", "renamed error", "nested", "norm"],
)
def test_what_a_module_makes_of_the_stop_does_not_matter(unit):
    torch.manual_seed(0)
    model = rd.Chain([unit()], backward="checkpoint").double()
    torch.manual_seed(0)
    plain = rd.Chain([unit()], backward="store").double()
    for _ in range(3):
        x = inputs()
        for own, other in zip(grads_of(model, x), grads_of(plain, x), strict=True):
            torch.testing.assert_close(own, other)


def test_gradients_inside_may_be_guarded_and_share_buffers():
    class Turn(MLP):
        def __init__(self, shared):
            super().__init__()
            self.register_buffer("cos", shared)

        def forward(self, x):
            return super().forward(x * self.cos)

    class Guard(Turn):
        def forward(self, x):
            with torch.enable_grad():
                inner = x.detach().requires_grad_()
                try:
                    grad = torch.autograd.grad(torch.tanh(inner).sum(), inner)[0]
                except:  # noqa: E722
                    grad = torch.zeros_like(x)
            return super().forward(x + grad)

    shared = torch.ones(1, dtype=torch.float64).expand(WIDTH)
    results = []
    for backward in ("store", "checkpoint"):
        torch.manual_seed(0)
        model = rd.Chain([Turn(shared), Guard(shared)], backward=backward).double()
        model[0].cos = model[1].cos = shared
        torch.manual_seed(1)
        results.append([grads_of(model, inputs()) for _ in range(2)])
    for expected, grads in zip(*results, strict=True):
        for own, other in zip(grads, expected, strict=True):
            assert torch.equal(own, other)


def test_threads_may_use_one_retained_graph():
    model = chain(MLP, MLP, backward="checkpoint")
    params = list(model.parameters())
    loss = model(inputs()).square().sum()
    expected = torch.autograd.grad(loss, params, retain_graph=True)

    def run(_: int) -> bool:
        grads = torch.autograd.grad(loss, params, retain_graph=True)
        return all(map(torch.equal, grads, expected))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(run, range(60)))


def test_norms_that_cannot_stop_cost_no_more():
    """Their second run leaves running statistics alone, by other operations than the first one."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(WIDTH)
    unit = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    model = rd.Chain([unit], backward="checkpoint").double()
    plain = copy.deepcopy(model)
    plain.backward = "store"
    counts = [count_products(model, inputs()) for _ in range(3)]
    assert counts == [count_products(plain, inputs()) + 2] * 3


def test_nothing_is_held_by_units_of_a_unit():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = rd.Chain([MLP(), MLP()], backward="compress")
            self.last = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.last(self.inner(x))

    model = rd.Chain([Outer()], backward="checkpoint").double()
    for _ in range(2):
        x = inputs()
        with Live() as live:
            loss = model(x).sum()
            assert live.bytes == loss.nbytes
            loss.backward()


def test_a_loss_that_is_kept_holds_no_tensors():
    """Nor does it between forward and backward, but for the input and the weights."""
    model = chain(MLP, backward="checkpoint")
    grads_of(model, inputs())
    x = inputs()
    with Live() as live:
        loss = model(x).sum()
        assert live.bytes == loss.nbytes
        loss.backward()
        grads = [x.grad, *(param.grad for param in model.parameters())]
        assert live.bytes == loss.nbytes + sum(grad.nbytes for grad in grads)


def test_an_error_of_the_second_run_leaves_nothing_behind():
    class Failing(MLP):
        fails = False

        def forward(self, x):
            y = self.up(x).tanh()
            if self.fails:
                raise ValueError("out of luck")
            return self.down(y)

    unit = Failing()
    model = rd.Chain([unit], backward="checkpoint").double()
    x = inputs()
    with Live() as live:
        loss = model(x).sum()
        held, unit.fails = live.bytes, True
        with pytest.raises(ValueError, match="out of luck"):
            loss.backward(retain_graph=True)
        assert live.bytes == held
        unit.fails = False
        loss.backward()
