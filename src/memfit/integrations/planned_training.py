"""A plan in a training loop that a library runs: made when training begins, guarded, measured, and taken off again.

Callbacks of transformers and Lightning tell a `PlannedTraining` when training and steps begin and end.

Note [Measured in a library's loop]: on a GPU the allocator counts every step. On a CPU it counts nothing, so the
profiler records its events in the third and the fourth step; frees of what was there before are missing from them,
so only the fourth counts. An allocation of an odd size marks its beginning. Gradients that were there before the third
step and are gone by then (Lightning zeroes them between forward and backward) are subtracted at the mark.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from memfit.capture import Step, trace
from memfit.errors import InputError
from memfit.hardware import Target
from memfit.memory import measured
from memfit.plans import Plan
from memfit.plans import plan as make_plan
from memfit.recovery import Guard, guard, loss_is_outside
from memfit.sharding import ShardOptions
from memfit.solve import SolveOptions
from memfit.torch_private.profiler import profiler_enabled
from memfit.torch_private.pytree import tree_leaves
from memfit.torch_private.storages import key_of
from memfit.tradeoff import LOSS
from memfit.units import display_budget, display_bytes

_P = ParamSpec("_P")
_R = TypeVar("_R")

logger = logging.getLogger("memfit")

_BESIDE_BYTES = 16 << 10
"""What is kept beside the step and left out of the budget: losses and counts of the library, each a tensor of one
number, and states of generators that the guard copies."""
_MEASURED_STEPS = (3, 4)
_MARK_BYTES = 1_000_003


def check_version(name: str, installed: str, oldest: str) -> None:
    """Refuse a library that is older than what memfit was tried with."""
    if _numbers(installed) < _numbers(oldest):
        raise InputError(
            f"{name} {installed} is installed, and memfit works with {oldest} or newer: pip install "
            f"'{name}>={oldest}', or all that it is tried with: pip install 'memfit[zoo]'"
        )


def load(name: str, oldest: str) -> Any:
    """Import a library that memfit does not depend on, or say what to install."""
    try:
        library = importlib.import_module(name)
    except ImportError as error:
        raise InputError(
            f"{name} cannot be imported ({error}); install it: pip install '{name}>={oldest}', or with memfit: "
            "pip install 'memfit[zoo]'"
        ) from error
    check_version(name, library.__version__, oldest)
    return library


def _numbers(version: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in version.split(".")[:3]:
        digits = "".join(ch for ch in part if ch.isdigit())
        numbers.append(int(digits) if digits else 0)
    return tuple(numbers)


class PlannedTraining:
    """The plan of one training: `begin` makes and applies it, `run` guards, `figures` says what was measured.

    `budget`, `target` and `options` are those of `memfit.plan`. Without a target it is the model's own device.
    """

    def __init__(
        self,
        *,
        budget: str | int | float | None,
        target: Any,
        options: SolveOptions | None,
        retries: int,
        measure: bool = True,
    ) -> None:
        self.plan: Plan | None = None
        self.measured_peak_bytes: int | None = None
        self.replans = 0
        self._budget, self._target, self._options = budget, target, options
        self._retries, self._measure = retries, measure
        self._guard: Guard | None = None
        self._model: nn.Module | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._prefetched_bytes = 0
        self._steps = 0
        self._recording: contextlib.ExitStack | None = None
        self._events: Any = None
        self._there_bytes = 0
        self._gradients: list[tuple[weakref.ref[torch.Tensor], int]] = []

    def begin(self, step: Step, model: nn.Module, optimizers: list[torch.optim.Optimizer], *, prefetched: int) -> Plan:
        """Plan the step and apply the plan to the model, which may be wrapped; `step` has the model unwrapped.

        `prefetched` is how many batches of the next step are on the device when one begins.
        """
        self.end()
        self.plan = None
        self._model, self._optimizers = model, [unwrap_optimizer(each) for each in optimizers]
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        device = next(model.parameters()).device
        target = resolve_target(self._target, device, ranks)
        if target.device.type != device.type:
            raise InputError(
                f"the model is on {device.type}, and the target is {target.device.title}; leave target out to train "
                "here, or plan for it without training: memfit.plan(step, target=...)"
            )
        budget = self._budget
        if budget is not None:
            copied = _storage_bytes(list(model.buffers())) if self._retries else 0  # by the guard
            budget = target.budget_bytes(budget) - _BESIDE_BYTES - copied
            if budget <= 0:
                raise InputError(f"the budget of {self._budget} is too small for any step")
        options = self._options or SolveOptions()
        if ranks > 1 and options.shard == ShardOptions():
            options = replace(options, shard=ShardOptions(parallel="ddp"))
        captured = trace(step, target=target)
        if loss_is_outside(captured) and LOSS not in (*options.force, *options.forbid):
            options = replace(options, forbid=(*options.forbid, LOSS))  # the library calls it, not `plan.loss`
        plan = make_plan(captured, target=target, budget=budget, options=options, progress=False)
        check_feasible(plan, beside_bytes=0 if budget is None else target.budget_bytes(self._budget) - budget)
        assert plan.predicted is not None
        self.plan = plan
        plan.apply(model, self._optimizers if len(self._optimizers) != 1 else self._optimizers[0])
        self._prefetched_bytes = prefetched * _storage_bytes(tree_leaves(step.batch))
        self._steps, self.measured_peak_bytes, self.replans = 0, None, 0
        if len(self._optimizers) == 1 and ranks == 1 and self._retries:
            self._guard = guard(
                plan,
                model,
                optimizer=self._optimizers[0],
                step=captured,
                tolerance=math.inf,
                retries=self._retries,
                accumulates="rerun",
                options=options,
            )
            self._guard.__enter__()
        return plan

    def describe(self) -> str:
        """Say in one sentence what the plan does and what it expects."""
        assert self.plan is not None
        return describe_plan(self.plan)

    def run(self, function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Run one micro-batch, forward and backward; out of memory, take its step back, plan tighter, run it again."""
        if self._guard is None:
            return function(*args, **kwargs)
        before = self._guard.plan
        result = self._guard.step(function, *args, **kwargs)
        if self._guard.plan is not before:
            self.plan = self._guard.plan
            self.replans += 1
            logger.warning("memfit: a step ran out of memory and was planned anew. " + self.describe())
        return result

    # -- measuring ---------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Note that a step begins: its first micro-batch is the next thing that runs."""
        self._steps += 1
        if self.plan is None or self._model is None or not self._measure:
            return
        device = next(self._model.parameters()).device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif device.type == "cpu" and self._steps == _MEASURED_STEPS[0] and not profiler_enabled():
            self._there_bytes = self._resident_bytes()
            self._gradients = self._own_gradients()
            self._recording = contextlib.ExitStack()
            self._events = self._recording.enter_context(measured())
        elif self._recording is not None:
            self._there_bytes -= sum(size for gradient, size in self._gradients if gradient() is None)
            self._gradients = []
            torch.empty(_MARK_BYTES, dtype=torch.uint8)

    def end_step(self) -> None:
        """Note that the optimizer has done its step."""
        if self.plan is None or self._model is None or not self._measure:
            return
        device = next(self._model.parameters()).device
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device)
            self.measured_peak_bytes = max(peak, self.measured_peak_bytes or 0)
        elif self._recording is not None and self._steps == _MEASURED_STEPS[1]:
            self._stop_recording()
            self.measured_peak_bytes = self._peak_after_mark()
            logger.info(
                f"memfit: measured peak {display_bytes(self.measured_peak_bytes)} in step {self._steps}, predicted "
                f"{display_bytes(self.plan.predicted.peak_bytes if self.plan.predicted else 0)}"
            )

    def _stop_recording(self) -> None:
        if self._recording is not None:
            recording, self._recording = self._recording, None
            recording.close()

    def _peak_after_mark(self) -> int:
        level = self._there_bytes
        peak, marked = 0, False
        for event in self._events.events:
            if event.bytes == _MARK_BYTES:
                marked = True
            elif event.bytes != -_MARK_BYTES:
                level += event.bytes
            if marked:
                peak = max(peak, level)
        self._events = None
        return peak

    def _resident_bytes(self) -> int:
        """Return what is there when a step begins, without its own batches, whose frees will not be seen."""
        assert self._model is not None
        tensors: list[Any] = [*self._model.parameters(), *self._model.buffers()]
        tensors += [each.grad for each in self._model.parameters() if each.grad is not None]
        for optimizer in self._optimizers:
            tensors += tree_leaves(list(optimizer.state.values()))
        return _storage_bytes(tensors) + self._prefetched_bytes

    def _own_gradients(self) -> list[tuple[weakref.ref[torch.Tensor], int]]:
        """Return the gradients that are freed when they are set to None, and their bytes: no views of buckets."""
        assert self._model is not None
        found = [each.grad for each in self._model.parameters() if each.grad is not None]
        whole = [each for each in found if each.nbytes == each.untyped_storage().nbytes()]
        return [(weakref.ref(each), each.nbytes) for each in whole]

    def figures(self) -> dict[str, float]:
        """Return what is logged: the predicted peak, the measured one once it is known, and how often was replanned."""
        if self.plan is None or self.plan.predicted is None:
            return {}
        found = {"memfit_predicted_peak_gib": self.plan.predicted.peak_bytes / 2**30}
        if self.measured_peak_bytes is not None:
            found["memfit_measured_peak_gib"] = self.measured_peak_bytes / 2**30
        if self.replans:
            found["memfit_replans"] = self.replans
        return found

    def end(self) -> None:
        """Take the plan off the model again. Also after a training that an error ended."""
        self._stop_recording()
        if self._guard is not None:
            guarding, self._guard = self._guard, None
            self.plan = guarding.plan  # also where the last replan did not help
            guarding.__exit__(None, None, None)
        if self._model is not None and self.plan is not None:
            self.plan.remove(self._model)
        self._model = None


def check_feasible(plan: Plan, *, beside_bytes: int = 0) -> None:
    """Refuse a plan that no step can run; name a budget that can be met.

    `beside_bytes` is the part of the user's budget that was kept for what is held beside the step.
    """
    if plan.status != "infeasible":
        return
    assert plan.minimum_budget_bytes is not None
    kept = f", {display_bytes(beside_bytes)} of it kept for what is held beside the step" if beside_bytes else ""
    raise InputError(
        f"no plan of this step fits a budget of {display_bytes(plan.budget_bytes + beside_bytes)}{kept}. Give "
        f"{display_budget(plan.minimum_budget_bytes + beside_bytes)} or more, or train with a smaller batch"
    )


def describe_plan(plan: Plan) -> str:
    """Say in one sentence what a plan does and what it expects."""
    assert plan.predicted is not None
    predicted, baseline = plan.predicted, plan.baseline
    text = (
        f"memfit: predicted peak {display_bytes(predicted.peak_bytes)} of a budget of "
        f"{display_bytes(plan.budget_bytes)} on {plan.target.device}"
    )
    if not plan.checkpoint:
        return f"{text}; it fits as it is, and nothing is recomputed"
    slower = predicted.step_ms / baseline.step_ms - 1 if baseline.step_ms else 0.0
    return (
        f"{text}, {display_bytes(baseline.peak_bytes)} without a plan; {len(plan.checkpoint)} unit calls are "
        f"recomputed, which makes a step about {slower:.0%} longer"
    )


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer of torch inside what a library wraps around it."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrap_optimizer(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def resolve_target(target: Any, device: torch.device, ranks: int) -> Target:
    """Return the target of a training: by name, or the device that the model is on."""
    if target is None:
        target = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Target.parse(target, ranks=ranks)


@contextlib.contextmanager
def patched_attributes(holder: Any, **replaced: Any) -> Iterator[None]:
    """Set attributes of an instance for a while, and take them off it again."""
    before = {name: vars(holder)[name] for name in replaced if name in vars(holder)}
    for name, value in replaced.items():
        object.__setattr__(holder, name, value)
    try:
        yield
    finally:
        for name in replaced:
            if name in before:
                object.__setattr__(holder, name, before[name])
            else:
                object.__delattr__(holder, name)


def _storage_bytes(leaves: list[Any]) -> int:
    storages = [each.untyped_storage() for each in leaves if isinstance(each, torch.Tensor)]
    return sum({key_of(each): each.nbytes() for each in storages}.values())
