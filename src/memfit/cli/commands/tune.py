"""`memfit tune`: the plan that is the fastest on this machine, by running those that may be."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from memfit.cli.options import HardwareOptions, Json, SolverOptions, TimedStepOptions, arg
from memfit.cli.output import show, show_json, write_text
from memfit.cli.problems import FAILED, UsageError, check_files
from memfit.cli.ranks import joined_ranks, wait_for_ranks
from memfit.cli.resolve import capture_step, resolve_target, solve_options, step_and_target
from memfit.errors import MemfitError

if TYPE_CHECKING:
    from memfit.capture import Step
    from memfit.hardware import Target
    from memfit.solve import SolveOptions


@dataclass(frozen=True, kw_only=True)
class Tune:
    """Plan a training step, run the plan and those that may be as fast here by turns, and keep the fastest.

    The target is this machine. A plan for several ranks is run by all of them; rank 0 plans and prints.
    The exit code is 3 when nothing fits.

    examples:
      memfit tune train.py:step --target cpu-calibrated --budget 8GiB --decide exact -o plan.json
      torchrun --nproc-per-node 8 -m memfit tune train.py:step -t h100-sxm -n 8 --decide all -o plan.json
    """

    step: TimedStepOptions
    hardware: HardwareOptions
    solver: SolverOptions
    rounds: Annotated[int, arg("N", "4")] = 4
    """How often each plan takes its turn; one that falls behind does so less often."""
    steps: Annotated[int, arg("N", "3")] = 3
    """Steps of each turn whose median counts."""
    output: Annotated[Path | None, arg("FILE", "", "-o")] = None
    """Where to write the plan (JSON), for Plan.apply, memfit verify and memfit report."""
    json: Json = False
    """Print what was run, and the plan, as JSON."""

    def run(self) -> int:
        from memfit.capture import Trace
        from memfit.verify import tune

        check_files({"--output": self.output})
        for name in ("rounds", "steps"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name} is {getattr(self, name)}; write a whole number of at least 1")
        if self.hardware.mesh is not None:
            raise UsageError("--mesh: the step shards its model by itself, and memfit runs plans that it applies")
        ranks = self.hardware.ranks or 1
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if started > 1 and ranks == 1:
            raise UsageError(f"torchrun started {started} processes, and the plan is for one; add --ranks {started}")
        target = resolve_target(self.hardware)
        with joined_ranks(ranks, target.device.type, "tune") as rank:  # before the step, which may ask for it
            given, target = step_and_target(self.step, self.hardware)
            if isinstance(given.step, Trace):
                raise UsageError(f"STEP: {self.step.step} is a trace, which cannot be run; give train.py:function")
            if rank == 0:
                given.show()
            options = self._options(given.step, target)
            try:
                found = tune(
                    given.step,
                    budget=self.hardware.budget,
                    target=target,
                    cost=self.step.cost,
                    options=options,
                    rounds=self.rounds,
                    steps=self.steps,
                )
            except MemfitError:
                if rank == 0:
                    raise
                return FAILED  # rank 0 was told, and says it
            finally:
                wait_for_ranks(ranks)
        code = 3 if found.plan.status == "infeasible" else 0
        if rank:
            return code
        if self.output is not None:
            write_text("--output", self.output, found.plan.to_json())
        if self.json:
            show_json(found)
        else:
            show(found)
        return code

    def _options(self, step: Step, target: Target) -> SolveOptions:
        """Return the solver's options; the step is captured only to look up names."""
        solver = self.solver
        named = solver.force or solver.forbid or solver.units or solver.shard_units
        trace = capture_step(step, target, self.hardware, solver) if named else None
        return solve_options(solver, trace, several_ranks=target.ranks > 1, ranks=target.ranks)
