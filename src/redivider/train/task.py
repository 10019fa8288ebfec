"""Task of a run: data, a model of matching shape, its loss, and its evaluation."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redivider.chain import Chain
from redivider.data import Batches, Source, Text, load
from redivider.data.vocabulary import Bytes, Vocabulary
from redivider.models.catalogue import create_model, resolve
from redivider.models.cross_entropy import ChunkedCrossEntropy
from redivider.models.language import Language
from redivider.train.recipe import Recipe
from redivider.train.torchrun import num_processes

# Size of an evaluation batch, unless micro-batches are larger: without a backward it fits.
IMAGES, TOKENS = 512, 2**14
MASKED = 0.15  # fraction of tokens that a masked language model has to predict


@dataclass(frozen=True)
class Score:
    """Mean loss over samples, and accuracy where the task has one."""

    loss: float
    accuracy: float | None


class Labels(nn.Module):
    """Cross entropy of image classes, with the number of correct predictions."""

    def __init__(self, smoothing: float) -> None:
        super().__init__()
        self._smoothing = smoothing

    def forward(self, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        smoothing = self._smoothing if self.training else 0.0
        loss = F.cross_entropy(scores.float(), labels, label_smoothing=smoothing)
        return loss, (scores.detach().argmax(1) == labels).sum()


@dataclass(frozen=True)
class Task:
    """Data, a model for them, and its loss.

    `body` is the part that is trained in stages; the head of a language model is in the loss.
    """

    model: Chain
    body: Chain
    loss: nn.Module
    train: Batches
    test: Batches
    shape: dict[str, int]
    """Options of the model that follow from the data."""

    @torch.no_grad()
    def evaluate(self, forward: Any) -> Score:
        """Score the test data; `forward` runs the body in evaluation mode.

        It returns None in a process that does not have the output.
        """
        losses = correct = num = 0.0
        was_training = self.loss.training
        self.loss.eval()
        for x, y in self.test:
            output = forward(x)
            if output is None:
                continue  # another process has it
            result = self.loss(output, y)
            loss, num_correct = result if isinstance(result, tuple) else (result, None)
            # Tokens with a negative target are not predicted, and not in the mean.
            count = int((y >= 0).sum()) if num_correct is None else len(y)
            losses += loss.double() * count
            correct += 0 if num_correct is None else num_correct
            num += count
        self.loss.train(was_training)
        has_accuracy = isinstance(self.loss, Labels)
        num = max(num, 1.0)
        return Score(float(losses) / num, float(correct) / num if has_accuracy else None)


def make_task(recipe: Recipe, device: torch.device) -> Task:
    """Load the data of a recipe, and make its model.

    Raises:
        ValueError: If the recipe asks for data or a model that cannot be made; it says what to
            change.
    """
    sources = [_read(recipe, train=train) for train in (True, False)]
    shape = find_shape(recipe, sources[0])
    # On the meta device a process allocates nothing until it knows its own stages.
    model = make_model(recipe, shape, "meta" if num_processes() > 1 else device)
    train, test = (_batches(recipe, source, i == 0, device) for i, source in enumerate(sources))
    if recipe.data == "text":
        return Task(model, model[:-1], ChunkedCrossEntropy(model[-1]), train, test, shape)
    return Task(model, model, Labels(recipe.label_smoothing), train, test, shape)


def make_model(recipe: Recipe, shape: dict[str, int], device: torch.device | str) -> Chain:
    """Make the model of a recipe, with its initial weights."""
    model = create_model(
        recipe.model,
        backward="store" if recipe.is_pipeline else recipe.method,
        arithmetic=recipe.arithmetic,
        seed=recipe.seed,
        device=device,
        **model_options(recipe, shape),
    )
    if recipe.channels_last and recipe.data != "text" and str(device) != "meta":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def model_options(recipe: Recipe, shape: dict[str, int]) -> dict[str, Any]:
    """Return all options of the model."""
    depths = {"depths": recipe.depths} if recipe.depths else {}
    return {**shape, **depths, **recipe.model_options}


def _read(recipe: Recipe, *, train: bool) -> Source:
    options: dict[str, Any] = {"tokens": recipe.tokens} if recipe.data == "text" else {}
    if recipe.data == "imagenet" and "image_size" in recipe.model_options:
        options["image_size"] = recipe.model_options["image_size"]
    return load(recipe.data, train=train, folder=recipe.data_folder, **options)


def find_shape(recipe: Recipe, source: Source | None = None) -> dict[str, int]:
    """Return the model options that follow from the data, which are read unless passed."""
    source = source or _read(recipe, train=True)
    if isinstance(source, Text):
        # One more for the mask token.
        size = source.vocabulary.size + (1 if is_masked(recipe) else 0)
        return {"vocabulary": size, "context": recipe.context}
    return {
        "num_classes": source.num_classes,
        "image_size": source.image_size,
        "in_channels": source.channels,
    }


def _batches(recipe: Recipe, source: Source, train: bool, device: torch.device) -> Batches:
    num_evaluated = TOKENS // recipe.context if isinstance(source, Text) else IMAGES
    size = recipe.microbatch if train else max(recipe.microbatch, num_evaluated)
    if isinstance(source, Text):
        return source.batches(
            size,
            train=train,
            context=recipe.context,
            masked=MASKED if is_masked(recipe) else None,
            seed=recipe.seed,
            device=device,
        )
    return source.batches(
        size,
        train=train,
        seed=recipe.seed,
        device=device,
        channels_last=recipe.channels_last,
    )


def find_vocabulary(recipe: Recipe) -> Vocabulary:
    """Return the vocabulary of a recipe for text; byte pairs are those of its training text."""
    if recipe.tokens == "bytes":
        return Bytes()
    source = _read(recipe, train=True)
    assert isinstance(source, Text)
    return source.vocabulary


def is_masked(recipe: Recipe) -> bool:
    """Return whether the model predicts hidden tokens, not the next one."""
    options = resolve(recipe.model)[0].options
    return issubclass(options, Language) and options.masked
