"""Skips of tests for what torch itself cannot do on this machine."""

from collections.abc import Callable

import pytest


def skip_unless(works: Callable[[], object]) -> None:
    """Skip a test if plain torch fails at something that it needs, and report how.

    Seen where ATEN_CPU_CAPABILITY=default hides the vector units: torch 2.11 cannot compile there,
    and its attention in bf16 asks for AVX-512 on a CPU that has it.
    """
    try:
        works()
    except RuntimeError as error:
        pytest.skip(f"torch fails here without us: {type(error).__name__}: {str(error)[:80]}")
