"""The public names: all there, and nothing is imported before it is asked for."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import redivider as rd


def test_what_a_checker_sees_is_what_there_is():
    tree = ast.parse(Path(rd.__file__).read_text())
    seen: dict[str | None, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            if node.module.startswith("redivider."):
                home = node.module.removeprefix("redivider.")
                seen |= {alias.asname: home for alias in node.names}
    assert seen == rd._HOMES


def test_every_name_is_there():
    for name in rd.__all__:
        assert getattr(rd, name).__name__ == name
        assert name in dir(rd)
    with pytest.raises(AttributeError, match="no attribute 'Chian'"):
        rd.Chian  # noqa: B018


def test_no_name_is_that_of_a_module():
    """Importing a module would put it in the name's place."""
    files = {path.stem for path in Path(rd.__file__).parent.iterdir()}
    assert not files & set(rd.__all__)


def test_torch_is_not_imported_until_it_is_needed():
    code = "import sys, redivider; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_core_imports_nothing_but_torch():
    """Also inside functions: optional packages come through `require`, which names the extra."""
    package = Path(rd.__file__).parent
    allowed = {*sys.stdlib_module_names, "torch", "redivider"}
    optional = {
        ("train/progress.py", "tqdm"),
        ("train/plots.py", "matplotlib"),
        ("pipeline/diagnostics/timeline.py", "matplotlib"),
        ("backward/quantizer_kernels.py", "triton"),  # comes with torch where there are GPUs for it
    }
    files = sorted(package.rglob("*.py"))
    assert len(files) > 100
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                assert node.module is not None
                modules = [node.module]
            for module in modules:
                top, where = module.partition(".")[0], path.relative_to(package).as_posix()
                assert top in allowed or (where, top) in optional, f"{where} imports {module}"
