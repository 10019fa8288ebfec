"""Fixed seeds, one thread per worker (or REDIVIDER_THREADS), short Hypothesis runs, time limits."""

import gc
import os
import re
from pathlib import Path

import pytest
from support.patience import patience, seconds

# One compiler process instead of a pool of them in every worker; read when torch is imported.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

SLOW_FILE = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.slow\b", re.MULTILINE)


def pytest_configure(config: pytest.Config) -> None:
    patience()  # before workers start, which inherit it
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return  # it hands tests to workers and runs none, so it needs no torch
    import torch
    from hypothesis import settings

    torch.set_num_threads(int(os.environ.get("REDIVIDER_THREADS", "1")))
    settings.register_profile("redivider", max_examples=25, deadline=None, derandomize=True)
    settings.load_profile("redivider")
    gc.disable()  # while files are imported: nothing of what they leave is garbage


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file whose tests are all slow when slow tests are deselected."""
    if config.option.markexpr == "not slow" and collection_path.suffix == ".py":
        return SLOW_FILE.search(collection_path.read_text()) is not None or None
    return None


def pytest_collection_finish() -> None:
    """Exclude all that was imported from garbage collection: a million objects each time."""
    gc.enable()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    usual = float(config.getini("timeout") or 0)
    for item in items:
        marker = item.get_closest_marker("timeout")
        limit = seconds(marker.args[0] if marker else usual)
        item.add_marker(pytest.mark.timeout(limit), append=False)


@pytest.fixture(autouse=True, scope="module")
def _few_objects() -> None:
    """Exclude what earlier files have imported from garbage collection."""
    gc.freeze()


@pytest.fixture
def one_thread():
    """Compute with one thread in this process, as the recipes of tests do."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)
