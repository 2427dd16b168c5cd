"""A tighter plan for a step that did not fit, and what a plan expects at every instant of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from memfit.capture import AFTER_STEP, NO_INDEX, Category, Phase, Step, Trace
from memfit.cost import Cost
from memfit.engines import apply, has_planned_loss, unplanned
from memfit.errors import InputError, MemfitError
from memfit.hardware import Target
from memfit.memory import Timeline
from memfit.plans import Engine, Plan, shard_options_of, units_with_loss
from memfit.plans import plan as make_plan
from memfit.solve import SolveOptions
from memfit.torch_private.distributed_tensors import local_tensor
from memfit.tradeoff import LOSS, find_units
from memfit.verify import is_out_of_memory, replay_on_ranks, replay_plan, resolve_step, without_state

LOWER = 0.1
"""The part of what did not fit by which the next budget is lower."""


class Replanner:
    """Knows the step of a plan op by op: says what a plan expects of it, and makes tighter ones.

    `trace` is the step as it is now; other inputs make it another one.
    """

    def __init__(
        self,
        plan: Plan,
        step: Step | Trace | Callable[[], Any],
        model: nn.Module,
        *,
        cost: Cost | str | None = None,
        options: SolveOptions | None = None,
        engine: Engine = "local",
        spare: bool = True,
    ) -> None:
        self._model = model
        self._engine: Engine = engine
        self._step = None if isinstance(step, Trace) else resolve_step(step, "guard")
        self.trace = step if isinstance(step, Trace) else _captured(plan, resolve_step(step, "guard"), model)
        plan.check(self.trace)
        self._cost = cost
        self._options = options
        self._min_budget_plan: Plan | None = None
        self._spare: tuple[Plan, Trace] | None = None
        if spare and plan.trace.device_type == "cpu":  # planning may find no memory when a step has not
            least = self.find_min_budget_plan(plan)
            self._spare = None if least is None else (least, self.trace)

    def timeline(self, plan: Plan) -> Timeline | None:
        """Return the timeline of the step under a plan, on a rank; None where only the plan's peak is known (DDP)."""
        if plan.shard is not None:
            return replay_on_ranks(plan, self.trace, self._engine)
        return replay_plan(plan, self.trace) if plan.ddp is None and not plan.mesh else None

    def for_inputs(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Capture the step for other inputs of the model. False when it cannot be.

        A trace does not allow that, nor a function that runs the step, nor a loss that holds labels of the old shape.
        """
        step = self._step
        if step is None or step.run is not None or (args and kwargs):
            return False
        given = kwargs or (args[0] if len(args) == 1 and not isinstance(step.batch, tuple) else args)
        if isinstance(given, dict) != isinstance(step.batch, dict):
            return False
        try:
            with unplanned(self._model):
                self.trace = plan.trace_of(step.with_batch(given))
        except (MemfitError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            return False
        return True

    def tighter(self, plan: Plan, failed_bytes: int, *, last: bool = False) -> Plan | None:
        """Return the fastest plan well below what did not fit, or the one with the lowest peak.

        The latter where there is no such plan, and at the last try; None when the step ran with it already.
        """
        try:
            found = (None if last else self._below(plan, failed_bytes)) or self.find_min_budget_plan(plan)
        except Exception as error:
            if not is_out_of_memory(error) or self._spare is None or same_decisions(self._spare[0], plan):
                raise
            found, self.trace = self._spare
        return None if found is None or same_decisions(found, plan) else found

    def _below(self, plan: Plan, failed_bytes: int) -> Plan | None:
        """Return a plan that differs from the one that failed: under its budget if the step has changed, else lower."""
        if plan.fingerprint != self.trace.fingerprint:
            found = self.plan(plan, plan.budget_bytes)
            if found.predicted is None or not same_decisions(found, plan):
                return None if found.predicted is None else found
            failed_bytes = found.predicted.peak_bytes
        found = self.plan(plan, max(1, int(failed_bytes * (1 - LOWER))))
        return None if found.predicted is None or same_decisions(found, plan) else found

    def find_min_budget_plan(self, plan: Plan) -> Plan | None:
        """Return the plan with the lowest peak for the step as it is now."""
        if self._min_budget_plan is None or self._min_budget_plan.fingerprint != self.trace.fingerprint:
            least = self.plan(plan, 1).minimum_budget_bytes
            self._min_budget_plan = None if least is None else self.plan(plan, least)
        return self._min_budget_plan

    def is_min_budget(self, plan: Plan) -> bool:
        """Return whether a plan is known to have the lowest peak."""
        return self._min_budget_plan is not None and same_decisions(self._min_budget_plan, plan)

    def plan(self, plan: Plan, budget: str | int | float) -> Plan:
        """Find the fastest plan of the step under a budget, on the device of another plan."""
        found = make_plan(
            self.trace,
            target=_target(plan),
            budget=budget,
            cost=self._cost,
            options=_divided(plan, self._possible_options(plan)),
            progress=False,
        )
        # The trace is that of the step with the plan's loss and optimizer step; these stay.
        return msgspec.structs.replace(found, chunked_loss=plan.chunked_loss, optimizer=plan.optimizer)

    def _possible_options(self, plan: Plan) -> SolveOptions | None:
        """Return the options, without what changes the step and without losses that cannot be recomputed.

        These are a loss outside the model where nothing goes through `plan.loss`, and one that is in chunks.
        """
        options = self._options
        if options is not None:
            offload = options.offload or bool(plan.offload_link)
            options = replace(options, decide=(), offload=offload, loss_chunks=None, optimizer=False)
        if plan.chunked_loss:
            found = units_with_loss(self.trace, plan.chunked_loss.setting)
            options = options or SolveOptions()
            return replace(options, forbid=tuple(dict.fromkeys((*options.forbid, *found))))
        return self._without_loss_outside(options)

    def _without_loss_outside(self, given: SolveOptions | None) -> SolveOptions | None:
        options = given or SolveOptions()
        if has_planned_loss() or {LOSS} & {*options.force, *options.forbid} or not loss_is_outside(self.trace):
            return given
        return replace(options, forbid=(*options.forbid, LOSS))


def _target(plan: Plan) -> Target:
    """Return the target that a plan was made for."""
    divided = plan.shard or plan.ddp
    if divided is None:
        return Target.parse(plan.target.device, **plan.target.settings)
    return Target.parse(
        plan.target.device,
        ranks=divided.ranks * (plan.shard.replicas if plan.shard is not None else 1),
        ranks_per_node=plan.target.ranks_per_node,
        intra_node_link=plan.target.intra_node_link,
        inter_node_link=plan.target.inter_node_link,
        **plan.target.settings,
    )


def _divided(plan: Plan, options: SolveOptions | None) -> SolveOptions | None:
    """Return options under which the step is divided between ranks as the plan does it; the model is so already."""
    if plan.shard is None and plan.ddp is None:
        return options
    options = options or SolveOptions()
    offload = options.offload or bool(plan.offload_link)
    return replace(options, shard=shard_options_of(plan), decide=options.decide or (), offload=offload)


def loss_is_outside(trace: Trace) -> bool:
    """Return whether the loss of any pass is computed outside the model."""
    outermost = [call for call in trace.calls if call.parent == NO_INDEX]
    return any(
        unit.kind == "loss" and not any(call.begin <= unit.begin and unit.end <= call.end for call in outermost)
        for unit in find_units(trace)
    )


def same_decisions(one: Plan, other: Plan) -> bool:
    """Return whether two plans do the same to the model, though their figures may be of other inputs."""
    return _decisions(one) == _decisions(other)


def _decisions(plan: Plan) -> tuple[Any, ...]:
    return tuple((each.unit, each.stop, each.dropped, [op.offset for op in each.saved_ops]) for each in plan.checkpoint)


def _captured(plan: Plan, step: Step, model: nn.Module) -> Trace:
    """Capture the step, without the optimizer's state when the plan is for an optimizer that had none yet."""
    if plan.mesh:
        raise InputError(
            "the plan is for a step on a mesh, which cannot be captured where there is a process group: give step= the "
            "trace that memfit.trace(step, mesh=...) made before init_process_group"
        )
    with unplanned(model):
        found = plan.trace_of(step)
    optimizer = step.optimizer
    if found.fingerprint == plan.fingerprint or not isinstance(optimizer, torch.optim.Optimizer):
        return found
    with without_state(optimizer), unplanned(model):
        return plan.trace_of(step)


def swap(old: Plan, new: Plan, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Make the model run another plan; it goes on with the old one when that is refused.

    For a model that no other rank trains: ranks that train one together replace its policies (`rank_guarding.py`).
    """
    old.remove(model)
    try:
        apply(new, model, optimizer, alone=True)
    except BaseException:
        apply(old, model, optimizer, alone=True)
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
    """Return the sizes of what an optimizer's step will have allocated at its highest point.

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
    """Return those of the optimizer's storages that are there at its highest point."""
    ops = [index for index, op in enumerate(trace.ops) if op.phase is Phase.OPTIMIZER]
    if not ops:
        return []
    first, last = ops[0], ops[-1]
    kept = (Category.GRADIENT, Category.OPTIMIZER_STATE)
    made = [each for each in trace.storages if first <= each.alloc_at <= last and each.category not in kept]
    change = np.zeros(last - first + 2, np.int64)
    for each in made:
        change[each.alloc_at - first] += each.bytes
        change[_end(each.free_after, last) + 1 - first] -= each.bytes
    peak = first + int(np.cumsum(change).argmax())
    return [each.bytes for each in made if each.bytes and each.alloc_at <= peak <= _end(each.free_after, last)]


def _end(free_after: int, last: int) -> int:
    return last if free_after == AFTER_STEP else min(free_after, last)


def _states(trace: Trace) -> list[int]:
    found = {storage for each in trace.parameters for storage in each.state}
    return [trace.storages[each].bytes for each in sorted(found) if trace.storages[each].bytes]


def _bytes(tensor: torch.Tensor) -> int:
    return local_tensor(tensor).numel() * tensor.element_size()
