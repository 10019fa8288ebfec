"""Drift: the difference between streams rebuilt in floating point and the original ones.

Every `check_every` steps a chain keeps a fingerprint of its input (sums and a norm) and compares it
with that of the rebuilt input. The sums run over all dimensions but the last. Rounding errors have
random signs, so the norm of the difference of the sums is about that of the error itself.

What a tape (tape.py) knows of an input is approximate by intent. It is compared in the forward, and
only one that is as far away as zero is reported.
"""

import warnings
from functools import partial
from math import isfinite

import torch
from torch import Tensor

from redivider.backward.mailbox import Mailbox
from redivider.coupling import Streams

FAR = 0.9  # of the norm of an input; up to 0.6 is usual where a value has one bit
LARGE = 0.01  # relative drift that rounding alone does not cause, unless it grows with depth


class DriftWarning(UserWarning):
    """Warning that rebuilt streams differ from the original ones by more than the tolerance."""


def compare_input(x: Tensor, y: Tensor, where: str, mailbox: Mailbox) -> None:
    """Warn, now or when the values arrive at the host, if y is no approximation of an input x.

    Values of x that are not finite do not count: where they are used, the loss shows it.
    """
    x = x.detach()
    x = torch.where(x.isfinite(), x, y)
    error, norm = _norm(x - y), _norm(x)
    distance = torch.where(error == 0, error, error / norm)
    mailbox.post(distance, partial(_warn_if_far, where))


def _warn_if_far(where: str, value: Tensor) -> None:
    distance = float(value)
    if not distance <= FAR:  # NaN must not pass
        message = (
            f"{where}: the input by which it runs again in the backward is off by {distance:.2g} "
            "of its norm, and gradients suffer: values that are not finite, or much larger than "
            "the rest, appear or vanish there; keep inputs whole, by checkpointing"
        )
        warnings.warn(message, DriftWarning, stacklevel=2)


class Drift:
    """Comparison of a rebuilt pair of streams with the original, by fingerprint."""

    def __init__(self, streams: Streams, tolerance: float, where: str, mailbox: Mailbox) -> None:
        self._fingerprint = _fingerprint(streams)
        self._norm = _norm(torch.stack([_norm(_real(x)) for x in streams]))
        self._tolerance = tolerance
        self._where = where
        self._mailbox = mailbox

    def compare(self, streams: Streams) -> None:
        """Warn, now or when the values arrive at the host, if the drift exceeds the tolerance."""
        error = (_fingerprint(streams) - self._fingerprint).norm()
        # NaN must not pass for a small drift.
        drift = torch.where(error == 0, error, error / self._norm).nan_to_num(nan=torch.inf)
        self._mailbox.post(torch.stack([drift, self._norm]), self._read)

    def _read(self, values: Tensor) -> None:
        drift, norm = values.tolist()
        if drift > self._tolerance:
            message = f"{self._where}: {self._describe(drift, norm)}"
            warnings.warn(message, DriftWarning, stacklevel=2)

    def _describe(self, drift: float, norm: float) -> str:
        if not isfinite(norm):
            return (
                "streams of the forward are not finite, and neither are the gradients; look at the "
                "input, the loss and the weights"
            )
        if not isfinite(drift):
            return (
                "the streams rebuilt in the backward are not finite, though those of the forward "
                f"are, and the gradients are lost; {self._advice(drift)}"
            )
        return (
            "the streams rebuilt in the backward differ from those of the forward by "
            f"{drift:.1e} of their norm (tolerance {self._tolerance:.0e}), and the gradients "
            f"suffer; {self._advice(drift)}"
        )

    def _advice(self, drift: float) -> str:
        if self._tolerance == 0.0:  # on a grid
            return (
                "f does not give the same bits twice; rd.check_reversible tells from which unit on"
            )
        unlike = "f does not give the same numbers twice"
        finer = (
            'use streams of more bits (float32 around an f in bf16), arithmetic="fixed", or fewer '
            "couplings in a row"
        )
        if drift < LARGE:
            return f"{finer}; if rd.check_reversible finds the same in float64, {unlike}"
        return (
            f"if rd.check_reversible finds the same in float64, {unlike} (random numbers or a "
            "state outside of torch?); else rounding has grown from unit to unit (has f a skip of "
            f"its own?): {finer}"
        )


def _fingerprint(streams: Streams) -> Tensor:
    # In float64: otherwise the rounding of the sums would hide the drift of float32 streams.
    return torch.cat([_sums(_real(x)).flatten() for x in streams])


def _sums(x: Tensor) -> Tensor:
    return x.sum(tuple(range(x.dim() - 1)), dtype=torch.float64) if x.dim() > 1 else x.double()


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
