"""Several processes that share one GPU: the numbers of a pipeline in one process."""

import pytest
import torch
from support.processes.cases import batch, finish, model, options
from support.processes.launch import launch

import redivider as rd

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def run(pipe, first: int, last: int) -> list:
    ticks = []
    for n in range(first, last):
        x, target, mask = (tensor.cuda() for tensor in batch(n))
        ticks.append(pipe.step(x, target, mask=mask))
    return [(tick.microbatch, tick.loss) for tick in ticks if tick.loss is not None]


def train(rank, cases, folder):
    torch.backends.cuda.matmul.allow_tf32 = False
    results = []
    for number, changes in enumerate(cases):
        pipe = rd.DistributedPipeline(model().cuda(), **options(**changes))
        losses = run(pipe, 0, 20)
        pipe.save(folder / str(number))
        losses += run(pipe, 20, 40) + finish(pipe)
        x, _, mask = (tensor.cuda() for tensor in batch(99))
        output = pipe.evaluate(x if rank == 0 else None, mask=mask)
        pipe.load(folder / str(number))
        run(pipe, 20, 40)
        finish(pipe)
        losses = [(n, loss.cpu()) for n, loss in losses]
        results.append((losses, output.cpu(), pipe.full_state_dict()))
        pipe.close()
    return results


def test_four_processes_on_one_gpu(tmp_path):
    cases = [
        {},
        {"accumulate": 3, "latency": 2, "method": "delayed"},
        {"arithmetic": "fixed"},
        {"message_dtype": torch.int8},
    ]
    results = launch(train, tmp_path, cases, tmp_path, world_size=4)
    for changes, *ours in zip(cases, *results, strict=True):
        pipe = rd.Pipeline(model().cuda(), stages=4, **options(**changes))
        losses = run(pipe, 0, 40) + finish(pipe)
        weights = {name: weight.cpu().clone() for name, weight in pipe.full_state_dict().items()}
        x, _, mask = (tensor.cuda() for tensor in batch(99))  # moves a buffer
        output = pipe.evaluate(x, mask=mask).cpu()
        for (n, one), (m, other) in zip(losses, ours[-1][0], strict=True):
            assert n == m and torch.allclose(one.cpu(), other, rtol=1e-4), (changes, n)
        for _, there, full in ours:
            assert torch.allclose(there, output, rtol=1e-3, atol=1e-4), changes
            for name, weight in weights.items():
                assert torch.allclose(full[name], weight, rtol=1e-3, atol=1e-4), (changes, name)
