"""What is seen of a run on the terminal."""

import os
import sys
from typing import Any

from redivider.train.errors import need

need("tqdm")
from tqdm import tqdm  # type: ignore[import-untyped]  # noqa: E402


def tell(name: str, text: str) -> None:
    """Print a line about a run; training goes on when nobody reads it."""
    try:
        print(f"{name}: {text}", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Progress:
    """A progress bar on a terminal; elsewhere a line for each evaluation."""

    def __init__(
        self, name: str, done: int, total: int, microbatch: int, *, is_quiet: bool = False
    ) -> None:
        self._is_shown = sys.stderr.isatty() and not is_quiet
        self._is_quiet = is_quiet
        self._name, self._microbatch = name, microbatch
        self._bar = tqdm(
            total=total * microbatch,
            initial=done * microbatch,
            desc=name,
            unit="sample",
            unit_scale=True,
            disable=not self._is_shown,
            mininterval=0.2,
            dynamic_ncols=True,
        )
        self._shown: dict[str, str] = {}

    def advance(self) -> None:
        """A micro-batch more."""
        self._bar.update(self._microbatch)

    def show(self, row: dict[str, Any]) -> None:
        """Show what the log has just been told."""
        if "loss" in row:
            self._shown["loss"] = f"{row['loss']:.3f}"
        if row.get("accuracy") is not None:
            self._shown["accuracy"] = f"{row['accuracy']:.1%}"
        if "memory" in row:
            self._shown["memory"] = f"{row['memory'] / 2**20:,.0f} MiB"
        self._bar.set_postfix(self._shown, refresh=False)

    def tell(self, text: str) -> None:
        """A line of its own."""
        if self._is_quiet:
            return
        self._bar.clear()
        tell(self._name, text)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._bar.close()
