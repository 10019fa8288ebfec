"""Hooks of the site: pages that live outside of docs/ are part of it, too."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/*/*.md", "experiments/**/README.md")
PICTURES = ("benchmarks/**/*.svg", "experiments/**/*.svg")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of benchmarks and experiments with their pictures."""
    for pattern in (*PAGES, *PICTURES):
        for path in sorted(ROOT.glob(pattern)):
            uri = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Adapt links: in the site docs/ is the root, and code is not a part of it."""
    depth = page.file.src_uri.count("/")
    is_inside = not (ROOT / page.file.src_uri).exists()  # a page of docs/

    def adapt(match: re.Match[str]) -> str:
        label, target = match[1], match[2]
        if is_inside:
            up = "../" * (depth + 1)
            target = "../" * depth + target[len(up) :] if target.startswith(up) else target
        else:
            target = re.sub(r"^((?:\.\./)*)docs/", r"\1", target)
        path = target.partition("#")[0]
        if path.endswith((".py", ".json", ".jsonl", ".toml", ".yml", "/")):
            return label
        return f"[{label}]({target})"

    return re.sub(r"\[([^\]]*)\]\((?!https?:)([^)\s]*)\)", adapt, markdown)
