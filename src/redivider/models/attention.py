"""Attention with torch's fused kernels, except cuDNN's where its gradients can be NaN."""

from collections.abc import Callable
from functools import partial
from threading import Lock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

from redivider._torch_private import is_exporting

_KERNELS: dict[SDPBackend, Callable[[], bool]] = {
    SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: cuda.math_sdp_enabled,
}
# The flash and cuDNN kernels let heads share keys, in these dtypes. In others torch may fall back
# to the kernel that keeps all attention weights.
_GROUPED = (torch.float16, torch.bfloat16)
# `sdpa_kernel` sets process-wide flags, so threads must not enter it at the same time.
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
    """Return scaled dot-product attention of queries of shape (..., heads, tokens, width).

    Args:
        q: Queries.
        k: Keys; where they have fewer heads, a group of consecutive heads of `q` shares one.
        v: Values, of as many heads as the keys.
        bias: Added to the logits.
        dropout: Dropout rate of the attention weights.
        causal: Whether a token attends only to itself and to earlier tokens.
    """
    group = q.shape[-3] // k.shape[-3] if q.dim() > 2 else 1
    if group > 1 and q.dtype not in _GROUPED:
        k, v = k.repeat_interleave(group, dim=-3), v.repeat_interleave(group, dim=-3)
        group = 1
    run = partial(
        F.scaled_dot_product_attention,
        q,
        k,
        v,
        attn_mask=bias,
        dropout_p=dropout,
        is_causal=causal,
        enable_gqa=group > 1,
    )
    # An exported graph has no kernels yet, and a test of the length would specialise it to one.
    if not _has_cudnn(k) or is_exporting() or k.shape[-2] % 128 != 64:
        return run()
    # cuDNN's backward treats the padding of the last block of 128 keys as logits of 0. In a row
    # of logits below -88 these overflow, and the query's gradient is NaN (pytorch issue 196678).
    if torch.compiler.is_compiling():  # the graph's kernels are chosen at compile time
        with sdpa_kernel(_without_cudnn()):
            return run()
    with _lock, sdpa_kernel(_without_cudnn()):
        return run()


def _has_cudnn(k: Tensor) -> bool:
    return k.is_cuda


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _without_cudnn() -> list[SDPBackend]:
    """Return the kernels that the user allows without cuDNN's, or cuDNN's if it is the only one."""
    kernels = [kernel for kernel, is_allowed in _KERNELS.items() if is_allowed()]
    return kernels or [SDPBackend.CUDNN_ATTENTION]
