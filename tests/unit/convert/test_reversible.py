"""Blocks made reversible: the plain forward, gradients at quantized inputs, few bits."""

import copy
import gc
import io
import warnings
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import ref

import pytest
import torch
from support.compressed import Watched, follow
from support.oracle import gradients, weigh, worst_error
from torch import nn
from torch._dynamo.utils import counters

import redivider as rd
from redivider.backward import tape
from redivider.checks.memory import Live

WIDTH = 12


class Block(nn.Module):
    """A residual block that draws random numbers, and takes a scale beside its input."""

    def __init__(self, width=WIDTH, dropout=0.1, returns_tuple=False):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.returns_tuple = returns_tuple

    def forward(self, x, scale=None):
        hidden = torch.tanh(self.first(self.norm(x)))
        y = self.dropout(self.second(hidden))
        y = x + (y if scale is None else y * scale)
        return (y, hidden.mean(), None) if self.returns_tuple else y


class Network(nn.Module):
    def __init__(self, depth=5, **options):
        super().__init__()
        self.stem = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList([Block(**options) for _ in range(depth)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, **side):
        x = self.stem(x)
        aside = []
        for layer in self.layers:
            x = layer(x, **side)
            if isinstance(x, tuple):
                x, other, _ = x
                aside.append(other)
        return self.head(x) + (sum(aside) if aside else 0)


def network(depth=5, dtype=torch.float32, **options) -> Any:
    torch.manual_seed(1)
    return Network(depth, **options).to(dtype)


def inputs(number=0, dtype=torch.float32):
    return torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(number)).to(dtype)


def train(model, *numbers, dtype=torch.float32, **side):
    """Return the gradients after a backward of the summed losses."""
    torch.manual_seed(5)
    model.zero_grad()
    losses = [weigh(model(inputs(number, dtype), **side)) for number in numbers or (0,)]
    torch.stack(losses).sum().backward()
    return gradients(model)


@pytest.mark.parametrize("bits", [1, 2, 3, 8])
@pytest.mark.parametrize("options", [{}, {"returns_tuple": True}])
def test_gradients_are_those_at_quantized_inputs(bits, options):
    model, reference = network(**options), network(**options)
    rd.make_reversible(model, bits)
    follow(reference.layers, bits)
    assert worst_error(train(model), train(reference)) <= 1e-5
    got = [torch.cat([grad.flatten() for grad in train(m).values()]) for m in (model, reference)]
    assert (got[0] - got[1]).norm() <= 1e-6 * got[1].norm()


def test_gradients_in_float64():
    model, reference = network(dtype=torch.float64), network(dtype=torch.float64)
    rd.make_reversible(model, 3)
    follow(reference.layers, 3)
    error = worst_error(train(model, dtype=torch.float64), train(reference, dtype=torch.float64))
    assert error <= 1e-12


def test_the_reference_is_the_plain_network_but_for_the_bits():
    """Otherwise both could be wrong alike."""
    errors = []
    for bits in (2, 5, 8):
        plain, reference = network(dropout=0), network(dropout=0)
        follow(reference.layers, bits)
        errors.append(worst_error(train(reference), train(plain)))
    assert all(later < 0.3 * earlier for earlier, later in pairwise(errors))
    assert errors[-1] < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_tape_is_walked_back(bits, dtype, monkeypatch):
    monkeypatch.setattr(tape, "Tape", Watched)
    monkeypatch.setattr(Watched, "num_compared", 0)
    model = rd.make_reversible(network(depth=64, dtype=dtype), bits)
    train(model, dtype=dtype)
    assert Watched.num_compared == 64


def test_under_autocast(monkeypatch):
    monkeypatch.setattr(tape, "Tape", Watched)
    monkeypatch.setattr(Watched, "num_compared", 0)
    model = rd.make_reversible(network(), 2)
    with torch.autocast("cpu", torch.bfloat16):
        loss = weigh(model(inputs()))
    loss.backward()
    assert Watched.num_compared == 5


def flat(grads):
    return torch.cat([grad.flatten() for grad in grads.values() if grad is not None]).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", range(1, 9))
def test_half_precision(bits, dtype):
    model, reference = network(4, dtype), network(4, dtype)
    rd.make_reversible(model, bits)
    follow(reference.layers, bits)
    ours, true = (flat(train(net, dtype=dtype)) for net in (model, reference))
    assert (ours - true).norm() <= 8 * torch.finfo(dtype).eps * true.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_under_autocast_with_a_scaler(dtype):
    model, reference = network(), network()
    rd.make_reversible(model, 2)
    follow(reference.layers, 2)
    grads = []
    for net in (model, reference):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=dtype == torch.float16)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        torch.manual_seed(5)
        with torch.autocast("cpu", dtype):
            loss = weigh(net(inputs()).float())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        grads.append(flat(gradients(net)))
        before = net.head.weight.detach().clone()
        scaler.step(optimizer)
        assert not torch.equal(net.head.weight, before)
    assert (grads[0] - grads[1]).norm() <= 8 * torch.finfo(dtype).eps * grads[1].norm()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_export_in_evaluation():
    plain, model = network(2).eval(), rd.make_reversible(network(2)).eval()
    program = torch.export.export(model, (inputs(),)).module()
    assert torch.equal(program(inputs(1)), plain(inputs(1)))


@pytest.mark.parametrize("bits", [1, 2, 3, 8])
def test_a_further_block_holds_its_bits(bits):
    held = []
    for depth in (8, 16):
        model = rd.make_reversible(network(depth), bits)
        x = torch.randn(64, 16, 4)
        with Live() as live:
            loss = weigh(model(x))
            held.append(live.bytes)
        del loss
    num_values = 64 * 16 * WIDTH
    assert (held[1] - held[0]) / 8 <= num_values * (bits + 0.5) / 8


def test_evaluation_is_the_original_to_the_last_bit():
    plain, model = network().eval(), rd.make_reversible(network())
    model.eval()
    assert torch.equal(model(inputs()), plain(inputs()))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert worst_error(train(model), train(plain)) == 0  # with gradients, too


@pytest.mark.parametrize("has_grad", [False, True])
def test_outputs_in_training_are_those_of_the_original(has_grad):
    outputs = []
    for net in (network(), rd.make_reversible(network(), 1)):
        torch.manual_seed(0)
        with torch.set_grad_enabled(has_grad):
            outputs.append(net(inputs()))
    assert torch.equal(*outputs)


def test_two_forwards_before_one_backward():
    model, reference = rd.make_reversible(network(), 2), network()
    follow(reference.layers, 2)
    assert worst_error(train(model, 0, 1), train(reference, 0, 1)) <= 1e-5


def test_gradients_accumulate_and_a_graph_can_be_used_twice():
    model = rd.make_reversible(network(), 2)
    twice = {name: 2 * grad for name, grad in train(model).items()}
    torch.manual_seed(5)
    model.zero_grad()
    loss = weigh(model(inputs()))
    loss.backward(retain_graph=True)
    loss.backward()
    assert worst_error(gradients(model), twice) <= 1e-6


@pytest.mark.parametrize("frozen", [["stem", "layers.0", "layers.1"], ["layers.2"], ["layers.4"]])
def test_frozen_blocks(frozen):
    model, reference = network(), network()
    for net in (model, reference):
        for name in frozen:
            net.get_submodule(name).requires_grad_(False)
    rd.make_reversible(model, 2)
    follow(reference.layers, 2)
    assert worst_error(train(model), train(reference)) <= 1e-5


def test_arguments_beside_the_stream_get_gradients():
    model, reference = rd.make_reversible(network(), 2), network()
    follow(reference.layers, 2)
    scales = [torch.full((WIDTH,), 0.5, requires_grad=True) for _ in range(2)]
    for net, scale in zip((model, reference), scales, strict=True):
        train(net, scale=scale)
    ours, theirs = ({"scale": scale.grad} for scale in scales)
    assert worst_error(ours, theirs) <= 1e-5


def test_a_copy_is_a_model_of_its_own():
    model = rd.make_reversible(network(), 2)
    expected = {name: grad.clone() for name, grad in train(model).items()}
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    for other in copies:
        assert worst_error(train(other), expected) == 0
        assert rd.make_plain(other) is other and type(other.layers[0]) is Block


def test_a_copy_of_a_block_is_one_block():
    model = rd.make_reversible(network(dropout=0), 2)
    file = io.BytesIO()
    torch.save(model.layers[1], file)
    assert file.tell() < 2 * sum(param.nbytes for param in model.layers[1].parameters()) + 10_000
    block = copy.deepcopy(model.layers[1])
    row, index = vars(block)["_redivider_place"]
    assert [plain is not None for plain in row.plain].index(True) == index == 1
    assert sum(plain is not None for plain in row.plain) == 1
    x = torch.randn(3, WIDTH)
    weigh(block(x)).backward()
    assert all(param.grad is None for param in model.parameters())
    assert torch.equal(block(x), model.layers[1](x))


def test_a_block_that_was_removed_is_forgotten():
    model, plain = rd.make_reversible(network(3, dropout=0), 1), network(3, dropout=0)
    for net in (model, plain):
        net.layers[2].train()
        del net.layers[2]
        net.eval()
    gc.collect()
    assert worst_error(train(model), train(plain)) == 0


def test_a_copy_in_the_middle_of_a_pass():
    model = rd.make_reversible(network(), 2)
    x = model.layers[0](model.stem(inputs()))
    other = copy.deepcopy(model)
    expected = {name: grad.clone() for name, grad in train(other).items()}
    model.layers[1](x)
    assert worst_error(train(model), expected) == 0


def test_plain_again():
    model = rd.make_plain(rd.make_reversible(network(), 2))
    assert type(model.layers[0]) is Block and not model._forward_pre_hooks
    assert worst_error(train(model), train(network())) == 0
    with pytest.raises(ValueError, match="Network is not reversible"):
        rd.make_plain(model)


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_network_that_is_dropped_frees_its_weights(is_plain):
    """Plain again at once, else with the next garbage collection."""
    model: Any = rd.make_reversible(network(), 2)
    train(model)
    weights = [ref(param) for param in model.parameters()]
    if is_plain:
        rd.make_plain(model)
    gc.collect()
    gc.disable()
    try:
        del model
        if not is_plain:
            gc.collect()
        assert all(weight() is None for weight in weights)
    finally:
        gc.enable()


def test_a_part_is_plain_again():
    outer: Any = nn.Sequential(network())
    outer.forward = lambda x, use_cache=True: (outer[0](x), use_cache)
    outer.gradient_checkpointing_enable = lambda: None
    rd.make_reversible(outer)
    assert not outer(inputs())[1]
    rd.make_plain(outer[0])
    assert outer(inputs())[1]  # caches are built again
    with pytest.raises(ValueError, match=r"call rd\.make_plain\(model\)"):
        outer.gradient_checkpointing_enable()
    rd.make_plain(outer)
    assert not outer._forward_pre_hooks
    with pytest.raises(ValueError, match="Sequential is not reversible"):
        rd.make_plain(outer)


def test_plain_again_or_not_at_all():
    model = rd.make_reversible(network())
    last: Any = model.layers[-1]
    kind: Any = type(last)
    last.__class__ = type("FSDPBlock", (kind,), {})
    with pytest.raises(ValueError, match="a block is FSDPBlock, made of a reversible one"):
        rd.make_plain(model)
    last.__class__ = kind
    assert worst_error(train(rd.make_plain(model)), train(network())) == 0


def test_hooks_see_a_block_once():
    model = rd.make_reversible(network(), 2)
    seen = []
    model.layers[1].register_forward_hook(lambda *_: seen.append("forward"))
    model.layers[1].register_full_backward_hook(lambda *_: seen.append("backward"))
    train(model)
    assert seen == ["forward", "backward"]


@pytest.mark.parametrize("size", [1e-6, 1e4, 1e12])
def test_values_of_every_size(size):
    model, reference = network(), network()
    for net in (model, reference):
        with torch.no_grad():
            net.stem.weight.mul_(size)
            for layer in net.layers:
                layer.second.weight.mul_(size)
    rd.make_reversible(model, 2)
    follow(reference.layers, 2)
    assert worst_error(train(model), train(reference)) <= 1e-5


def test_a_value_that_is_not_finite_shows_in_the_loss_and_the_gradients():
    model = rd.make_reversible(network(), 2)
    with torch.no_grad():
        model.layers[2].second.bias.fill_(torch.inf)
    assert model(inputs()).isnan().all()
    assert train(model)["head.weight"].isnan().all()


class Padded(Block):
    """A block that does not look at the first position."""

    def forward(self, x, scale=None):
        pad = torch.tensor([True, False, False])[:, None]
        return super().forward(x.masked_fill(pad, 0.0), scale)


def test_values_that_are_not_finite_and_not_used():
    nets: list[Any] = []
    for _ in range(2):
        torch.manual_seed(1)
        net: Any = Changing(4)
        net.layers = nn.ModuleList(Padded(dropout=0.0) for _ in range(4))
        filler = torch.tensor([-torch.inf, 0.0, 0.0])[:, None]
        net.change = lambda x, filler=filler: x + filler
        nets.append(net)
    model, plain = nets
    rd.make_reversible(model, 8)
    assert worst_error(train(model), train(plain)) <= 0.05


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated")  # the compiler's own
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_blocks(monkeypatch):
    monkeypatch.setattr(tape, "Tape", Watched)
    monkeypatch.setattr(Watched, "num_compared", 0)
    torch._dynamo.reset()
    counters["stats"].clear()
    model, reference = rd.make_reversible(network(dropout=0), 2), network(dropout=0)
    follow(reference.layers, 2)
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    assert worst_error(train(model), train(reference)) <= 1e-5
    assert Watched.num_compared == 5
    assert counters["stats"]["unique_graphs"] <= 2  # five blocks share them
    model.eval(), reference.eval()
    assert torch.allclose(model(inputs()), rd.make_plain(model)(inputs()), rtol=1e-5)
    with pytest.raises(ValueError, match="a block in layers is compiled; compile after"):
        other = network()
        other.layers[0].compile(backend="aot_eager")
        rd.make_reversible(other)


class Attending(nn.Module):
    """A block with attention, which may add an outlier to a channel of the first token."""

    def __init__(self, width, outlier):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.outlier = outlier

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (-1, 64)).transpose(1, 2).chunk(3, 1)
        x = x + self.out(
            nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        )
        x = x + self.mlp(self.norms[1](x))
        outlier = torch.zeros_like(x)
        outlier[:, 0, 7] = self.outlier
        return x + outlier


@pytest.mark.slow
def test_an_attention_sink_leaves_the_gradients_alone():
    width = 384
    outliers = [3000 if index == 2 else -3000 if index == 9 else 0 for index in range(12)]
    errors = []
    for has_sink in (False, True):
        grads = []
        for is_reversible in (False, True):
            torch.manual_seed(0)
            blocks = [Attending(width, has_sink * outlier) for outlier in outliers]
            net = nn.ModuleDict({"blocks": nn.Sequential(*blocks)})
            if is_reversible:
                rd.make_reversible(net, 2, "blocks")
            x = torch.randn(2, 6, width, generator=torch.Generator().manual_seed(1))
            weigh(net["blocks"](x)).backward()
            grads.append(
                torch.cat([grad.flatten() for grad in gradients(net).values() if grad is not None])
            )
        errors.append((grads[1] - grads[0]).norm() / grads[0].norm())
    assert errors[1] <= 1.2 * errors[0] <= 0.2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated")  # the compiler's own
@pytest.mark.parametrize("has_grad", [False, True])
def test_a_whole_network_compiles_in_evaluation(has_grad):
    torch._dynamo.reset()
    model = rd.make_reversible(network(2)).eval()
    with torch.set_grad_enabled(has_grad):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(inputs()), model(inputs()))


def test_blocks_by_name():
    model: Any = nn.ModuleDict({"a": Network(3), "b": Network(2)})
    with pytest.raises(ValueError, match=r"several lists of blocks, 'a\.layers', 'b\.layers'"):
        rd.make_reversible(model)
    rd.make_reversible(model, blocks="b.layers")
    assert type(model["a"].layers[0]) is Block
    assert type(model["b"].layers[0]) is not Block
    assert type(model["b"].layers[0]).__name__ == "Block"


def test_plain_again_after_a_forward_was_replaced():
    """As accelerate's hooks do; when removed, they leave a bound method behind."""
    model = rd.make_reversible(network(), 2)
    block = model.layers[2]
    own = block.forward
    block.forward = lambda *args, **kwargs: own(*args, **kwargs)
    with pytest.raises(ValueError, match=r"forward of a block has been replaced.*make_plain"):
        rd.make_plain(model)
    train(model)  # all of it is still reversible
    block.forward = own
    rd.make_plain(model)
    assert worst_error(train(model), train(network())) == 0
    assert not any("forward" in vars(layer) for layer in model.layers)


def scale(factor):
    return lambda block, args, output: output * factor


def test_a_block_whose_input_the_tape_has_lost_is_named(monkeypatch):
    """Its input is thousands of times smaller than that of the block before."""
    monkeypatch.setattr("redivider.convert.reversible.CHECK_EVERY", 3)
    model = rd.make_reversible(network(), 2)
    model.layers[1].register_forward_hook(scale(5000.0))
    train(model, 0)  # by itself this is harmless
    model.layers[3].register_forward_hook(scale(1 / 5000))
    train(model, 1)  # not checked
    train(model, 2)
    for _ in range(2):
        with pytest.warns(rd.DriftWarning, match=r"^layers\.4: the input .* of its norm"):
            train(model, 3)
        train(model, 4, 5)
    model.eval()
    train(model, 6)
    with torch.no_grad():
        model.train()(inputs())


def test_a_value_that_is_not_finite_and_stays_is_reported():
    def spoil(block, args):
        return torch.cat([torch.full_like(args[0][:, :1], torch.nan), args[0][:, 1:]], 1)

    class Cleaning(Block):
        def forward(self, x, scale=None):
            return super().forward(x.nan_to_num(), scale)

    model = network()
    model.layers = nn.ModuleList([Cleaning() for _ in range(3)])
    rd.make_reversible(model, 8)
    model.layers[0].register_forward_pre_hook(spoil)
    with pytest.warns(rd.DriftWarning, match=r"layers\.\d: the input .* off by nan"):
        train(model)


@pytest.mark.parametrize("check_every, num", [(1, 1), (0, 0)])
def test_a_unit_of_a_chain_whose_input_the_tape_has_lost_is_named(check_every, num):
    torch.manual_seed(0)
    units = [nn.Linear(4, WIDTH), *(Block() for _ in range(5))]
    chain = rd.Chain(units, backward="compress", check_every=check_every)
    chain[2].register_forward_hook(scale(5000.0))
    chain[4].register_forward_hook(scale(1 / 5000))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weigh(chain(inputs())).backward()
    assert [str(warning.message)[:6] for warning in caught] == ["unit 5"][:num]
    assert all(warning.category is rd.DriftWarning for warning in caught)


def test_units_of_a_chain():
    def blocks():
        torch.manual_seed(0)
        return [nn.Linear(4, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, 3)]

    chain = rd.Chain(blocks(), backward="compress")
    reference: Any = nn.Sequential(*blocks())
    for unit in chain[1:-1]:
        unit.takes = ("scale",)
    for block in reference[1:-1]:
        block.forward = partial(block.forward, scale=0.5)
    plain = copy.deepcopy(reference)
    follow(reference[1:], 2)
    torch.manual_seed(5)
    weigh(chain(inputs(), scale=0.5)).backward()
    theirs = train(reference)
    ours = dict(zip(theirs, gradients(chain).values(), strict=True))
    assert worst_error(ours, theirs) <= 1e-5
    chain.eval(), plain.eval()
    assert torch.equal(chain(inputs(), scale=0.5), plain(inputs()))


def test_several_lists_one_after_the_other():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(Network(3), nn.Linear(3, 4), Network(2))

    model, reference = make(), make()
    for name, blocks in (("0.layers", reference[0].layers), ("2.layers", reference[2].layers)):
        rd.make_reversible(model, 2, name)
        follow(blocks, 2)
    with pytest.raises(ValueError, match=r"2\.layers is reversible already"):
        rd.make_reversible(model, 2, "2.layers")
    assert len(model._forward_pre_hooks) == 1
    assert worst_error(train(model), train(reference)) <= 1e-5


def test_some_blocks_in_evaluation_mode():
    model, reference = rd.make_reversible(network(), 2), network()
    follow(reference.layers, 2)
    for net in (model, reference):
        for index in (0, 2):
            net.layers[index].eval().requires_grad_(False)
    assert worst_error(train(model), train(reference)) <= 1e-5


def test_blocks_in_a_sequential():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, WIDTH), nn.Sequential(*(Block() for _ in range(3))))

    model, reference = rd.make_reversible(make(), 2), make()
    follow(reference[1], 2)
    assert worst_error(train(model), train(reference)) <= 1e-5


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda m: rd.make_reversible(m, 9), "bits must be a whole number from 1 to 8, got 9"),
        (lambda m: rd.make_reversible(m, 0), "bits must be a whole number from 1 to 8, got 0"),
        (lambda m: rd.make_reversible(m, True), "bits must be a whole number"),
        (lambda m: rd.make_reversible(m, blocks="body"), "the model has no module of that name"),
        (lambda m: rd.make_reversible(m, blocks="head"), "must name a list of blocks"),
        (lambda m: rd.make_reversible(m, blocks=""), "blocks must be a name, such as .* got ''"),
        (lambda m: rd.make_reversible(m, blocks=m.layers), "must be a name, .* got ModuleList"),
        (
            lambda m: rd.make_reversible(m, blocks="layers.0.returns_tuple"),
            "of blocks, .* got bool",
        ),
        (lambda m: rd.make_reversible(network(1), blocks="layers"), "layers has one block, and"),
        (lambda m: rd.make_reversible(network(1)), "no ModuleList .* checkpointing for one block"),
        (lambda m: rd.make_reversible(m.head), "Linear has no ModuleList or Sequential"),
        (lambda m: rd.make_reversible(rd.make_reversible(m)), "is reversible already"),
    ],
)
def test_bad_arguments_change_nothing(call, message):
    model = network()
    with pytest.raises(ValueError, match=message):
        call(model)
    assert "reversible already" in message or type(model.layers[0]) is Block


def test_a_list_of_python():
    model: Any = [Block(), Block()]
    with pytest.raises(TypeError, match=r"the model must be an nn\.Module, got list"):
        rd.make_reversible(model)
    holder: Any = nn.Module()
    holder.layers = model
    with pytest.raises(ValueError, match=r"'layers' must name a list of blocks, .* got list"):
        rd.make_reversible(holder, blocks="layers")


def test_a_stream_that_is_keyword_only():
    class Keyword(nn.Sequential):
        def forward(self, *, hidden):  # type: ignore[override]
            return super().forward(hidden)

    model: Any = nn.ModuleDict(
        {"layers": nn.ModuleList(Keyword(nn.Linear(4, 4)) for _ in range(2))}
    )
    rd.make_reversible(model)
    with pytest.raises(rd.UnitError, match=r"layers\.0: .* positional argument, and hidden is"):
        model["layers"][0](hidden=torch.randn(3, 4))


class Changing(Network):
    """A network that changes the stream between two blocks."""

    change = staticmethod(lambda x: x)

    def forward(self, x, **side):
        x = self.stem(x)
        for index, layer in enumerate(self.layers):
            x = layer(self.change(x) if index == 2 else x, **side)
        return self.head(x)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x * 2,
        lambda x: x.mul_(2),
        lambda x: x.transpose(0, 1),
        lambda x: x[:, 1:],
        lambda x: x.detach(),
    ],
    ids=["scaled", "in place", "transposed", "shorter", "detached"],
)
def test_a_stream_that_changes_between_blocks(change):
    nets: list[Any] = []
    for _ in range(2):
        torch.manual_seed(1)
        nets.append(Changing())
        nets[-1].change = change
    model, reference = nets
    rd.make_reversible(model, 2)
    follow(reference.layers, 2)
    assert worst_error(train(model), train(reference)) <= 1e-5


def test_blocks_that_are_left_out_and_run_in_any_order():
    def run(net):
        torch.manual_seed(5)
        net.zero_grad()
        x = net.stem(inputs())
        left = net.layers[3](net.layers[1](x))
        right = net.layers[2](net.layers[0](x))
        weigh(net.head(left + right)).backward()
        return gradients(net)

    plain, model = network(dropout=0), rd.make_reversible(network(dropout=0), 8)
    ours, theirs = run(model), run(plain)
    assert ours["layers.4.first.weight"] is None
    assert worst_error(ours, theirs) <= 0.02


class Dropping(nn.Module):
    """A block whose random numbers are drawn in the order of its input's memory."""

    def __init__(self):
        super().__init__()
        self.drop, self.linear = nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear(self.drop(x))


@pytest.mark.parametrize("by_chain", [False, True])
def test_dropout_is_replayed_in_every_order_of_memory(by_chain):
    def make():
        torch.manual_seed(1)
        return nn.Sequential(*(Dropping() for _ in range(3)))

    plain, reference = make(), make()
    follow(reference, 2)
    if by_chain:
        model: Any = rd.Chain(make(), backward="compress")
    else:
        model = rd.make_reversible(nn.ModuleList([make()]), 2, "0")[0]
    x = torch.randn(4, WIDTH, 6).transpose(1, 2)
    outputs, grads = [], []
    for net in (plain, reference, model):
        torch.manual_seed(5)
        outputs.append(net(x))
        weigh(outputs[-1]).backward()
        grads.append({str(i): grad for i, grad in enumerate(gradients(net).values())})
    assert torch.equal(outputs[0], outputs[2])
    assert worst_error(grads[2], grads[1]) <= 1e-5


@pytest.mark.parametrize("first, then", [([0], [0, 1, 2, 3]), ([0, 1], [2, 3]), ([0, 1], [1, 3])])
def test_a_pass_continues_its_own_tape_alone(first, then):
    model, reference = rd.make_reversible(network(dropout=0), 2), network(dropout=0)
    follow([reference.layers[index] for index in then], 2)

    def run(net, layers, size):
        x = size * torch.randn(6, 3, WIDTH, generator=torch.Generator().manual_seed(1))
        for index in layers:
            x = net.layers[index](x)
        return weigh(x)

    other = run(model, first, 30)  # whose graph is alive
    run(model, then, 1).backward()
    run(reference, then, 1).backward()
    assert worst_error(gradients(model), gradients(reference)) <= 1e-5
    other.backward()


def test_nothing_is_held_after_the_backward():
    model = rd.make_reversible(network(dropout=0))
    train(model)  # gradients are there
    with Live() as live:
        loss = weigh(model(inputs()))
        loss.backward()
        gc.collect()
        assert live.bytes <= loss.nbytes
    with pytest.raises(RuntimeError):
        loss.backward()


def test_blocks_in_any_order_and_again_keep_their_bits():
    model = rd.make_reversible(network(dropout=0), 2)
    x = model.stem(torch.randn(64, 16, 4))
    held = []
    with Live() as live:
        for index in (4, 3, 2, 1, 0, 0, 0):
            x = model.layers[index](x)
            held.append(live.bytes)
    per_value = [(b - a) / (64 * 16 * WIDTH) for a, b in pairwise(held)]
    assert max(per_value) <= (2 + 0.5) / 8


def test_float16_does_not_overflow():
    known = tape.Tape(1, x := torch.full((1, 64), 40_000.0, dtype=torch.float16))
    known.append(x)
    x = x.clone()
    x[0, :32] = 64_000
    x[0, 32:] = -64_000
    assert known.read(known.append(x)).isfinite().all()


def test_passes_that_take_turns():
    model, other = (rd.make_reversible(network(dropout=0), 2) for _ in range(2))
    expected = train(other, 0, 1)
    model.zero_grad()
    first, second = (model.stem(inputs(number)) for number in (0, 1))
    for layer in model.layers:
        first = layer(first)
        second = layer(second)
    (weigh(model.head(first)) + weigh(model.head(second))).backward()
    assert worst_error(gradients(model), expected) <= 1e-5


class Failing(Block):
    """A block that fails when it is told to."""

    fails = False

    def forward(self, x, scale=None):
        y = super().forward(x, scale)
        if self.fails:
            raise RuntimeError("out of memory")
        return y


def test_a_pass_that_fails_is_over_and_leaves_nothing():
    model = rd.make_reversible(network(), 2)
    expected = {name: grad.clone() for name, grad in train(model).items()}
    model = network()
    model.layers[2] = Failing()
    model.layers[2].load_state_dict(network().layers[2].state_dict())
    rd.make_reversible(model, 2, "layers")
    gc.collect()
    with Live() as live:
        for _ in range(3):
            model.layers[2].fails = True
            x = model.layers[1](model.layers[0](model.stem(inputs())))
            with pytest.raises(RuntimeError, match="out of memory"):
                model.layers[2](x)
            model.layers[2].fails = False
            del x
        gc.collect()
        assert live.bytes == 0
    assert worst_error(train(model), expected) == 0


def test_a_pass_that_is_left_is_forgotten_by_the_next():
    model = rd.make_reversible(network(), 2)
    held = []
    with Live() as live:
        for _ in range(4):
            model.layers[1](model.layers[0](model.stem(inputs())))
            held.append(live.bytes)
    assert held[1] == held[3]


class Keeping(Block):
    """A block that keeps a loss of its own, which it does not return."""

    def forward(self, x, scale=None):
        y = super().forward(x, scale)
        self.aside = y.square().mean()
        return y


def test_gradients_of_what_a_block_keeps_inside_are_refused():
    model = network()
    model.layers = nn.ModuleList(Keeping() for _ in range(3))
    rd.make_reversible(model, 2)
    loss = weigh(model(inputs())) + model.layers[1].aside
    with pytest.raises(
        rd.UnitError, match=r"^layers\.1: a gradient reached a tensor that was kept inside"
    ):
        loss.backward()


class Noting(Block):
    seen: list[bool]

    def forward(self, x, scale=None):
        self.seen.append(x.requires_grad)
        return super().forward(x, scale)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_both_runs_of_a_block_see_the_same_flags(is_frozen):
    model = network()
    model.layers = nn.ModuleList(Noting() for _ in range(3))
    for layer in model.layers:
        layer.seen = []
    model.stem.requires_grad_(not is_frozen)
    model.layers[0].requires_grad_(not is_frozen)
    rd.make_reversible(model, 2)
    train(model)
    seen = [layer.seen for layer in model.layers]
    assert seen[1] == ([False] * 2 if is_frozen else [True] * 2)
    assert seen[2] == [True] * 2


def test_a_shallow_copy_has_its_own_weights_and_does_not_train():
    model = rd.make_reversible(network(dropout=0))
    block = copy.copy(model.layers[0])
    block._modules = {**block._modules, "second": nn.Linear(2 * WIDTH, WIDTH)}
    x = torch.randn(2, WIDTH)
    with torch.no_grad():
        assert not torch.equal(block(x), model.layers[0](x))
    with pytest.raises(rd.UnitError, match=r"nn\.DataParallel .* cannot train"):
        block(x)


def test_no_samples():
    model = rd.make_reversible(network(), 2)
    model(torch.randn(0, 3, 4)).sum().backward()


def test_a_block_whose_forward_was_replaced_is_refused():
    model = network()
    model.layers[2].forward = model.layers[2].forward
    with pytest.raises(ValueError, match="forward of a block in layers has been replaced"):
        rd.make_reversible(model)


@pytest.mark.parametrize("blocks", ["layers", None])
def test_a_block_that_is_used_twice_is_refused(blocks):
    model = network()
    model.layers[3] = model.layers[1]
    with pytest.raises(ValueError, match="layers has a block twice"):
        rd.make_reversible(model, blocks=blocks)


def test_blocks_that_change_the_shape():
    def make():
        torch.manual_seed(0)
        pairs = [(8, 8), (8, 6), (6, 6), (6, 4)]
        return nn.Sequential(*(nn.Sequential(nn.Linear(*pair), nn.Tanh()) for pair in pairs))

    model, reference = rd.make_reversible(nn.ModuleDict({"layers": make()})), make()
    follow(reference, 2)
    x = torch.randn(3, 8)
    weigh(model["layers"](x)).backward()
    weigh(reference(x)).backward()
    ours = dict(zip(gradients(reference), gradients(model).values(), strict=True))
    assert worst_error(ours, gradients(reference)) <= 1e-5


def test_a_list_whose_blocks_all_change_the_shape_is_reported_once():
    stages = nn.Sequential(*(nn.Sequential(nn.Linear(n, n - 1), nn.Tanh()) for n in (8, 7, 6)))
    model: Any = rd.make_reversible(nn.ModuleDict({"stages": stages}))
    with pytest.warns(UserWarning, match="stages: no two blocks have inputs of one shape") as seen:
        model["stages"](torch.randn(3, 8))
    assert len(seen) == 1
    model["stages"](torch.randn(3, 8))


def test_many_operations_between_two_blocks():
    def change(x):
        for _ in range(100):
            x = (x + 0.01) / 1.01
        return x

    held = []
    for function in (Changing.change, change):
        model: Any = Changing()
        model.change = function
        rd.make_reversible(model, 2)
        x = torch.randn(64, 16, 4)
        with Live() as live:
            loss = weigh(model(x))
            held.append(live.bytes)
        del loss
    assert held[1] - held[0] <= 1000  # no second tape


def test_gradients_of_gradients_are_refused():
    model = rd.make_reversible(network(), 2)
    loss = weigh(model(inputs()))
    with pytest.raises(RuntimeError, match=r"layers\.4: create_graph=True .*make_plain"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


def test_weights_that_changed_since_the_forward_are_noticed():
    model = rd.make_reversible(network(), 2)
    loss = weigh(model(inputs()))
    with torch.no_grad():
        model.layers[2].first.weight.add_(1)
    with pytest.raises(rd.ChangedError, match=r"layers\.2"):
        loss.backward()


def test_without_anything_to_train_it_is_the_original():
    model, plain = rd.make_reversible(network(dropout=0.0), 1), network(dropout=0.0)
    for net in (model, plain):
        net.requires_grad_(False)
        net.head.requires_grad_()
    assert torch.equal(model(inputs()), plain(inputs()))
    grads = train(model)["head.weight"], train(plain)["head.weight"]
    assert torch.equal(*grads)
    follow(plain.layers, 1)
    for net in (model, plain):  # gradients pass through the frozen blocks
        net.stem.requires_grad_()
    assert worst_error(train(model), train(plain)) <= 1e-5


def test_a_block_that_changes_its_input_is_refused():
    class InPlace(Block):
        def forward(self, x, scale=None):
            return x.add_(self.second(self.first(x)))

    model = network()
    model.layers = nn.ModuleList(InPlace() for _ in range(2))
    model.stem.requires_grad_(False)  # else autograd refuses it
    rd.make_reversible(model)
    with pytest.raises(rd.UnitError, match=r"layers\.0: f writes into its own input"):
        model(inputs())


def test_a_gradient_that_begins_after_the_first_block():
    """Nothing before it is to be rebuilt, so those blocks run as they are."""
    model, plain = rd.make_reversible(network(dropout=0.0), 1), network(dropout=0.0)
    prompt = torch.ones(WIDTH, requires_grad=True)
    follow(plain.layers, 1)
    grads: list[torch.Tensor] = []
    for net in (model, plain):
        net.requires_grad_(False)
        net.layers[2].register_forward_pre_hook(lambda _, args: (args[0] + prompt,))
        grads += torch.autograd.grad(weigh(net(inputs())), prompt)
    assert (grads[0] - grads[1]).norm() <= 1e-6 * grads[1].norm()


def test_a_stream_that_is_no_tensor_of_reals():
    model = rd.make_reversible(network())
    with pytest.raises(rd.UnitError, match=r"layers\.0: the first argument of a block must be"):
        model.layers[0](torch.arange(3))


def test_codes_are_released_as_the_backward_proceeds():
    known = tape.Tape(2, torch.zeros(4, 64))
    inputs = [torch.full((4, 64), 0.1 * index) for index in range(5)]
    assert [known.append(x) for x in inputs] == [0, 1, 2, 3, 4]
    num_inputs = []
    for position in (4, 3, 1, 2, 0):  # a unit may finish before the one above it
        known.release(position)
        num_inputs.append(known.num_inputs)
    assert num_inputs == [4, 3, 3, 1, 1]
