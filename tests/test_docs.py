"""The code of the documents runs as it stands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


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
    assert names["scores"].shape == (8, 10)
    assert names["tick"].loss.isfinite()


@pytest.mark.parametrize("document", ["docs/models.md"])
def test_the_code_of_other_documents_runs(document):
    names = run(document)
    assert all(each.grad is not None for each in names["model"].parameters())
