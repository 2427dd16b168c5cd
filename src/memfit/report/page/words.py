"""The headline of the page: in words, whether the step fits, what it takes and what the plan does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from memfit.paths import alike, folded
from memfit.plan import Plan
from memfit.plan.display import counted
from memfit.plan.record import PeakAt
from memfit.report.facts import Report
from memfit.report.page.strings import named, short
from memfit.units import display_bytes, display_ms

_NAMES = 3
_WAYS = {
    "single": "one tensor after another (foreach=False)",
    "foreach": "on lists of tensors (foreach=True)",
    "fused": "in one kernel (fused=True)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """What a reader sees first. `verdict` is one word or two; `subject` says of what and where."""

    tone: Literal["good", "care", "bad"]
    verdict: str
    figures: str
    subject: str
    sentences: tuple[str, ...]

    @property
    def title(self) -> str:
        """The title of the document."""
        return f"{self.verdict}: {self.figures} - {self.subject}"


def headline(report: Report) -> Headline:
    """The headline of a report."""
    trace, target = report.trace, report.target
    model = trace.modules[0].kind if trace.modules else "the step"
    where = target.device.title if target.ranks == 1 else f"{target.ranks} x {target.device.title}"
    subject = f"{model} on {where}"
    if report.plan is None:
        return _unplanned(report, subject)
    predicted = report.plan.predicted
    found = _infeasible(report.plan, subject) if predicted is None else _planned(report.plan, subject)
    notes = [f"Note: {note}." for note in report.plan.notes if note not in trace.notes]
    found = replace(found, sentences=(*found.sentences, *notes))
    if predicted is None or predicted.peak_reserved_bytes <= target.usable_bytes:
        return found
    reserved, usable = display_bytes(predicted.peak_reserved_bytes), display_bytes(target.usable_bytes)
    mind = f"Take care: the caching allocator would reserve {reserved}, and the device has {usable} for tensors."
    return replace(found, tone="care", verdict="Fits the budget, with care", sentences=(mind, *found.sentences))


def _unplanned(report: Report, subject: str) -> Headline:
    peak, usable = report.baseline.peak_bytes, report.target.usable_bytes
    step_ms = report.runtime.total_ms + report.problem.exposed_ms
    fits = peak <= usable
    rest = display_bytes(abs(usable - peak))
    return Headline(
        tone="good" if fits else "bad",
        verdict="Fits" if fits else "Does not fit",
        figures=f"peak {display_bytes(peak)} of {display_bytes(usable)} usable, {display_ms(step_ms)} a step",
        subject=subject,
        sentences=(
            f"The step as it is {f'leaves {rest} of the device free' if fits else f'needs {rest} more than there is'}.",
            "No plan was made: this is what the step takes when nothing is changed.",
        ),
    )


def _infeasible(plan: Plan, subject: str) -> Headline:
    sentences = []
    least = plan.minimum_budget_bytes
    if least is not None:
        more = display_bytes(least - plan.budget_bytes)
        sentences.append(f"The smallest budget that works is {display_bytes(least)}, {more} more than this one.")
    if plan.blocker is not None:
        lowest = display_bytes(plan.blocker.peak_bytes)
        sentences.append(f"What stands in the way: {place(plan.blocker.peak_at)}, where no plan gets below {lowest}.")
    sentences.append(_before(plan))
    return Headline(
        tone="bad",
        verdict="Does not fit",
        figures=f"no plan keeps the step within {display_bytes(plan.budget_bytes)}",
        subject=subject,
        sentences=tuple(sentences),
    )


def _planned(plan: Plan, subject: str) -> Headline:
    predicted = plan.predicted
    assert predicted is not None
    peak, budget = display_bytes(predicted.peak_bytes), display_bytes(plan.budget_bytes)
    sentences = [_before(plan), _does(plan)]
    if plan.shard is not None:
        sentences.append(
            f"Parameters are sharded over {plan.shard.ranks} ranks in {counted(len(plan.shard.units), 'unit')}; "
            f"{display_ms(predicted.exposed_communication_ms)} a step is spent waiting for communication."
        )
    if plan.optimizer is not None:
        sentences.append(f"The optimizer's step is done {_WAYS[plan.optimizer]}, which needs less at once.")
    sentences.append(_proof(plan))
    return Headline(
        tone="good",
        verdict="Fits",
        figures=f"peak {peak} of a {budget} budget, {display_ms(predicted.step_ms)} a step",
        subject=subject,
        sentences=tuple(sentences),
    )


def _before(plan: Plan) -> str:
    over = plan.baseline.peak_bytes - plan.budget_bytes
    first = "Without a plan" if plan.ranks == 1 else "Only sharded"
    peak = display_bytes(plan.baseline.peak_bytes)
    if over > 0:
        return f"{first}, the step peaks at {peak}, {display_bytes(over)} above the budget."
    return f"{first}, the step peaks at {peak} and fits the budget already."


def _does(plan: Plan) -> str:
    """What the plan changes, with the units that it checkpoints."""
    if not plan.checkpoint:
        return "The plan recomputes nothing."
    assert plan.predicted is not None
    groups: dict[str, list[str]] = {}
    for entry in plan.checkpoint:
        groups.setdefault(alike(entry.unit), []).append(entry.unit)
    names = [named(folded(units)) for units in groups.values()]
    shown = ", ".join(names[:_NAMES]) + (f" and {len(names) - _NAMES} more" if len(names) > _NAMES else "")
    dropped = display_bytes(sum(entry.discarded_bytes for entry in plan.checkpoint))
    again_ms = plan.predicted.recompute_ms
    part = again_ms / plan.baseline.step_ms if plan.baseline.step_ms else 0.0
    return (
        f"The plan checkpoints {counted(len(plan.checkpoint), 'unit')} ({shown}): they hold {dropped} less for "
        f"backward and compute it again there, which takes {display_ms(again_ms)} a step ({part:.1%})."
    )


def _proof(plan: Plan) -> str:
    if plan.status == "optimal" and plan.gap == 0:
        return "No plan under this budget is faster (proven)."
    assert plan.bound_ms is not None and plan.gap is not None
    return (
        f"No plan under this budget has a step below {display_ms(plan.bound_ms)} (proven); "
        f"the time that this one adds may be {plan.gap:.2%} from the least possible."
    )


def place(at: PeakAt) -> str:
    """Where a peak is, in words."""
    if at.second_run_of is not None:
        return f"the second run of {named(at.second_run_of)}"
    if not at.name:
        return at.phase
    module = "outside any module" if at.module is None else f"in {named(at.module)}"
    return f"{at.phase}, {short(at.name)}, {module}"
