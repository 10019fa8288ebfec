"""A pipeline over processes: the numbers of one process, to the last bit."""

import gc

import pytest
import torch
import torch.nn.functional as F
from pipeline.reference import METHODS
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import redivider as rd
from distributed.cases import batch, finish, model, options, run, sgd
from distributed.launch import launch
from redivider.initial import materialise
from redivider.pipeline import wire

pytestmark = pytest.mark.slow


def train(rank, cases):
    found = []
    for changes in cases:
        pipe = rd.DistributedPipeline(model(), **options(**changes))
        losses = run(pipe, 0, 40)
        x, _, mask = batch(99)
        output = pipe.evaluate(x if rank == 0 else None, **({"mask": mask} if rank == 0 else {}))
        losses += finish(pipe)
        found.append((losses, output, pipe.full_state_dict(), len(pipe._units)))
        assert not pipe._known and not pipe._future_targets
        pipe.close()
    return found


def compare(cases, world_size, tmp_path):
    torch.set_num_threads(1)
    results = launch(train, tmp_path, cases, world_size=world_size)
    for changes, *ours in zip(cases, *results, strict=True):
        pipe = rd.Pipeline(model(), **options(**{"stages": world_size, **changes}))
        losses = run(pipe, 0, 40)
        x, _, mask = batch(99)
        output = pipe.evaluate(x, mask=mask)
        losses += finish(pipe)
        weights = pipe.full_state_dict()
        assert len(losses) == 40
        for rank, (_, there, full, _) in enumerate(ours):
            assert torch.equal(there, output), (changes, rank)
            assert list(full) == list(weights)
            assert all(torch.equal(full[name], weights[name]) for name in weights), (changes, rank)
        for (n, one), (m, other) in zip(losses, ours[-1][0], strict=True):
            assert n == m and torch.equal(one, other)
        assert all(not losses for losses, *_ in ours[:-1])
        assert sum(num for *_, num in ours) == len(pipe._units)


def test_two_processes(tmp_path):
    cases = [{"method": method} for method in METHODS]
    cases += [
        {"accumulate": 3, "latency": 2},
        {"stages": [1, 2, 3, 1, 2], "accumulate": 3},
        {"arithmetic": "fixed", "clip_norm": 0.5, "clip_over": "all"},
        {"lookahead": "momentum", "latency": 2, "lr_by_delay": True},
        {"message_dtype": torch.bfloat16, "stages": [3, 6]},  # the mask travels, and is not rounded
        {"message_dtype": torch.int8, "stages": 5},
    ]
    compare(cases, 2, tmp_path)


def test_three_processes(tmp_path):
    cases = [
        {},
        {"stages": [4, 1, 4], "accumulate": 3, "clip_norm": 0.5},
        {"stages": 9, "latency": 2, "method": "delayed"},
    ]
    compare(cases, 3, tmp_path)


def test_four_processes(tmp_path):
    cases = [
        {"accumulate": 3},
        {"stages": [1, 3, 2, 1, 1, 1], "latency": 2, "method": "exact-inverse"},
        {"stages": 7, "clip_norm": 0.5, "clip_over": "all", "accumulate": 3},
    ]
    compare(cases, 4, tmp_path)


def save(rank, changes, folder, num):
    pipe = rd.DistributedPipeline(model(), **options(**changes))
    losses = run(pipe, 0, num)
    pipe.save(folder)
    losses += run(pipe, num, 40)  # saving disturbs nothing
    losses += finish(pipe)
    return losses, pipe.full_state_dict()


def go_on(rank, changes, folder, num, first):
    wire.NUM_TAGS = 8  # they begin anew often
    pipe = rd.DistributedPipeline(model(dropout=0.3), **options(**changes))
    run(pipe, 0, first)  # forgotten
    pipe.load(folder)
    losses = run(pipe, num, 40) + finish(pipe)
    return losses, pipe.full_state_dict()


@pytest.mark.parametrize(
    "changes",
    [
        {"stages": 5, "latency": 2},
        {"stages": [1, 2, 2, 2, 2], "method": "delayed-graph", "accumulate": 3},
    ],
    ids=str,
)
def test_saved_on_four_processes_it_goes_on_on_two_and_on_one(changes, tmp_path):
    torch.set_num_threads(1)
    folder, num = tmp_path / "state", 17
    whole = rd.Pipeline(model(), **options(**changes))
    losses = run(whole, 0, 40) + finish(whole)
    weights = whole.full_state_dict()
    four = launch(save, tmp_path, changes, folder, num, world_size=4)
    assert all(torch.equal(four[0][1][name], weights[name]) for name in weights)
    two = launch(go_on, tmp_path / "two", changes, folder, num, 5, world_size=2)
    alone = rd.Pipeline(model(), **options(**changes))
    alone.load(folder)
    ends = [(run(alone, num, 40) + finish(alone), alone.full_state_dict()), two[-1]]
    for there, full in ends:
        assert all(torch.equal(full[name], weights[name]) for name in weights)
        for (n, one), (m, other) in zip(losses[-9:], there[-9:], strict=True):
            assert n == m and torch.equal(one, other)
    # And back: written by one process, continued by three.
    alone = rd.Pipeline(model(), **options(**changes))
    run(alone, 0, num)
    alone.save(folder)
    three = launch(go_on, tmp_path / "three", changes, folder, num, 0, world_size=3)
    assert all(torch.equal(three[1][1][name], weights[name]) for name in weights)


def columns(rank, changes, folder, norm):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
    column = rank // 2
    torch.manual_seed(rank)  # replicas begin with the first one's weights
    net = model(dropout=0.3 if norm else 0.0, norm=norm)
    if column:
        for each in net.parameters():
            torch.nn.init.normal_(each)
    pipe = rd.DistributedPipeline(net, mesh=mesh, **options(**changes))
    losses = run(pipe, 0, 23, column)
    pipe.save(folder)
    losses += run(pipe, 23, 40, column) + finish(pipe)
    first = pipe.full_state_dict()
    net = model(dropout=0.3 if norm else 0.0, norm=norm)
    pipe = rd.DistributedPipeline(net, mesh=mesh, **options(**changes))
    pipe.load(folder)
    run(pipe, 23, 40, column)
    finish(pipe)
    again = pipe.full_state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    return losses, first


@pytest.mark.parametrize("norm", [True, False])
def test_replicas(norm, tmp_path):
    torch.set_num_threads(1)
    changes = {"accumulate": 3, "clip_norm": 0.5}
    found = launch(columns, tmp_path, changes, tmp_path / "state", norm, world_size=4)
    weights = found[0][1]
    for _, other in found:
        assert all(torch.equal(weights[name], other[name]) for name in weights)
    one, other = (dict(found[rank][0]) for rank in (1, 3))
    assert len(one) == 40 and all(one[n] != other[n] for n in one)
    with pytest.raises(ValueError, match="of 2 replicas"):
        rd.Pipeline(model(), stages=2, **options(**changes)).load(tmp_path / "state")
    if norm:
        return  # batch norm sees a replica's batch, and dropout differs
    pipe = rd.Pipeline(model(dropout=0.0, norm=False), stages=2, **options(**changes))
    for n in range(40):
        pairs = [batch(n, data_rank=d) for d in (0, 1)]
        x, y = (torch.cat([pair[i] for pair in pairs]) for i in (0, 1))
        pipe.step(x, y, mask=pairs[0][2])
    pipe.flush(update=True)
    joined = pipe.full_state_dict()
    assert all(torch.allclose(weights[n], joined[n], rtol=1e-4, atol=1e-6) for n in joined)


def count_bytes(rank, dtypes):
    found = []
    for dtype in dtypes:
        pipe = rd.DistributedPipeline(model(), **options(message_dtype=dtype))
        for n in range(10):
            pipe.step(*batch(n)[:2])
        found.append(pipe.num_bytes_sent)
        finish(pipe)
        pipe.close()
    return found


def test_bytes_are_those_of_the_formula(tmp_path):
    """Two streams upwards; the same, and their gradients, downwards."""
    sizes = {None: 4, torch.bfloat16: 2, torch.int8: 1}
    found = launch(count_bytes, tmp_path, list(sizes), world_size=3)
    for (dtype, size), *ours in zip(sizes.items(), *found, strict=True):
        stream = 4 * 6 * 8 * size + (4 * 4 if dtype == torch.int8 else 0)  # and a scale a sample
        # Of three stages in ten ticks: 10 and 9 upwards, 7 and 8 downwards.
        assert ours == [10 * 2 * stream, (9 * 2 + 7 * 4) * stream, 8 * 4 * stream]


def on_meta(rank):
    before = sum(each.numel() for each in gc_tensors())
    net = rd.create_model("rev_gpt_nano", device="meta", context=16, vocabulary=50)
    if rank == 2:  # the head is in the loss, and gets the weights of its name in the model
        materialise(dict(list(net.named_children())[-1:]), seed=3)
    pipe = rd.DistributedPipeline(
        net[:-1], loss=rd.ChunkedCrossEntropy(net[-1]), optimizer=sgd, seed=3, share_loss=True
    )
    own = sum(each.numel() for each in gc_tensors()) - before
    total = sum(each.numel() for each in net.parameters())
    losses = []
    for n in range(8):
        tokens = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(n))
        tick = pipe.step(tokens if rank == 0 else None, tokens if rank == 2 else None)
        losses.append(None if tick.loss is None else float(tick.loss))
    sent = pipe.num_bytes_sent
    return own / total, losses, pipe.full_state_dict(), sent


def gc_tensors():
    gc.collect()
    found = [each for each in gc.get_objects() if torch.is_tensor(each) and not each.is_meta]
    return {each.untyped_storage().data_ptr(): each for each in found if each.numel()}.values()


def test_a_model_without_memory_is_given_some_where_its_stages_are(tmp_path):
    torch.set_num_threads(1)
    found = launch(on_meta, tmp_path, world_size=3)
    parts = [part for part, *_ in found]
    assert max(parts) < 0.8 and sum(parts) == pytest.approx(1, abs=0.02), parts
    net = rd.create_model("rev_gpt_nano", seed=3, context=16, vocabulary=50)
    pipe = rd.Pipeline(
        net[:-1], stages=3, loss=rd.ChunkedCrossEntropy(net[-1]), optimizer=sgd, seed=3
    )
    losses = []
    for n in range(8):
        tokens = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(n))
        tick = pipe.step(tokens, tokens)
        losses.append(None if tick.loss is None else float(tick.loss))
    for _, each, _, _ in found:
        assert each == losses
    weights = pipe.full_state_dict()
    for _, _, full, _ in found:
        assert all(torch.equal(full[name], weights[name]) for name in weights)


class Either(nn.Module):
    """Uses one of two weights, and gives more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x):
        return {"scores": (self.one if x.sum() > 0 else self.other)(x), "none": None, "number": 3}


def choose(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
    torch.manual_seed(0)
    pipe = rd.DistributedPipeline(
        [nn.Linear(5, 5), Either()],
        mesh=mesh,
        **options(loss=lambda output, target: F.cross_entropy(output["scores"], target)),
    )
    for n in range(20):
        x, y, _ = batch(n, data_rank=rank // 2)
        pipe.step(x[:, 0], y)
    finish(pipe)
    output = pipe.evaluate(x[:, 0])
    return pipe.full_state_dict(), output


def test_replicas_that_use_different_weights(tmp_path):
    found = launch(choose, tmp_path, world_size=4)
    for weights, output in found:
        assert all(torch.equal(weights[name], found[0][0][name]) for name in weights)
        assert output["none"] is None and output["number"] == 3 and output["scores"].shape == (4, 3)


def backwards(rank):
    mesh = DeviceMesh("cpu", [1, 0], mesh_dim_names=("stage",))
    pipe = rd.DistributedPipeline(model(), mesh=mesh, **options())
    losses = run(pipe, 0, 12)
    weights = pipe.full_state_dict()
    x, _, mask = batch(99)
    output = pipe.evaluate(x, **({"mask": mask} if rank == 1 else {}))
    pipe.close()  # with things in flight
    return losses, output, weights


def test_a_mesh_in_another_order(tmp_path):
    torch.set_num_threads(1)
    found = launch(backwards, tmp_path, world_size=2)
    pipe = rd.Pipeline(model(), stages=2, **options())
    losses = run(pipe, 0, 12)
    assert [loss.item() for _, loss in found[0][0]] == [loss.item() for _, loss in losses]
    weights = pipe.full_state_dict()
    for _, _, full in found:
        assert all(torch.equal(full[name], weights[name]) for name in weights)
    assert torch.equal(found[0][1], found[1][1])


def in_turn(rank):
    pipes = [rd.DistributedPipeline(model(), **options(latency=2, seed=s)) for s in (1, 2)]
    for i, first, last in ((0, 0, 5), (1, 0, 12), (0, 5, 20), (1, 12, 20)):
        run(pipes[i], first, last)
    for pipe in pipes:
        finish(pipe)
    return [pipe.full_state_dict() for pipe in pipes]


def test_two_pipelines_in_the_same_processes(tmp_path):
    torch.set_num_threads(1)
    found = launch(in_turn, tmp_path, world_size=2)
    for seed, *ours in zip((1, 2), *found, strict=True):
        pipe = rd.Pipeline(model(), stages=2, **options(latency=2, seed=seed))
        run(pipe, 0, 20)
        finish(pipe)
        weights = pipe.full_state_dict()
        for full in ours:
            assert all(torch.equal(full[name], weights[name]) for name in weights)


def odd_ones(rank, folder):
    pipe = rd.DistributedPipeline(model(), **options())
    with pytest.raises(ValueError, match="holds no readable manifest"):
        pipe.load(folder / "nowhere")
    (folder / "file").touch()
    with pytest.raises((OSError, ValueError), match="file"):
        pipe.save(folder / "file" / "state")  # and they go on
    with pytest.raises(ValueError, match=r"use rd\.Pipeline"):
        pipe.probe()
    tick = pipe.step(*batch(0)[:2])
    assert rank or (tick.loss is None and "rank 1" in tick.reason)
    pipe.close()  # else this process may end before the other one has sent
    return repr(pipe)


def test_what_is_elsewhere_is_said(tmp_path):
    found = launch(odd_ones, tmp_path, tmp_path, world_size=2)
    assert "rank 0" in found[0] and "DistributedPipeline" in found[1]


def test_without_other_processes_it_says_how_to_start_them():
    with pytest.raises(rd.PipelineError, match="torchrun"):
        rd.DistributedPipeline(model(), **options())
