"""`memfit explain`: what fills the memory of a step, and what would help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from memfit.cli.options import HardwareOptions, Json, TimedStepOptions, arg
from memfit.cli.output import show_result
from memfit.cli.problems import UsageError
from memfit.cli.resolve import parse_mesh, parse_rank, read_plan, resolve_step, step_and_target


@dataclass(frozen=True, kw_only=True)
class Explain:
    """What fills the peak, by category, module and line of code; what holds it; and the levers that would lower it.

    STEP may also be a plan (.json) by itself; with --plan the step is explained as it runs under the plan.

    examples:
      memfit explain llama3-8b --target h100-sxm --ranks 8
      memfit explain train.py:step --target rtx-4090 --budget 20GiB
      memfit explain train.py:step --plan plan.json
      memfit explain plan.json
    """

    step: TimedStepOptions
    hardware: HardwareOptions
    plan: Annotated[Path | None, arg("FILE")] = None
    """A plan for this step, as `memfit plan -o` wrote it."""
    levers: Annotated[bool, tyro.conf.arg(help_behavior_hint="(default: --levers)")] = True
    """Work out what would lower the peak, which captures the step in other ways."""
    json: Json = False
    """Print JSON."""

    def run(self) -> int:
        from memfit.analysis import explain

        path = Path(self.step.step)
        if path.suffix == ".json" and not self.step.step.startswith("hf:"):
            self._check_no_hardware(path)
            if self.plan is not None:
                raise UsageError(f"--plan: STEP is a plan already ({path}); give the step that it is for as STEP")
            found = explain(read_plan(path, "STEP"))
        elif self.plan is not None:
            self._check_no_hardware(self.plan)
            plan = read_plan(self.plan, "--plan")
            given = resolve_step(self.step)
            given.show()
            found = explain(plan, given.step, budget=self.hardware.budget, cost=self.step.cost, levers=self.levers)
        else:
            given, target = step_and_target(self.step, self.hardware)
            given.show()
            found = explain(
                given.step,
                target=target,
                mesh=parse_mesh(self.hardware.mesh),
                rank=parse_rank(self.hardware.rank),
                budget=self.hardware.budget,
                cost=self.step.cost,
                levers=self.levers,
            )
        show_result(found, json=self.json)
        return 0

    def _check_no_hardware(self, plan: Path) -> None:
        for name, own in (
            ("target", "its own target"),
            ("ranks", "its own number of ranks"),
            ("mesh", "its own mesh"),
            ("rank", "its own rank"),
        ):
            if getattr(self.hardware, name) is not None:
                raise UsageError(f"--{name}: the plan {plan} has {own}; leave --{name} out")
