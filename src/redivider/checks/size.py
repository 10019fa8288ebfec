"""Numbers of bytes as text."""

import re
from numbers import Integral

UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
UNITS |= {f"{prefix}ib": UNITS[prefix] for prefix in "kmgt"}
UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)}
MOST = 2**63  # which tensors cannot hold


def parse_bytes(memory: int | str) -> int:
    """Return a number of bytes, from a number or from text such as "6GiB" or "500 MB"."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", str(memory).strip().lower())
    is_number = isinstance(memory, Integral | str) and not isinstance(memory, bool)
    if not is_number or match is None or match[2] not in UNITS:
        raise ValueError(
            f'memory is a whole number of bytes, as 6 * 2**30 or "6GiB", got {memory!r}'
        )
    size = float(match[1]) * UNITS[match[2]]
    if not 1 <= size < MOST:
        raise ValueError(f"memory must be from 1 byte to less than 8 EiB, got {memory!r}")
    return int(size)
