"""Fixed seeds, two threads at most per worker, and short Hypothesis runs."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("redivider", max_examples=25, deadline=None, derandomize=True)
settings.load_profile("redivider")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
