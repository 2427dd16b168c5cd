"""A curve for people: what every budget costs in time, and what more of it would save."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.text import Text

from memfit.solve import Curve, CurvePoint
from memfit.text import number_table
from memfit.units import GiB, MiB, display_bytes, display_ms


def describe_curve(curve: Curve) -> str:
    """Return the curve in one line."""
    least = curve.points[0]
    begin, end = display_bytes(least.budget_bytes), display_bytes(curve.baseline_bytes)
    if least.budget_bytes >= curve.baseline_bytes:
        return f"nothing gets below {end}, where nothing is recomputed: {display_ms(curve.baseline_ms)} a step"
    slower = _slower(curve, least)
    at_most = f"{slower} slower" if slower else "no slower"
    return f"from {begin}, the smallest budget that works ({at_most}), to {end}, where nothing is recomputed"


def curve_report(curve: Curve) -> Group:
    """Return the headline and a row for each budget."""
    unit, size = ("GiB", GiB) if curve.baseline_bytes - curve.minimum_budget_bytes >= GiB else ("MiB", MiB)
    proven = all(point.gap == 0 for point in curve.points)
    names = ("budget", "peak", "step", "slower by", f"each further {unit} saves", *(() if proven else ("gap",)))
    table = number_table(*names, left=0)
    for point in curve.points:
        saves = point.price_ms_per_gib * size / GiB
        cells = [
            display_bytes(point.budget_bytes),
            display_bytes(point.peak_bytes) if point.peak_bytes else "",
            display_ms(point.step_ms) if math.isfinite(point.step_ms) else "no plan found",
            _slower(curve, point),
            display_ms(saves) if math.isfinite(saves) and saves > 0 else "",
            *(() if proven else (f"{point.gap:.2%}" if point.gap else "",)),
        ]
        table.add_row(*cells)
    parts: list[RenderableType] = [Text(describe_curve(curve)), Text(), table, Text()]
    parts.append(Text("slower by: than without a limit; saves: of a step, on the way to the next row", "dim"))
    if not proven:
        parts.append(Text("gap: the part of the added time that a better plan could save, at most", "dim"))
    return Group(*parts)


def _slower(curve: Curve, point: CurvePoint) -> str:
    """Return how much longer a step takes than without a limit; nothing when it does not."""
    added_ms = point.step_ms - curve.baseline_ms
    if not math.isfinite(added_ms) or curve.baseline_ms <= 0 or added_ms <= 0:
        return ""
    share = added_ms / curve.baseline_ms
    return f"{share:.1%}" if share >= 5e-4 else "under 0.1%"
