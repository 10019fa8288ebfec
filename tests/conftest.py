"""Fixed seeds, one thread per worker, short Hypothesis runs, and time limits for slow machines."""

import os

# One compiler process instead of a pool of them in every worker; read when torch is imported.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch
from hypothesis import settings
from patience import patience, seconds

settings.register_profile("redivider", max_examples=25, deadline=None, derandomize=True)
settings.load_profile("redivider")
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    patience()  # before workers start, which inherit it


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    usual = float(config.getini("timeout") or 0)
    for item in items:
        marker = item.get_closest_marker("timeout")
        limit = seconds(marker.args[0] if marker else usual)
        item.add_marker(pytest.mark.timeout(limit), append=False)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
