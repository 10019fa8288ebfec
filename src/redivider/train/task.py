"""Task of a run: data, a model of matching shape, its loss, and its evaluation."""

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
    is_text = recipe.data == "text"
    # On the meta device a process allocates nothing until it knows its own stages.
    is_distributed = num_processes() > 1
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
        device="meta" if is_distributed else device,
        **{**shape, **recipe.model_options},
    )
    if recipe.channels_last and not is_text and not is_distributed:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    train, test = (_batches(recipe, source, i == 0, device) for i, source in enumerate(sources))
    if is_text:
        return Task(model, model[:-1], ChunkedCrossEntropy(model[-1]), train, test)
    return Task(model, model, Labels(recipe.label_smoothing), train, test)


def _shape(recipe: Recipe, source: Source) -> dict[str, Any]:
    """Return the model options that follow from the data."""
    if isinstance(source, Text):
        # One more for the mask token.
        size = source.vocabulary.size + (1 if _is_masked(recipe) else 0)
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
