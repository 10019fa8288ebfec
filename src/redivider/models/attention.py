"""Attention by torch's fused kernels, but for one whose gradients are not always numbers."""

from collections.abc import Callable
from functools import partial
from threading import Lock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

_OTHERS: dict[SDPBackend, Callable[[], bool]] = {
    SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: cuda.math_sdp_enabled,
}
# Kernels are allowed and forbidden for the whole process.
_lock = Lock()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
) -> Tensor:
    """What queries of shape (..., tokens, width) find among keys and values.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        bias: Added to the logits.
        dropout: Of the weights.
        causal: Whether a token sees only those before it, and itself.
    """
    run = partial(
        F.scaled_dot_product_attention, q, k, v, attn_mask=bias, dropout_p=dropout, is_causal=causal
    )
    # An exported graph has no kernels yet, and would be for one length alone.
    if not _has_cudnn(k) or _is_exporting() or k.shape[-2] % 128 != 64:
        return run()
    # Here cuDNN's backward counts the padding of its last 128 keys as logits of 0. Beside a row of
    # logits below -88 these overflow, and the query's gradient is not a number: pytorch 196678.
    if torch.compiler.is_compiling():  # whose graph has its kernels chosen now
        with sdpa_kernel(_without_cudnn()):
            return run()
    with _lock, sdpa_kernel(_without_cudnn()):
        return run()


def _has_cudnn(k: Tensor) -> bool:
    return k.is_cuda


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_exporting() -> bool:
    # As torch knows it: torch 2.11's compiler says yes to every graph.
    return torch.compiler.is_exporting()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _without_cudnn() -> list[SDPBackend]:
    """The kernels that the user allows, less one; that one if it is the only one."""
    others = [kernel for kernel, is_allowed in _OTHERS.items() if is_allowed()]
    return others or [SDPBackend.CUDNN_ATTENTION]
