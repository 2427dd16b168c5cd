"""A guard for training: watches real steps, explains what does not fit, and plans tighter.

Note [Watching]: a step begins with the model's first forward in training and ends with the optimizer's step. Its peak
is what the allocator, or the kernel, counts anyway; hooks on the model and on the optimizer are all that is added, and
they are gone when the guard is. Everything else happens when a step has failed.
"""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memfit.capture import Phase, Step, Trace
from memfit.cost import Cost
from memfit.engines import plan_of_model
from memfit.errors import InputError, StateError
from memfit.plans import Plan, unwrap, wrappers_of
from memfit.recovery.drift import Drift, PlanDrift, Seen, find_different, list_tensors
from memfit.recovery.explanation import (
    REST,
    Explanation,
    OutOfMemory,
    count_tensors,
    describe_place,
    find_expected,
    find_levers,
)
from memfit.recovery.meter import NOISE_BYTES, find_limit, make_meter
from memfit.recovery.replan import Replanner, optimizer_bytes, single_tensor, swap
from memfit.recovery.rollback import Before, Keeper
from memfit.solve import SolveOptions
from memfit.torch_private.modules import forward_pre_hooks
from memfit.torch_private.pytree import tree_map_only
from memfit.units import display_bytes
from memfit.verify import FailedAt, is_out_of_memory, locate_failure, parse_asked_bytes, release

_P = ParamSpec("_P")
_R = TypeVar("_R")
TOLERANCE = 0.05
RETRIES = 3
_AND_STATE = f"{REST}, and optimizer state that guard was not told of (optimizer=)"


class Guard:
    """Watches the steps of a model that runs a plan; made by `memfit.guard`.

    `plan` is the plan that the model runs, after a replan the new one. `peak_bytes` is the peak of the last step on a
    GPU, `growth_bytes` how far the process grew in it on a CPU, `drifts` the first of each kind.
    """

    _divided = False
    """Whether parameters and optimizer state are divided between ranks, and the trace's are whole."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        *,
        optimizer: torch.optim.Optimizer | None,
        step: Step | Trace | Callable[[], Any] | None,
        tolerance: float,
        retries: int,
        copies: bool,
        accumulates: bool | Literal["rerun"],
        cost: Cost | str | None,
        options: SolveOptions | None,
    ) -> None:
        _check(plan, model, optimizer, tolerance, retries)
        self.plan = plan
        self.steps = 0
        self.peak_bytes: int | None = None
        self.growth_bytes: int | None = None
        self.drifts: tuple[Drift, ...] = ()
        self._model = model
        self._optimizer = optimizer
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet(
            () if optimizer is None else (optimizer,)
        )
        self._tolerance = tolerance
        self._retries = retries
        self._copies = copies
        self._replanner = None if step is None else self._make_replanner(step, cost, options)
        self._timeline = None if self._replanner is None else self._replanner.timeline(plan)
        self._keeper = None if optimizer is None else Keeper(model, optimizer, accumulates=accumulates is True)
        self._reruns = accumulates == "rerun"
        self._window: tuple[Before, list[Callable[[], Any]]] | None = None
        """With `accumulates="rerun"`: the start of the step that is under way, and its calls so far."""
        first = next(iter(model.parameters()), None)
        self._device = torch.device("cpu") if first is None else first.device
        self._meter = make_meter(self._device, self._resident_bytes)
        self._hooks: list[Any] = []
        self._before: Before | None = None
        self._in_step = self._in_optimizer = False
        self._seen: tuple[Seen, ...] = ()
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._sizes: tuple[bool, list[int]] | None = None
        self._switched = False
        self._planning = False
        self._captured = True
        self._resident: tuple[tuple[int, bool], int] | None = None

    def __repr__(self) -> str:
        peak = "" if self.peak_bytes is None else f", the last with a peak of {display_bytes(self.peak_bytes)}"
        if self.growth_bytes is not None:
            peak = f", the process grew by {display_bytes(self.growth_bytes)} in the last"
        state = "at work" if self._hooks else "not at work"
        found = "".join(f"; {drift}" for drift in self.drifts)
        return f"<guard {state}: {self.steps} {'step' if self.steps == 1 else 'steps'}{peak}{found}>"

    def _make_replanner(
        self, step: Step | Trace | Callable[[], Any], cost: Cost | str | None, options: SolveOptions | None
    ) -> Replanner:
        return Replanner(self.plan, step, self._model, cost=cost, options=options)

    # -- watching ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Guard:
        if self._hooks:
            raise StateError("this guard is at work already; make another with memfit.guard")
        if any(isinstance(getattr(hook, "__self__", None), Guard) for hook in forward_pre_hooks(self._model).values()):
            raise StateError("another guard watches this model; leave its `with` block first, one guard is enough")
        applied = plan_of_model(self._model)
        if applied is None or applied.plan.checkpoint != self.plan.checkpoint:
            what = "does not run a plan" if applied is None else "runs another plan"
            raise StateError(f"the model {what}; call plan.apply(model, optimizer) before the guard")
        if math.isfinite(self._tolerance):
            applied.leave_inputs()
        self._hooks.append(self._model.register_forward_pre_hook(self._on_forward, with_kwargs=True))
        if self._optimizer is not None:
            self._hooks.append(self._optimizer.register_step_pre_hook(self._on_optimizer))
            self._hooks.append(self._optimizer.register_step_post_hook(self._after_optimizer))
        else:
            self._hooks.append(register_optimizer_step_pre_hook(self._on_optimizer))
            self._hooks.append(register_optimizer_step_post_hook(self._after_optimizer))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trail: TracebackType | None
    ) -> None:
        self._remove_hooks()
        if error is None or isinstance(error, OutOfMemory) or not is_out_of_memory(error):
            return
        explanation = self._explain(error)
        applied = plan_of_model(self._model)
        if applied is not None:
            applied.reset()
        raise OutOfMemory(explanation, restored=False) from error

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _on_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trained = model.training or bool(self.plan.trace.in_eval)
        if self._in_step or self._planning or not trained or not torch.is_grad_enabled():
            return
        self._in_step, self._in_optimizer = True, False
        call = (args, kwargs)
        self._seen = list_tensors(call)
        self._call = None
        if find_different(self._seen, self.plan.trace.inputs):
            self._call = tree_map_only(torch.Tensor, lambda each: each.detach().to("meta"), call)
        self._meter.begin()

    def _on_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._in_step or not self._ours(optimizer):
            return
        self._optimizers.add(optimizer)
        self._in_optimizer = True
        if self._before is None:
            return
        if self._copies and not self._before.copied:
            self._before.copy_all()
        self._before.rehearse(self._needed(optimizer), self._device)
        self._commit()
        self._before.optimizer_began = True

    def _commit(self) -> None:
        """Do what comes before an optimizer's first write; on several ranks they agree here that all go on."""

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._in_step or not self._ours(optimizer):
            return
        self._in_step = self._in_optimizer = False
        self._window = None
        self.steps += 1
        self.peak_bytes = self._meter.peak_bytes()
        growth = self._meter.growth()
        self.growth_bytes = None if growth is None else growth[0]
        self._judge(0 if growth is None else growth[1])

    def _ours(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._optimizer is not None:
            return optimizer is self._optimizer
        first = next(iter(optimizer.param_groups[0]["params"]), None)
        return any(each is first for each in self._model.parameters())

    def _judge(self, there_bytes: int) -> None:
        """Compare the step with the plan. Low growth of a process says nothing, since malloc keeps pages."""
        assert self.plan.predicted is not None
        if not math.isfinite(self._tolerance):
            return
        planned, inputs = self.plan.predicted.peak_bytes, find_different(self._seen, self.plan.trace.inputs)
        allowed = self._tolerance * planned
        first = self.steps == 1  # libraries make their buffers, the optimizer its state
        if self.peak_bytes is not None:
            if self.peak_bytes > planned + allowed:
                self._warn("higher", self.peak_bytes, planned, inputs)
            elif self.peak_bytes < planned - allowed and not first:
                self._warn("lower", self.peak_bytes, planned, inputs)
            return
        needed = max(0, planned - there_bytes)
        if self.growth_bytes is not None and self.growth_bytes > needed + max(allowed, NOISE_BYTES) and not first:
            self._warn("growth", self.growth_bytes, needed, inputs)
        elif inputs and not any(each.inputs for each in self.drifts):
            self._warn("inputs", None, planned, inputs)

    def _warn(self, kind: str, measured: int | None, planned: int, inputs: tuple[str, ...]) -> None:
        if any(each.kind == kind for each in self.drifts):
            return
        drift = Drift(kind=kind, step=self.steps, measured_bytes=measured, planned_bytes=planned, inputs=inputs)
        self.drifts = (*self.drifts, drift)
        warnings.warn(str(drift), PlanDrift, stacklevel=2)

    def _resident_bytes(self) -> int:
        """Return what is there when a step begins: inputs, and what outlives steps, counted anew when state appears."""
        first = next(iter(self._model.parameters()), None)
        states = sum(len(each.state) for each in self._optimizers)
        key = states, first is not None and first.grad is not None
        if self._resident is None or self._resident[0] != key:
            self._resident = key, sum(count_tensors(self._model, self._optimizers)[0].values())
        return self._resident[1] + self._input_bytes

    @property
    def _input_bytes(self) -> int:
        return sum(each.size_bytes for each in self._seen)

    # -- steps that may be run again --------------------------------------------------------------------------------

    def step(self, function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Run one training step, `function(*args, **kwargs)`; out of memory, roll back, plan tighter and run it again.

        Raises `OutOfMemory` when no tighter plan is left, when the step could not be taken back, or after `retries`.
        """
        if not self._hooks:
            raise StateError("the guard is not at work; write `with memfit.guard(...) as guard:` around the steps")
        if self._keeper is None:
            raise StateError("guard.step must know the optimizer to take steps back; give optimizer= to memfit.guard")
        history: list[str] = []

        def call() -> _R:
            return function(*args, **kwargs)

        while True:
            before, run = self._begin_call(call, again=bool(history))
            self._before = before
            finished = False
            try:
                result = run()
                self._keeper.learn(before)
                finished = True
                return result
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                cause, explanation = error, self._explain(error)
            finally:
                self._before = None
                if not (finished and self._reruns):  # else the optimizer's step, after some call, ends the step
                    self._in_step = self._in_optimizer = False
            release(cause)
            restored = self._take_back(before, explanation, history)
            if not restored or not self._tighten(explanation, history):
                raise OutOfMemory(replace(explanation, history=tuple(history)), restored=restored) from cause
            del before, cause

    def _begin_call(self, call: Callable[[], _R], *, again: bool) -> tuple[Before, Callable[[], _R]]:
        """Return what the call starts from, and the function that runs it.

        With `accumulates="rerun"` that is the start of the whole step, and a call that failed is run again after all
        the calls of the step before it, whose gradients were taken back with its own.
        """
        assert self._keeper is not None
        if not self._reruns:
            self._in_step = self._in_optimizer = False
            return self._keeper.before(), call
        if again:
            assert self._window is not None
            before, calls = self._window

            def rerun() -> _R:
                for each in calls[:-1]:
                    each()
                return call()

            return before, rerun
        if self._window is None or all(each.grad is None for each in self._model.parameters()):
            self._in_step = self._in_optimizer = False
            self._window = self._keeper.before(), []
        self._window[1].append(call)
        return self._window[0], call

    def replan(self, budget: str | int | float) -> Plan:
        """Solve the step for another budget and make the model run that plan from its next step on."""
        if self._replanner is None:
            raise StateError("replan must know the step; give step= to memfit.guard")
        if self._in_step:
            raise StateError("a step is running; replan between steps")
        found = self._replanner.plan(self.plan, budget)
        self._run(found)
        return found

    def _take_back(self, before: Before, explanation: Explanation, history: list[str]) -> bool:
        """Roll back to before the failed step; return False when something could not be restored."""
        lost = before.restore()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        if not lost:
            history.append(f"the step failed {describe_place(explanation.at)} and was taken back")
            return True
        history.append(list_lost(lost))
        return False

    def _tighten(self, explanation: Explanation, history: list[str]) -> bool:
        """Apply a tighter plan for the next run of the step; return False when there is none."""
        if self._replanner is None:
            return False
        assert self._optimizer is not None
        tries = len(history) // 2  # each that failed and what was done about it are two
        if tries >= self._retries:
            history.append(
                self._gave_up() if self._replanner.is_min_budget(self.plan) else tell_all_allowed(self._retries)
            )
            return False
        if explanation.at.phase is Phase.OPTIMIZER:
            if single_tensor(self._optimizer):
                self._switched, self._sizes = True, None
                history.append("the optimizer now updates one parameter after the other (foreach=False)")
                return True
            history.append("no plan lowers what the optimizer's step takes: activations are gone by then")
            return False
        try:
            found = self._tighter(explanation, last=tries == self._retries - 1)
            if found is not None:
                self._run(found)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            history.append("there was not enough memory left to plan the step anew")
            return False
        if found is None or found.predicted is None:
            history.append(self._gave_up())
            return False
        history.append(
            f"it was planned anew for {display_bytes(found.budget_bytes)}, peak "
            f"{display_bytes(found.predicted.peak_bytes)}, and run again"
        )
        return True

    def _tighter(self, explanation: Explanation, *, last: bool) -> Plan | None:
        assert self._replanner is not None
        self._captured = True
        if self._call is not None:
            self._planning = True
            try:
                self._captured = self._replanner.for_inputs(self.plan, *self._call)
            finally:
                self._planning = False
        failed = min(explanation.expected.total_bytes, explanation.planned_peak_bytes)
        return self._replanner.tighter(self.plan, failed, last=last)

    def _gave_up(self) -> str:
        """Say why nothing is left to try: the step ran with the plan of the lowest peak."""
        assert self._replanner is not None
        least = self._replanner.find_min_budget_plan(self.plan)
        if least is None or least.predicted is None:
            return "no plan of this step with a lower peak was found"
        text = (
            f"it ran with the lowest peak that any plan of this step has, {display_bytes(least.predicted.peak_bytes)}"
        )
        if self._captured:
            return text
        return (
            f"{text} with the planned inputs (with these it could not be captured: give guard a Step that takes them)"
        )

    def _run(self, plan: Plan) -> None:
        swap(self.plan, plan, self._model, self._optimizer)
        self.plan = plan
        self._timeline = None if self._replanner is None else self._replanner.timeline(plan)
        self._sizes = None

    def _needed(self, optimizer: torch.optim.Optimizer) -> list[int]:
        """Return the sizes that the optimizer's step allocates; with its state made, always the same."""
        has_state = bool(optimizer.state)
        if self._sizes is None or self._sizes[0] != has_state:
            known = self._replanner is not None and not self._switched and not self._divided
            trace = self._replanner.trace if known and self._replanner is not None else None
            self._sizes = has_state, optimizer_bytes(optimizer, trace)
        return self._sizes[1]

    # -- explaining -------------------------------------------------------------------------------------------------

    def _explain(self, error: BaseException) -> Explanation:
        """Explain the failure; where that needs memory too, the frames of the failed step are released first."""
        at = locate_failure(error, unwrap(self._model), in_step=self._in_step, in_optimizer=self._in_optimizer)
        total = self._meter.now_bytes() if self._in_step else None
        try:
            return self._explained(error, at, total)
        except Exception as again:
            if not is_out_of_memory(again):
                raise
        release(error)
        gc.collect()
        return self._explained(error, at, total)

    def _explained(self, error: BaseException, at: FailedAt, total_bytes: int | None) -> Explanation:
        assert self.plan.predicted is not None
        asked = parse_asked_bytes(error)
        input_bytes = self._input_bytes if self._in_step else 0
        model = unwrap(self._model)
        by_category, by_module = count_tensors(
            model, self._optimizers, input_bytes=input_bytes, total_bytes=total_bytes
        )
        uncounted = []
        if not self._optimizers and self._device.type == "cuda" and total_bytes is not None:
            by_category = {_AND_STATE if name == REST else name: size for name, size in by_category.items()}
        elif not self._optimizers:
            uncounted.append("the optimizer's state (give guard optimizer=)")
        if self._in_step and total_bytes is None:
            uncounted.append("activations and temporaries, which nothing counts on this system")
        before = self._before
        graded = frozenset(name for name, each in model.named_parameters() if each.grad is not None)
        found = find_expected(self.plan, self._timeline, at, asked, graded)
        inputs = find_different(self._seen, self.plan.trace.inputs)
        return Explanation(
            at=at,
            asked_bytes=asked,
            limit=find_limit(self._device),
            total_bytes=total_bytes,
            by_category=by_category,
            by_module=by_module,
            uncounted=tuple(uncounted),
            expected=found,
            budget_bytes=self.plan.budget_bytes,
            planned_peak_bytes=self.plan.predicted.peak_bytes,
            inputs=inputs,
            levers=find_levers(
                self.plan,
                found,
                at,
                inputs,
                replans=self._replanner is not None,
                least=self._replanner is not None and self._replanner.is_min_budget(self.plan),
            ),
            history=(),
            copies_bytes=0 if before is None else before.held_bytes,
        )


def guard(
    plan: Plan,
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    step: Step | Trace | Callable[[], Any] | None = None,
    tolerance: float = TOLERANCE,
    retries: int = RETRIES,
    copies: bool = False,
    accumulates: bool | Literal["rerun"] = False,
    cost: Cost | str | None = None,
    options: SolveOptions | None = None,
) -> Guard:
    """Watch the steps of a model that runs a plan: `with memfit.guard(plan, model): ...`.

    Warns when peaks drift from the plan by more than `tolerance` (`math.inf`: never) and explains an out-of-memory
    error (`OutOfMemory`). With `step`, what the plan was made of (a step, its trace or a function), it explains in
    full. With `optimizer` as well, `guard.step(function)` takes a step that failed back, plans tighter and runs it
    again, `retries` times at most. `copies` keeps parameters and optimizer state while the optimizer steps.
    `accumulates` is for gradients that outlive a call of `guard.step`: True copies them, `"rerun"` takes them back with
    the call that failed and runs all calls since the optimizer's last step again. `cost` and `options` are those that
    the plan was made with. On several ranks every rank makes and enters it, and a step that one of them has no memory
    for is taken back, planned anew and run again on all.
    """
    kind = Guard
    if _runs_on_ranks(plan, model):
        if accumulates == "rerun":
            raise InputError(
                "accumulates='rerun' is for one rank; give accumulates=True, or a whole step to guard.step"
            )
        from memfit.recovery.rank_guarding import RankGuard  # it needs this file

        kind = RankGuard
    return kind(
        plan,
        model,
        optimizer=optimizer,
        step=step,
        tolerance=tolerance,
        retries=retries,
        copies=copies,
        accumulates=accumulates,
        cost=cost,
        options=options,
    )


def _runs_on_ranks(plan: Plan, model: nn.Module) -> bool:
    """Return whether the ranks of the process group train one model together."""
    if not isinstance(plan, Plan) or not isinstance(model, nn.Module):
        return False  # refused with the reason
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    divided = plan.shard is not None or plan.ddp is not None or bool(plan.mesh)
    if divided and not several:
        raise InputError(
            "this plan is for several ranks, and there is no process group of several: start the script with torchrun, "
            "call torch.distributed.init_process_group() and plan.apply(model, optimizer) before the guard, or plan "
            "with ranks=1"
        )
    return several and (divided or bool(wrappers_of(model)))


def list_lost(lost: Sequence[str]) -> str:
    """Say what could not be restored, and what to do."""
    names = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
    return (
        f"the step could not be taken back, because it had written to {names}: go on from a checkpoint, and give "
        "guard copies=True (accumulates=True for gradients that outlive steps)"
    )


def tell_all_allowed(retries: int) -> str:
    """Say that a step was run as often as it may be."""
    often = f"{retries + 1} times" if retries else "once"
    return f"it was run {often}, and that is all that was allowed (retries={retries})"


def _check(
    plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer | None, tolerance: float, retries: int
) -> None:
    if not isinstance(plan, Plan):
        raise InputError(f"guard takes a plan first, not a {type(plan).__name__}: memfit.guard(plan, model)")
    if not isinstance(model, nn.Module):
        raise InputError(f"guard takes the model, an nn.Module, not a {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"optimizer is a {type(optimizer).__name__}; give the model's torch.optim.Optimizer")
    if plan.predicted is None:
        raise InputError("this plan is infeasible, so there is nothing to watch; plan with a larger budget")
    if not tolerance > 0:
        raise InputError(f"tolerance is {tolerance}; give a part of the peak above 0, such as {TOLERANCE}")
    if retries < 0:
        raise InputError(f"retries is {retries}; give 0 or more")
