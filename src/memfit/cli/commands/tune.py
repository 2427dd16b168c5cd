"""`memfit tune`: the plan that is the fastest on this machine, by running those that may be."""

from __future__ import annotations

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
    from memfit.verify import Tuning


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

        check_files({"--output": self.output})
        for name in ("rounds", "steps"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name} is {getattr(self, name)}; write a whole number of at least 1")
        if self.hardware.mesh is not None:
            raise UsageError("--mesh: the step shards its model by itself, and memfit runs plans that it applies")
        target = resolve_target(self.hardware)
        with joined_ranks(target.ranks, target.device.type, "tune") as rank:  # before the step, which may ask for it
            given, target = step_and_target(self.step, self.hardware)
            if isinstance(given.step, Trace):
                raise UsageError(f"STEP: {self.step.step} is a trace, which cannot be run; give train.py:function")
            if rank == 0:
                given.show()
            try:
                found = self._tune(given.step, target, show_progress=rank == 0)
            except MemfitError:
                if rank == 0:
                    raise
                return FAILED  # rank 0 was told, and says it
            finally:
                wait_for_ranks(target.ranks)
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

    def _tune(self, step: Step, target: Target, *, show_progress: bool) -> Tuning:
        from memfit.verify import tune

        trace = capture_step(step, target, self.hardware, self.solver)  # for names with a star
        options = solve_options(self.solver, trace, several_ranks=target.ranks > 1, ranks=target.ranks)
        return tune(
            step,
            budget=self.hardware.budget,
            target=target,
            cost=self.step.cost,
            options=options,
            rounds=self.rounds,
            steps=self.steps,
            progress=show_progress,
        )
