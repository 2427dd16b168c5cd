"""A tighter plan for a step that did not fit, and what a plan expects at every instant of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from memfit.cost import Cost
from memfit.engines import unplanned
from memfit.errors import InputError, MemfitError
from memfit.plan import Plan
from memfit.plan import plan as make_plan
from memfit.solve import PlannedTimeline, SolveOptions
from memfit.trace import NEVER, Category, Phase, Step, Trace
from memfit.trace import trace as capture
from memfit.verify.faults import is_out_of_memory
from memfit.verify.prediction import replayed

LOWER = 0.1
"""The part of what did not fit by which the next budget is lower."""


class Replanner:
    """Knows the step of a plan op by op: says what a plan expects of it, and makes tighter ones."""

    def __init__(
        self,
        plan: Plan,
        step: Step | Trace,
        model: nn.Module,
        *,
        cost: Cost | str | None = None,
        options: SolveOptions | None = None,
    ) -> None:
        if not isinstance(step, Step | Trace):
            raise InputError(
                f"step is a {type(step).__name__}; give the memfit.Step or the memfit.Trace that the plan was made of"
            )
        self._model = model
        self.trace = _captured(plan, step, model) if isinstance(step, Step) else step
        plan.check(self.trace)
        self._step = step if isinstance(step, Step) else None
        self._cost = cost
        self._options = options
        self._least: Plan | None = None
        if plan.trace.device_type == "cpu":  # planning may find no memory when a step has not
            self._least = self._with_least_peak(plan)

    def timeline(self, plan: Plan) -> PlannedTimeline:
        """Memory at every instant of the step under a plan."""
        return replayed(plan, self.trace)

    def for_inputs(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan | None:
        """The plan under the same budget for other inputs of the model; None when it cannot be made.

        The step is captured anew, which a trace, or a loss that holds labels of the old shape, does not allow.
        """
        step = self._step
        if step is None or step.run is not None or (args and kwargs):
            return None
        given = kwargs or (args[0] if len(args) == 1 and not isinstance(step.batch, tuple) else args)
        if isinstance(given, dict) != isinstance(step.batch, dict):
            return None
        try:
            with unplanned(self._model):
                captured = capture(step.with_batch(given), target=plan.target.device)
        except (MemfitError, RuntimeError):
            return None
        before, self.trace = self.trace, captured
        found = self.plan(plan, plan.budget_bytes)
        if found.status == "infeasible":
            self.trace = before
            return None
        self._least = None
        return found

    def tighter(self, plan: Plan, failed_bytes: int) -> Plan | None:
        """The fastest plan that stays well below what did not fit, or the one with the lowest peak; None when no plan
        is lower than that."""
        try:
            found = self.plan(plan, max(1, int(failed_bytes * (1 - LOWER))))
            if found.status == "infeasible":
                found = self._least or self._with_least_peak(plan)
        except Exception as error:
            if not is_out_of_memory(error) or self._least is None:
                raise
            found = self._least
        lower = found is not None and found.predicted is not None and found.predicted.peak_bytes < failed_bytes
        return found if lower and found is not None and found.checkpoint != plan.checkpoint else None

    def _with_least_peak(self, plan: Plan) -> Plan | None:
        least = self.plan(plan, 1).minimum_budget_bytes
        return None if least is None else self.plan(plan, least)

    def plan(self, plan: Plan, budget: str | int | float) -> Plan:
        """The fastest plan of the step under a budget, on the device of another plan."""
        return make_plan(
            self.trace,
            target=plan.target.device,
            budget=budget,
            cost=self._cost,
            options=self._options,
            progress=False,
        )


def _captured(plan: Plan, step: Step, model: nn.Module) -> Trace:
    """The step's trace. When the plan is for an optimizer that had no state yet, it is captured without."""
    with unplanned(model):
        found = capture(step, target=plan.target.device)
    optimizer = step.optimizer
    if found.fingerprint == plan.fingerprint or not isinstance(optimizer, torch.optim.Optimizer):
        return found
    kept = dict(optimizer.state)
    optimizer.state.clear()
    try:
        with unplanned(model):
            return capture(step, target=plan.target.device)
    finally:
        optimizer.state.clear()
        optimizer.state.update(kept)


def swap(old: Plan, new: Plan, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Make the model run another plan; it goes on with the old one when that is refused."""
    old.remove(model)
    try:
        new.apply(model, optimizer)
    except BaseException:
        old.apply(model, optimizer)
        raise


def single_tensor(optimizer: torch.optim.Optimizer) -> bool:
    """Let the optimizer update one parameter after the other, which makes temporaries of one instead of all of them.

    Its state stays as it is. False when it does so already, or is fused and makes none.
    """
    changed = False
    for group in optimizer.param_groups:
        device = group["params"][0].device.type if group["params"] else "cpu"
        usual = device == "cuda" and not group.get("fused")
        if "foreach" in group and (group["foreach"] or (group["foreach"] is None and usual)):
            group["foreach"], changed = False, True
    return changed


def optimizer_bytes(optimizer: torch.optim.Optimizer, trace: Trace | None) -> list[int]:
    """The sizes of what an optimizer's step will have allocated at its highest point.

    Of a trace they are known. Otherwise two temporaries of the largest parameter, of all of them for a `foreach`
    optimizer, none for a fused one; and two states of each parameter that has none.
    """
    groups = [[each for each in group["params"] if each.requires_grad] for group in optimizer.param_groups]
    missing = [_bytes(each) for group in groups for each in group if not optimizer.state.get(each)]
    if trace is not None:
        states = _states(trace)
        return (states if missing else []) + _temporaries(trace)
    needed = 2 * missing
    for group, members in zip(optimizer.param_groups, groups, strict=True):
        sizes = [_bytes(each) for each in members]
        many = group.get("foreach") or (group.get("foreach") is None and any(each.is_cuda for each in members))
        if sizes and not group.get("fused"):
            needed += 2 * (sizes if many else [max(sizes)])
    return needed


def _temporaries(trace: Trace) -> list[int]:
    """Of the optimizer's storages, those that are there when most bytes are."""
    ops = [index for index, op in enumerate(trace.ops) if op.phase is Phase.OPTIMIZER]
    if not ops:
        return []
    first, last = ops[0], ops[-1]
    kept = (Category.GRADIENT, Category.OPTIMIZER_STATE)
    made = [each for each in trace.storages if first <= each.birth <= last and each.category not in kept]
    change = np.zeros(last - first + 2, np.int64)
    for each in made:
        change[each.birth - first] += each.bytes
        change[_end(each.death, last) + 1 - first] -= each.bytes
    peak = first + int(np.cumsum(change).argmax())
    return [each.bytes for each in made if each.bytes and each.birth <= peak <= _end(each.death, last)]


def _end(death: int, last: int) -> int:
    return last if death == NEVER else min(death, last)


def _states(trace: Trace) -> list[int]:
    found = {storage for each in trace.parameters for storage in each.state}
    return [trace.storages[each].bytes for each in sorted(found) if trace.storages[each].bytes]


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
