"""`memfit plan`: from a step to the plan, and to the files that show it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from memfit.cli.options import FileOptions, HardwareOptions, Json, SolverOptions, TimedStepOptions, arg
from memfit.cli.output import show, show_json, write_files, write_text
from memfit.cli.problems import UsageError, check_files
from memfit.cli.resolve import ResolvedStep, capture_step, find_levers, solve_options, step_and_target

if TYPE_CHECKING:
    from memfit.analysis import EarlyCaptures
    from memfit.hardware import Target


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The fastest plan for a training step that fits the memory, proven. No GPU is needed.

    The exit code is 3 when nothing fits; the plan then says the smallest budget that works.

    examples:
      memfit plan llama3-8b --target h100-sxm --ranks 8 --batch 2 --seq 8192
      memfit plan train.py:step -t a100-sxm-80gb -b 60GiB -o plan.json
      memfit plan hf:config.json -t h100-sxm --batch 4 --html report.html
      memfit plan gpt2 -t rtx-4090 --batch 16 --forbid 'layers.*.attention'
    """

    step: TimedStepOptions
    hardware: HardwareOptions
    solver: SolverOptions
    file: FileOptions
    optimizer_lever: Json = False
    """Also choose how the optimizer does its step: one tensor after another, on lists, or fused."""
    output: Annotated[Path | None, arg("FILE", "", "-o")] = None
    """Where to write the plan (JSON), for Plan.apply, memfit verify and memfit report."""
    curve: Json = False
    """Show the whole trade-off on the page as well."""
    levers: Annotated[bool, tyro.conf.arg(help_behavior_hint="(default: --levers)")] = True
    """Show what would lower the peak further; memfit explain has all of it."""
    json: Json = False
    """Print the plan as JSON."""

    def run(self) -> int:
        from memfit.analysis import EarlyCaptures
        from memfit.capture import Step, Trace

        check_files({"--output": self.output, **self.file.by_option})
        if self.curve and not self.file.any:
            raise UsageError("--curve is for files that show the plan; add --html FILE, or use memfit curve")
        given, target = step_and_target(self.step, self.hardware)
        step = given.step
        if self.optimizer_lever and isinstance(step, Trace):
            raise UsageError("--optimizer-lever captures the step in other ways; give the step, not its trace")
        changes = self.solver.loss_chunks is not None or {"loss", "optimizer", "micro_batch"} & set(self.solver.decide)
        if changes and isinstance(step, Trace):
            raise UsageError("--decide and --loss-chunks capture the step in other ways; give the step, not its trace")
        given.show()
        plain = self._shows_levers and isinstance(step, Step) and self.hardware.mesh is None
        with EarlyCaptures(step if plain else None, target) as early:
            return self._plan(given, target, early)

    def _plan(self, given: ResolvedStep, target: Target, early: EarlyCaptures) -> int:
        from memfit.capture import CHUNKS, Step
        from memfit.plans import MOST_CHUNKS, Inputs, plan_problem, resolve_cost
        from memfit.report import plan_report

        step = given.step
        trace = capture_step(step, target, self.hardware, self.solver)
        early.drop_useless(trace)
        ranks = target.ranks
        options = solve_options(
            self.solver, trace, several_ranks=ranks > 1, ranks=ranks, optimizer=self.optimizer_lever
        )
        early.begin_chunked_loss(trace, MOST_CHUNKS if "loss" in options.decided else CHUNKS)
        inputs = Inputs(
            step=step if isinstance(step, Step) else None,
            trace=trace,
            target=target,
            cost=resolve_cost(self.step.cost, target),
            options=options,
        )
        found, problem = plan_problem(inputs, budget=self.hardware.budget, early=early.chunked_trace)
        if self.output is not None:
            write_text("--output", self.output, found.to_json())
        if self.json:
            show_json(found)
        else:
            show(plan_report(found, next_step=not self._shows_levers))
        if sys.stdout is not None:
            sys.stdout.flush()  # the plan is known; levers take as long again
        if self.file.any or self._shows_levers:
            from memfit.analysis import Report
            from memfit.report import levers_in_short

            report = Report(problem=problem, plan=found, title=given.title)
            levers = find_levers(report, step, self.step.cost, early) if self.levers else None
            if self.file.any:
                write_files(self.file, report.with_curve() if self.curve else report, levers or ())
            if levers is not None and not self.json:
                show(levers_in_short(levers, found, self._explain()))
        return 3 if found.status == "infeasible" else 0

    @property
    def _shows_levers(self) -> bool:
        return self.levers and (self.file.any or not self.json)

    def _explain(self) -> str:
        """Return the command that explains the step under this plan, once it is written."""
        first = "" if self.output is not None else "write the plan with -o plan.json, then "
        words = ["memfit explain", self.step.step]
        given = {
            "--batch": self.step.batch,
            "--seq": self.step.seq,
            "--autocast": self.step.autocast,
            "--accumulation-steps": self.step.accumulation_steps,
            "--plan": self.output or "plan.json",
        }
        for option, value in given.items():
            words += [] if value is None else [option, str(value)]
        return first + " ".join(words)
