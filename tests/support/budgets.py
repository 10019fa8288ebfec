"""Budgets of plans."""

import re
from typing import Any

import pytest

import redivider as rd


def smallest_budget(model: Any, *args: Any, unit: str, **keywords: Any) -> int:
    """Return the smallest budget that a plan asks for, for a unit whose name matches."""
    with pytest.raises(ValueError, match=rf"smallest budget is [\d,]+ bytes, which {unit}") as got:
        rd.plan(model, *args, memory=1000, **keywords)
    match = re.search(r"smallest budget is ([\d,]+) bytes", str(got.value))
    assert match is not None
    return int(match[1].replace(",", ""))
