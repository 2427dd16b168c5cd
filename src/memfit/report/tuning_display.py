"""A tuning for people: the plans that were run, the fastest first, and the one that was kept."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from memfit.text import number_table
from memfit.units import display_bytes, display_ms

if TYPE_CHECKING:
    from memfit.verify import TimedPlan, Tuning

_FAR = 0.25
"""Predictions that are farther off than this part are remarked on: which plans come near depends on them."""


def tuning_report(found: Tuning) -> Group:
    """Show what each plan was predicted to take and took, then the plan that was kept."""
    parts: list[RenderableType] = []
    if len(found.tried) > 1:
        table = number_table("plan", "peak", "predicted", "measured", "", "rounds", title="run here, by turns")
        kept_ms = found.tried[0].measured_ms
        for each in found.tried:
            table.add_row(each.label, *_cells(each, kept_ms))
        parts += [table, Text(f"kept: {found.tried[0].label}, {display_ms(kept_ms)} a step", style="bold")]
        parts += [*_far_off(found.tried[0]), Text()]
    elif found.plan.predicted is not None:
        parts += [
            Text("no other plan comes near this one, so nothing was run; try a smaller budget, or more decisions")
        ]
        parts += [Text()]
    return Group(*parts, found.plan.__rich__())


def _far_off(kept: TimedPlan) -> list[RenderableType]:
    """Say that predictions are far from what was measured, where they are."""
    assert kept.plan.predicted is not None
    error = kept.measured_ms / kept.plan.predicted.step_ms - 1
    if abs(error) <= _FAR:
        return []
    hint = "`memfit calibrate` measures this machine: plan with the device that it writes"
    return [Text(f"steps are {error:+.0%} from their prediction; {hint}", style="yellow")]


def _cells(each: TimedPlan, kept_ms: float) -> tuple[str, ...]:
    predicted = each.plan.predicted
    assert predicted is not None
    if math.isinf(each.measured_ms):
        measured, slower = "out of memory", ""
    else:
        measured = display_ms(each.measured_ms)
        slower = f"{each.measured_ms / kept_ms - 1:+.1%}" if each.measured_ms != kept_ms else ""
    peak, step = display_bytes(predicted.peak_bytes), display_ms(predicted.step_ms)
    return peak, step, measured, slower, str(len(each.rounds_ms))
