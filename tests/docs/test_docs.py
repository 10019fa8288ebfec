"""The code of the documents runs as it stands."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from redivider.train.loop import train
from redivider.train.recipes import get_recipe

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def run(document: str, smaller: dict[str, str] | None = None) -> dict:
    """Run the code of a document; `smaller` replaces sizes, so that it takes less time."""
    text = (ROOT / document).read_text()
    for size, other in (smaller or {}).items():
        assert text.count(size) == 1, size
        text = text.replace(size, other)
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    names: dict = {}
    for block in blocks:
        exec(block, names)
    return names


def test_the_code_of_the_readme_runs():
    names = run("README.md", {"for _ in range(100)]": "for _ in range(16)]"})
    assert names["logits"].shape == (32, 10)
    assert names["tick"].loss.isfinite()


def test_the_code_about_models_runs():
    smaller = {
        '"rev_swin_tiny", drop_path': '"rev_swin_tiny", device="meta", drop_path',
        "(8, 257)": "(2, 33)",
    }
    names = run("docs/models.md", smaller)
    assert all(param.grad is not None for param in names["model"].parameters())


def test_the_code_about_scale_runs():
    assert run("docs/scale.md")["there"].late == 0.5


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own
def test_the_code_about_speed_runs():
    names = run("docs/speed.md")
    assert names["model"].backward == "auto" and callable(names["train"])


def test_the_code_of_the_guide_runs():
    pytest.importorskip("transformers")
    smaller = {
        "for _ in range(20)]": "for _ in range(6)]",
        "for _ in range(80):": "for _ in range(30):",
        "(16,), device": "(10,), device",
        "torch.randn(16, 3, 32, 32, device": "torch.randn(10, 3, 32, 32, device",
    }
    names = run("docs/guide.md", smaller)
    assert names["losses"][-1] < names["losses"][2]
    assert names["accuracy"] > 0.5


def test_the_code_about_training_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quickstart = replace(get_recipe("quickstart"), compare=(), epochs=0.05)
    train(replace(quickstart, method="reverse"), "runs/quickstart/reverse")
    names = run("docs/training.md")
    assert names["recipe"].name == "quickstart" and not names["model"].training


def test_the_examples_of_the_guide_are_short():
    text = (ROOT / "docs" / "guide.md").read_text()
    examples = re.findall(r"\*\*The example\.\*\*.*?```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 3
    assert all(len([line for line in example.splitlines() if line]) <= 20 for example in examples)
