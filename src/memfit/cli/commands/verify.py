"""`memfit verify`: a plan beside what really happens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from memfit.cli.given import plan_given, step_given
from memfit.cli.options import Json, StepOptions, arg
from memfit.cli.output import Work, json_of, say, show, show_json
from memfit.cli.problems import UsageError, check_files


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Run a training step with a plan and without it, and show what was predicted beside what was measured.

    The exit code is 0 when everything is within the tolerances and 1 when something is not.

    examples:
      memfit verify plan.json train.py:step
      memfit verify plan.json train.py:step --time-tolerance None --json
    """

    plan: Annotated[tyro.conf.Positional[Path], arg("PLAN")]
    """The plan, as `memfit plan -o` or Plan.save wrote it."""
    step: StepOptions
    steps: Annotated[int, arg("N", "3")] = 3
    """Steps whose median is the measured time."""
    memory_tolerance: Annotated[float, arg("PART", "0.01")] = 0.01
    """How far the measured peak may be from its prediction, as a part of it."""
    time_tolerance: Annotated[float | None, arg("PART", "0.15")] = 0.15
    """The same of the step's time; None shows times without judging them."""
    output: Annotated[Path | None, arg("FILE", "", "-o")] = None
    """Where to write what was found (JSON), for memfit report --verified."""
    json: Json = False
    """Print JSON."""

    def run(self) -> int:
        from memfit.trace import Trace
        from memfit.verify import verify

        check_files({"--output": self.output})
        plan = plan_given(self.plan)
        step = step_given(self.step).step
        if isinstance(step, Trace):
            raise UsageError(f"STEP: {self.step.step} is a trace, which cannot be run; give train.py:function")
        with Work("running the step with the plan and without it"):
            found = verify(
                plan, step, self.steps, memory_tolerance=self.memory_tolerance, time_tolerance=self.time_tolerance
            )
        if self.output is not None:
            self.output.write_text(json_of(found))
            say(f"wrote {self.output}")
        if self.json:
            show_json(found)
        else:
            show(found)
        return 0 if found.ok else 1
