"""Redivider: train deep networks without storing their activations."""

from importlib import import_module as _import_module
from importlib import metadata as _metadata
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from redivider.arithmetic import Fixed as Fixed
    from redivider.arithmetic import Float as Float
    from redivider.backward.drift import DriftWarning as DriftWarning
    from redivider.backward.saving import save as save
    from redivider.budget.plan import Plan as Plan
    from redivider.budget.planner import plan as plan
    from redivider.chain import Chain as Chain
    from redivider.checks.gradients import check_gradients as check_gradients
    from redivider.checks.max_batch import find_max_batch as find_max_batch
    from redivider.checks.memory import check_memory as check_memory
    from redivider.checks.memory import compare_memory as compare_memory
    from redivider.checks.memory import measure_memory as measure_memory
    from redivider.checks.reversibility import check_reversible as check_reversible
    from redivider.convert.reversible import make_plain as make_plain
    from redivider.convert.reversible import make_reversible as make_reversible
    from redivider.convert.units import units_from as units_from
    from redivider.coupling import Coupling as Coupling
    from redivider.errors import CaptureError as CaptureError
    from redivider.errors import ChangedError as ChangedError
    from redivider.errors import PipelineError as PipelineError
    from redivider.errors import StateError as StateError
    from redivider.errors import UnitError as UnitError
    from redivider.gpu.capture import capture as capture
    from redivider.junction import Duplicate as Duplicate
    from redivider.junction import Fuse as Fuse
    from redivider.junction import Split as Split
    from redivider.models.catalogue import create_model as create_model
    from redivider.models.catalogue import list_models as list_models
    from redivider.models.cross_entropy import ChunkedCrossEntropy as ChunkedCrossEntropy
    from redivider.optim.muon import Muon as Muon
    from redivider.pipeline.balance import balance as balance
    from redivider.pipeline.distributed import DistributedPipeline as DistributedPipeline
    from redivider.pipeline.pipeline import Pipeline as Pipeline
    from redivider.pipeline.simulate import simulate as simulate
    from redivider.pipeline.stage_costs import measure_stages as measure_stages
    from redivider.skip import SkipWarning as SkipWarning
    from redivider.train.model import load_run as load_run

# The module of every public name. It is imported when the name is first used: importing torch takes
# seconds, and `redivider --help` must not wait for it.
_HOMES = {
    "CaptureError": "errors",
    "Chain": "chain",
    "ChangedError": "errors",
    "StateError": "errors",
    "ChunkedCrossEntropy": "models.cross_entropy",
    "Coupling": "coupling",
    "DriftWarning": "backward.drift",
    "DistributedPipeline": "pipeline.distributed",
    "Duplicate": "junction",
    "Fixed": "arithmetic",
    "Float": "arithmetic",
    "Fuse": "junction",
    "Muon": "optim.muon",
    "Pipeline": "pipeline.pipeline",
    "PipelineError": "errors",
    "Plan": "budget.plan",
    "SkipWarning": "skip",
    "Split": "junction",
    "UnitError": "errors",
    "balance": "pipeline.balance",
    "capture": "gpu.capture",
    "check_gradients": "checks.gradients",
    "check_memory": "checks.memory",
    "check_reversible": "checks.reversibility",
    "compare_memory": "checks.memory",
    "create_model": "models.catalogue",
    "find_max_batch": "checks.max_batch",
    "list_models": "models.catalogue",
    "load_run": "train.model",
    "make_plain": "convert.reversible",
    "make_reversible": "convert.reversible",
    "measure_memory": "checks.memory",
    "plan": "budget.planner",
    "measure_stages": "pipeline.stage_costs",
    "save": "backward.saving",
    "simulate": "pipeline.simulate",
    "units_from": "convert.units",
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
