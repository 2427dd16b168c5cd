"""print(curve): what every budget costs, and what more of it would save."""

from __future__ import annotations

import pytest

from memfit.solve import Curve, CurvePoint, Status
from memfit.units import GiB, MiB


def curve_over(span: int, *, gap: float = 0.0) -> Curve:
    """Three budgets, `span` apart; half of the added time goes in each step."""
    times = (130.0, 110.0, 100.0)
    points = []
    for number, step_ms in enumerate(times):
        gained = step_ms - times[number + 1] if number + 1 < len(times) else 0.0
        budget = 20 * GiB + number * span
        points.append(
            CurvePoint(
                budget_bytes=budget,
                peak_bytes=budget,
                step_ms=step_ms,
                recompute_ms=step_ms - 100.0,
                status=Status.FEASIBLE if gap else Status.OPTIMAL,
                gap=gap if step_ms > 100.0 else 0.0,
                price_ms_per_gib=gained / (span / GiB),
            )
        )
    return Curve(points=tuple(points), baseline_bytes=20 * GiB + 2 * span, baseline_ms=100.0)


def rows_of(curve: Curve) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")] for line in str(curve).splitlines() if "│" in line]


def test_headline_and_rows() -> None:
    curve = curve_over(2 * GiB)
    first = str(curve).splitlines()[0]
    assert first.startswith("from 20.00 GiB, the smallest budget that works (30.0% slower), to 24.00 GiB")
    assert "each further GiB saves" in str(curve)
    assert rows_of(curve) == [
        ["20.00 GiB", "20.00 GiB", "130.0 ms", "30.0%", "10.0 ms"],
        ["22.00 GiB", "22.00 GiB", "110.0 ms", "10.0%", "5.0 ms"],
        ["24.00 GiB", "24.00 GiB", "100.0 ms", "", ""],
    ]


def test_small_curves_are_priced_by_the_mib() -> None:
    curve = curve_over(100 * MiB)
    assert "each further MiB saves" in str(curve)
    assert rows_of(curve)[0][-1] == "200 us"


def test_what_is_not_proven_shows_its_gap() -> None:
    assert "gap" not in str(curve_over(GiB))
    shown = str(curve_over(GiB, gap=0.25))
    assert "gap" in shown and "25.00%" in shown


def test_it_fits_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = str(curve_over(GiB, gap=0.25))
    assert max(map(len, shown.splitlines())) <= 80 and len(rows_of(curve_over(GiB))) == 3


def test_a_step_that_cannot_give_anything_up_says_so() -> None:
    curve = curve_over(GiB)
    last = Curve(points=curve.points[-1:], baseline_bytes=curve.baseline_bytes, baseline_ms=curve.baseline_ms)
    assert str(last).startswith("nothing gets below 22.00 GiB")


def test_repr_is_one_short_line() -> None:
    shown = repr(curve_over(GiB))
    assert shown.startswith("Curve(from 20.00 GiB") and shown.endswith("points: 3)") and len(shown) < 150
