"""Counter of FLOPs."""

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count


class _NoModules:
    """Stand-in for torch's tracker of modules, whose hooks can fail inside `autograd.grad`."""

    parents = ("Global",)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


def counting_flops() -> FlopCounterMode:
    """Return a counter of FLOPs that knows the CPU's kernels of attention."""
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    formulas = {
        forward: lambda *shapes, **_: sdpa_flop_count(*shapes[:3]),  # type: ignore[no-untyped-call]
        backward: lambda *shapes, **_: sdpa_backward_flop_count(*shapes[:4]),  # type: ignore[no-untyped-call]
    }
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    return counter
