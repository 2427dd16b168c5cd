"""`memfit curve`: the whole trade-off of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from rich.text import Text

from memfit.cli.options import HardwareOptions, Json, SolverOptions, TimedStepOptions, arg
from memfit.cli.output import plain, show, show_json
from memfit.cli.problems import about
from memfit.cli.resolve import capture_step, solve_options, step_and_target

if TYPE_CHECKING:
    from memfit.solve import Curve as Found


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Memory against time: from the smallest budget that works to the one where nothing is recomputed.

    With --budget it also says what more would buy there; the exit code is 3 when nothing fits that budget.

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
        from memfit.capture import Step
        from memfit.plans import curve
        from memfit.solve import check_points

        with about("--points"):
            check_points(self.points)
        given, target = step_and_target(self.step, self.hardware)
        step = given.step
        given.show()
        trace = capture_step(step, target, self.hardware, self.solver)
        options = solve_options(self.solver, trace, several_ranks=target.ranks > 1, ranks=target.ranks)
        cast = options.shard.param_dtype is not None and isinstance(step, Step)  # captured again, in that dtype
        found = curve(step if cast else trace, target=target, points=self.points, cost=self.step.cost, options=options)
        budget = self.hardware.budget
        budget_bytes = None if budget is None else target.budget_bytes(budget)
        fits = budget_bytes is None or budget_bytes >= found.minimum_budget_bytes
        price = _price(found, budget_bytes) if budget_bytes is not None and fits else None
        if self.json:
            show_json({**plain(found), "price": price})
        else:
            show(found)
            if budget_bytes is not None:
                show(Text(_at(found, budget_bytes, price)))
        return 0 if fits else 3


def _price(curve: Found, budget_bytes: int) -> dict[str, float]:
    return {"budget_bytes": budget_bytes, "ms_per_gib": curve.price_ms_per_gib(budget_bytes)}


def _at(curve: Found, budget_bytes: int, price: dict[str, float] | None) -> str:
    """Return what more would buy at a budget, or that nothing fits it."""
    from memfit.units import GiB, MiB, display_budget, display_bytes, display_ms

    budget, least = display_bytes(budget_bytes), display_budget(curve.minimum_budget_bytes)
    if price is None:
        return f"no plan fits {budget}; the smallest budget that works is {least}"
    wide = curve.baseline_bytes - curve.minimum_budget_bytes >= GiB
    unit, part = ("GiB", 1.0) if wide else ("MiB", MiB / GiB)
    return f"at {budget}, each further {unit} saves {display_ms(price['ms_per_gib'] * part)} of a step"
