"""How much of the package one reads to understand a class: the lines that importing it loads.

Lines of code, without comments, blank lines and docstrings.
"""

import ast
import io
import sys
import tokenize
from importlib import import_module
from pathlib import Path

import pytest
from support.patience import seconds
from support.workers import end, start

BLANK = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def count_lines(path: Path) -> int:
    """Count the lines of code of a file."""
    text = path.read_text()
    strings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            assert node.end_lineno is not None
            strings.update(range(node.lineno, node.end_lineno + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    spans = (token for token in tokens if token.type not in BLANK)
    lines = {line for token in spans for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - strings)


def loaded() -> dict[str, str]:
    """Return the files of the package that have been imported, by module."""
    return {
        name: module.__file__
        for name, module in sys.modules.items()
        if name.split(".")[0] == "redivider" and module.__file__
    }


def print_files(wanted: str) -> None:
    """Import a module of the package and all that it needs anew, and print their files."""
    for name in loaded():
        del sys.modules[name]
    import_module(wanted)
    print(*loaded().values(), sep="\n")


@pytest.mark.slow
def test_few_lines_are_loaded(tmp_path):
    limits = {"redivider.chain": 2000, "redivider.pipeline.pipeline": 5000}
    for module, most in limits.items():
        output = tmp_path / module
        process = start(print_files, module, output=output)
        assert not end([process], seconds(60)) and process.exitcode == 0, output.read_text()
        files = [Path(file) for file in output.read_text().splitlines()]
        num = sum(map(count_lines, files))
        print(f"{module}: {num} lines of code in {len(files)} files, {most} at most")
        assert 0 < num <= most
