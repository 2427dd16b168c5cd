"""The levers of a step in a few lines; `memfit explain` has them in full."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from memfit.progress import Progress
from memfit.text import number_table
from memfit.units import display_bytes, display_ms

if TYPE_CHECKING:
    from memfit.analysis.levers import Lever
    from memfit.analysis.report import Report
    from memfit.capture import Step, Trace
    from memfit.plans import Plan

_SHOWN = 5
_SHOWN_HOPELESS = 8


def find_levers(report: Report, step: Step | Trace, cost: str) -> tuple[Lever, ...]:
    """What would lower the peak of the step: under the plan where there is one, under the plan that needs least where
    nothing fits."""
    from memfit.analysis.levers import Case, find_levers
    from memfit.capture import Step
    from memfit.plans.resolve import resolve_cost

    budget_bytes = report.target.usable_bytes if report.plan is None else report.plan.budget_bytes
    case = Case(
        report=report,
        step=step if isinstance(step, Step) else None,
        cost=resolve_cost(cost, report.target),
        budget_bytes=budget_bytes,
    )
    with Progress("working out levers") as work:
        return find_levers(case, watch=work.add)


def levers_in_short(levers: Sequence[Lever], plan: Plan, explain: str) -> RenderableType:
    """The first few of them, and the command that has the rest. Where nothing fits, all that would make it fit."""
    from memfit.analysis.levers import enough

    hopeless = plan.predicted is None
    if not levers:
        return Text(f"\nno lever that memfit knows would lower this peak {'' if hopeless else 'further'}".rstrip())
    title = "what would lower this peak further: free ones first, then by bytes saved for each millisecond"
    if hopeless:
        title = "what would help, on top of the plan that needs least: what is enough by itself comes first"
    table = number_table("lever", "saves", "peak then", "a step takes", *(["for the budget"] if hopeless else []))
    shown = sorted(levers, key=lambda lever: hopeless and lever.peak_bytes > plan.budget_bytes)
    shown = shown[: _SHOWN_HOPELESS if hopeless else _SHOWN]
    for lever in shown:
        name = Text(lever.name if lever.same_numbers else f"{lever.name} *")
        if lever.option:
            name.append(f" ({lever.option})", style="dim")
        cells = [display_bytes(lever.saves_bytes), display_bytes(lever.peak_bytes), _longer(lever.costs_ms)]
        table.add_row(name, *cells, *([enough(lever, plan.budget_bytes)] if hopeless else []))
    more = len(levers) - len(shown)
    rest = f"{more} more, and how each is done" if more > 0 else "how each is done"
    other = "" if all(lever.same_numbers for lever in shown) else "*: computes other numbers\n"
    return Group(Text(), Text(title, style="italic"), table, Text(f"{other}{rest}: {explain}", style="dim"))


def _longer(costs_ms: float | None) -> str:
    if costs_ms is None:
        return "unknown"
    if costs_ms == 0:
        return "as long"
    return f"{display_ms(abs(costs_ms))} {'longer' if costs_ms > 0 else 'less'}"
