"""What users give to `verify`, checked: the step, by object or by name, and whether it can be run here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memfit.capture import Step, find_step
from memfit.engines import plan_of_model
from memfit.errors import InputError, MissingFeatureError, StateError
from memfit.plans import Plan
from memfit.presets import step_at as step_at
from memfit.units import display_budget
from memfit.verify.faults import is_out_of_memory
from memfit.verify.state import tensors_in


def resolve_step(step: Step | Callable[[], Any], verb: str = "verify") -> Step:
    """Return a step, or the one that a function runs on a model of its own."""
    if isinstance(step, Step):
        return step
    if isinstance(step, nn.Module) or not callable(step):
        raise InputError(
            f"{verb} takes the step that is run, not a {type(step).__name__}: memfit.Step(model, batch, ...), or a "
            "function that runs one"
        )
    return find_step(step)


def check_plan(plan: Plan) -> None:
    """Refuse plans that nothing here can run."""
    if plan.status == "infeasible" or plan.predicted is None:
        least = "" if plan.minimum_budget_bytes is None else f" {display_budget(plan.minimum_budget_bytes)}"
        raise InputError(f"this plan is infeasible, there is nothing to verify; plan with a budget of{least} or more")
    if plan.mesh:
        raise MissingFeatureError(
            f"this plan is for a step on {plan.ranks} ranks, wrapped by its own code, and verify runs on one; plan the "
            "plain model with ranks=1 to verify it here"
        )
    if plan.ddp is not None:
        raise MissingFeatureError(
            f"this plan is for a model that is replicated on {plan.ddp.ranks} ranks, and a step on one device has none "
            "of its buckets; plan with ranks=1 to verify it here"
        )
    check_device(plan.trace.device_type, plan.target.title)


def check_device(kind: str, title: str) -> None:
    """Refuse a device that is not here."""
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"the plan is for {title}, and this machine has no GPU that torch can use; run it there, or plan for "
            "target='cpu' to run it here"
        )
    if kind not in ("cpu", "cuda"):
        raise MissingFeatureError(f"the plan is for a device of type {kind!r}; only cpu and cuda can be measured")


def build_real(step: Step, device_type: str) -> tuple[Step, nn.Module]:
    """Return the step with a model and an optimizer that exist; those that were given as callables are made."""
    if isinstance(step.model, nn.Module):
        model = step.model
    else:
        try:
            with torch.device(device_type):
                model = step.model()
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise StateError(f"there is not enough memory here to build the model: {error}") from error
            raise
        if not isinstance(model, nn.Module):
            raise InputError(f"the model factory returned a {type(model).__name__}, not an nn.Module")
    if any(tensor.is_meta for tensor in model.parameters()):
        raise InputError(
            "the model is on the meta device and has no values; give a real one, or a callable that builds one"
        )
    if any(tensor.is_meta for tensor in tensors_in(step.batch)):
        raise InputError("the batch was made with memfit.spec and has no values; give real tensors to run the step on")
    return replace(step, model=model, optimizer=step.build_optimizer(model)), model


def real_step(plan: Plan, step: Step) -> tuple[Step, nn.Module]:
    """Return the step as it can be run under a plan, and its model."""
    step, model = build_real(step, plan.trace.device_type)
    if plan.checkpoint and not model.training and not plan.trace.in_eval:
        raise InputError(
            "the model is in eval mode, and the plan was made for train mode and does nothing; call model.train() first"
        )
    applied = plan_of_model(model)
    if applied is not None and (
        applied.plan.fingerprint != plan.fingerprint or applied.plan.checkpoint != plan.checkpoint
    ):
        raise StateError("this model runs another plan; call remove on that one first, or verify it instead")
    return step, model
