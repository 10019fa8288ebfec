"""A pipeline over processes computes the same as one process, over any backend.

The one process is a child, too: on some CPUs kernels round differently in a process that has run
other tests before.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import redivider as rd
from redivider.pipeline.runners import captured, wire
from redivider.pipeline.runners.captured import CapturedRunner
from redivider.tree import tensors_of
from support.processes import cases
from support.processes.cases import batch, equal, finish, model, options, run
from support.processes.launch import launch, launch_alone
from support.tape import Tape

NUM = 14  # micro-batches
NUM_SAVED = 13  # before a state is written, and a few more after it
NUM_IN_ALL = 18
NUM_CAPTURED = 40  # until ticks have been captured, and replayed
NUM_AFTER = 12  # after a state was read

# Results of one process, by function and setting: they are the same for every backend.
_alone: dict[tuple[str, str, bool], Any] = {}
# Results of all ranks by eager ticks, by setting: they, too, are the same for every backend.
_eager: dict[tuple[str, int, bool, bool], Any] = {}


def train(rank, settings):
    results = []
    for changes in settings:
        pipe = rd.DistributedPipeline(model(), **options(**changes))
        losses = run(pipe, 0, NUM)
        x, _, mask = batch(99)
        output = pipe.evaluate(x if rank == 0 else None, **({"mask": mask} if rank == 0 else {}))
        losses += finish(pipe)
        results.append((losses, output, pipe.full_state_dict(), len(pipe._units)))
        assert not pipe.transport.contexts() and not pipe.transport.targets()
        pipe.close()
    return results


def train_alone(rank, settings):
    results = []
    for changes in settings:
        pipe = rd.Pipeline(model(), **options(**changes))
        losses = run(pipe, 0, NUM)
        x, _, mask = batch(99)
        output = pipe.evaluate(x, mask=mask)
        losses += finish(pipe)
        results.append((losses, output, pipe.full_state_dict(), len(pipe._units)))
    return results


def compare(settings, world_size, backend, tmp_path):
    results = launch(train, tmp_path, settings, world_size=world_size, backend=backend)
    alone = [{"stages": world_size, **changes} for changes in settings]
    expected = _expect(train_alone, alone, backend, tmp_path)
    for changes, (losses, output, weights, num_units), *ours in zip(
        settings, expected, *results, strict=True
    ):
        assert len(losses) == NUM
        for rank, (_, there, full, _) in enumerate(ours):
            assert torch.equal(there.cpu(), output.cpu()), (changes, rank)
            assert equal(full, weights), (changes, rank)
        for (n, one), (m, other) in zip(losses, ours[-1][0], strict=True):
            assert n == m and torch.equal(one.cpu(), other.cpu())
        assert all(not losses for losses, *_ in ours[:-1])
        assert sum(num for *_, num in ours) == num_units


def _expect(function, settings, backend, tmp_path):
    """Return the results of a function in one process, which runs once for a setting."""
    keys = [(function.__name__, repr(setting), "nccl" in backend) for setting in settings]
    new = {key: setting for key, setting in zip(keys, settings, strict=True) if key not in _alone}
    if new:
        results = launch_alone(function, tmp_path, list(new.values()), backend=backend)
        _alone.update(zip(new, results, strict=True))
    return [_alone[key] for key in keys]


def evaluate_between(pipe, num: int) -> list:
    """Evaluate before the first step, and after every step."""
    outputs = []
    for n in range(num + 1):
        x, target, mask = batch(n)
        y, _, other = batch(100 + n, size=2 + n)  # of another size each time
        outputs.append(pipe.evaluate(y, mask=other))
        pipe.step(x, target, mask=mask)
    return outputs


def evaluate_early(rank, latencies):
    results = []
    for latency in latencies:
        pipe = rd.DistributedPipeline(model(), **options(latency=latency))
        results.append((evaluate_between(pipe, 2 * latency), pipe.full_state_dict()))
        for _ in range(10):
            pipe.evaluate(batch(0)[0], mask=batch(0)[2])
        assert len(pipe.team._waits) <= latency + 3  # transfers in progress do not pile up
        pipe.close()
    return results


def evaluate_early_alone(rank, latencies):
    results = []
    for latency in latencies:
        pipe = rd.Pipeline(model(), stages=3, **options(latency=latency))
        results.append((evaluate_between(pipe, 2 * latency), pipe.full_state_dict()))
    return results


def compare_evaluations(backend, tmp_path):
    """Compare evaluations before the first step, and after each step that fills the pipeline."""
    latencies = (1, 2, 3)
    results = launch(evaluate_early, tmp_path, latencies, world_size=3, backend=backend)
    expected = _expect(evaluate_early_alone, latencies, backend, tmp_path)
    for (outputs, weights), *ours in zip(expected, *results, strict=True):
        for there, full in ours:
            assert all(map(torch.equal, there, outputs))
            assert equal(full, weights)


class Choose(nn.Module):
    """Computes with side inputs of several dtypes."""

    def forward(self, x, chosen, few, nothing):
        return torch.tanh(x) * chosen + few.to(x.dtype).sum() + nothing.sum()


def choose_by_side(pipe, num: int) -> list:
    ticks = []
    for n in range(num):
        x, target, _ = batch(n)
        dice = torch.Generator().manual_seed(n)
        side = {
            "chosen": torch.rand(8, generator=dice) > 0.5,
            "few": torch.randint(-3, 3, (2,), generator=dice, dtype=torch.int16),
            "nothing": torch.zeros(0, 2),
        }
        side = {name: tensor.to(x.device) for name, tensor in side.items()}
        ticks.append(pipe.step(x[:, 0], target, **side))
    return [tick.loss for tick in (*ticks, *pipe.flush()) if tick.loss is not None]


def odd_units() -> rd.Chain:
    torch.manual_seed(0)
    takes = ("chosen", "few", "nothing")
    couplings = [rd.Coupling(Choose(), takes=takes) for _ in range(3)]
    units = [nn.Linear(5, 8), rd.Duplicate(), *couplings, rd.Fuse("mean"), nn.Linear(8, 3)]
    return rd.Chain(units).to(cases.DEVICE)


def odd_sides(rank):
    pipe = rd.DistributedPipeline(odd_units(), share_loss=True, **options())
    return choose_by_side(pipe, 9)


def odd_sides_alone(rank, settings):
    return [choose_by_side(rd.Pipeline(odd_units(), **options(**s)), 9) for s in settings]


def compare_side_inputs(backend, tmp_path):
    """Compare runs with side inputs of dtypes that backends do not support."""
    results = launch(odd_sides, tmp_path, world_size=3, backend=backend)
    [losses] = _expect(odd_sides_alone, [{"stages": 3}], backend, tmp_path)
    assert len(losses) == 9
    for ours in results:
        assert [float(loss) for loss in ours] == [float(loss) for loss in losses]


def save(rank, changes, folder, num):
    pipe = rd.DistributedPipeline(model(), **options(**changes))
    losses = run(pipe, 0, num)
    pipe.save(folder)
    losses += run(pipe, num, NUM_IN_ALL)  # saving disturbs nothing
    losses += finish(pipe)
    return losses, pipe.full_state_dict()


def go_on(rank, changes, folder, num, first):
    wire.NUM_TAGS = 8  # they wrap around often
    pipe = rd.DistributedPipeline(model(dropout=0.3), **options(**changes))
    run(pipe, 0, first)  # forgotten
    pipe.load(folder)
    losses = run(pipe, num, NUM_IN_ALL) + finish(pipe)
    return losses, pipe.full_state_dict()


def save_alone(rank, changes, folder, num):
    pipe = rd.Pipeline(model(), **options(**changes))
    losses = run(pipe, 0, num)
    pipe.save(folder)
    return losses + run(pipe, num, NUM_IN_ALL) + finish(pipe), pipe.full_state_dict()


def go_on_alone(rank, changes, folder, num):
    pipe = rd.Pipeline(model(), **options(**changes))
    pipe.load(folder)
    return run(pipe, num, NUM_IN_ALL) + finish(pipe), pipe.full_state_dict()


def compare_saved(changes, backend, tmp_path):
    """Resume a run that four processes saved on two processes and on one."""
    folder, other, num = tmp_path / "state", tmp_path / "other", NUM_SAVED
    losses, weights = launch_alone(save_alone, tmp_path, changes, other, num, backend=backend)
    four = launch(save, tmp_path, changes, folder, num, world_size=4, backend=backend)
    assert equal(four[0][1], weights)
    two = launch(go_on, tmp_path / "two", changes, folder, num, 5, backend=backend)
    one = launch_alone(go_on_alone, tmp_path / "one", changes, folder, num, backend=backend)
    for there, full in (one, two[-1]):
        assert equal(full, weights)
        assert len(there) >= NUM_IN_ALL - num
        for (n, loss), (m, loss_there) in zip(losses[-len(there) :], there, strict=True):
            assert n == m and torch.equal(loss.cpu(), loss_there.cpu())
    # And back: written by one process, continued by three.
    three = launch(go_on, tmp_path / "three", changes, other, num, 0, world_size=3, backend=backend)
    assert equal(three[1][1], weights)


def columns(rank, changes, folder, norm):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
    column = rank // 2
    torch.manual_seed(rank)  # replicas begin with the first one's weights
    net = model(dropout=0.3 if norm else 0.0, norm=norm)
    if column:
        for param in net.parameters():
            torch.nn.init.normal_(param)
    pipe = rd.DistributedPipeline(net, mesh=mesh, **options(**changes))
    losses = run(pipe, 0, 7, column)  # in the middle of an update
    pipe.save(folder)
    losses += run(pipe, 7, NUM, column) + finish(pipe)
    first = pipe.full_state_dict()
    net = model(dropout=0.3 if norm else 0.0, norm=norm)
    pipe = rd.DistributedPipeline(net, mesh=mesh, **options(**changes))
    pipe.load(folder)
    run(pipe, 7, NUM, column)
    finish(pipe)
    again = pipe.full_state_dict()
    assert equal(first, again)
    return losses, first


def compare_replicas(norm, backend, tmp_path):
    """Train on two by two ranks; without batch norm as a pipeline does on both batches joined."""
    changes = {"accumulate": 3, "clip_norm": 0.5}
    results = launch(
        columns, tmp_path, changes, tmp_path / "state", norm, world_size=4, backend=backend
    )
    weights = results[0][1]
    for _, other in results:
        assert equal(weights, other)
    one, other = (dict(results[rank][0]) for rank in (1, 3))
    assert len(one) == NUM and all(one[n] != other[n] for n in one)
    with pytest.raises(ValueError, match="of 2 replicas"):
        rd.Pipeline(model(), stages=2, **options(**changes)).load(tmp_path / "state")
    if norm:
        return  # batch norm sees a replica's batch, and dropout differs
    pipe = rd.Pipeline(model(dropout=0.0, norm=False), stages=2, **options(**changes))
    for n in range(NUM):
        pairs = [batch(n, data_rank=d) for d in (0, 1)]
        x, y = (torch.cat([pair[i] for pair in pairs]) for i in (0, 1))
        pipe.step(x, y, mask=pairs[0][2])
    pipe.flush(update=True)
    joined = pipe.full_state_dict()
    assert all(torch.allclose(weights[n], joined[n].cpu(), rtol=1e-4, atol=1e-6) for n in joined)


def in_turn(rank, seeds):
    pipes = [rd.DistributedPipeline(model(), **options(latency=2, seed=s)) for s in seeds]
    for i, first, last in ((0, 0, 5), (1, 0, 12), (0, 5, 20), (1, 12, 20)):
        run(pipes[i], first, last)
    for pipe in pipes:
        finish(pipe)
    return [pipe.full_state_dict() for pipe in pipes]


def in_turn_alone(rank, seeds):
    results = []
    for seed in seeds:
        pipe = rd.Pipeline(model(), stages=2, **options(latency=2, seed=seed))
        run(pipe, 0, 20)
        finish(pipe)
        results.append(pipe.full_state_dict())
    return results


def compare_two_pipelines(backend, tmp_path):
    """Compare two pipelines that take turns in the same processes."""
    seeds = (1, 2)
    results = launch(in_turn, tmp_path, seeds, backend=backend)
    expected = _expect(in_turn_alone, seeds, backend, tmp_path)
    for weights, *ours in zip(expected, *results, strict=True):
        for full in ours:
            assert equal(full, weights)


def run_ticks(rank, settings, ranks, flushes):
    """Train with captured ticks in some ranks, with a saved state and an evaluation between."""
    on_host, is_captured = cases.DEVICE == "cpu", rank in ranks
    if on_host:
        captured.NUM_PHASES = 1  # as few as possible: memory is used again as soon as it may be
    results = []
    for changes in settings:
        column = 0
        if "replicas" in changes:
            changes = dict(changes)
            num_columns = changes.pop("replicas")
            num_places = dist.get_world_size() // num_columns
            column, shape = rank // num_places, (num_columns, num_places)
            names = ("data", "stage")
            changes["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=names)
        units = list(model(dropout=0.0 if on_host else 0.3, norm=False))  # a tape has no seeds
        units[7] = nn.BatchNorm1d(16).to(cases.DEVICE)
        keywords = options(optimizer=fused_sgd, **changes) | {"capture": is_captured}
        pipe = rd.DistributedPipeline(rd.Chain(units), **keywords)
        if is_captured and on_host:
            pipe.execution = CapturedRunner(pipe, Tape)
        num = _num_until_replayed(pipe)
        losses = run(pipe, 0, num, column)
        assert pipe.execution.is_active == is_captured, changes
        if flushes:
            losses += [(tick.microbatch, tick.loss) for tick in pipe.flush()]
            losses += run(pipe, num, 2 * num, column)
            assert pipe.execution.is_active == is_captured, changes
            num *= 2
        state = pipe.state_dict()
        for stage in state["stages"].values():
            del stage["groups"]  # rates are numbers, or tensors
        losses += run(pipe, num, num + 5, column)
        x, _, mask = batch(99)
        output = pipe.evaluate(x, mask=mask)
        losses += run(pipe, num + 5, num + NUM_AFTER, column)
        assert pipe.execution.is_active == is_captured, changes
        losses += finish(pipe)
        assert not pipe.transport.contexts() and not pipe.transport.targets()
        results.append((num + NUM_AFTER, losses, pipe.full_state_dict(), output, state))
        pipe.close()
    return results


def _num_until_replayed(pipe) -> int:
    """Return a number of micro-batches after which ticks have been captured, and replayed.

    With one phase they are captured after 2 * (in flight + accumulate) + 2, and replayed 9 times.
    """
    if captured.NUM_PHASES > 1:
        return NUM_CAPTURED
    return 2 * (pipe.schedule.num_in_flight + pipe.accumulate) + 12


def fused_sgd(stage):
    return torch.optim.SGD(stage.parameters(), lr=0.05, momentum=0.9, fused=True)


def compare_captured(settings, world_size, backend, tmp_path, *, ranks=range(9), flushes=False):
    """Compare captured ticks of some ranks with eager ones, in all that a process can know."""
    eager = _run_eagerly(settings, world_size, flushes, backend, tmp_path / "eager")
    results = launch(
        run_ticks, tmp_path, settings, ranks, flushes, world_size=world_size, backend=backend
    )
    for changes, expected, *ours in zip(settings, eager, *results, strict=True):
        for rank, (one, other) in enumerate(zip(expected, ours, strict=True)):
            num, losses, weights, *_ = one
            assert equal(weights, other[2]), (changes, rank)
            num_places = world_size // changes.get("replicas", 1)
            has_loss = (rank + 1) % num_places == 0 or changes.get("share_loss")
            assert len(losses) == len(other[1]) == (num if has_loss else 0)
            for tensor, same in zip(*map(tensors_of, (one, other)), strict=True):
                assert torch.equal(tensor, same), (changes, rank)


def _run_eagerly(settings, world_size, flushes, backend, folder):
    """Return the results of all ranks by eager ticks, which run once for a setting."""
    keys = [(repr(s), world_size, flushes, "nccl" in backend) for s in settings]
    new = {key: s for key, s in zip(keys, settings, strict=True) if key not in _eager}
    if new:
        args = (list(new.values()), (), flushes)
        results = launch(run_ticks, folder, *args, world_size=world_size, backend=backend)
        _eager.update(zip(new, zip(*results, strict=True), strict=True))
    return [_eager[key] for key in keys]
