"""The runtime of a sharded model: what happens before and after each unit's forward and backward.

Note [Determinism]
Collectives must be begun in the same order on every rank, also where ranks use different parameters. So a unit's
gradients are summed when the gradients of its inputs are there, not when its own are complete, and a unit whose inputs
need none waits for the end of the backward. A gradient that comes after that is summed once more at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from memfit.errors import StateError
from memfit.sharded.gradients import Gradients
from memfit.sharded.links import Link
from memfit.sharded.options import Precision, Schedule
from memfit.sharded.order import Order
from memfit.sharded.states import State
from memfit.sharded.unit import Run, Unit
from memfit.sharded.values import mapped, tensors_in

_queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback


class Runtime:
    """All units of a model, and the pass that is under way."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        links: Sequence[Link],
        device: torch.device,
        precision: Precision,
        schedule: Schedule,
    ) -> None:
        self.model = model
        self.units = list(units)
        self.links = list(links)
        self.device = device
        self.precision = precision
        self.schedule = schedule
        self.communicates = True
        self.order = Order(self.units, links[0].group, device)
        self._active: list[Unit] = []
        self._root: Unit | None = None
        self._in_backward = False
        self._summing: list[Unit] = []
        self._ran: set[Unit] = set()
        self._summed: set[Unit] = set()
        self._unused_possible: bool | None = None

    def __reduce__(self) -> NoReturn:
        raise StateError(
            "a sharded model cannot be copied or pickled: its parts belong to one process; use its state dict instead"
        )

    @property
    def parameters(self) -> set[nn.Parameter]:
        """The parameters that are sharded."""
        return {parameter for unit in self.units for flat in unit.flats for parameter in flat.parameters}

    @property
    def idle(self) -> bool:
        """Whether no forward and no backward is running."""
        return not self._active and not self._in_backward

    def before_forward(
        self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather a unit's parameters, begin to gather those of the next, and prepare its inputs."""
        if unit in self._active or (self._in_backward and not _backward_runs()):
            self.recover()
        outermost = not self._active and not self._in_backward
        if outermost:
            self._begin_pass(unit)
        self._active.append(unit)
        if self._in_backward:  # a checkpoint's second forward: the parameters stay until the backward has used them
            unit.begin_gather("backward")
            unit.wait()
            unit.show_whole()
            return self._cast_inputs(unit, args, kwargs, outermost=False)
        unit.go(State.FORWARD)
        self.order.enter(unit)
        unit.begin_gather("forward")
        self._gather_ahead(self.order.following(self.schedule.forward_prefetch), "forward")
        unit.wait()
        unit.show_whole()
        args, kwargs = self._cast_inputs(unit, args, kwargs, outermost=outermost)
        return args, kwargs

    def mark_inputs(
        self, unit: Unit, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pass the inputs that need gradients through a function which sees when these are there."""
        tensors = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if not tensors:
            return args, kwargs
        marked = iter(_AfterBackward.apply(self, unit, run, *tensors))
        return mapped((args, kwargs), lambda tensor: next(marked) if tensor.requires_grad else tensor)

    def after_forward(self, unit: Unit, run: Run | None, output: Any) -> Any:
        """Watch the outputs' gradients and give up what the backward gathers again."""
        self._leave(unit)
        outermost = not self._active
        watched = [tensor for tensor in tensors_in(output) if tensor.requires_grad] if torch.is_grad_enabled() else []
        if self._in_backward:
            if watched and run is not None:
                self._watch(unit, run, watched)
            return output
        if outermost and unit is self._root and self.precision.output_dtype is not None:
            output = mapped(output, lambda each: _cast(each, self.precision.output_dtype))
            watched = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if watched and run is not None:
            self._watch(unit, run, watched)
            self.order.ended.append(unit)
        unit.go(State.IDLE)
        unit.show_shards()
        if not watched:
            unit.free()
        elif not (unit.options.keep or unit is self._root):
            unit.reshard()
        if outermost:
            self._end_forward()
        return output

    def failed_forward(self, unit: Unit) -> None:
        """An exception goes through a unit's forward."""
        self._leave(unit)
        if not self._active and not self._in_backward:
            self.recover()

    def new_run(self, unit: Unit) -> Run | None:
        """The run that begins, if it can have a backward that is not yet known of."""
        if not torch.is_grad_enabled():
            return None
        if self._in_backward and len(unit.runs):
            return None  # the second forward of a checkpoint whose backward belongs to the first
        return Run()

    def before_backward(self, unit: Unit, run: Run) -> None:
        """Gather a unit's parameters again, and begin to gather those of the unit whose backward comes next."""
        if not self._in_backward:
            self._in_backward = True
            _queue_callback(self._end_backward)
        if run.began:
            return
        run.began = True
        self._ran.add(unit)
        unit.go(State.PRE_BACKWARD)
        if unit.options.backward_gather:
            unit.begin_gather("backward")
        if self.schedule.backward_prefetch_at == "before":
            self._gather_before(unit)
        unit.wait()
        if unit.gathered:
            unit.show_whole()
        unit.go(State.BACKWARD)

    def after_backward(self, unit: Unit, run: Run) -> None:
        """Begin to sum a unit's gradients, and give up its parameters."""
        if unit.state is not State.BACKWARD:
            return
        unit.runs.discard(run)
        self.order.left(unit)
        if any(each.began for each in unit.runs):  # another run of it, side by side with this one, still reads them
            return
        unit.go(State.POST_BACKWARD)
        unit.show_shards()
        unit.free()
        if not unit.runs and self.communicates:
            unit.begin_sum(everything=True)
            self._finish_sums()
            self._summing.append(unit)
            self._summed.add(unit)
        if self.schedule.backward_prefetch_at == "after":
            self._gather_before(unit)

    def _end_backward(self) -> None:
        """Everything that is still to be done when autograd is through, also for units whose hooks did not run."""
        ran = [unit for unit in reversed(self.units) if unit in self._ran]
        if self.communicates:
            for unit in ran:
                unit.begin_sum(everything=unit not in self._summed)
            self._finish_sums()
            for unit in ran:
                unit.each_gradients(Gradients.finish)
            self._resolve_unused()
        for unit in self.units:
            if unit in self._ran or unit.in_flight or (unit.gathered and not unit.runs):
                unit.show_shards()
                unit.free()
            unit.state = State.IDLE
            unit.runs = type(unit.runs)(run for run in unit.runs if not run.began)
        self._ran.clear()
        self._summed.clear()
        self.order.ended = [unit for unit in self.order.ended if len(unit.runs)]
        self._in_backward = False

    def _finish_sums(self) -> None:
        """Finish the sums of units that began before;

        the one that has just begun runs beside the next unit's backward.
        """
        for unit in self._summing:
            unit.each_gradients(Gradients.finish)
        self._summing.clear()

    def _resolve_unused(self) -> None:
        """Agree on which parameters no rank used, where that can happen, and give the others their gradients."""
        if self._unused_possible is False:
            return
        every = [gradients for unit in self.units for gradients in unit.gradients]
        came = torch.tensor([float(each) for gradients in every for each in gradients.came()], device=self.device)
        ranks = 1
        for link in self.links:
            dist.all_reduce(came, group=link.group)
            ranks *= link.ranks
        counts = came.tolist()
        self._unused_possible = any(count < ranks for count in counts)
        begin = 0
        for gradients in every:
            end = begin + len(gradients.flat.parameters)
            gradients.resolve([count > 0 for count in counts[begin:end]])
            gradients.holds_missing = self._unused_possible
            begin = end

    def recover(self) -> None:
        """Forget a pass that an exception ended; collectives that other ranks take part in are waited for."""
        self._active.clear()
        self._summing.clear()
        self._ran.clear()
        self._summed.clear()
        self._in_backward = False
        self._root = None
        self.order.ended.clear()
        for unit in self.units:
            unit.state = State.IDLE
            unit.runs.clear()
            unit.show_shards()
            unit.free()
            unit.each_gradients(Gradients.drop)

    def _begin_pass(self, unit: Unit) -> None:
        self._root = unit
        self.order.begin()
        for each in self.units:
            each.stale = each.gathered

    def _end_forward(self) -> None:
        self.order.end()
        for unit in self.units:
            if unit.in_flight:  # it was gathered ahead, and did not run
                unit.free()

    def _leave(self, unit: Unit) -> None:
        while self._active and self._active.pop() is not unit:
            pass

    def _watch(self, unit: Unit, run: Run, outputs: Sequence[torch.Tensor]) -> None:
        unit.runs.add(run)
        for tensor in outputs:
            tensor.register_hook(_BeforeBackward(self, unit, run))

    def _gather_before(self, unit: Unit) -> None:
        ahead = self.order.preceding(unit, self.schedule.backward_prefetch)
        self._gather_ahead([each for each in ahead if each.options.backward_gather], "backward")

    def _gather_ahead(self, ahead: Sequence[Unit], phase: str) -> None:
        limit = self.schedule.in_flight_bytes
        taken = sum(unit.bytes for unit in self.units if unit.in_flight) if limit is not None else 0
        for unit in ahead:
            if unit.gathered or unit.in_flight:
                continue
            if limit is not None:
                taken += unit.bytes
                if taken > limit:
                    return
            unit.begin_gather(phase)

    def _cast_inputs(
        self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], *, outermost: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        wanted, precision = self.precision.param_dtype, self.precision
        if wanted is None or precision.cast_inputs == "none" or (precision.cast_inputs == "root" and not outermost):
            return args, kwargs
        if precision.full_in_eval and not unit.module.training:
            return args, kwargs
        return mapped((args, kwargs), lambda tensor: _cast(tensor, wanted))


class _BeforeBackward:
    """The hook on an output of a unit. Holding the run, it keeps it as long as the graph is there."""

    __slots__ = ("_run", "_runtime", "_unit")

    def __init__(self, runtime: Runtime, unit: Unit, run: Run) -> None:
        self._runtime, self._unit, self._run = runtime, unit, run

    def __call__(self, gradient: torch.Tensor) -> None:
        self._runtime.before_backward(self._unit, self._run)


class _AfterBackward(torch.autograd.Function):
    """The identity on a unit's inputs; its backward runs when all their gradients are there."""

    @staticmethod
    def forward(ctx: Any, runtime: Runtime, unit: Unit, run: Run, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.after = (runtime, unit, run)
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        runtime, unit, run = ctx.after
        runtime.after_backward(unit, run)
        return (None, None, None, *gradients)


def attach(runtime: Runtime, unit: Unit) -> list[torch.utils.hooks.RemovableHandle]:
    """Make a unit's module call the runtime around its forward; user hooks see gathered parameters."""
    runs: list[Run | None] = []

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        runs.append(None)
        args, kwargs = runtime.before_forward(unit, args, kwargs)
        run = runtime.new_run(unit)
        if run is not None:
            args, kwargs = runtime.mark_inputs(unit, run, args, kwargs)
        runs[-1] = run
        return args, kwargs

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        run = runs.pop() if runs else None
        if output is None and sys.exc_info()[1] is not None:
            runs.clear()
            runtime.failed_forward(unit)
            return None
        return runtime.after_forward(unit, run, output)

    return [
        unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        unit.module.register_forward_hook(after, with_kwargs=True, always_call=True),
    ]


def _backward_runs() -> bool:
    return torch._C._current_graph_task_id() != -1


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and dtype is not None else tensor
