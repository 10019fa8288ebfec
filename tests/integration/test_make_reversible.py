"""Models of transformers and timm made reversible: trained in few bits, used unchanged."""

import copy
from itertools import product

import pytest
import torch
from support.compressed import Watched, follow
from support.oracle import gradients
from support.pretrained import CAUSAL, FAMILIES, batch, make

import redivider as rd
from redivider.backward import tape
from redivider.convert.blocks import find_blocks

pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def train(model, family):
    torch.manual_seed(3)
    model.train()
    model.zero_grad()
    model(**batch(family)).loss.backward()
    return gradients(model)


def logits(model, family):
    with torch.no_grad():
        return model.eval()(**batch(family, 1)).logits


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.mark.parametrize(
    "family, bits",
    [*((family, 2) for family in FAMILIES), *product(("GPT2", "Llama"), (1, 8))],
)
def test_gradients_are_those_at_quantized_inputs(family, bits, monkeypatch):
    monkeypatch.setattr(tape, "Tape", Watched)
    monkeypatch.setattr(Watched, "num_compared", 0)
    model, reference = make(family), make(family)
    name, blocks = find_blocks(reference, None)
    assert name == FAMILIES[family][2]
    follow(blocks, bits)
    reference.config.use_cache = False  # it runs its blocks twice
    rd.make_reversible(model, bits)
    got, true = train(model, family), train(reference, family)
    assert got.keys() == true.keys()
    pairs = [(got[n], true[n]) for n in true if true[n] is not None]
    ours, theirs = (
        torch.cat([grad.flatten() for grad in grads]) for grads in zip(*pairs, strict=True)
    )
    assert (ours - theirs).norm() <= 1e-6 * theirs.norm()
    assert Watched.num_compared == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(family, dtype, monkeypatch):
    """The tape is walked back, outputs are the plain ones, and gradients are near them."""
    monkeypatch.setattr(tape, "Tape", Watched)
    monkeypatch.setattr(Watched, "num_compared", 0)
    side = {
        key: value.to(dtype) if value.is_floating_point() else value
        for key, value in batch(family).items()
    }
    losses, grads = [], []
    for is_reversible in (True, False):
        model = make(family).to(dtype).train()
        if is_reversible:
            rd.make_reversible(model, 8)
        torch.manual_seed(3)
        loss = model(**side).loss
        loss.backward()
        losses.append(loss)
        own = [grad for grad in gradients(model).values() if grad is not None]
        grads.append(torch.cat([grad.flatten() for grad in own]).float())
    assert Watched.num_compared == 4
    assert torch.equal(*losses)
    assert (grads[0] - grads[1]).norm() <= 0.1 * grads[1].norm()


def test_evaluation_is_the_original_and_a_trained_model_loads_plainly(family, tmp_path):
    plain = make(family)
    model = rd.make_reversible(copy.deepcopy(plain))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert torch.equal(logits(model, family), logits(plain, family))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, family)
    optimizer.step()
    after = logits(model, family)
    assert not torch.equal(after, logits(plain, family))
    model.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, family), after)
    kinds = [type(module) for module in loaded.modules()]
    assert [type(module) for module in rd.make_plain(model).modules()] == kinds


@pytest.mark.parametrize("family", CAUSAL)
def test_generation_in_the_middle_of_training(family):
    plain = make(family)
    model = rd.make_reversible(copy.deepcopy(plain))
    tokens = batch(family)["input_ids"][:1, :5]
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = plain.eval().generate(tokens, **options)
    model.train()
    assert model(**batch(family)).past_key_values is None
    model.eval()
    assert torch.equal(model.generate(tokens, **options), expected)
    model.train()
    model.generate(tokens, **options)  # dropout is on: other tokens may come
    train(model, family)


def test_checkpointing_is_refused_in_a_line():
    model = rd.make_reversible(make("GPT2"))
    with pytest.raises(ValueError, match="gradient checkpointing is not for a reversible model"):
        model.gradient_checkpointing_enable()
    model.transformer.gradient_checkpointing_enable()  # its base has a method of its own
    with pytest.raises(ValueError, match="gradient checkpointing is not for a reversible model"):
        train(model, "GPT2")
    other = make("GPT2")
    other.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient checkpointing is on"):
        rd.make_reversible(other)
    rd.make_plain(rd.make_reversible(make("GPT2"))).gradient_checkpointing_enable()


def test_a_cache_with_tokens_is_refused_in_training():
    model = rd.make_reversible(make("Llama"))
    tokens = batch("Llama")["input_ids"]
    with torch.no_grad():
        cache = model(tokens[:, :6], use_cache=True).past_key_values
    with pytest.raises(rd.UnitError, match=r"model\.layers\.0: a cache with earlier tokens"):
        model(tokens[:, 6:], past_key_values=cache)


def test_hidden_states_can_be_asked_for():
    model = rd.make_reversible(make("Llama"))
    output = model(**batch("Llama"), output_hidden_states=True)
    assert len(output.hidden_states) == 5
    output.hidden_states[2].square().mean().add(output.loss).backward()
    assert all(param.grad is not None for param in model.parameters())


def test_vit_of_timm():
    timm = pytest.importorskip("timm")

    def make_vit():
        torch.manual_seed(0)
        return timm.models.VisionTransformer(
            img_size=16, patch_size=4, embed_dim=32, depth=4, num_heads=4, drop_path_rate=0.2
        )

    model, reference = rd.make_reversible(make_vit(), 2), make_vit()
    x = torch.randn(3, 3, 16, 16)
    assert torch.equal(model.eval()(x), reference.eval()(x))
    follow(reference.blocks, 2)
    grads = []
    for net in (model.train(), reference.train()):
        torch.manual_seed(3)
        net(x).square().mean().backward()
        grads.append(torch.cat([param.grad.flatten() for param in net.parameters()]))
    assert (grads[0] - grads[1]).norm() <= 1e-6 * grads[1].norm()
