"""`memfit curve`: the whole trade-off of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from rich.text import Text

from memfit.cli.given import captured, solve_options, step_and_target
from memfit.cli.options import HardwareOptions, Json, SolverOptions, TimedStepOptions, arg
from memfit.cli.output import plain, show, show_json
from memfit.cli.problems import about

if TYPE_CHECKING:
    from memfit.solve import Curve as Found


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Memory against time: from the smallest budget that works to the one where nothing is recomputed.

    With --budget it also says what more would buy there.

    examples:
      memfit curve llama3-8b --target h100-sxm --ranks 8 --batch 2 --seq 8192
      memfit curve train.py:step --target a100-sxm-80gb --points 8 --budget 60GiB
    """

    step: TimedStepOptions
    hardware: HardwareOptions
    solver: SolverOptions
    points: Annotated[int, arg("N", "16")] = 16
    """How many budgets to solve for."""
    json: Json = False
    """Print JSON."""

    def run(self) -> int:
        from memfit.plan import curve
        from memfit.solve.curve import check_points
        from memfit.units import GiB, MiB, display_bytes, display_ms

        with about("--points"):
            check_points(self.points)
        given, target = step_and_target(self.step, self.hardware)
        step = given.step
        given.show()
        trace = captured(step, target)
        options = solve_options(self.solver, trace)
        found = curve(trace, target=target, points=self.points, cost=self.step.cost, options=options)
        price = None
        if self.hardware.budget is not None:
            price = _price(found, target.budget_bytes(self.hardware.budget))
        if self.json:
            show_json({**plain(found), "price": price})
            return 0
        show(found)
        if price is not None:
            wide = found.baseline_bytes - found.minimum_budget_bytes >= GiB
            unit, part = ("GiB", 1.0) if wide else ("MiB", MiB / GiB)
            budget, saved = display_bytes(price["budget_bytes"]), display_ms(price["ms_per_gib"] * part)
            show(Text(f"at {budget}, each further {unit} saves {saved} of a step"))
        return 0


def _price(curve: Found, budget_bytes: int) -> dict[str, float]:
    with about("--budget"):
        return {"budget_bytes": budget_bytes, "ms_per_gib": curve.price_ms_per_gib(budget_bytes)}
