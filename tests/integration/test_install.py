"""The wheel works, or says why not, in a clean environment with torch and its requirements."""

import re
import shutil
import subprocess
import sys
import venv
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

# Not imported: pip changes what the compiler sees in the tests after it.
MISSING = [name for name in ("hatchling", "pip") if find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
]

ROOT = Path(__file__).parents[2]
REMEDY = re.compile(r'[\w ]+ needs [\w-]+; pip install "redivider\[(train|checkpoint)\]"')


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> Path:
    """Return the python of a virtual environment that has the wheel, torch and its requirements.

    Those are linked from the environment of the tests, since torch alone is a gigabyte.
    """
    folder = tmp_path_factory.mktemp("install")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", folder / "wheels", folder], check=True)
    (wheel,) = (folder / "wheels").glob("redivider-*.whl")
    venv.create(folder / "env", with_pip=False, symlinks=True)
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    install = [sys.executable, "-m", "pip", "--python", str(folder / "env"), "install", "--quiet"]
    subprocess.run([*install, "--no-deps", "--no-index", str(wheel)], check=True)
    for path in top_level(requirements("torch")):
        (site / path.name).symlink_to(path)
    return folder / "env" / "bin" / "python"


def requirements(name: str) -> set[str]:
    """Return a package and, recursively, the installed packages that it requires."""
    names, todo = set(), [name]
    while todo:
        name = todo.pop()
        if name in names:
            continue
        names.add(name)
        for line in metadata.requires(name) or ():
            match = re.match(r"[\w.-]+", line)
            assert match is not None, line
            required = match[0].lower().replace("_", "-")
            if "extra ==" not in line and is_installed(required):
                todo.append(required)
    return names


def is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def top_level(names: set[str]) -> set[Path]:
    """Return the folders and modules of packages in site-packages."""
    paths = set()
    for name in names:
        package = metadata.distribution(name)
        for file in package.files or ():
            if not file.parts[0].startswith(("..", "__pycache__")):
                paths.add(Path(str(package.locate_file(file.parts[0]))))
    return {path for path in paths if path.exists()}


def run(clean: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess:
    # Isolated: neither the working directory nor PYTHONPATH can lend it our sources.
    return subprocess.run([clean, "-I", *words], capture_output=True, text=True, cwd=cwd)


def test_the_environment_is_clean(clean, tmp_path):
    code = """
import importlib.util, sys
import redivider
assert not [name for name in sys.argv[1:] if importlib.util.find_spec(name)]
assert "site-packages" in redivider.__file__
"""
    extras = ("numpy", "safetensors", "tqdm", "tyro", "matplotlib", "sklearn", "pytest", "PIL")
    done = run(clean, "-c", code, *extras, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


USE = """
import contextlib
import io
import warnings
warnings.filterwarnings("ignore", message=".*NumPy.*")  # of torch, which does without
import torch
import torch.nn.functional as F
from torch import nn
import redivider as rd
from redivider.cli import main

for name in rd.__all__:
    getattr(rd, name)
units = [nn.Linear(6, 8), rd.Duplicate(), *(rd.Coupling(nn.Linear(8, 8)) for _ in range(4))]
units += [rd.Fuse("concat"), nn.Linear(16, 3)]
model = rd.Chain(units, backward="reverse")
model(torch.randn(5, 6)).sum().backward()
assert all(param.grad is not None for param in model.parameters())
assert rd.check_gradients(model, torch.randn(5, 6)).worst < 1e-4
pipe = rd.Pipeline(
    rd.create_model("revnet18", image_size=8, in_channels=1, width=4, depths=(1, 1)),
    stages=3,
    loss=F.cross_entropy,
    optimizer=lambda stage: torch.optim.SGD(stage.parameters(), lr=0.05),
)
probe = pipe.probe(every=2)
for _ in range(8):
    pipe.step(torch.randn(4, 1, 8, 8), torch.randint(10, (4,)))
pipe.flush()
assert pipe.evaluate(torch.randn(2, 1, 8, 8)).isfinite().all()
state = pipe.state_dict()
with contextlib.redirect_stdout(io.StringIO()) as said:
    assert main(["models", "revnet18"]) == 0
assert "12,215,912" in said.getvalue()
for use in (lambda: pipe.save("state"), lambda: pipe.load("state"), lambda: probe.plot("plot.png")):
    try:
        use()
    except ImportError as error:
        print(error)
"""


def test_the_core_runs_and_names_the_extra_that_is_missing(clean, tmp_path):
    done = run(clean, "-c", USE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and all(REMEDY.fullmatch(line) for line in lines), lines
    assert "safetensors" in lines[0] and "matplotlib" in lines[2]
    assert not list(tmp_path.iterdir()), "nothing is half-written"


@pytest.mark.parametrize(
    "words",
    [
        "train quickstart",
        "train quickstart --help",
        "compare quickstart",
    ],
)
def test_a_command_that_needs_an_extra_says_so_in_a_line(words, clean, tmp_path):
    done = run(clean, "-m", "redivider", *words.split(), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if "NumPy" not in line]
    assert REMEDY.fullmatch(lines[-1].removeprefix("redivider: ")), done.stderr
    assert "Traceback" not in done.stderr and not list(tmp_path.iterdir())


def test_a_report_without_its_extra_says_so_in_a_line(clean, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.json").write_text('{"name": "a", "method": "store"}')
    (tmp_path / "run" / "log.jsonl").write_text(
        '{"kind": "train", "step": 1, "loss": 2.0, "seconds": 1.0}\n' * 2
    )
    done = run(clean, "-m", "redivider", "report", "run", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert REMEDY.search(done.stderr) and "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "report.html").exists()


def test_commands_that_need_neither_torch_nor_an_extra_run(clean, tmp_path):
    for words in ("recipes", "--help"):
        done = run(clean, "-m", "redivider", *words.split(), cwd=tmp_path)
        assert done.returncode == 0, (words, done.stderr)
        assert done.stdout
