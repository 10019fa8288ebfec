"""Rotary positions: the published frequencies, distances, and the precision of angles."""

import pytest
import torch
from support.families import LLAMA
from support.llama import CONFIGURATIONS

import redivider as rd
from redivider.models.catalogue import resolve
from redivider.models.rope import Rope, frequencies


@pytest.mark.slow
@pytest.mark.parametrize("size", CONFIGURATIONS)
def test_frequencies_are_those_of_transformers(size):
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    options = resolve(f"rev_llama_{size}")[1]
    width = options.width // options.heads
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**CONFIGURATIONS[size])).inv_freq
    assert torch.equal(frequencies(width, options.rope_theta, options.rope_factor), theirs)
    assert frequencies(width, options.rope_theta, 1.0)[-1] > theirs[-1] * 2


@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_logits_depend_on_distances_alone(factor):
    torch.manual_seed(0)
    q, k = (x.expand(1, 1, 20, 16) for x in torch.randn(2, 1, 1, 1, 16, dtype=torch.float64))
    q, k = Rope(16, theta=100.0, factor=factor)(q, k)
    logits = (q @ k.mT)[0, 0]
    for distance in range(-19, 20):
        diagonal = logits.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)
    assert logits[0].std() > 0.1


def test_angles_are_exact_in_a_model_of_bfloat16():
    options = {**LLAMA, "depth": 1, "context": 4096}
    model = rd.create_model("llama_tiny", dtype=torch.bfloat16, **options)
    rope = model[1].f.body.rope
    q = torch.ones(1, 1, 4096, 4)
    exact, _ = rope(q, q)
    rounded, _ = rope(q.bfloat16(), q.bfloat16())
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, exact.bfloat16())
    assert (exact[0, 0, 4000] - exact[0, 0, 4001]).abs().max() > 0.1, "bfloat16 cannot count so far"
