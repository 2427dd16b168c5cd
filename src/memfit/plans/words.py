"""The verdict on a plan in words: the same on the terminal, on the page and in Markdown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from memfit.errors import InputError
from memfit.hardware import load_device
from memfit.units import display_bytes, display_ms

if TYPE_CHECKING:
    from memfit.plans.document import Plan

Tone = Literal["good", "care", "bad"]

STEP_WAYS = {
    "single": "one tensor after another (foreach=False)",
    "foreach": "on lists of tensors (foreach=True)",
    "fused": "in one kernel (fused=True)",
}
"""How an optimizer's step is done."""


def without_plan(ranks: int, *, ddp: bool) -> str:
    """What a step is called that runs without its plan: on several ranks it is sharded or replicated all the same."""
    if ranks == 1:
        return "without a plan"
    return "only replicated (DDP)" if ddp else "only sharded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`words` are one or two, `figures` say by how much; `reasons` are sentences on what the allocator does."""

    tone: Tone
    words: str
    figures: str
    reasons: tuple[str, ...] = ()


def verdict_of(plan: Plan, usable_bytes: int | None = None) -> Verdict:
    """Whether the step fits under the plan; `usable_bytes`, what the device has for tensors, is known by its name."""
    budget = display_bytes(plan.budget_bytes)
    predicted = plan.predicted
    if predicted is None:
        return Verdict(tone="bad", words="Does not fit", figures=f"no plan keeps the step within {budget}")
    peak = display_bytes(predicted.peak_bytes)
    figures = f"peak {peak} of the {budget} budget, {display_ms(predicted.step_ms)} a step"
    if predicted.peak_reserved_bytes <= plan.budget_bytes:
        return Verdict(tone="good", words="Fits", figures=figures)
    usable_bytes = _usable_bytes(plan) if usable_bytes is None else usable_bytes
    reserved, usable = display_bytes(predicted.peak_reserved_bytes), display_bytes(usable_bytes)
    if predicted.peak_reserved_bytes <= usable_bytes:
        why = f"The budget is for tensors; the caching allocator reserves {reserved} of {usable} for them."
        return Verdict(tone="good", words="Fits", figures=figures, reasons=(why,))
    why = f"Take care: the caching allocator would reserve {reserved}, and the device has {usable} for tensors."
    return Verdict(tone="care", words="Fits the budget, with care", figures=figures, reasons=(why,))


def changes_nothing(plan: Plan) -> bool:
    """Whether the plan leaves the step as it is."""
    return plan.predicted is not None and not plan.checkpoint and plan.optimizer is None


def _usable_bytes(plan: Plan) -> int:
    """What the plan's device has for tensors; all of its memory where this machine has no figures of it."""
    total_bytes = plan.target.memory_total_bytes
    try:
        device = load_device(plan.target.device)
    except InputError:
        return total_bytes
    return device.usable_bytes if device.memory_total_bytes == total_bytes else total_bytes
