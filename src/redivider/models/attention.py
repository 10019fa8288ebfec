"""Attention by torch's fused kernels, but for one whose gradients are not always numbers."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

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
    with _sound_kernels(k.shape[-2]):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, dropout_p=dropout, is_causal=causal
        )


def _sound_kernels(num_keys: int) -> AbstractContextManager[None]:
    """Where cuDNN's backward counts the padding of its last 128 keys as logits of 0, not cuDNN.

    Beside logits below -88 these overflow, and the gradients of queries are not numbers: pytorch
    issue 196678. A compiled graph has its kernels chosen when it is traced, within this.
    """
    return sdpa_kernel(_without_cudnn()) if num_keys % 128 == 64 else nullcontext()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _without_cudnn() -> list[SDPBackend]:
    """The kernels that the user allows, less one."""
    return [kernel for kernel, is_allowed in _OTHERS.items() if is_allowed()]
