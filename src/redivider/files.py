"""Files that no reader sees in part."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; rename it at the end, or delete it on an error."""
    new = path.with_name(f".{path.name}.new-{os.getpid()}")
    try:
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
