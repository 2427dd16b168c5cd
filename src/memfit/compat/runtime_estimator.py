"""`RuntimeEstimator`, a name that users of `torch.distributed._tools` know, answered from a trace.

The prototype watches code as it runs and needs a GPU. memfit captures a whole step first; this class gives the
prototype's times and orders of it. docs/design/graph.md says where they differ and why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from memfit.capture import NO_INDEX, Phase, Step, Trace, trace
from memfit.compat.step_capture import TimedStepCapture
from memfit.cost import Cost, Runtime, cost_model, repeats
from memfit.errors import InputError
from memfit.hardware import Device, Target


class RuntimeEstimator(TimedStepCapture[Runtime]):
    """Forward and backward time of every module, and the orders in which modules run, without a GPU.

        with RuntimeEstimator(step, target="h100-sxm") as estimator:
            estimator.display_modulewise_stats(depth=2)

    or `estimator.run(function)` for a loop of one's own, or `RuntimeEstimator.of(trace, cost)`. Modules go by
    their path in the model, the model itself by the empty one. Times are milliseconds, children included; the
    orders list every call, so a module called twice is in them twice.
    """

    def __init__(self, step: Step | Callable[[], Any] | None = None, *, target: str | Device | Target = "cpu") -> None:
        super().__init__(step, target=target)
        self.mod_runtimes: dict[str, dict[str, float]] = {}
        self.mod_fw_pre_order: list[str] = []
        self.mod_bw_pre_order: list[str] = []
        self.mod_fw_post_order: list[str] = []
        self.mod_bw_post_order: list[str] = []
        self.total_runtime = 0.0

    @classmethod
    def of(cls, step: Trace | Runtime, cost: Cost | None = None) -> RuntimeEstimator:
        """Build the estimator of a step captured before, under a cost model, or of times already known."""
        if isinstance(step, Trace):
            if cost is None:
                raise InputError("a trace has no times; give a cost model too, RuntimeEstimator.of(trace, cost)")
            step = Runtime.of(step, cost)
        elif cost is not None:
            raise InputError("a Runtime has its times already; give it alone, or a trace and a cost model")
        estimator = cls(target=step.trace.hardware)
        estimator._take(step)
        return estimator

    @property
    def fw_pre_order(self) -> list[str]:
        """Modules as their forward begins."""
        return self.mod_fw_pre_order

    @property
    def fw_post_order(self) -> list[str]:
        """Modules as their forward ends."""
        return self.mod_fw_post_order

    @property
    def bw_pre_order(self) -> list[str]:
        """Modules as their backward begins, a parent before its children."""
        return self.mod_bw_pre_order

    @property
    def bw_post_order(self) -> list[str]:
        """Modules as their backward ends, a parent after its children."""
        return self.mod_bw_post_order

    @property
    def runtime(self) -> Runtime:
        """The times of the step by op, phase, call and module."""
        return self._captured()

    def display_modulewise_stats(self, depth: int = 2, console: Console | None = None) -> None:
        """Show the orders and every module's times, down to a depth of nesting (1 is the model itself)."""
        trace = self.runtime.trace
        root = next((module.kind for module in trace.modules if not module.path), "")
        console = console or Console()

        def show(path: str, text: str = "") -> None:
            if (path.count(".") + 2 if path else 1) <= depth:
                name = f"{root}.{path}" if root and path else path or root
                console.print(f"{name}{text}", highlight=False, markup=False)

        for title, order in (("Forward", self.mod_fw_pre_order), ("Backward", self.mod_bw_pre_order)):
            console.print(f"Pre-{title} Execution Order:", highlight=False)
            for path in order:
                show(path)
        for path, times in self.mod_runtimes.items():
            show(path, f" fw: {times['fw']:.3f}ms bw: {times['bw']:.3f}ms")

    def _capture(self, step: Step | Callable[[], Any]) -> None:
        captured = trace(step, target=self.target)
        self._take(Runtime.of(captured, cost_model(self._mode, self.target)))

    def _take(self, runtime: Runtime) -> None:
        calls = runtime.trace.calls
        orders = CallOrders.of(runtime.trace)
        self._found = runtime
        self.total_runtime = runtime.total_ms
        self.mod_fw_pre_order = [calls[call].module for call in orders.fw_pre_order]
        self.mod_fw_post_order = [calls[call].module for call in orders.fw_post_order]
        self.mod_bw_pre_order = [calls[call].module for call in orders.bw_pre_order]
        self.mod_bw_post_order = [calls[call].module for call in orders.bw_post_order]
        self.mod_runtimes = {
            path: {"fw": times.forward_ms, "bw": times.backward_ms} for path, times in runtime.modules.items()
        }


# -- The orders in which modules run: before and after their forward, before and after their backward -----------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOrders:
    """Indices of module calls. Calls of which nothing runs in backward are missing from the last two."""

    fw_pre_order: tuple[int, ...]
    fw_post_order: tuple[int, ...]
    bw_pre_order: tuple[int, ...]
    bw_post_order: tuple[int, ...]

    @classmethod
    def of(cls, trace: Trace) -> CallOrders:
        """Build the orders of one step; what a checkpoint recomputes in backward is no call of its own here."""
        calls = trace.calls
        forward = [index for index, call in enumerate(calls) if call.phase is not Phase.BACKWARD]
        depth = [0] * len(calls)
        for index, call in enumerate(calls):
            if call.parent != NO_INDEX:
                depth[index] = depth[call.parent] + 1
        begin = {index: calls[index].backward_begin for index in forward if calls[index].backward_begin != NO_INDEX}
        end = {index: calls[index].backward_end for index in begin}
        for again, first in repeats(trace).items():
            if calls[again].backward_begin != NO_INDEX:
                begin[first] = min(begin.get(first, calls[again].backward_begin), calls[again].backward_begin)
                end[first] = max(end.get(first, NO_INDEX), calls[again].backward_end)
        return cls(
            fw_pre_order=tuple(forward),
            fw_post_order=_post_order(trace, forward),
            bw_pre_order=tuple(sorted(begin, key=lambda i: (begin[i], depth[i], -i))),
            bw_post_order=tuple(sorted(end, key=lambda i: (end[i], -depth[i], -i))),
        )


def _post_order(trace: Trace, forward: list[int]) -> tuple[int, ...]:
    order: list[int] = []
    open_calls: list[int] = []
    for index in forward:
        while open_calls and open_calls[-1] != trace.calls[index].parent:
            order.append(open_calls.pop())
        open_calls.append(index)
    return (*order, *reversed(open_calls))
