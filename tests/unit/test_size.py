"""How much of the package one reads to understand a class: the lines that importing it loads.

Lines of code, without comments, blank lines and docstrings.
"""

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

# A child for each module; they share what torch loads, which takes seconds.
PRINT_FILES = """
import importlib, os, sys
import torch._dynamo
for wanted in sys.argv[1:]:
    if os.fork() == 0:
        importlib.import_module(wanted)
        for name, module in sorted(sys.modules.items()):
            if name.split(".")[0] == "redivider" and module.__file__:
                print(wanted, module.__file__)
        break
    assert os.wait()[1] == 0
"""
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


@pytest.mark.slow
def test_few_lines_are_loaded():
    limits = {"redivider.chain": 2000, "redivider.pipeline.pipeline": 5000}
    command = [sys.executable, "-c", PRINT_FILES, *limits]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    pairs = [line.split(maxsplit=1) for line in printed.splitlines()]
    for module, most in limits.items():
        files = [Path(file) for wanted, file in pairs if wanted == module]
        num = sum(map(count_lines, files))
        print(f"{module}: {num} lines of code in {len(files)} files, {most} at most")
        assert 0 < num <= most
