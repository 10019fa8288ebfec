"""A pipeline over processes computes the numbers of one process, to the last bit."""

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.processes import ordered
from support.processes.cases import batch, equal, finish, model, muon, options, run, sgd
from support.processes.equalities import (
    compare,
    compare_evaluations,
    compare_replicas,
    compare_saved,
    compare_side_inputs,
    compare_two_pipelines,
)
from support.processes.launch import launch, launch_alone
from support.reference import METHODS
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import redivider as rd
from redivider.initial import materialise
from redivider.pipeline.runners import topology, wire
from redivider.pipeline.schedule import Schedule

pytestmark = pytest.mark.slow

over_all_backends = pytest.mark.parametrize("backend", ["gloo", *ordered.MODES])


@over_all_backends
def test_two_processes(backend, tmp_path):
    settings: list[dict[str, Any]] = [
        {"accumulate": 3, "latency": 2},
        {"stages": [1, 2, 3, 1, 2], "accumulate": 3, "latency": 3},
        {"arithmetic": "fixed", "clip_norm": 0.5, "clip_over": "all"},
    ]
    if backend in ("gloo", "rendezvous"):
        settings += [
            {"message_dtype": torch.bfloat16, "stages": [3, 6]},  # the mask is not rounded
            {"message_dtype": torch.int8, "stages": 5},
        ]
    if backend == "gloo":  # they differ in what a process computes, not in its messages
        settings += [{"method": method} for method in METHODS if method != "petra"]
        settings += [{"lookahead": True, "latency": 2, "lr_by_delay": True}]
    compare(settings, 2, backend, tmp_path)


@over_all_backends
def test_three_processes(backend, tmp_path):
    settings: list[dict[str, Any]] = [
        {},
        {"stages": 9, "latency": 2, "method": "delayed"},
        {"optimizer": muon, "latency": 0.5, "clip_norm": 0.5, "clip_over": "all"},
    ]
    if backend == "gloo":  # they differ in what a process computes, not in its messages
        settings += [{"stages": [4, 1, 4], "accumulate": 3, "clip_norm": 0.5}]
        settings += [{"optimizer": muon, "lookahead": True}]
    compare(settings, 3, backend, tmp_path)


@pytest.mark.parametrize("backend", ["gloo", "rendezvous", "device"])
def test_four_processes(backend, tmp_path):
    settings = [
        *([{"accumulate": 3}] if backend == "gloo" else []),
        {"stages": [1, 3, 2, 1, 1, 1], "latency": 2, "method": "exact-inverse"},
        {"stages": 7, "clip_norm": 0.5, "clip_over": "all", "accumulate": 3},
    ]
    compare(settings, 4, backend, tmp_path)


@over_all_backends
def test_evaluation_while_the_pipeline_fills(backend, tmp_path):
    compare_evaluations(backend, tmp_path)


@over_all_backends
def test_side_inputs_of_dtypes_that_backends_do_not_know(backend, tmp_path):
    compare_side_inputs(backend, tmp_path)


@over_all_backends
def test_two_pipelines_in_the_same_processes(backend, tmp_path):
    compare_two_pipelines(backend, tmp_path)


@pytest.mark.parametrize(
    "changes, backend",
    [
        ({"stages": 5, "latency": 2}, "gloo"),
        ({"stages": 5, "latency": 2}, "eager"),
        ({"stages": [1, 2, 2, 2, 2], "method": "delayed-graph", "accumulate": 3}, "gloo"),
        ({"stages": [1, 2, 2, 2, 2], "accumulate": 3}, "rendezvous"),
    ],
    ids=str,
)
def test_saved_on_four_processes_it_goes_on_on_two_and_on_one(changes, backend, tmp_path):
    compare_saved(changes, backend, tmp_path)


@pytest.mark.parametrize(
    "norm, backend", [(True, "gloo"), (False, "gloo"), (True, "device"), (False, "rendezvous")]
)
def test_replicas(norm, backend, tmp_path):
    compare_replicas(norm, backend, tmp_path)


def train_twins(rank, method, mesh_shape):
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("data", "stage"))
    changes = {"method": method, "stages": [8, 1]}  # with batch norm below the last stage
    pipe = rd.DistributedPipeline(model(dropout=0.0), mesh=mesh, **options(**changes))
    losses = run(pipe, 0, 14) + finish(pipe)
    return losses, pipe.full_state_dict()


@pytest.mark.parametrize("method", ["petra", "delayed-graph"])
def test_replicas_of_the_same_data_are_one_pipeline(method, tmp_path):
    """Their averages, also of running statistics, are their own."""
    expected = launch(train_twins, tmp_path, method, (1, 2), world_size=2)
    results = launch(train_twins, tmp_path, method, (2, 2), world_size=4)
    for rank, (losses, weights) in enumerate(results):
        assert equal(weights, expected[0][1])
        ours, theirs = (
            [(n, loss.item()) for n, loss in own] for own in (losses, expected[rank % 2][0])
        )
        assert ours == theirs


def count_bytes(rank, dtypes):
    counts = []
    for dtype in dtypes:
        pipe = rd.DistributedPipeline(model(), **options(message_dtype=dtype))
        for n in range(10):
            pipe.step(*batch(n)[:2])
        counts.append(pipe.num_bytes_sent)
        finish(pipe)
        pipe.close()
    return counts


def test_bytes_are_those_of_the_formula(tmp_path):
    """Two streams upwards; the same, and their gradients, downwards."""
    sizes = {None: 4, torch.bfloat16: 2, torch.int8: 1}
    counts = launch(count_bytes, tmp_path, list(sizes), world_size=3)
    for (dtype, size), *ours in zip(sizes.items(), *counts, strict=True):
        stream = 4 * 6 * 8 * size + (4 * 4 if dtype == torch.int8 else 0)  # and a scale a sample
        # Of three stages in ten ticks: 10 and 9 upwards, 7 and 8 downwards.
        assert ours == [10 * 2 * stream, (9 * 2 + 7 * 4) * stream, 8 * 4 * stream]


def count_receives(rank, latency, ticks):
    """Return how many receives were posted after each tick, and the weights; flush halfway."""
    posted = []
    receive = dist.irecv

    def irecv(*args, **keywords):
        posted.append(keywords["tag"])
        return receive(*args, **keywords)

    dist.irecv = irecv
    pipe = rd.DistributedPipeline(model(), **options(latency=latency))
    counts = []
    for half in range(2):
        for n in range(ticks):
            run(pipe, half * ticks + n, half * ticks + n + 1)
            counts.append(len(posted))
        finish(pipe)
    return counts, pipe.full_state_dict()


@pytest.mark.parametrize("latency", [0.5, 1, 3])
def test_receives_are_posted_before_their_micro_batches_enter(latency, tmp_path):
    """Those of messages that are sent up to `latency` ticks later: nothing waits for them then."""
    schedule, ticks = Schedule(2, latency), 12
    (_, weights), (counts, _) = launch(count_receives, tmp_path, latency, ticks)
    # The layout comes with the first message.
    first, ahead = schedule.lag("F", 1), schedule.max_ticks
    assert counts == [0] * first + [1] + [n + ahead + 1 for n in range(first + 1, 2 * ticks)]
    pipe = rd.Pipeline(model(), stages=2, **options(latency=latency))
    for half in range(2):
        run(pipe, half * ticks, (half + 1) * ticks)
        finish(pipe)
    assert equal(weights, pipe.full_state_dict())


def close_and_make_others(rank, changes):
    weights = []
    for num_micro_batches in (6, 20):
        pipe = rd.DistributedPipeline(model(), **options(**changes))
        run(pipe, 0, num_micro_batches)
        weights.append(pipe.full_state_dict())
        pipe.close()  # full: receives are posted that nothing will match
        topology._num_teams += 31
    return weights


def test_a_pipeline_that_was_closed_takes_no_messages_of_later_ones(tmp_path):
    changes = {"latency": 2}
    (_, weights), _ = launch(close_and_make_others, tmp_path, changes)
    pipe = rd.Pipeline(model(), stages=2, **options(**changes))
    run(pipe, 0, 20)
    assert equal(weights, pipe.full_state_dict())


def make_one_too_many(rank):
    topology._num_teams = wire.NUM_TEAMS - 1
    rd.DistributedPipeline(model(), **options()).close()
    with pytest.raises(RuntimeError, match=r"2,048 pipelines, .* start new processes"):
        rd.DistributedPipeline(model(), **options())


def test_tags_are_not_used_again(tmp_path):
    launch(make_one_too_many, tmp_path)


GPT: Any = {"width": 32, "heads": 2, "depth": 3, "context": 16, "vocabulary": 50}


def on_meta(rank):
    before = sum(tensor.numel() for tensor in gc_tensors())
    net = rd.create_model("rev_gpt_nano", device="meta", **GPT)
    if rank == 2:  # the head is in the loss, and gets the weights of its name in the model
        materialise(dict(list(net.named_children())[-1:]), seed=3)
    pipe = rd.DistributedPipeline(
        net[:-1], loss=rd.ChunkedCrossEntropy(net[-1]), optimizer=sgd, seed=3, share_loss=True
    )
    own = sum(tensor.numel() for tensor in gc_tensors()) - before
    total = sum(param.numel() for param in net.parameters())
    losses = []
    for n in range(8):
        tokens = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(n))
        tick = pipe.step(tokens if rank == 0 else None, tokens if rank == 2 else None)
        losses.append(None if tick.loss is None else float(tick.loss))
    sent = pipe.num_bytes_sent
    return own / total, losses, pipe.full_state_dict(), sent


def gc_tensors():
    gc.collect()
    tensors = [obj for obj in gc.get_objects() if torch.is_tensor(obj) and not obj.is_meta]
    # Not those of bytes: texts that ranks have just told each other.
    real = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    return {tensor.untyped_storage().data_ptr(): tensor for tensor in real}.values()


def in_memory(rank):
    net = rd.create_model("rev_gpt_nano", seed=3, **GPT)
    pipe = rd.Pipeline(
        net[:-1], stages=3, loss=rd.ChunkedCrossEntropy(net[-1]), optimizer=sgd, seed=3
    )
    losses = []
    for n in range(8):
        tokens = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(n))
        tick = pipe.step(tokens, tokens)
        losses.append(None if tick.loss is None else float(tick.loss))
    return losses, pipe.full_state_dict()


def test_a_model_without_memory_is_given_some_where_its_stages_are(tmp_path):
    results = launch(on_meta, tmp_path, world_size=3)
    parts = [part for part, *_ in results]
    assert max(parts) < 0.8 and sum(parts) == pytest.approx(1, abs=0.001), parts
    losses, weights = launch_alone(in_memory, tmp_path)
    for _, own_losses, full, _ in results:
        assert own_losses == losses
        assert equal(full, weights)


class Either(nn.Module):
    """Uses one of two weights, and returns more than tensors."""

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
    results = launch(choose, tmp_path, world_size=4)
    for weights, output in results:
        assert all(torch.equal(weights[name], results[0][0][name]) for name in weights)
        assert output["none"] is None and output["number"] == 3 and output["scores"].shape == (4, 3)


def backwards(rank):
    mesh = DeviceMesh("cpu", [1, 0], mesh_dim_names=("stage",))
    pipe = rd.DistributedPipeline(model(), mesh=mesh, **options())
    losses = run(pipe, 0, 12)
    weights = pipe.full_state_dict()
    x, _, mask = batch(99)
    output = pipe.evaluate(x, **({"mask": mask} if rank == 1 else {}))
    pipe.close()  # with micro-batches in flight
    return losses, output, weights


def forwards(rank):
    pipe = rd.Pipeline(model(), stages=2, **options())
    return run(pipe, 0, 12), pipe.full_state_dict()


def test_a_mesh_in_another_order(tmp_path):
    results = launch(backwards, tmp_path, world_size=2)
    losses, weights = launch_alone(forwards, tmp_path)
    assert [loss.item() for _, loss in results[0][0]] == [loss.item() for _, loss in losses]
    for _, _, full in results:
        assert equal(full, weights)
    assert torch.equal(results[0][1], results[1][1])


def odd_ones(rank, folder):
    pipe = rd.DistributedPipeline(model(), **options())
    with pytest.raises(ValueError, match="holds no readable manifest"):
        pipe.load(folder / "nowhere")
    (folder / "file").touch()
    with pytest.raises((OSError, ValueError), match="file"):
        pipe.save(folder / "file" / "state")  # and all ranks continue
    with pytest.raises(ValueError, match=r"use rd\.Pipeline"):
        pipe.probe()
    tick = pipe.step(*batch(0)[:2])
    assert rank or (tick.loss is None and tick.reason is not None and "rank 1" in tick.reason)
    pipe.close()  # else this process may end before the other one has sent
    return repr(pipe)


def test_what_is_elsewhere_is_said(tmp_path):
    texts = launch(odd_ones, tmp_path, tmp_path, world_size=2)
    assert "rank 0" in texts[0] and "DistributedPipeline" in texts[1]


def test_without_other_processes_it_says_how_to_start_them():
    with pytest.raises(rd.PipelineError, match="torchrun"):
        rd.DistributedPipeline(model(), **options())


def shard(rank):
    """Return what Muon says of a model whose weights FSDP has sharded."""
    mesh = init_device_mesh("cpu", (2,))
    sharded = fully_shard(nn.Linear(4, 4), mesh=mesh)
    try:
        rd.Muon(sharded, lr=0.02)  # type: ignore[arg-type]
    except TypeError as error:
        return str(error)
    return ""


def test_muon_refuses_weights_that_are_sharded(tmp_path):
    for text in launch(shard, tmp_path):
        assert text.startswith("Muon orthogonalises whole matrices, and these are sharded")
