"""A tuning for people: the plans that were run, the fastest first, and the one that was kept."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from memfit.text import counted, number_table
from memfit.units import display_bytes, display_ms

if TYPE_CHECKING:
    from memfit.verify import TimedPlan, Tuning

_NOTHING = "-"


def tuning_report(found: Tuning) -> Group:
    """Show what each plan was predicted to take and took, then the plan that was kept."""
    parts: list[RenderableType] = []
    if len(found.tried) > 1:
        table = number_table("plan", "peak", "predicted", "measured", "", "rounds", title="run here, by turns")
        fastest_ms = found.tried[0].measured_ms
        for each in found.tried:
            table.add_row(each.label, *_cells(each, fastest_ms))
        parts += [table, Text()]
    elif found.plan.predicted is not None:
        parts += [Text("no other plan comes near this one, so nothing was run"), Text()]
    return Group(*parts, found.plan.__rich__())


def _cells(each: TimedPlan, fastest_ms: float) -> tuple[str, ...]:
    predicted = each.plan.predicted
    assert predicted is not None
    if math.isinf(each.measured_ms):
        return display_bytes(predicted.peak_bytes), display_ms(predicted.step_ms), "out of memory", _NOTHING, _NOTHING
    return (
        display_bytes(predicted.peak_bytes),
        display_ms(predicted.step_ms),
        display_ms(each.measured_ms),
        f"{each.measured_ms / fastest_ms - 1:+.1%}" if each.measured_ms != fastest_ms else "",
        counted(len(each.rounds_ms), "round"),
    )
