"""DDP and FSDP2 over two processes: gradients equal those of one process on the joined batch."""

import copy
from typing import Any

import pytest
import torch
from support.lanes import OnTheCpu
from support.networks import MLP, Attention
from support.oracle import run_plainly, weigh, worst_error
from support.processes.launch import launch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import redivider as rd
from redivider.backward.strategy import Strategy

pytestmark = pytest.mark.slow

BATCH = 4  # samples of each process


MIXED = ("store", "store", "reverse", "checkpoint", "overlap", "overlap", "checkpoint", "store")


def build(backward: str | tuple[str, ...]) -> rd.Chain:
    torch.manual_seed(3)
    couplings = [rd.Coupling(make(8)) for make in (Attention, MLP) * 2]
    units = [nn.Linear(6, 8), rd.Duplicate(), *couplings, rd.Fuse("concat"), nn.Linear(16, 3)]
    return rd.Chain(units, backward=backward).double()


def batches(rank: int, number: int) -> list[torch.Tensor]:
    """Return batches of samples that differ by process and by batch."""
    return [
        torch.randn(BATCH, 5, 6, generator=torch.Generator().manual_seed(10 * rank + i)).double()
        for i in range(number)
    ]


def expected(number: int) -> dict[str, torch.Tensor | None]:
    """Return the mean over processes of the summed gradients, by plain autograd in one process."""
    chain = build("store")
    for rank in range(2):
        for x in batches(rank, number):
            (weigh(run_plainly(chain, x)) / 2).backward()
    return {name: param.grad for name, param in chain.named_parameters()}


def prepare_ahead() -> None:
    """Let chains of this process use the engine of "overlap" on the CPU."""
    cpu = torch.device("cpu")
    Strategy.make_overlap = lambda self, x: (  # type: ignore[method-assign]
        OnTheCpu(cpu) if self.overlaps else None
    )


def ddp_variants(rank: int) -> dict[str, float]:
    errors = {}
    variants: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"static_graph": True}]
    prepare_ahead()
    model = DistributedDataParallel(build(MIXED))
    weigh(model(*batches(rank, 1))).backward()
    grads = {name: param.grad for name, param in model.module.named_parameters()}
    errors["mixed"] = worst_error(grads, expected(1))
    for backward in ("reverse", "checkpoint", "overlap"):
        for options in variants:
            model = DistributedDataParallel(build(backward), **options)
            for _ in range(2):  # a static graph is learned in the first step and used in the second
                model.zero_grad()
                (x,) = batches(rank, 1)
                weigh(model(x)).backward()
            grads = {name: param.grad for name, param in model.module.named_parameters()}
            errors[f"{backward} {options}"] = worst_error(grads, expected(1))
        model = DistributedDataParallel(build(backward))
        errors[f"{backward} spare"] = spare_parameter(rank, backward)
        first, second = batches(rank, 2)
        with model.no_sync():
            weigh(model(first)).backward()
        weigh(model(second)).backward()
        grads = {name: param.grad for name, param in model.module.named_parameters()}
        errors[f"{backward} no_sync"] = worst_error(grads, expected(2))
    return errors


class Spare(MLP):
    """Has a parameter that it does not use."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.spare = nn.Parameter(torch.zeros(3))


def spare_parameter(rank: int, backward: str) -> float:
    torch.manual_seed(3)
    chain = rd.Chain([rd.Coupling(Spare(6)) for _ in range(3)], backward=backward).double()
    model = DistributedDataParallel(chain, find_unused_parameters=True)
    plain = copy.deepcopy(chain)
    x, other = batches(rank, 1)[0], batches(1 - rank, 1)[0]
    for _ in range(2):
        model.zero_grad()
        weigh(model((x, x))).backward()
    for batch in (x, other):
        (weigh(run_plainly(plain, (batch, batch))) / 2).backward()
    used = [name for name, _ in chain.named_parameters() if "spare" not in name]
    grads, true = (
        {name: model.get_parameter(name).grad for name in used} for model in (chain, plain)
    )
    return worst_error(grads, true)


def sharded_couplings(rank: int) -> dict[str, float]:
    errors = {}
    prepare_ahead()
    for backward in ("reverse", "checkpoint", "overlap"):
        for reshard in (True, False):
            chain = build(backward)
            for unit in chain:
                if isinstance(unit, rd.Coupling):
                    fully_shard(unit, reshard_after_forward=reshard)
            if backward != "checkpoint":
                fully_shard(chain)
            for _ in range(2):
                chain.zero_grad()
                (x,) = batches(rank, 1)
                weigh(chain(x)).backward()
            grads = {
                name: param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
                for name, param in chain.named_parameters()
            }
            true = expected(1)
            if backward == "checkpoint":  # stem and head are not sharded: nobody averages them
                grads = {name: grad for name, grad in grads.items() if ".f." in name}
                true = {name: grad for name, grad in true.items() if ".f." in name}
            errors[f"{backward} reshard={reshard}"] = worst_error(grads, true)
    return errors


def sharded_f(rank: int) -> dict[str, str]:
    messages = {}
    for backward in ("reverse", "checkpoint"):
        chain = build(backward)
        for unit in chain:
            if isinstance(unit, rd.Coupling):
                fully_shard(unit.f)
        with pytest.raises(ValueError) as raised:
            chain(batches(rank, 1)[0])
        assert all(param.grad is None for param in chain.parameters())
        messages[backward] = str(raised.value)
    return messages


def test_ddp_gives_the_gradient_of_the_joined_batch(tmp_path):
    for errors in launch(ddp_variants, tmp_path):
        assert len(errors) == 16
        assert max(errors.values()) <= 1e-12, errors


def test_fully_shard_of_couplings_gives_the_gradient_of_the_joined_batch(tmp_path):
    for errors in launch(sharded_couplings, tmp_path):
        assert len(errors) == 6
        assert max(errors.values()) <= 1e-12, errors


def test_fully_shard_of_f_is_refused_in_the_forward(tmp_path):
    for messages in launch(sharded_f, tmp_path):
        for message in messages.values():
            assert "unit 2, Coupling" in message
            assert "fully_shard" in message
