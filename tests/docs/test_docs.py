"""The code of the documents runs as it stands."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def run(document: str) -> dict:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    assert len(blocks) >= 2
    names: dict = {}
    for block in blocks:
        exec(block, names)
    return names


def test_the_code_of_the_readme_runs():
    names = run("README.md")
    assert names["logits"].shape == (32, 10)
    assert names["tick"].loss.isfinite()


def test_the_code_about_models_runs():
    names = run("docs/models.md")
    assert all(param.grad is not None for param in names["model"].parameters())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own
def test_the_code_about_speed_runs():
    names = run("docs/speed.md")
    assert names["model"].backward == "auto" and callable(names["train"])


def test_the_code_of_the_guide_runs():
    pytest.importorskip("transformers")
    names = run("docs/guide.md")
    assert names["losses"][-1] < names["losses"][2]
    assert names["accuracy"] > 0.5


def test_the_examples_of_the_guide_are_short():
    text = (ROOT / "docs" / "guide.md").read_text()
    examples = re.findall(r"\*\*The example\.\*\*.*?```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 3
    assert all(len([line for line in example.splitlines() if line]) <= 20 for example in examples)
