"""Redivider: train deep networks without storing their activations."""

from importlib import metadata as _metadata

from redivider.arithmetic import Fixed as Fixed
from redivider.arithmetic import Float as Float
from redivider.capture import capture as capture
from redivider.chain import Chain as Chain
from redivider.coupling import Coupling as Coupling
from redivider.drift import DriftWarning as DriftWarning
from redivider.errors import CaptureError as CaptureError
from redivider.errors import ChangedError as ChangedError
from redivider.errors import UnitError as UnitError
from redivider.footprint import check_memory as check_memory
from redivider.footprint import measure_memory as measure_memory
from redivider.junction import Duplicate as Duplicate
from redivider.junction import Fuse as Fuse
from redivider.junction import Split as Split
from redivider.models.catalogue import create_model as create_model
from redivider.models.catalogue import list_models as list_models
from redivider.models.cross_entropy import ChunkedCrossEntropy as ChunkedCrossEntropy
from redivider.pipeline.cut import balance as balance
from redivider.pipeline.lockstep import Pipeline as Pipeline
from redivider.verify import check_gradients as check_gradients
from redivider.verify import check_reversible as check_reversible

__all__ = [
    "CaptureError",
    "Chain",
    "ChangedError",
    "ChunkedCrossEntropy",
    "Coupling",
    "DriftWarning",
    "Duplicate",
    "Fixed",
    "Float",
    "Fuse",
    "Pipeline",
    "Split",
    "UnitError",
    "balance",
    "capture",
    "check_gradients",
    "check_memory",
    "check_reversible",
    "create_model",
    "list_models",
    "measure_memory",
]

try:
    __version__ = _metadata.version("redivider")
except _metadata.PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+source"
