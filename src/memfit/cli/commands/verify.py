"""`memfit verify`: a plan beside what really happens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from memfit.cli.options import Engines, Json, StepOptions, arg, number
from memfit.cli.output import show, show_json, to_json, write_text
from memfit.cli.problems import DONE, FAILED, UsageError, check_files
from memfit.cli.ranks import joined_ranks, wait_for_ranks
from memfit.cli.resolve import read_plan, resolve_step
from memfit.errors import MemfitError
from memfit.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Run a training step with a plan and without it, and show what was predicted beside what was measured.

    The exit code is 0 when the plan holds: the same gradients, and a peak within the budget and as predicted.
    It is 1 when it does not. A time that is off is remarked on; it counts when --time-tolerance is given.

    A plan for several ranks is run by all of them; rank 0 prints.

    examples:
      memfit verify plan.json train.py:step
      memfit verify plan.json train.py:step --time-tolerance 0.3 --json
      torchrun --nproc-per-node 2 -m memfit verify plan.json train.py:step --engine fsdp2
    """

    plan: Annotated[tyro.conf.Positional[Path], arg("PLAN")]
    """The plan, as `memfit plan -o` or Plan.save wrote it."""
    step: StepOptions
    engine: Annotated[Engines, arg("{fsdp2,sharded}", "the plan's, or sharded")] = None
    """What shards the model, for a plan of several ranks that leaves it open."""
    steps: Annotated[int, arg("N", "3")] = 3
    """Steps whose median is the measured time."""
    memory_tolerance: Annotated[float, arg("PART", "0.01")] = 0.01
    """How far the measured peak may be from its prediction, as a part of it."""
    time_tolerance: Annotated[float | None, number(float, "0.3"), arg("PART", "a remark beyond 0.15")] = None
    """The same of the step's time, which is then part of the verdict."""
    output: Annotated[Path | None, arg("FILE", "", "-o")] = None
    """Where to write what was found (JSON), for memfit report --verified."""
    json: Json = False
    """Print JSON."""

    def run(self) -> int:
        from memfit.capture import Trace
        from memfit.verify import TIME_TOLERANCE, verify

        check_files({"--output": self.output})
        self._check()
        plan = read_plan(self.plan)
        ranks = 1 if plan.shard is None else plan.ranks
        with joined_ranks(
            ranks, plan.trace.device_type, "verify"
        ) as rank:  # before the step is made, which may ask for its rank
            step = resolve_step(self.step).step
            if isinstance(step, Trace):
                raise UsageError(f"STEP: {self.step.step} is a trace, which cannot be run; give train.py:function")
            try:
                with Progress("running the step with the plan and without it", show=rank == 0):
                    found = verify(
                        plan,
                        step,
                        self.steps,
                        memory_tolerance=self.memory_tolerance,
                        time_tolerance=self.time_tolerance,
                        engine=self.engine,
                    )
            except MemfitError:
                if rank == 0:
                    raise
                return FAILED  # rank 0 was told, and says it
            finally:
                wait_for_ranks(ranks)
        if rank:
            return DONE if found.ok else FAILED
        if self.output is not None:
            write_text("--output", self.output, to_json(found))
        if self.json:
            show_json(found)
        else:
            remarked = TIME_TOLERANCE if self.time_tolerance is None else self.time_tolerance
            show(replace(found, time_tolerance=remarked))
        return DONE if found.ok else FAILED

    def _check(self) -> None:
        if self.steps < 1:
            raise UsageError(f"--steps is {self.steps}; write a whole number of at least 1")
        for name in ("memory_tolerance", "time_tolerance"):
            part = getattr(self, name)
            if part is not None and not part >= 0:
                raise UsageError(f"--{name.replace('_', '-')} is {part:g}; write a part such as 0.1, at least 0")
