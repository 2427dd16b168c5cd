"""The headline of a report: in words, whether the step fits, what it takes and what the plan does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memfit.analysis import Report
from memfit.errors import InputError
from memfit.hardware import load_device
from memfit.memory import Room, judge_room
from memfit.paths import alike, folded, module_label
from memfit.plans import Plan, TargetRecord, describe_peak
from memfit.text import counted
from memfit.units import display_bytes, display_ms

_NAMES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """What a reader sees first. `verdict` is one word or two; `subject` says of what and where."""

    tone: Tone
    verdict: str
    figures: str
    subject: str
    sentences: tuple[str, ...]

    @property
    def title(self) -> str:
        """The title of the document."""
        return f"{self.verdict}: {self.figures} - {self.subject}"


def headline(report: Report) -> Headline:
    """Write the headline of a report."""
    trace, target = report.trace, report.target
    model = trace.modules[0].kind if trace.modules else "the step"
    where = target.device.title if target.ranks == 1 else f"{target.ranks} x {target.device.title}"
    subject = f"{report.title}, on {where}" if report.title else f"{model} on {where}"
    if report.plan is None:
        return _unplanned(report, subject)
    verdict = verdict_of(report.plan, target.usable_bytes)
    sentences = _infeasible(report.plan) if report.plan.predicted is None else _planned(report.plan)
    notes = [f"Note: {note}." for note in report.plan.notes if note not in trace.notes]
    said = (*verdict.reasons, *sentences) if verdict.tone == "care" else (*sentences, *verdict.reasons)
    return Headline(
        tone=verdict.tone,
        verdict=verdict.words,
        figures=verdict.figures,
        subject=subject,
        sentences=(*said, *notes),
    )


def _unplanned(report: Report, subject: str) -> Headline:
    peak, usable = report.baseline.peak_bytes, report.target.usable_bytes
    step_ms = report.runtime.total_ms + report.problem.exposed_ms
    reservation = judge_room(report.target, report.baseline)
    care = peak <= usable and reservation.room is not Room.ENOUGH
    fits = peak <= usable and not care
    rest = display_bytes(abs(usable - peak))
    reserved = display_bytes(reservation.reserved_bytes)
    leaves = f"leaves {rest} of the device free" if fits else f"needs {rest} more than there is"
    if care:
        leaves = f"has room for its tensors, but the caching allocator would reserve {reserved} for them"
    return Headline(
        tone="good" if fits else "care" if care else "bad",
        verdict="Fits" if fits else "Fits, with care" if care else "Does not fit",
        figures=f"peak {display_bytes(peak)} of {display_bytes(usable)} usable, {display_ms(step_ms)} a step",
        subject=subject,
        sentences=(
            f"The step as it is {leaves}.",
            "No plan was made: this is what the step takes when nothing is changed.",
        ),
    )


def _infeasible(plan: Plan) -> list[str]:
    sentences = []
    least = plan.minimum_budget_bytes
    if least is not None:
        more = display_bytes(least - plan.budget_bytes)
        sentences.append(f"The smallest budget that works is {display_bytes(least)}, {more} more than this one.")
    if plan.blocker is not None:
        lowest = display_bytes(plan.blocker.peak_bytes)
        sentences.append(
            f"What stands in the way: {describe_peak(plan.blocker.peak_at)}, where no plan gets below {lowest}."
        )
    return [*sentences, _before(plan)]


def _planned(plan: Plan) -> list[str]:
    predicted = plan.predicted
    assert predicted is not None
    sentences = [_before(plan), _does(plan)]
    if plan.shard is not None:
        sentences.append(
            f"Parameters are sharded over {plan.shard.ranks} ranks in {counted(len(plan.shard.units), 'unit')}; "
            f"{display_ms(predicted.exposed_communication_ms)} a step is spent waiting for communication."
        )
    if plan.ddp is not None:
        sentences.append(
            f"The model is replicated on {plan.ddp.ranks} ranks (DDP), with {counted(len(plan.ddp.buckets), 'bucket')} "
            f"of gradients, {display_bytes(sum(plan.ddp.buckets))}; "
            f"{display_ms(predicted.exposed_communication_ms)} a step is spent on waiting for them and copying them."
        )
    if plan.optimizer is not None:
        sentences.append(f"The optimizer's step is done {STEP_WAYS[plan.optimizer]}, which needs less at once.")
    if plan.chunked_loss:
        sentences.append(
            f"The loss is computed in {plan.chunked_loss.chunks} chunks, which is equal up to the order of sums."
        )
    return [*sentences, _proof(plan)]


def _before(plan: Plan) -> str:
    over = plan.baseline.peak_bytes - plan.budget_bytes
    first = without_plan(plan.ranks, ddp=plan.ddp is not None)
    first = first[:1].upper() + first[1:]
    peak = display_bytes(plan.baseline.peak_bytes)
    if over > 0:
        return f"{first}, the step peaks at {peak}, {display_bytes(over)} above the budget."
    return f"{first}, the step peaks at {peak} and fits the budget already."


def _does(plan: Plan) -> str:
    """Say what the plan changes, with the units that it checkpoints."""
    if not plan.checkpoint:
        return "Nothing needs to be checkpointed: the plan recomputes nothing."
    assert plan.predicted is not None
    groups: dict[str, list[str]] = {}
    for entry in plan.checkpoint:
        groups.setdefault(alike(entry.unit), []).append(entry.unit)
    names = [module_label(folded(units)) for units in groups.values()]
    shown = ", ".join(names[:_NAMES]) + (f" and {len(names) - _NAMES} more" if len(names) > _NAMES else "")
    recomputing = [entry for entry in plan.checkpoint if entry.stop >= 0]
    dropped = display_bytes(sum(entry.discarded_bytes for entry in recomputing))
    again_ms = plan.predicted.recompute_ms
    part = again_ms / plan.baseline.step_ms if plan.baseline.step_ms else 0.0
    checkpoints = (
        f"The plan checkpoints {counted(len(recomputing), 'unit')}{'' if plan.offload_link else f' ({shown})'}: they "
        f"hold {dropped} less for backward and compute it again there, which takes {display_ms(again_ms)} a step "
        f"({part:.1%})."
    )
    if not plan.offload_link:
        return checkpoints
    offloading = [entry for entry in plan.checkpoint if entry.offloaded_bytes]
    away = display_bytes(sum(entry.offloaded_bytes or 0 for entry in offloading))
    waits_ms = plan.predicted.exposed_offload_ms or 0.0
    costs = f"which adds {display_ms(waits_ms)} a step" if waits_ms else "hidden by compute"
    offloads = (
        f"{counted(len(offloading), 'unit')} offload {away} from forward to backward over {plan.offload_link.name}, "
        f"{costs}."
    )
    return f"{checkpoints} {offloads}" if recomputing else offloads


def _proof(plan: Plan) -> str:
    if plan.status == "optimal" and plan.gap == 0:
        return "No plan under this budget is faster (proven)."
    assert plan.bound_ms is not None and plan.gap is not None
    return (
        f"No plan under this budget has a step below {display_ms(plan.bound_ms)} (proven); "
        f"the time that this one adds may be {plan.gap:.2%} from the least possible."
    )


# The verdict, the same on the terminal, on the page and in Markdown


Tone = Literal["good", "care", "bad"]

STEP_WAYS = {
    "single": "one tensor after another (foreach=False)",
    "foreach": "on lists of tensors (foreach=True)",
    "fused": "in one kernel (fused=True)",
}
"""How an optimizer's step is done."""


def without_plan(ranks: int, *, ddp: bool) -> str:
    """Say what a step without its plan is called: on several ranks it is sharded or replicated all the same."""
    if ranks == 1:
        return "without a plan"
    return "only replicated (DDP)" if ddp else "only sharded"


def without_plan_of(report: Report) -> str:
    """Say what the step of a report without its plan is called."""
    return without_plan(report.target.ranks, ddp=report.problem.options.shard.parallel == "ddp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`words` are one or two, `figures` say by how much; `reasons` are sentences on what the allocator does."""

    tone: Tone
    words: str
    figures: str
    reasons: tuple[str, ...] = ()


def verdict_of(plan: Plan, usable_bytes: int | None = None) -> Verdict:
    """Judge whether the step fits under the plan; `usable_bytes` is what the device has for tensors."""
    budget = display_bytes(plan.budget_bytes)
    predicted = plan.predicted
    if predicted is None:
        return Verdict(tone="bad", words="Does not fit", figures=f"no plan keeps the step within {budget}")
    peak = display_bytes(predicted.peak_bytes)
    figures = f"peak {peak} of the {budget} budget, {display_ms(predicted.step_ms)} a step"
    usable_bytes = _usable_bytes(plan) if usable_bytes is None else usable_bytes
    reserved, usable = predicted.reserved, display_bytes(usable_bytes)
    most_bytes = predicted.peak_reserved_high_bytes or predicted.peak_reserved_bytes
    has_room = most_bytes <= usable_bytes if predicted.room is None else predicted.room == "enough"
    if has_room and most_bytes <= plan.budget_bytes:
        return Verdict(tone="good", words="Fits", figures=figures)
    if has_room:
        why = f"The budget is for tensors; the caching allocator reserves {reserved} of {usable} for them."
        return Verdict(tone="good", words="Fits", figures=figures, reasons=(why,))
    why = f"Take care: the caching allocator would reserve {reserved}, and the device has {usable} for tensors."
    if predicted.room == "too little":
        return Verdict(tone="bad", words="Fits the budget, not the device", figures=figures, reasons=(why,))
    return Verdict(tone="care", words="Fits the budget, with care", figures=figures, reasons=(why,))


def rank_memory_of(target: TargetRecord) -> str:
    """Say what one rank has of its device, and what is taken off; empty for plans of earlier versions."""
    if target.usable_bytes is None or target.usable_bytes == target.memory_total_bytes:
        return ""
    taken = [(target.context_bytes, "context"), (target.nccl_bytes, "NCCL"), (target.margin_bytes, "margin")]
    off = [f"{display_bytes(n_bytes)} {name}" for n_bytes, name in taken if n_bytes]
    if target.margin and off:
        off[-1] += f" ({target.margin:.1%})"
    usable, total = display_bytes(target.usable_bytes), display_bytes(target.memory_total_bytes)
    segments = "; expandable segments" if target.expandable_segments else ""
    return f"{usable} of {total} a rank: less {', '.join(off)}{segments}"


def changes_nothing(plan: Plan) -> bool:
    """Return whether the plan leaves the step as it is."""
    return plan.predicted is not None and not plan.checkpoint and plan.optimizer is None and not plan.chunked_loss


def _usable_bytes(plan: Plan) -> int:
    """Return what the plan's device has for tensors; all of its memory where this machine has no figures of it."""
    total_bytes = plan.target.memory_total_bytes
    if plan.target.usable_bytes is not None:
        return plan.target.usable_bytes
    try:
        device = load_device(plan.target.device)
    except InputError:
        return total_bytes
    return device.usable_bytes if device.memory_total_bytes == total_bytes else total_bytes
