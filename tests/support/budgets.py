"""Budgets of plans."""

import re
from collections.abc import Sequence
from typing import Any

import pytest

import redivider as rd
from redivider.budget.problem import Problem, trace


def smallest_budget(model: Any, *args: Any, unit: str, **keywords: Any) -> int:
    """Return the smallest budget that a plan asks for, for a unit whose name matches."""
    with pytest.raises(ValueError, match=rf"smallest budget is [\d,]+ bytes, which {unit}") as got:
        rd.plan(model, *args, memory=1000, **keywords)
    match = re.search(r"smallest budget is ([\d,]+) bytes", str(got.value))
    assert match is not None
    return int(match[1].replace(",", ""))


def choices_of(problem: Problem, numbers: Sequence[int]) -> list[str]:
    """Return the choices that a plan's numbers stand for, of the units and the loss."""
    return [own[number].choice for own, number in zip(problem.units, numbers, strict=True)]


def numbers_of(problem: Problem, choices: Sequence[str]) -> list[int]:
    """Return the numbers of choices, which a unit must have."""
    pairs = zip(problem.units, choices, strict=True)
    return [[option.choice for option in own].index(choice) for own, choice in pairs]


def predict(problem: Problem, numbers: Sequence[int]) -> int:
    """Return the peak that is predicted for a plan."""
    return max(peak for _, peak in trace(problem, numbers))
