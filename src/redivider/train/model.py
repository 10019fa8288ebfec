"""Model of a run that has ended: load it, evaluate it, sample from it, export it."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from redivider.chain import Chain
from redivider.errors import require
from redivider.models.catalogue import resolve
from redivider.train.build import build
from redivider.train.errors import TrainError, first_mismatch
from redivider.train.machine import report_out_of_memory, resolve_device, using_threads
from redivider.train.recipe import SHAPE, Recipe, read_recipe
from redivider.train.runs import RECIPE, WEIGHTS, find_runs, parse_row
from redivider.train.task import (
    Score,
    find_shape,
    find_vocabulary,
    is_masked,
    make_model,
    model_options,
)

FORMATS = {"torch": "model.pt2", "onnx": "model.onnx"}
"""Formats of an export, and the name of the file in the run's folder."""
MAX_ONNX_BYTES = 2**30
"""Weights above this lie in a second file, `model.onnx.data`: an ONNX file holds at most 2 GiB."""


class LoadedRun(NamedTuple):
    """Trained model of a run, and its recipe."""

    model: Chain
    """Model with the trained weights, in evaluation mode."""
    recipe: Recipe


def load_run(folder: str | Path, *, device: torch.device | str = "cpu") -> LoadedRun:
    """Load the trained model of a run.

        model, recipe = rd.load_run("runs/quickstart/reverse")

    The folder holds all that this needs. Only for runs of versions that did not write the shape of
    the data to `recipe.json`, the data are read as well.

    Args:
        folder: Folder of a run that has ended.
        device: Device of the model.
    """
    folder = Path(folder)
    recipe, weights = _read(folder)
    try:
        model = make_model(recipe, _read_shape(folder, recipe), device)
    except ValueError as error:  # of data and models; its message contains the remedy
        raise TrainError(f"{folder}: {error}") from error
    _load_weights(model, weights, folder)
    return LoadedRun(model.eval(), recipe)


def evaluate_run(folder: str | Path, *, device: str = "auto") -> Score:
    """Score the trained model of a run on its test data."""
    folder = Path(folder)
    recipe, weights = _read(folder)
    # All methods evaluate alike; this one needs neither stages nor other processes.
    plain = replace(recipe, method="store", stages="auto", replicas=1, compile=False, device=device)
    with report_out_of_memory(plain, device), using_threads(recipe.threads):
        engine = build(plain)
        _load_weights(engine.task.model, weights, folder)
        return engine.evaluate()


@torch.no_grad()
def sample_text(
    folder: str | Path,
    prompt: str = "\n",
    *,
    num_tokens: int = 256,
    temperature: float = 1.0,
    seed: int = 0,
    device: str = "auto",
) -> str:
    """Continue a text with the trained language model of a run.

    Args:
        folder: Folder of the run.
        prompt: Text to continue.
        num_tokens: Number of tokens to add.
        temperature: Divisor of the logits; 0 always takes the likeliest token.
        seed: Seed of the random choices.
        device: Device to run on.
    """
    if not prompt or num_tokens < 0 or not temperature >= 0:
        raise TrainError(
            "a sample needs a prompt of a character or more, and 0 or more tokens and temperature"
        )
    place = resolve_device(device)
    model, recipe = load_run(folder, device=place)
    if recipe.data != "text" or is_masked(recipe):
        raise TrainError(
            f"{folder} cannot continue a text: {recipe.model} was trained on {recipe.data}"
            f"{', to fill in hidden tokens' if recipe.data == 'text' else ''}; take a run of a "
            "GPT or Llama on text"
        )
    vocabulary = find_vocabulary(recipe)
    tokens = vocabulary.encode(prompt.encode(), where=Path("prompt")).to(place).long()
    generator = torch.Generator(place).manual_seed(seed)
    for _ in range(num_tokens):
        logits = model(tokens[None, -recipe.context :])[0, -1].float()
        tokens = torch.cat((tokens, _choose(logits, temperature, generator)))
    return vocabulary.decode(tokens.tolist())


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(keepdim=True)
    return torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)


def export_run(folder: str | Path, out: str | Path | None = None, *, format: str = "torch") -> Path:
    """Export the trained model of a run, for batches of any size, and return the file.

    Args:
        folder: Folder of the run.
        out: File to write; by default `model.pt2` or `model.onnx` in the run's folder.
        format: "torch" for `torch.export.load`, or "onnx".
    """
    if format == "onnx":
        for package in ("onnx", "onnxscript"):
            require(package, "an export to ONNX", "onnx")
    model, recipe = load_run(folder)
    options = model_options(recipe, _read_shape(Path(folder), recipe))
    # Two samples: torch.export takes a size of one for a constant.
    inputs = (resolve(recipe.model, **options)[1].example(2),)
    dynamic: Any = ({0: torch.export.Dim.DYNAMIC},)
    path = Path(folder) / FORMATS[format] if out is None else Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    if format == "onnx":
        num_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
        torch.onnx.export(
            model,
            inputs,
            path,
            dynamo=True,
            dynamic_shapes=dynamic,
            external_data=num_bytes > MAX_ONNX_BYTES,
            verbose=False,
        )
    else:
        torch.export.save(torch.export.export(model, inputs, dynamic_shapes=dynamic), path)
    return path


def _read(folder: Path) -> tuple[Recipe, dict[str, Tensor]]:
    """Return the recipe and the weights of a run."""
    inside = find_runs(folder)
    if inside != [folder]:
        names = ", ".join(map(str, inside))
        raise TrainError(f"{folder} is a folder of runs; choose one of them: {names}")
    if not (folder / WEIGHTS).exists():
        raise TrainError(
            f"{folder} has no {WEIGHTS}, since the run has not ended; "
            f"`redivider train --resume {folder}` continues it"
        )
    safetensors = require("safetensors.torch", "reading a run", "checkpoint")
    recipe = read_recipe(folder / RECIPE)
    # The weights that the run began with are of no use any more.
    options = {name: value for name, value in recipe.model_options.items() if name != "weights"}
    try:
        return replace(recipe, model_options=options), safetensors.load_file(folder / WEIGHTS)
    except require("safetensors", "reading a run", "checkpoint").SafetensorError as error:
        raise TrainError(f"{folder / WEIGHTS} is damaged ({error}); train the run anew") from None


def _read_shape(folder: Path, recipe: Recipe) -> dict[str, int]:
    row = parse_row((folder / RECIPE).read_bytes()) or {}
    return row.get(SHAPE) or find_shape(recipe)


def _load_weights(model: Chain, weights: dict[str, Tensor], folder: Path) -> None:
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise TrainError(
            f"the weights in {folder} do not fit the model of its {RECIPE}: {first_mismatch(error)}"
        ) from error
