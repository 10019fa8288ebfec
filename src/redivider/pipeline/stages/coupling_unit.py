"""A coupling in a pipeline: (a, b) -> (b + f(a), a). Its input can be rebuilt from its output."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from redivider.arithmetic import Arithmetic, Checked
from redivider.backward.recovery import Recovered, recover
from redivider.backward.row import prepare_streams
from redivider.coupling import Coupling, verify_residual
from redivider.pipeline.stages.message import Flow
from redivider.pipeline.stages.split_backward import pull_back_first
from redivider.pipeline.stages.unit import Grads, Kept, LaterGrads, Place, Unit
from redivider.replay import Call, GraphRun
from redivider.replay.statistics import statistics_untouched


class CouplingUnit(Unit):
    """A coupling. Within a row of couplings the streams stay in stored form."""

    def __init__(self, module: Coupling, place: Place, arithmetic: Arithmetic) -> None:
        super().__init__(module, module.f, place.method.coupling, place, arithmetic)

    def _enter(self, flow: Flow) -> Flow:
        if self._place.follows == "coupling":
            return flow  # stored already
        streams = prepare_streams(flow.value)
        a, b = (self._verified(self.arithmetic.store(stream), stream) for stream in streams)
        return Flow((a, b), streams[0].dtype)

    def _argument(self, flow: Flow) -> Any:
        assert flow.dtype is not None
        return self.arithmetic.real(flow.value[0], flow.dtype).requires_grad_()

    def _result(
        self, flow: Flow, argument: Any, output: Any, weights: Sequence[Tensor] | None = None
    ) -> Flow:
        a, b = flow.value
        residual = verify_residual(output, argument)
        return Flow((self._verified(self.arithmetic.add(b, residual), residual), a), flow.dtype)

    def _input_to_keep(self, flow: Flow) -> Any:
        return flow.value[0]

    def _flow_of_kept(self, value: Any, dtype: torch.dtype | None) -> Flow:
        return Flow((value, None), dtype)

    def _run_backward(
        self, kept: Kept, flow: Flow, grads: Grads, side: dict[str, Any], *, is_split: bool
    ) -> tuple[Flow, list[Tensor | None], LaterGrads]:
        dc, da = grads
        if kept.run is None:
            recovered, below = self._recover(kept, flow, side)
        else:
            recovered, below = Recovered(None, kept.run), Flow(None)
        with self._holding_weights_of(recovered.run):
            if is_split and not recovered.joined:
                [through_f], later = pull_back_first(recovered.run, [dc], 1)
                if through_f is not None:
                    da = through_f if da is None else da + through_f
                return below, [da, dc], later
            da, db, *others = recovered.pull_back(dc, da)
            return below, [da, db], lambda: others

    def _recover(self, kept: Kept, flow: Flow, side: dict[str, Any]) -> tuple[Recovered, Flow]:
        """Evaluate f at the first stream once more, and rebuild the second one if it is needed."""
        assert kept.dtype is not None
        c, a = flow.value if self.keep == "nothing" else (None, kept.value)
        real = self.arithmetic.real(a, kept.dtype)
        call, tensors = self._split((real,), side)
        b = None
        if not self._place.hands_down:
            c = None  # the junction below has kept its own input
        elif c is not None and self._inverts_by_other_weights(kept):
            b, c = self._invert(call, c, tensors, kept), None
        tensors = self._with_weights(tensors, self._backward_weights(kept))
        needs = self._needs(tensors, real)
        recovered = recover(call, c, tensors, needs, kept.record, self.arithmetic)
        if self.arithmetic.exact and recovered.b is not None:
            self._verify_exact(recovered.b, recovered.run)
        b = recovered.b if b is None else b
        return recovered, Flow(None) if b is None else Flow((a, b), kept.dtype)

    def _inverts_by_other_weights(self, kept: Kept) -> bool:
        method = self._place.method
        if self.weights.stash is None or method.inverse == method.weights:
            return False
        return kept.version != self.weights.stash.version

    def _invert(self, call: Call, c: Tensor, tensors: Sequence[Tensor], kept: Kept) -> Tensor:
        """Rebuild the second stream by the current weights."""
        with statistics_untouched(call.modules):
            run = call.rerun(tensors, [False] * len(tensors), kept.record)
        b = self.arithmetic.subtract(c, run.output)
        if self.arithmetic.exact:
            self._verify_exact(b, run)
        return b

    def _verify_exact(self, b: Tensor, run: GraphRun) -> None:
        """Refuse a stream that left the range on its way back, by other weights than forward's."""
        self._verified(self.arithmetic.add(b, run.output), run.output)

    def _verified(self, checked: Checked, x: Tensor) -> Tensor:
        if checked.fault is not None and checked.fault:
            what = "a stream left the range of" if torch.isfinite(x).all() else "f is not finite on"
            raise OverflowError(f"{self.name}: {what} {self.arithmetic}")
        return checked.stored
