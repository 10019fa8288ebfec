"""Training on a GPU: captured steps and ticks, and runs that stop and go on."""

import pytest
import torch
from safetensors.torch import load_file
from support.training import REVNET, recipe, rows, stop_after

from redivider.train.loop import Stopped, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("method", ["store", "reverse", "overlap", "petra", "delayed"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_captured_and_eager_runs_agree(method, precision, tmp_path):
    for capture in (True, False):
        run_recipe = recipe(
            method=method,
            capture=capture,
            precision=precision,
            device="cuda",
            channels_last=True,
            epochs=2,
            clip_norm=5.0,
            **REVNET,
        )
        train(run_recipe, tmp_path / str(capture))
    ours, theirs = rows(tmp_path / "True"), rows(tmp_path / "False")
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    assert ours[0]["loss"] == pytest.approx(theirs[0]["loss"], rel=1e-3)
    assert ours[-1]["loss"] < 0.6 * ours[0]["loss"]
    assert ours[-1]["loss"] == pytest.approx(theirs[-1]["loss"], rel=0.2)


@pytest.mark.parametrize("method", ["store", "petra"])
def test_a_run_that_was_stopped_goes_on(method, tmp_path, monkeypatch):
    torch.backends.cudnn.deterministic = True
    run_recipe = recipe(method=method, device="cuda", epochs=2, **REVNET)
    train(run_recipe, tmp_path / "whole")
    stop_after(monkeypatch, 101)
    with pytest.raises(Stopped):
        train(run_recipe, tmp_path / "parts")
    train(run_recipe, tmp_path / "parts", resume=True)
    torch.backends.cudnn.deterministic = False
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    ours, theirs = (load_file(tmp_path / run / "model.safetensors") for run in ("parts", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
