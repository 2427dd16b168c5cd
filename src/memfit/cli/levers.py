"""The levers of a step in a few lines; `memfit explain` has them in full."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memfit.cli.output import Work
from memfit.units import display_bytes, display_ms

if TYPE_CHECKING:
    from memfit.report.facts import Report
    from memfit.report.levers import Lever
    from memfit.trace import Step, Trace

_SHOWN = 5


def levers_given(report: Report, step: Step | Trace, cost: str) -> tuple[Lever, ...]:
    """What would lower the peak of the step, under the plan where there is one."""
    from memfit.plan.given import cost_given
    from memfit.report.levers import Case, levers_of
    from memfit.trace import Step

    budget_bytes = report.target.usable_bytes if report.plan is None else report.plan.budget_bytes
    case = Case(
        report=report,
        step=step if isinstance(step, Step) else None,
        cost=cost_given(cost, report.target),
        budget_bytes=budget_bytes,
    )
    with Work("working out levers") as work:
        return levers_of(case, watch=work.heard)


def levers_in_short(levers: Sequence[Lever], explain: str) -> RenderableType:
    """The first few of them, and the command that has the rest."""
    if not levers:
        return Text("\nno lever that memfit knows would lower this peak further")
    title = "\nwhat would lower this peak further: free ones first, then by bytes saved for each millisecond"
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("lever", overflow="fold")
    for heading in ("saves", "peak then", "a step takes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for lever in levers[:_SHOWN]:
        name = Text(lever.name if lever.same_numbers else f"{lever.name} *")
        table.add_row(name, display_bytes(lever.saves_bytes), display_bytes(lever.peak_bytes), _longer(lever.costs_ms))
    more = len(levers) - _SHOWN
    rest = f"{more} more, and how each is done" if more > 0 else "how each is done"
    other = "" if all(lever.same_numbers for lever in levers[:_SHOWN]) else "*: computes other numbers\n"
    return Group(table, Text(f"{other}{rest}: {explain}", style="dim"))


def _longer(costs_ms: float | None) -> str:
    if costs_ms is None:
        return "unknown"
    if costs_ms == 0:
        return "as long"
    return f"{display_ms(abs(costs_ms))} {'longer' if costs_ms > 0 else 'less'}"
