"""Models are exported as they are, also with gradients on, and compute the same bits."""

from typing import Any

import pytest
import torch
from support.families import EACH, REVERSIBLE, is_text
from torch import nn

import redivider as rd

ON_THE_GRID = ("revnet50", "rev_swin_tiny", "rev_llama_tiny")


def cases():
    """Yield families with few layers, because tracing takes long, and some on the grid."""
    for name, options in REVERSIBLE:  # the plain ones have the same layers; ONNX has some of them
        few: dict[str, Any] = {
            key: tuple(min(2, d) for d in options[key]) for key in options if key == "depths"
        }
        few |= {"depth": 1} if "depth" in options else {}
        yield name, options | few, "float"
        if name in ON_THE_GRID:
            yield name, options | few, "fixed"


def inputs(name, number=0):
    generator = torch.Generator().manual_seed(number)
    if is_text(name):
        return torch.randint(256, (2, 16), generator=generator)
    return torch.randn(2, 1, 8, 8, generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "arithmetic"), [*cases()])
def test_every_family(name, options, arithmetic):
    torch.manual_seed(0)
    model = rd.create_model(name, **options).eval()
    model.arithmetic = arithmetic
    program = torch.export.export(model, (inputs(name),)).module()
    for number in range(2):
        x = inputs(name, number)
        assert torch.equal(program(x), model(x))


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("arithmetic", ["float", "fixed"])
def test_keywords_and_a_dynamic_batch(arithmetic, strict):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, scale):
            return torch.tanh(self.linear(x)) * scale

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            couplings = [rd.Coupling(Scaled(), takes=("scale",)) for _ in range(3)]
            self.chain = rd.Chain([rd.Duplicate(), *couplings, rd.Fuse()], arithmetic=arithmetic)

        def forward(self, x, scale):
            return self.chain(x, scale=scale)

    torch.manual_seed(0)
    network, batch = Network(), torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(
        network,
        (torch.randn(4, 4), torch.tensor(0.5)),
        dynamic_shapes=({0: batch}, None),
        strict=strict,
    ).module()
    for size in (4, 9):
        x, scale = torch.randn(size, 4), torch.rand(())
        assert torch.equal(program(x, scale), network(x, scale))


def test_a_compiled_chain_still_reverses():
    """Only an exported one runs plainly."""
    couplings = [rd.Coupling(nn.Sequential(nn.Linear(8, 8), nn.Tanh())) for _ in range(6)]
    chain = rd.Chain([rd.Duplicate(), *couplings, rd.Fuse()], backward="reverse")
    compiled: Any = torch.compile(chain, backend="eager")
    x = torch.randn(64, 8)
    compiled(x).sum().backward()
    held = [rd.measure_memory(net, x).held for net in (chain, compiled)]
    assert held[1] <= 1.2 * held[0]


def run_onnx(path, *tensors):
    """Return the outputs of a file by onnxruntime."""
    session = pytest.importorskip("onnxruntime").InferenceSession(path)
    names = [node.name for node in session.get_inputs()]
    feed = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
    return [torch.from_numpy(output) for output in session.run(None, feed)]


# The exporter of torch warns of its own calls.
exports_onnx = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
# A Rev-ViT has the patches of Swin, the layers of a GPT, and the class token of MViT.
SHALLOW: dict[str, dict[str, Any]] = {
    "revnet18": {"depths": (1, 1)},
    "rev_swin_tiny": {"depths": (1, 1)},
    "rev_mvit_base": {"depths": (1, 1)},
    "rev_gpt_nano": {"depth": 1},
    "rev_llama_tiny": {"depth": 1},
    "rev_roberta_base": {"depth": 1},
}
# Networks that run code which none of those on the grid runs.
OTHERS = {
    "revnet18": "resnet18",
    "rev_mvit_base": "mvit_base",
    "rev_gpt_nano": "rev_gpt_nano",  # couplings in floats
    "rev_roberta_base": "roberta_base",
}


@pytest.mark.slow
@exports_onnx
@pytest.mark.parametrize("of_text", [False, True], ids=["images", "text"])
def test_every_family_as_onnx(of_text, tmp_path):
    """On the grid, and some others, as one network: an export takes seconds.

    As programs of torch, `test_every_family` has all the others.
    """
    pytest.importorskip("onnxscript")
    names = [name for name in SHALLOW if is_text(name) == of_text]
    models: dict[str, nn.Module] = {}
    for name in names:
        options = {**dict(EACH)[name], **SHALLOW[name]}
        models[f"{name} on the grid"] = rd.create_model(name, arithmetic="fixed", **options)
        if name in OTHERS:
            models[OTHERS[name]] = rd.create_model(OTHERS[name], **options)

    class All(nn.Module):
        def __init__(self):
            super().__init__()
            self.models = nn.ModuleList(models.values())

        def forward(self, x):
            return tuple(model(x) for model in self.models)

    network, path = All().eval(), tmp_path / "all.onnx"
    # Rewriting takes as long as all the rest; the tests of one chain and of the command have it.
    torch.onnx.export(network, (inputs(names[0]),), path, verbose=False, optimize=False)
    x = inputs(names[0], 1)
    outputs, expected = run_onnx(path, x), [output.detach() for output in network(x)]
    by_name = (dict(zip(models, tensors, strict=True)) for tensors in (outputs, expected))
    torch.testing.assert_close(*by_name, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@exports_onnx
def test_a_grid_in_onnx_is_exact(tmp_path):
    """Where f computes without rounding, the streams have the same bits, for any batch."""
    pytest.importorskip("onnxscript")

    class Scaled(nn.Module):
        def forward(self, x):
            return x * 0.375 - 1.5  # of few bits, and between the points of the grid

    couplings = [rd.Coupling(Scaled()) for _ in range(4)]
    chain = rd.Chain([rd.Duplicate(), *couplings, rd.Fuse()], arithmetic=rd.Fixed(bits=4))
    path, batch = tmp_path / "chain.onnx", torch.export.Dim("batch", min=2, max=64)
    example = torch.arange(-16, 16).view(8, 4) / 64
    torch.onnx.export(chain.eval(), (example,), path, dynamic_shapes=({0: batch},), verbose=False)
    for x in (example, 17 * torch.cat((example, example + 3))):
        assert torch.equal(run_onnx(path, x)[0], chain(x))
