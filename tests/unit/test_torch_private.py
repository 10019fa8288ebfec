"""Private names of torch do what we use them for. Checked with torch 2.11 and 2.13."""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import redivider
from redivider import _torch_private as private

ROOT = Path(redivider.__file__).parent
# Names of torch that begin with an underscore; _torch_private.py lists the exceptions.
PRIVATE = re.compile(
    r"\btorch\.[\w.]*\b_(?!foreach_|pytree)[a-z]\w*|distributed_c10d|_execution_engine|_orig_mod"
    r"|_compiled_call_impl|\._(forward|backward)_(pre_)?hooks|\._post_accumulate_grad_hooks"
    r"|_group_(start|end)|_(start|end)_coalescing|\._get_backend"
)


def test_private_names_are_in_one_file():
    uses = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted(ROOT.rglob("*.py"))
        if path.name != "_torch_private.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PRIVATE.search(line) and "torch.ops.aten." not in line
    ]
    assert not uses


def test_the_node_of_a_sum_knows_the_factor_of_its_second_term():
    x = torch.ones(3, requires_grad=True)
    for sum_of in (torch.add, torch.sub):
        assert private.scale_of_second(sum_of(x, x).grad_fn) == 1
        assert private.scale_of_second(sum_of(x, x, alpha=0.5).grad_fn) == 0.5


def test_a_function_is_called_when_the_backward_ends():
    seen = []
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: private.after_backward(lambda: seen.append("end")))
    x.register_hook(lambda grad: seen.append("leaf"))
    y.sum().backward()
    assert seen == ["leaf", "end"]


def test_a_stream_can_be_kept_busy():
    """On a GPU, tests/gpu/test_pipeline.py runs it."""
    assert callable(torch.cuda._sleep)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_backward_that_keeps_its_graph(keeps):
    seen = []
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda grad: seen.append(private.backward_keeps_graph()))
    (x * x).sum().backward(retain_graph=keeps)
    assert seen == [keeps]


def test_a_hook_is_removed_without_its_handle():
    module, seen = nn.Linear(2, 2), []

    def hook(module, args, kwargs):
        seen.append("removed")

    module.register_forward_pre_hook(hook, with_kwargs=True)
    module.register_forward_pre_hook(lambda *_: seen.append("stays"))
    private.remove_forward_pre_hook(module, hook)
    private.remove_forward_pre_hook(module, hook)
    module(torch.zeros(2))
    assert seen == ["stays"]


def test_a_call_runs_the_compiled_function():
    module = nn.Linear(2, 2)
    assert private.compiled_call(module) is None
    private.set_compiled_call(module, lambda x: x + 1)
    assert torch.equal(module(torch.zeros(2)), torch.ones(2))
    other = nn.Linear(2, 2)
    other.compile(backend="eager")
    assert private.compiled_call(other) is not None
    compiled: Any = torch.compile(other, backend="eager")
    assert private.original_module(compiled) is other
    assert private.original_module(other) is None


def test_a_lowering_is_registered():
    """That it avoids a copy is tested in unit/backward/test_saving_compiled.py."""
    from torch._inductor.lowering import lowerings

    from redivider.backward import saving

    operator = torch.ops.redivider.save.default
    private.lower_to_input(operator)
    assert lowerings[operator](3) == 3 and saving.save is redivider.save


def test_loops_stay_in_order():
    from torch._inductor import config

    before = config.loop_ordering_after_fusion
    with private.loops_in_order():
        assert not config.loop_ordering_after_fusion
    assert config.loop_ordering_after_fusion == before


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_hooks_of_modules(register):
    module = nn.Linear(2, 2)
    assert not private.has_call_hooks(module) and not private.has_forward_hooks(module)
    getattr(module, register)(lambda *args: None)
    assert private.has_call_hooks(module)
    assert private.has_forward_hooks(module) == ("forward" in register)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_gradients(register):
    parameter = nn.Parameter(torch.ones(2))
    assert not private.has_grad_hooks(parameter)
    getattr(parameter, register)(lambda *args: None)
    assert private.has_grad_hooks(parameter)


def test_hooks_of_saved_tensors():
    assert not private.has_saved_tensors_hooks()
    with torch.autograd.graph.save_on_cpu():
        assert private.has_saved_tensors_hooks()
    assert not private.has_saved_tensors_hooks()


def test_stores_and_backends(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        store = private.prefix_store("mine", private.default_store())
        store.set("key", "value")
        assert private.default_store().get("mine/key") == b"value"
        backend = private.backend_of(dist.group.WORLD, torch.device("cpu"))
        assert isinstance(backend, dist.ProcessGroupGloo)
    finally:
        dist.destroy_process_group()


def test_a_backend_is_unwrapped(monkeypatch, tmp_path):
    """TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    dist.set_debug_level_from_env()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        backend = private.backend_of(dist.group.WORLD, torch.device("cpu"))
        assert isinstance(backend, dist.ProcessGroupGloo)
    finally:
        dist.destroy_process_group()
        monkeypatch.undo()
        dist.set_debug_level_from_env()


def test_calls_of_nccl_are_one_group():
    calls: list[str] = []
    names = ("_group_start", "_group_end")  # of torch.distributed.ProcessGroupNCCL
    backend = SimpleNamespace(**{name: partial(calls.append, name) for name in names})
    with private.nccl_group(backend):
        calls.append("abort")
    assert calls == ["_group_start", "abort", "_group_end"]
    with private.nccl_group(object()):  # a wrapped backend has no such calls
        pass
    if dist.is_nccl_available():
        assert all(hasattr(dist.ProcessGroupNCCL, name) for name in (*names, "get_error"))


def test_operations_are_seen():
    class Seen(private.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    names = []
    with Seen():
        torch.ones(2) + 1
    assert "aten.add.Tensor" in names


def test_a_process_group_begins_sends_and_receives_as_one():
    """Only NCCL can do it: tests/gpu/test_nccl.py uses these."""
    for name in ("_start_coalescing", "_end_coalescing", "send", "recv"):
        assert callable(getattr(dist.ProcessGroup, name))
