"""What a model is trained for: its shape, its loss, and how well it does."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redivider.chain import Chain
from redivider.data import Batches, Source, Text, load
from redivider.models.catalogue import create_model, resolve
from redivider.models.cross_entropy import ChunkedCrossEntropy
from redivider.models.language import Language
from redivider.train.recipe import Recipe
from redivider.train.torchrun import num_processes

# In a batch of an evaluation, however small those of training are: without a backward they fit.
IMAGES, TOKENS = 512, 2**14
MASKED = 0.15  # of the tokens, where a model learns hidden ones


@dataclass(frozen=True)
class Score:
    """How well a model does: means over samples; accuracy where there is such a thing."""

    loss: float
    accuracy: float | None


class Labels(nn.Module):
    """The loss of image classes, and how many are right."""

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

    `body` is what is trained in stages; a language model's head is in its loss.
    """

    model: Chain
    body: Chain
    loss: nn.Module
    train: Batches
    test: Batches

    @torch.no_grad()
    def evaluate(self, scores: Any) -> Score:
        """Score the test data, given what runs the body in evaluation mode."""
        losses = correct = num = 0.0
        was_training = self.loss.training
        self.loss.eval()
        for x, y in self.test:
            output = scores(x)
            if output is None:
                continue  # it is in another process
            found = self.loss(output, y)
            loss, right = found if isinstance(found, tuple) else (found, None)
            count = int((y >= 0).sum()) if right is None else len(y)
            losses += loss.double() * count
            correct += 0 if right is None else right
            num += count
        self.loss.train(was_training)
        has_accuracy = isinstance(self.loss, Labels)
        num = max(num, 1.0)
        return Score(float(losses) / num, float(correct) / num if has_accuracy else None)


def make_task(recipe: Recipe, device: torch.device) -> Task:
    """Load the data of a recipe, and make its model.

    Raises:
        ValueError: One that says what to change, if they cannot be so.
    """
    is_text = recipe.data == "text"
    # Each process gives memory to its own stages alone.
    is_spread = num_processes() > 1
    options: dict[str, Any] = {"tokens": recipe.tokens} if is_text else {}
    if recipe.data == "imagenet" and "image_size" in recipe.model_options:
        options["image_size"] = recipe.model_options["image_size"]
    sources = [
        load(recipe.data, train=train, folder=recipe.data_folder, **options)
        for train in (True, False)
    ]
    shape = _shape(recipe, sources[0])
    if recipe.depths:
        shape["depths"] = recipe.depths
    model = create_model(
        recipe.model,
        backward="store" if recipe.is_pipeline else recipe.method,
        arithmetic=recipe.arithmetic,
        seed=recipe.seed,
        device="meta" if is_spread else device,
        **{**shape, **recipe.model_options},
    )
    if recipe.channels_last and not is_text and not is_spread:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    train, test = (_batches(recipe, source, i == 0, device) for i, source in enumerate(sources))
    if is_text:
        return Task(model, model[:-1], ChunkedCrossEntropy(model[-1]), train, test)
    return Task(model, model, Labels(recipe.label_smoothing), train, test)


def _shape(recipe: Recipe, source: Source) -> dict[str, Any]:
    """What the data ask of a model."""
    if isinstance(source, Text):
        # One more for what stands in the place of hidden tokens.
        size = source.vocabulary.size + (1 if _is_masked(recipe) else 0)
        return {"vocabulary": size, "context": recipe.context}
    return {
        "num_classes": source.num_classes,
        "image_size": source.image_size,
        "in_channels": source.channels,
    }


def _batches(recipe: Recipe, source: Source, train: bool, device: torch.device) -> Batches:
    at_once = TOKENS // recipe.context if isinstance(source, Text) else IMAGES
    size = recipe.microbatch if train else max(recipe.microbatch, at_once)
    if isinstance(source, Text):
        return source.batches(
            size,
            train=train,
            context=recipe.context,
            masked=MASKED if _is_masked(recipe) else None,
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


def _is_masked(recipe: Recipe) -> bool:
    options = resolve(recipe.model)[0].options
    return issubclass(options, Language) and options.masked
