"""A rank that fails ends all of them, in seconds and with the reason; nothing hangs."""

import pytest

import redivider as rd
from distributed.cases import model, options
from distributed.failures import CASES, meet
from distributed.launch import launch

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_all_ranks_end(case, tmp_path):
    meet(case, tmp_path)


def test_stages_that_do_not_fit(tmp_path):
    found = launch(_too_many, tmp_path, world_size=3)
    assert all("2 stages cannot be spread over 3 processes" in each for each in found)


def _too_many(rank):
    try:
        rd.DistributedPipeline(model(), stages=2, **options())
    except ValueError as error:
        return str(error)


def test_ranks_that_disagree(tmp_path):
    for name, (first, second), said in (
        ("accumulate", (1, 2), "2 and not 1"),
        ("lr_by_delay", (False, True), "True and not False"),
    ):
        found = launch(_disagree, tmp_path / name, name, first, second)
        message = f"rank 1 was given another {name} than rank 0: {said}"
        assert all(message in each for each in found)


def _disagree(rank, name, *values):
    try:
        rd.DistributedPipeline(model(), **{name: values[rank]}, **options())
    except (ValueError, rd.PipelineError) as error:
        return str(error)
