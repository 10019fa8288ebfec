"""Redivider: train deep networks without storing their activations."""

from importlib import import_module as _import_module
from importlib import metadata as _metadata
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from redivider.arithmetic import Fixed as Fixed
    from redivider.arithmetic import Float as Float
    from redivider.captured import capture as capture
    from redivider.chain import Chain as Chain
    from redivider.coupling import Coupling as Coupling
    from redivider.drift import DriftWarning as DriftWarning
    from redivider.errors import CaptureError as CaptureError
    from redivider.errors import ChangedError as ChangedError
    from redivider.errors import PipelineError as PipelineError
    from redivider.errors import UnitError as UnitError
    from redivider.footprint import check_memory as check_memory
    from redivider.footprint import measure_memory as measure_memory
    from redivider.junction import Duplicate as Duplicate
    from redivider.junction import Fuse as Fuse
    from redivider.junction import Split as Split
    from redivider.models.catalogue import create_model as create_model
    from redivider.models.catalogue import list_models as list_models
    from redivider.models.cross_entropy import ChunkedCrossEntropy as ChunkedCrossEntropy
    from redivider.pipeline.distributed import DistributedPipeline as DistributedPipeline
    from redivider.pipeline.partition import balance as balance
    from redivider.pipeline.pipeline import Pipeline as Pipeline
    from redivider.verify import check_gradients as check_gradients
    from redivider.verify import check_reversible as check_reversible

# Where each name is from: found when it is first asked for, since importing torch takes seconds
# that `redivider --help` has no use for.
_HOMES = {
    "CaptureError": "errors",
    "Chain": "chain",
    "ChangedError": "errors",
    "ChunkedCrossEntropy": "models.cross_entropy",
    "Coupling": "coupling",
    "DriftWarning": "drift",
    "DistributedPipeline": "pipeline.distributed",
    "Duplicate": "junction",
    "Fixed": "arithmetic",
    "Float": "arithmetic",
    "Fuse": "junction",
    "Pipeline": "pipeline.pipeline",
    "PipelineError": "errors",
    "Split": "junction",
    "UnitError": "errors",
    "balance": "pipeline.partition",
    "capture": "captured",
    "check_gradients": "verify",
    "check_memory": "footprint",
    "check_reversible": "verify",
    "create_model": "models.catalogue",
    "list_models": "models.catalogue",
    "measure_memory": "footprint",
}

__all__ = list(_HOMES)

try:
    __version__ = _metadata.version("redivider")
except _metadata.PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+source"


def __getattr__(name: str) -> _Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
