"""Documents and examples: their code runs, their links lead somewhere, and the site builds."""

import json
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes.launch import launch

import redivider as rd
from redivider.train.loop import train
from redivider.train.recipes import get_recipe

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
ALONE = ("README.md", "docs/ecosystem.md")  # every block of these runs on its own
APART = (*ALONE, "docs/distributed.md")
SMALLER = {
    "README.md": {
        "for _ in range(100)]": "for _ in range(16)]",
        "GPT2Config(n_layer=8,": "GPT2Config(n_layer=2,",
    },
    "docs/models.md": {
        '"rev_swin_tiny", drop_path': '"rev_swin_tiny", device="meta", drop_path',
        "(8, 257)": "(2, 33)",
    },
    "docs/guide.md": {
        "heads=4) for _ in range(6)]": "heads=4) for _ in range(2)]",
        "for _ in range(80):": "for _ in range(30):",
        "(16,), device": "(10,), device",
        "torch.randn(16, 3, 32, 32, device": "torch.randn(10, 3, 32, 32, device",
    },
    "docs/networks.md": {
        "n_layer=4, ": "n_layer=1, vocab_size=1024, ",
        "torch.randn(2, 3, 32, 32).double()": "torch.randn(2, 3, 8, 8).double()",
        "for _ in range(20)]": "for _ in range(6)]",
    },
    "docs/pipelines.md": {"for _ in range(64):": "for _ in range(16):"},
    "docs/distributed.md": {
        '"revnet50", num_classes': '"rev_vit_tiny", width=24, depth=2, patch_size=8, num_classes'
    },
}
PAGES = [ROOT / "README.md", *DOCS]
WITH_CODE = [str(page.relative_to(ROOT)) for page in PAGES if "```python" in page.read_text()]


def blocks_of(document: str) -> list[str]:
    """Return the code of a document, with smaller sizes, so that it takes less time."""
    text = (ROOT / document).read_text()
    for size, other in SMALLER.get(document, {}).items():
        assert text.count(size) == 1, size
        text = text.replace(size, other)
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def prepare(document: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names that a document takes from its reader."""
    if document == "docs/training.md":
        quickstart = replace(get_recipe("quickstart"), compare=(), epochs=0.05)
        train(replace(quickstart, method="reverse"), "runs/quickstart/reverse")
    if document == "docs/pretrained.md":
        transformers = pytest.importorskip("transformers")
        config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2)
        kind = transformers.AutoModelForCausalLM
        monkeypatch.setattr(kind, "from_pretrained", lambda _: transformers.GPT2LMHeadModel(config))
    return {}


def run_in_a_process(rank: int, blocks: list[str]) -> int:
    x, target = torch.randn(2, 3, 32, 32), torch.randint(10, (2,))
    names: dict[str, Any] = {"batches": [(x, target)] * 4}
    for block in blocks:
        exec(block, names)
    return len(names["weights"])


def test_code_for_several_processes_runs(tmp_path):
    first, second = launch(run_in_a_process, tmp_path, blocks_of("docs/distributed.md"))
    assert first == second > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of compilers and exporters
@pytest.mark.parametrize("document", [name for name in WITH_CODE if name not in APART])
def test_code_runs(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = prepare(document, monkeypatch)
    for block in blocks_of(document):
        exec(block, names)
    if document == "docs/guide.md":
        assert names["accuracy"] > 0.5
    if document == "docs/networks.md":
        assert names["losses"][-1] < names["losses"][2]


@pytest.mark.filterwarnings("ignore")  # of other libraries
@pytest.mark.parametrize(
    "document, number", [(name, n) for name in ALONE for n in range(len(blocks_of(name)))]
)
def test_code_runs_on_its_own(document, number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    block = blocks_of(document)[number]
    for library in re.findall(r"^(?:from|import) (\w+)", block, re.MULTILINE):
        pytest.importorskip(library)
    if "Trainer" in block:
        pytest.importorskip("accelerate")
    exec(block, {})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_examples_run(script, tmp_path, monkeypatch, capsys):
    if "transformers" in script.read_text():
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_the_notebook_runs():
    pytest.importorskip("transformers")
    notebook = json.loads((ROOT / "examples" / "tour.ipynb").read_text())
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"]
            exec("".join(cell["source"]), names)
    assert names["tick"].loss.isfinite()


def slugs(path: Path) -> set[str]:
    """Return the anchors of a page, as GitHub and the site make them."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    plain = [re.sub(r"[`*]|\[|\]\([^)]*\)", "", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain}


LINKING = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *DOCS,
    *sorted((ROOT / "benchmarks").rglob("*.md")),
    *sorted((ROOT / "experiments").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), target
        assert not anchor or anchor in slugs(other), target


def test_every_public_name_is_in_the_reference():
    reference = "".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    listed = set(re.findall(r"^::: redivider\.(\w+)$", reference, re.MULTILINE))
    assert listed == set(rd.__all__)


def test_pages_are_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    for page in DOCS:
        assert len(page.read_text().splitlines()) <= 200, page
        assert len(sentences(page)) == 0 or words_a_sentence(page) <= 25, page


def sentences(page: Path) -> list[str]:
    """Return the sentences of a page, without code and tables."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not re.match(r"\s*([|#!]|    |:::)", line)]
    parts = re.split(r"(?<=[.:;!?])\s+|\n\s*\n|\n(?=\s*(?:-|\d+\.) )", "\n".join(lines))
    return [part for part in parts if len(part.split()) > 1]


def words_a_sentence(page: Path) -> float:
    parts = sentences(page)
    return sum(len(part.split()) for part in parts) / len(parts)


def test_pictures_show_the_schedule(tmp_path):
    """Pictures of ticks are drawn from the schedule that pipelines execute."""
    pictures = ROOT / "docs" / "pictures"
    names = runpy.run_path(str(pictures / "draw.py"))
    draw = names["depth"].__globals__
    draw["HERE"] = tmp_path
    shutil.copy(pictures / "memory.json", tmp_path)
    for name in ("depth", "stages", "row", "tick", "holds"):
        names[name]()
    drawn = sorted(tmp_path.glob("*.svg"))
    assert len(drawn) == 5
    for path in drawn:
        assert path.read_text() == (pictures / path.name).read_text(), path.name


def test_the_site_builds_without_warnings(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "reference" / "chains" / "index.html").exists()
