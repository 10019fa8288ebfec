"""Pages of the experiments: one folder per question, with its data and figures."""

import re
from pathlib import Path

import pytest
from claims import CLAIMS

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
PAGES = sorted(EXPERIMENTS.glob("*/README.md"))


def test_every_claim_is_repeated_by_a_page():
    text = "".join(page.read_text() for page in PAGES)
    commands = " ".join(re.findall(r"^    python experiments/run.py (.*)", text, re.MULTILINE))
    assert {claim.name for claim in CLAIMS} <= {*re.findall(r"\w+", commands)}


@pytest.mark.parametrize("page", PAGES, ids=[page.parent.name for page in PAGES])
def test_a_page_shows_its_data_and_figures(page):
    text = page.read_text()
    assert text.startswith("# ") and text.splitlines()[0].endswith("?")
    assert len(text.splitlines()) <= 80
    for path in page.parent.iterdir():
        assert path == page or f"]({path.name})" in text, path.name
    index = (EXPERIMENTS / "README.md").read_text()
    assert f"]({page.parent.name}/README.md)" in index
