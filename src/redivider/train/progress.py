"""Progress of a run on the terminal."""

import os
import sys
from typing import Any

from redivider.train.errors import check_installed

check_installed("tqdm")
from tqdm import tqdm  # type: ignore[import-untyped]  # noqa: E402


def tell(name: str, text: str) -> None:
    """Print a line about a run; training continues if the reader has closed the pipe."""
    try:
        print(f"{name}: {text}", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Progress:
    """Progress bar on a terminal; elsewhere a line for each evaluation."""

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
        self._postfix: dict[str, str] = {}

    def advance(self) -> None:
        """Count one more micro-batch."""
        self._bar.update(self._microbatch)

    def show(self, row: dict[str, Any]) -> None:
        """Show the metrics of a log row beside the bar."""
        if "loss" in row:
            self._postfix["loss"] = f"{row['loss']:.3f}"
        if row.get("accuracy") is not None:
            self._postfix["accuracy"] = f"{row['accuracy']:.1%}"
        if "memory" in row:
            self._postfix["memory"] = f"{row['memory'] / 2**20:,.0f} MiB"
        self._bar.set_postfix(self._postfix, refresh=False)

    def tell(self, text: str) -> None:
        """Print a line above the bar."""
        if self._is_quiet:
            return
        self._bar.clear()
        tell(self._name, text)

    def close(self) -> None:
        """Close the bar."""
        self._bar.close()
