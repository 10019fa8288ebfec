"""Recipe: a flat record of everything that a run depends on, saved in its folder.

Nothing here imports torch, so that the command line lists recipes at once.
"""

import json
import re
import types
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from redivider.checks.size import parse_bytes
from redivider.errors import did_you_mean
from redivider.train.errors import TrainError

Backprop = Literal[
    "store",
    "checkpoint",
    "offload",
    "compress",
    "reverse",
    "reverse-checkpoint",
    "overlap",
    "auto",
]
Decoupled = Literal[
    "petra", "dsp", "delayed", "delayed-graph", "exact-inverse", "approximate-input"
]
Method = Literal[Backprop, Decoupled]
COMPARED: tuple[Method, ...] = ("store", "checkpoint", "reverse", "petra")
"""Methods of a comparison, unless the recipe names its own."""


SHAPE = "shape"
"""Key in `recipe.json` of a run, beside the fields: model options that follow from the data."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of a run: data, model, method, optimizer, machine and log.

    Numbers of epochs may be fractions.
    """

    name: str
    """Name of the recipe, and of its run folder unless another one is set."""
    model: str
    """Name of the model; `redivider models` lists them."""
    model_options: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Options of the model, beside those that follow from the data: depth 12 patch_size 4."""
    depths: tuple[int, ...] = ()
    """Blocks per group or stage (ResNet, RevNet, Swin, MViT); by default those of the model."""
    data: str
    """Data set: digits, cifar10, cifar100, imagenet32, imagenet or text."""
    data_folder: str | None = None
    """Folder of the data files; $REDIVIDER_DATA by default."""
    context: int = 256
    """Tokens per window of text."""
    tokens: int | Literal["bytes"] = "bytes"
    """bytes, or the size of a byte-pair vocabulary."""
    method: Method = "reverse"
    """Method that computes gradients: the first eight are backprop, the others pipelines."""
    memory: str | None = None
    """Bytes that a step may add to weights and optimizer, as 6GiB; then a plan replaces method."""
    stages: int | tuple[int, ...] | Literal["auto"] = "auto"
    """Number of pipeline stages, or their sizes; auto is one per unit, or one per process."""
    replicas: int = 1
    """Replicas of a pipeline, with equally many processes each; gradients are averaged."""
    message_dtype: Literal["bf16", "int8"] | None = None
    """Dtype of messages between stages; int8 has a scale per sample."""
    timeout: float = 300.0
    """Seconds that a process waits for another one before the run ends."""
    latency: float = 1
    """Ticks that a message takes between stages, a multiple of 0.5."""
    lookahead: Literal["displacement", "lead", "momentum"] | None = None
    """Correct for late gradients: by predicted weights (displacement), or by a lead for AdamW."""
    lr_by_delay: bool = False
    """Divide the learning rate of each stage by 1 + the delay of its gradients in updates."""
    arithmetic: Literal["float", "fixed"] = "float"
    """fixed (fixed-point) reverses bit for bit."""
    microbatch: int = 64
    """Samples per forward and backward."""
    accumulate: int = 1
    """Micro-batches per update; their gradients are averaged."""
    epochs: float = 1.0
    """Passes over the training data."""
    optimizer: Literal["sgd", "adamw", "muon"] = "sgd"
    """SGD with Nesterov momentum, AdamW, or Muon, which bears late gradients best."""
    lr: float = 0.1
    """Peak learning rate."""
    momentum: float = 0.9
    """Momentum of SGD, and of Muon's matrices; a rest by SGD has 0.9."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Betas of AdamW."""
    muon_scale: Literal["match_rms_adamw", "spectral"] = "match_rms_adamw"
    """Length of Muon's steps: with rates of AdamW, or for convolutions."""
    muon_rest: Literal["adamw", "sgd"] = "adamw"
    """Optimizer of what Muon does not orthogonalise: stem, head, norms and biases."""
    muon_rest_lr: float | None = None
    """Peak learning rate of that rest; lr by default."""
    weight_decay: float = 0.0
    """Weight decay; norms and biases have none."""
    warmup: float = 0.0
    """Epochs in which the learning rate rises from zero."""
    schedule: Literal["constant", "step", "cosine"] = "constant"
    """Learning rate after the warm-up; cosine ends at zero."""
    milestones: tuple[float, ...] = ()
    """Epochs after which the step schedule divides the learning rate by ten."""
    clip_norm: float | None = None
    """Largest gradient norm; a pipeline clips per stage."""
    label_smoothing: float = 0.0
    """Label smoothing of image classes."""
    device: str = "auto"
    """Device; auto is a GPU if there is one, else the CPU."""
    precision: Literal["float32", "bf16"] = "float32"
    """bf16 is autocast; weights and streams stay float32."""
    channels_last: bool = False
    """Memory format of images that is fast for convolutions on a GPU."""
    compile: bool = False
    """Compile the units with torch.compile."""
    capture: bool = True
    """On a GPU, run steps as CUDA graphs where possible."""
    threads: int = 0
    """CPU threads; bit-identical results need the same number. 0 leaves it to torch."""
    seed: int = 0
    """Seed of weights, order, augmentation and dropout."""
    log_every: int = 100
    """Micro-batches between two log lines."""
    evaluate_every: float = 1.0
    """Epochs between two evaluations; there is always one at the end."""
    save_minutes: float = 5.0
    """Minutes between two checkpoints; 0 saves one per log line."""
    probe_every: int = 0
    """Micro-batches between two samples of a pipeline's gradient quality; 0 is none."""
    compare: tuple[Method, ...] = ()
    """Methods to train by in turn, for one table; none trains by the method above alone."""
    compare_depths: tuple[int, ...] = ()
    """Model depths for which that table shows the activation memory."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for item in fields(self):
            value, annotation = getattr(self, item.name), hints[item.name]
            if isinstance(value, list):  # JSON has no tuples
                object.__setattr__(self, item.name, value := tuple(value))
            if not _has_type(value, annotation):
                hint = did_you_mean(str(value), _words(annotation))
                must = f"{item.name} must be {_describe(annotation)}, got {value!r}"
                raise TrainError(f"{must}; {hint}" if hint else must)
        for name, (low, high, is_open) in _RANGES.items():
            value = getattr(self, name)
            for number in value if isinstance(value, tuple) else (value,):
                if number is None or (low <= number <= high and not (is_open and number == low)):
                    continue
                bound = f"above {low:g}" if is_open else f"{low:g} or more"
                raise TrainError(f"{name} must be {bound} and at most {high:g}, got {value!r}")
        self._verify_fields()

    def _verify_fields(self) -> None:
        if not re.fullmatch(r"[\w+-][\w .+-]*", self.name):
            raise TrainError(f"name must be words, as of a folder, got {self.name!r}")
        reserved = _NOT_OPTIONS if self.data == "imagenet" else {*_NOT_OPTIONS, "image_size"}
        for name in sorted(reserved & self.model_options.keys()):
            raise TrainError(f"model_options may not have {name}: it follows from the other fields")
        if 2 * self.latency % 1:
            raise TrainError(f"latency must be a multiple of 0.5, got {self.latency!r}")
        if self.memory is not None:
            if self.is_pipeline:
                raise TrainError(
                    f"memory is for backprop, not for {self.method}: use --method reverse as well"
                )
            try:
                parse_bytes(self.memory)
            except ValueError as error:
                raise TrainError(str(error)) from None
        if len(set(self.compare)) < len(self.compare):
            raise TrainError(f"compare names a method twice: {', '.join(self.compare)}")

    @property
    def is_pipeline(self) -> bool:
        """Whether a pipeline computes the gradients."""
        return self.method in get_args(Decoupled)

    def to_json(self, shape: dict[str, int] | None = None) -> str:
        """Return the recipe as JSON.

        Args:
            shape: Options of the model that follow from the data. With these, the model can be
                built without the data.
        """
        fields = asdict(self) if shape is None else {**asdict(self), SHAPE: shape}
        return json.dumps(fields, indent=1) + "\n"


# Lower bound, upper bound, and whether the lower bound itself is excluded.
_RANGES: dict[str, tuple[float, float, bool]] = {
    **dict.fromkeys(("microbatch", "accumulate", "log_every", "context"), (1, 10**9, False)),
    "compare_depths": (1, 10**6, False),
    "depths": (1, 10**6, False),
    "latency": (0.5, 1000, False),
    "replicas": (1, 10**6, False),
    "timeout": (0, 10**6, True),
    "epochs": (0, 10**6, True),
    "evaluate_every": (1e-6, 10**6, False),
    **dict.fromkeys(("lr", "muon_rest_lr"), (0, 10**6, True)),
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
    """Read a recipe from a JSON file, of a run or written by hand."""
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise TrainError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise TrainError(f"{path} is not JSON ({error}); take recipe.json of a run") from None
    if not isinstance(values, dict):
        raise TrainError(f"{path} must hold an object of fields, as recipe.json of a run does")
    values.pop(SHAPE, None)  # another run finds it anew, as its data may be others
    known = [item.name for item in fields(Recipe)]
    for name in values:
        if name not in known:
            otherwise = f"it has {', '.join(known)}"
            raise TrainError(
                f"{path}: a recipe has no field {name!r}; {did_you_mean(name, known, otherwise)}"
            )
    missing = [name for name in ("name", "model", "data") if name not in values]
    if missing:
        raise TrainError(f"{path} has no {' and no '.join(missing)}")
    try:
        return Recipe(**values)
    except TrainError as error:
        raise TrainError(f"{path}: {error}") from None


def _has_type(value: Any, annotation: Any) -> bool:
    """Return whether a value has the type of an annotation; covers those of `Recipe`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(_has_type(value, argument) for argument in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        size = len(value if isinstance(value, tuple) else ())
        has_size = arguments[1] is Ellipsis or size == 2
        fits = isinstance(value, tuple) and all(_has_type(item, arguments[0]) for item in value)
        return fits and has_size
    if origin is dict:
        return isinstance(value, dict) and all(
            isinstance(key, str) and _has_type(item, arguments[1]) for key, item in value.items()
        )
    # A bool is an int in Python, but not in a recipe.
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, annotation)


def _words(annotation: Any) -> list[str]:
    """Return the words of all literals in an annotation."""
    if isinstance(annotation, str):
        return [annotation]
    return [word for argument in get_args(annotation) for word in _words(argument)]


def _describe(annotation: Any) -> str:
    """Return an annotation in words."""
    text = str(annotation).replace("typing.", "")
    if text.startswith("Literal["):
        return "one of " + text[len("Literal[") : -1].replace("'", "")
    plain = text.replace("<class '", "").replace("'>", "").replace("NoneType", "None")
    return plain.replace("Literal['", "'").replace("']", "'").replace(" | ", " or ")
