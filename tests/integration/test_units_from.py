"""Models of transformers and timm as units: the same function, and couplings by the equations."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support.oracle import equal, gradients, weigh
from support.pretrained import FAMILIES, batch, make
from support.reference import Reference
from torch import nn

import redivider as rd
from redivider.tree import tensors_of

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
PRE_NORM = [family for family in FAMILIES if family not in ("Bert", "Roberta")]


def inputs(family, number=0):
    """Return the input of a model and its keywords, without labels; padding differs by number."""
    rest = batch(family, number)
    del rest["labels"]
    if "attention_mask" in rest:
        rest["attention_mask"][0, 6 + number :] = 0
    return rest.pop("input_ids" if "input_ids" in rest else "pixel_values"), rest


def untied(family, **options):
    """Return a model whose head has weights of its own, without dropout, in double precision."""
    model = make(family, **options).double().eval()
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    return model


def next_token_loss(logits, tokens):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def sgd(stage):
    parameters = stage.parameters() if isinstance(stage, nn.Module) else stage
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.5)


def pipeline(units, cut, **options):
    return rd.Pipeline(
        units, stages=cut, loss=next_token_loss, optimizer=sgd, arithmetic="float", **options
    )


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_chain_of_the_units_is_the_model(family, attention):
    model = make(family, attn_implementation=attention).eval()
    chain, body = rd.Chain(rd.units_from(model)), rd.Chain(rd.units_from(model.base_model))
    x, side = inputs(family)
    with torch.no_grad():
        assert torch.equal(chain(x), model(x).logits)
        assert torch.equal(body(x), model.base_model(x).last_hidden_state)
        assert torch.equal(chain(x, **side), model(x, **side).logits)
        if side:
            assert not torch.equal(chain(x, **side), chain(x))


def without_mask(forward):
    return lambda hidden_states: forward(hidden_states)


def test_blocks_that_take_no_mask_get_none():
    """As those of DINOv2 do with transformers 5.17."""
    model = make("Dinov2").eval()
    x, _ = inputs("Dinov2")
    with torch.no_grad():
        logits = model(x).logits
        for layer in model.base_model.encoder.layer:
            layer.forward = without_mask(layer.forward)
        assert torch.equal(rd.Chain(rd.units_from(model))(x), logits)


@pytest.mark.parametrize("backward", ["store", "checkpoint", "reverse"])
def test_gradients_are_those_of_the_model(family, backward):
    model = make(family).train()
    chain = rd.Chain(rd.units_from(model), backward=backward)
    assert {*chain.parameters()} <= {*model.parameters()}
    x, side = inputs(family)
    grads = []
    for net in (lambda: chain(x, **side), lambda: model(x, **side).logits):
        model.zero_grad()
        torch.manual_seed(3)
        weigh(net()).backward()
        grads.append({name: grad for name, grad in gradients(model).items() if grad is not None})
    assert len(grads[0]) > 20 and equal(*grads)


def test_masks_differ_by_layer():
    gemma = make("Gemma3Text").eval()
    assert {*gemma.config.layer_types} == {"full_attention", "sliding_attention"}
    qwen = make("Qwen3", use_sliding_window=True, sliding_window=4, max_window_layers=2).eval()
    assert {*qwen.config.layer_types} == {"full_attention", "sliding_attention"}
    x, side = inputs("Qwen3")
    with torch.no_grad():
        for model in (gemma, qwen):
            assert torch.equal(rd.Chain(rd.units_from(model))(x, **side), model(x, **side).logits)


@pytest.mark.parametrize("family", ["GPT2", "Bert"])
def test_token_types(family):
    model = make(family).eval()
    x, side = inputs(family)
    side["token_type_ids"] = (torch.arange(12) > 5).long().expand(3, -1)
    chain = rd.Chain(rd.units_from(model))
    with torch.no_grad():
        assert torch.equal(chain(x, **side), model(x, **side).logits)


@pytest.mark.parametrize(
    "name", ["BertForSequenceClassification", "RobertaForSequenceClassification"]
)
def test_classifiers_of_texts(name):
    family = name.removesuffix("ForSequenceClassification")
    model = getattr(transformers, name)(make(family).config).eval()
    x, side = inputs(family)
    with torch.no_grad():
        assert torch.equal(rd.Chain(rd.units_from(model))(x, **side), model(x, **side).logits)


def test_soft_caps_of_logits():
    model = make("Gemma3Text", final_logit_softcapping=0.5).eval()
    x, _ = inputs("Gemma3Text")
    with torch.no_grad():
        assert torch.equal(rd.Chain(rd.units_from(model))(x), model(x).logits)


def test_modules_inside_of_blocks_stay_the_models():
    model = make("Llama").eval()
    calls = []
    model.model.layers[1].register_forward_hook(lambda *_: calls.append("block"))
    model.model.layers[1].mlp.register_forward_hook(lambda *_: calls.append("mlp"))
    x, _ = inputs("Llama")
    rd.Chain(rd.units_from(model))(x)
    assert calls == ["mlp", "block"]
    rd.Chain(rd.units_from(model, couplings=True))(x)
    assert calls == 2 * ["mlp", "block"]


@pytest.mark.parametrize("family", ["GPT2", "Gemma3Text", "Bert"])
@pytest.mark.parametrize("cut", [[7], [2, 3, 2]])
def test_a_pipeline_that_is_flushed_is_plain_training(family, cut):
    model = untied(family)
    plain = copy.deepcopy(model)
    units = rd.units_from(model)
    pipe = pipeline(units, [*cut[:-1], len(units) - sum(cut[:-1])])
    optimizer = sgd(plain)
    for number in range(3):
        x, side = inputs(family, number)
        first, later = pipe.step(x, x, **side), pipe.flush()
        optimizer.zero_grad()
        loss = next_token_loss(plain(x, **side).logits, x)
        loss.backward()
        optimizer.step()
        assert torch.equal((later[-1] if later else first).loss, loss)
    assert equal(dict(model.named_parameters()), dict(plain.named_parameters()))


@pytest.mark.parametrize("couplings", [False, True])
@pytest.mark.parametrize("family", ["GPT2", "Gemma3Text"])
def test_stages_train_the_models_weights_by_the_equations(family, couplings):
    model = untied(family)
    before = copy.deepcopy(model.state_dict())
    units = rd.units_from(model, couplings=couplings)
    cut = [3, 2, len(units) - 5]
    options = {"method": "petra", "accumulate": 2, "latency": 1}
    reference = Reference(units, cut, loss=next_token_loss, optimizer=sgd, **options)
    pipe = pipeline(units, cut, **options)
    losses = []
    for number in range(8):
        x, _ = inputs(family, number)
        tick = pipe.step(x, x)
        reference.tick((x, x))
        losses += [] if tick.loss is None else [tick.loss.item()]
    pipe.flush()
    reference.flush()
    assert losses == pytest.approx(reference.losses[: len(losses)], rel=1e-9)
    for name, param in rd.Chain(units).named_parameters():
        torch.testing.assert_close(param, reference.parameters()[name], rtol=1e-7, atol=1e-9)
    changed = [key for key, value in model.state_dict().items() if not equal(value, before[key])]
    assert len(changed) == len(before)


def test_a_pipeline_keeps_inputs_of_blocks_and_nothing_of_couplings():
    num_kept = {}
    for couplings in (False, True):
        units = rd.units_from(untied("GPT2"), couplings=couplings)
        assert len(units) == 7
        pipe = pipeline(units, [2, 1, 4])
        for number in range(6):
            x, _ = inputs("GPT2", number)
            pipe.step(x, x)
        num_kept[couplings] = [
            [len(tensors_of([kept.value for kept in unit.kept.values()])) for unit in stage.units]
            for stage in pipe.stages
        ]
    assert num_kept[False] == [[4, 4], [2], [0, 0, 0, 0]]
    assert num_kept[True] == [[4, 0], [0], [0, 0, 0, 0]]


@pytest.mark.parametrize("family", ["GPT2", "Llama"])
def test_a_state_resumes_and_the_model_is_saved_as_it_is(family, tmp_path):
    model = untied(family)
    twin = copy.deepcopy(model)
    pipe, other = (pipeline(rd.units_from(net), [2, 2, 3]) for net in (model, twin))
    for number in range(4):
        x, side = inputs(family, number)
        pipe.step(x, x, **side)
        if number == 2:
            other.load_state_dict(pipe.state_dict())
    other.step(x, x, **side)
    pipe.flush()
    other.flush()
    assert equal(model.state_dict(), twin.state_dict())
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(x).logits, pipe.evaluate(x))


def test_tied_weights_need_one_stage():
    model = make("GPT2")
    units = rd.units_from(model)
    with pytest.raises(ValueError, match=r"is also '0\.wte\.weight' of stage 0: .* untie it"):
        pipeline(units, 2)
    x, _ = inputs("GPT2")
    before = model.lm_head.weight.detach().clone()
    pipeline(units, 1).step(x, x)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not torch.equal(model.lm_head.weight, before)


@pytest.mark.parametrize("family", PRE_NORM)
def test_couplings_are_the_equations(family):
    model = make(family).double().eval()
    model.config.use_cache = False
    blocks = list(model.get_submodule(FAMILIES[family][2]))
    calls = {}  # by block: what the model passes to it
    hooks = [
        block.register_forward_pre_hook(
            lambda block, args, kwargs: calls.update({block: (args, kwargs)}), with_kwargs=True
        )
        for block in blocks
    ]
    x, side = inputs(family)
    x = x.double() if x.is_floating_point() else x
    with torch.no_grad():
        model(x, **side)
        for hook in hooks:
            hook.remove()
        a = b = calls[blocks[0]][0][0]
        for block in blocks:
            (_, *args), kwargs = calls[block]
            a, b = b + block(a, *args, **kwargs) - a, a
        norm, head = rd.units_from(model)[-2:]
        units = rd.units_from(model, couplings=True)
        result, expected = rd.Chain(units)(x, **side), head(norm((a + b) / 2))
    assert sum(isinstance(unit, rd.Coupling) for unit in units) == len(blocks)
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", PRE_NORM)
def test_couplings_are_reversed(family):
    model = make(family).double().train()
    chain = rd.Chain(rd.units_from(model, couplings=True))
    x, side = inputs(family)
    x = x.double() if x.is_floating_point() else x
    rd.check_reversible(chain, x, tolerance=1e-9, **side)
    rd.check_gradients(chain, x, **side)


def test_what_is_not_supported_is_refused_in_a_line():
    with pytest.raises(ValueError, match=r"cannot make units of Linear; .* list of units"):
        rd.units_from(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="the blocks of BertForMaskedLM cannot become couplings"):
        rd.units_from(make("Bert"), couplings=True)
    model = make("GPT2")
    with pytest.raises(ValueError, match=r"head of GPT2ForTokenClassification.*model\.base_model"):
        rd.units_from(transformers.GPT2ForTokenClassification(model.config))
    with pytest.raises(ValueError, match=r"call rd\.make_plain\(model\) first"):
        rd.units_from(rd.make_reversible(model))
    with pytest.raises(ValueError, match="use_bidirectional_attention"):
        rd.units_from(make("Gemma3Text", use_bidirectional_attention=True))
    with pytest.raises(TypeError, match="no unit takes the keyword 'position_ids'"):
        x, _ = inputs("Llama")
        rd.Chain(rd.units_from(make("Llama")))(x, position_ids=x)


def test_vit_of_timm():
    timm = pytest.importorskip("timm")
    model = timm.models.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=32, depth=4, num_heads=4, drop_path_rate=0.2
    )
    x = torch.randn(3, 3, 16, 16)
    chain = rd.Chain(rd.units_from(model))
    assert {*chain.parameters()} == {*model.parameters()}
    assert torch.equal(chain.eval()(x), model(x))
    chain.train()
    grads = []
    for net in (chain, model):
        model.zero_grad()
        torch.manual_seed(3)
        weigh(net(x)).backward()
        grads.append({name: param.grad for name, param in model.named_parameters()})
    assert equal(*grads)
    rd.check_gradients(rd.Chain(rd.units_from(model, couplings=True)), x)


def test_positions_that_change_with_what_was_seen_are_refused():
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        rope_scaling={"rope_type": "dynamic", "factor": 2.0},
    )
    with pytest.raises(ValueError, match="RoPE of the type dynamic changes with the lengths"):
        rd.units_from(transformers.LlamaForCausalLM(config))
