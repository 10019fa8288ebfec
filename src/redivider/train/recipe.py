"""A recipe: all that a run depends on, in one flat record that is saved beside it.

Nothing here imports torch, so that recipes are listed at once.
"""

import json
import re
import types
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from redivider.train.errors import TrainError, hint

Backprop = Literal["store", "checkpoint", "reverse", "reverse-checkpoint", "overlap", "auto"]
Decoupled = Literal[
    "petra", "dsp", "delayed", "delayed-graph", "exact-inverse", "approximate-input"
]
Method = Literal[Backprop, Decoupled]
COMPARED: tuple[Method, ...] = ("store", "checkpoint", "reverse", "petra")
"""What a comparison is of, unless a recipe says otherwise."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is trained, how, and what is seen of it. An epoch may be a fraction."""

    name: str
    """Of the recipe."""
    model: str
    """As `redivider models` lists them."""
    model_options: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Of its family, beside those that the data set: depth 12 patch_size 4."""
    depths: tuple[int, ...] = ()
    """Blocks of each group or stage (ResNet, RevNet, Swin, MViT), unless those of its size."""
    data: str
    """digits, cifar10, cifar100, imagenet32, imagenet or text."""
    data_folder: str | None = None
    """Where the files are; $REDIVIDER_DATA unless given."""
    context: int = 256
    """Tokens in a window of text."""
    tokens: int | Literal["bytes"] = "bytes"
    """Bytes, or the size of a vocabulary of byte pairs."""
    method: Method = "reverse"
    """How gradients are found: the first six by backprop, the others by a pipeline."""
    stages: int | tuple[int, ...] | Literal["auto"] = "auto"
    """Of a pipeline: how many, or their sizes; auto is one for each unit, or for each process."""
    replicas: int = 1
    """Of a pipeline over processes; each has as many of them, and gradients are averaged."""
    message_dtype: Literal["bf16", "int8"] | None = None
    """What numbers become between stages; int8 has a scale for each sample."""
    timeout: float = 300.0
    """Seconds that a process waits for another one before the run ends."""
    latency: int = 1
    """Ticks that a message travels between stages."""
    lookahead: Literal["momentum"] | None = None
    """Forwards of a pipeline by predicted weights."""
    lr_by_delay: bool = False
    """Divide the rate of a pipeline's stages by 1 + the updates that their gradients are late."""
    arithmetic: Literal["float", "fixed"] = "float"
    """Fixed reverses to the last bit."""
    microbatch: int = 64
    """Samples in a forward and backward."""
    accumulate: int = 1
    """Micro-batches in an update; their gradients are averaged."""
    epochs: float = 1.0
    """Passes over the training data."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """SGD with Nesterov momentum, or AdamW."""
    lr: float = 0.1
    """Learning rate, at its highest."""
    momentum: float = 0.9
    """Of SGD."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Of AdamW."""
    weight_decay: float = 0.0
    """Of weights; norms and biases have none."""
    warmup: float = 0.0
    """Epochs in which the rate rises from zero."""
    schedule: Literal["constant", "step", "cosine"] = "constant"
    """What the rate does after that; cosine ends at zero."""
    milestones: tuple[float, ...] = ()
    """Epochs after which a step schedule divides the rate by ten."""
    clip_norm: float | None = None
    """The largest norm of a gradient; a pipeline's is per stage."""
    label_smoothing: float = 0.0
    """Of image labels."""
    device: str = "auto"
    """auto is a GPU where there is one, else the CPU."""
    precision: Literal["float32", "bf16"] = "float32"
    """bf16 is autocast; weights and streams stay float32."""
    channels_last: bool = False
    """Memory format of images, which convolutions on a GPU like."""
    compile: bool = False
    """Let torch.compile fuse what units compute."""
    capture: bool = True
    """On a GPU, run steps as CUDA graphs where that can be."""
    threads: int = 0
    """Of the CPU; numbers are the same to the last bit if these are. 0 leaves it to torch."""
    seed: int = 0
    """Of weights, order, augmentation and dropout."""
    log_every: int = 100
    """Micro-batches between two lines of the log."""
    evaluate_every: float = 1.0
    """Epochs between two evaluations; there is always one at the end."""
    save_minutes: float = 5.0
    """Between two checkpoints; 0 is one for each line of the log."""
    probe_every: int = 0
    """Micro-batches between two samples of a pipeline's gradient quality; 0 is none."""
    compare: tuple[Method, ...] = ()
    """Methods to train by one after the other, for one table; none is just the one above."""
    compare_depths: tuple[int, ...] = ()
    """Depths at which that table has the activation memory of the model."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, list):  # as JSON has it
                object.__setattr__(self, each.name, value := tuple(value))
            if not _fits(value, hints[each.name]):
                raise TrainError(f"{each.name} must be {_say(hints[each.name])}, got {value!r}")
        for name, (least, most, is_open) in _RANGES.items():
            value = getattr(self, name)
            for each in value if isinstance(value, tuple) else (value,):
                if each is None or (least <= each <= most and not (is_open and each == least)):
                    continue
                said = f"above {least:g}" if is_open else f"{least:g} or more"
                raise TrainError(f"{name} must be {said} and at most {most:g}, got {value!r}")
        self._verify_words()

    def _verify_words(self) -> None:
        if not re.fullmatch(r"[\w+-][\w .+-]*", self.name):
            raise TrainError(f"name must be words, as of a folder, got {self.name!r}")
        known = _NOT_OPTIONS if self.data == "imagenet" else {*_NOT_OPTIONS, "image_size"}
        for name in sorted(known & self.model_options.keys()):
            raise TrainError(f"model_options may not have {name}: it follows from the other fields")
        if len(set(self.compare)) < len(self.compare):
            raise TrainError(f"compare names a method twice: {', '.join(self.compare)}")

    @property
    def is_pipeline(self) -> bool:
        """Whether gradients come from a pipeline."""
        return self.method in get_args(Decoupled)

    def to_json(self) -> str:
        """The record as text."""
        return json.dumps(asdict(self), indent=1) + "\n"


# Least, most, and whether the least itself is too little.
_RANGES: dict[str, tuple[float, float, bool]] = {
    **dict.fromkeys(("microbatch", "accumulate", "log_every", "context"), (1, 10**9, False)),
    "compare_depths": (1, 10**6, False),
    "depths": (1, 10**6, False),
    "latency": (1, 1000, False),
    "replicas": (1, 10**6, False),
    "timeout": (0, 10**6, True),
    "epochs": (0, 10**6, True),
    "evaluate_every": (1e-6, 10**6, False),
    "lr": (0, 10**6, True),
    "clip_norm": (0, 10**9, True),
    **dict.fromkeys(("warmup", "weight_decay", "save_minutes", "milestones"), (0, 10**9, False)),
    "probe_every": (0, 10**9, False),
    "threads": (0, 1024, False),
    **dict.fromkeys(("momentum", "betas", "label_smoothing"), (0, 1, False)),
    "seed": (0, 2**63 - 1, False),
}
_NOT_OPTIONS = {
    *("backward", "arithmetic", "seed", "device", "dtype", "depths"),
    *("num_classes", "in_channels", "vocabulary", "context"),
}


def read_recipe(path: Path) -> Recipe:
    """Read a recipe from the JSON of a run, or one written by hand."""
    try:
        given = json.loads(path.read_text())
    except OSError as error:
        raise TrainError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise TrainError(f"{path} is not JSON ({error}); take recipe.json of a run") from None
    if not isinstance(given, dict):
        raise TrainError(f"{path} must hold an object of fields, as recipe.json of a run does")
    known = [each.name for each in fields(Recipe)]
    for name in given:
        if name not in known:
            otherwise = f"it has {', '.join(known)}"
            raise TrainError(
                f"{path}: a recipe has no field {name!r}; {hint(name, known, otherwise)}"
            )
    missing = [name for name in ("name", "model", "data") if name not in given]
    if missing:
        raise TrainError(f"{path} says no {' and no '.join(missing)}")
    try:
        return Recipe(**given)
    except TrainError as error:
        raise TrainError(f"{path}: {error}") from None


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a value has a type, as annotations of this record go."""
    origin, arguments = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        is_long = arguments[1] is Ellipsis or len(value if isinstance(value, tuple) else ()) == 2
        fits = isinstance(value, tuple) and all(_fits(each, arguments[0]) for each in value)
        return fits and is_long
    if origin is dict:
        return isinstance(value, dict) and all(
            isinstance(key, str) and _fits(each, arguments[1]) for key, each in value.items()
        )
    if wanted is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, wanted)


def _say(hint: Any) -> str:
    """An annotation for people."""
    wanted = str(hint).replace("typing.", "")
    if wanted.startswith("Literal["):
        return "one of " + wanted[len("Literal[") : -1].replace("'", "")
    plain = wanted.replace("<class '", "").replace("'>", "").replace("NoneType", "None")
    return plain.replace("Literal['", "'").replace("']", "'").replace(" | ", " or ")
