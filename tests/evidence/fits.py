"""Plans that say "fits", held to it: four steps of each at the limit of what a rank has.

python -m tests.evidence.fits

A plan is made as the command makes it. Then its events go through a new allocator that may reserve what the device has,
less context, NCCL and margin, step after step, and every failed allocation and every emptied cache is counted. Nothing
of the planner's own verdict is used.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memfit.analysis import Report
from memfit.cost import Roofline
from memfit.hardware import Target
from memfit.memory import AllocationTable, CachingAllocator, ProcessEvents, allocator_config
from memfit.memory.allocator import FREE, AllocatorOutOfMemory
from memfit.memory.convolution_workspace import convolution_workspaces, with_convolutions
from memfit.plans import Inputs, Plan, plan_problem
from memfit.presets import named_steps_at
from memfit.solve import Problem, SolveOptions
from memfit.units import display_bytes

STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A plan to be made: a built-in shape on a target."""

    shape: str
    target: str
    ranks: int = 1
    batch: int = 1
    seq: int | None = None

    @property
    def name(self) -> str:
        """The words of the command."""
        seq = "" if self.seq is None else f" --seq {self.seq}"
        return f"{self.shape} -t {self.target} -n {self.ranks} --batch {self.batch}{seq}"


README = Asked(shape="llama3-8b", target="h100-sxm", ranks=8, batch=2, seq=8192)
"""The plan of the README."""
PLANS = (
    README,
    Asked(shape="llama3-8b", target="h100-sxm", ranks=8, batch=1, seq=8192),
    Asked(shape="llama3-8b", target="h100-sxm", ranks=32, batch=2, seq=8192),
    Asked(shape="llama3-8b", target="a100-sxm-80gb", ranks=8, batch=2, seq=8192),
    Asked(shape="llama3-8b", target="a100-sxm-80gb", ranks=32, batch=1, seq=8192),
    Asked(shape="bert-base", target="rtx-4090", batch=64),
    Asked(shape="bert-large", target="v100-sxm2-32gb", batch=32),
    Asked(shape="bert-large", target="a100-sxm-40gb", ranks=4, batch=64),
    Asked(shape="gpt2", target="rtx-4090", batch=16),
    Asked(shape="gpt2", target="rtx-3090", ranks=2, batch=16),
    Asked(shape="gpt2-medium", target="a10g", ranks=4, batch=8),
    Asked(shape="gpt2-large", target="l40s", batch=8),
    Asked(shape="gpt2-large", target="h100-sxm", ranks=8, batch=32),
    Asked(shape="gpt2-xl", target="a100-sxm-80gb", batch=8),
    Asked(shape="gpt2-xl", target="a100-sxm-40gb", ranks=8, batch=8),
    Asked(shape="llama3.2-1b", target="a100-sxm-80gb", batch=2, seq=8192),
    Asked(shape="llama3.2-1b", target="rtx-4090", batch=1, seq=2048),
    Asked(shape="llama3.2-3b", target="h100-sxm", ranks=8, batch=4, seq=8192),
    Asked(shape="llama3.2-3b", target="h200", batch=2, seq=8192),
    Asked(shape="llama3-70b", target="h100-sxm", ranks=64, batch=1, seq=8192),
    Asked(shape="mixtral-8x7b", target="h100-sxm", ranks=64, batch=1, seq=4096),
    Asked(shape="qwen3-0.6b", target="l4", batch=1, seq=4096),
    Asked(shape="qwen3-8b", target="h100-sxm", ranks=8, batch=2, seq=4096),
    Asked(shape="qwen3-32b", target="h100-sxm", ranks=32, batch=2, seq=4096),
    Asked(shape="vit-large", target="a100-sxm-40gb", batch=256),
    Asked(shape="vit-huge", target="h100-sxm", ranks=8, batch=128),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a plan; `emptied` counts, step by step, how often the cache was given back."""

    asked: Asked
    plan: Plan
    problem: Problem
    limit_bytes: int
    reserved_bytes: int
    emptied: tuple[int, ...]
    failed_step: int | None

    @property
    def says_fits(self) -> bool:
        """Whether the plan says that it fits, without care."""
        return self.plan.predicted is not None and self.plan.predicted.room == "enough"

    @property
    def fits(self) -> bool:
        """Whether no allocation failed and no step after the first emptied the cache."""
        return self.failed_step is None and not any(self.emptied[1:])

    @property
    def needed_bytes(self) -> int:
        """What the device must have: what was reserved, and what stands beside it in the plan."""
        target = self.plan.target
        beside = (target.context_bytes, target.nccl_bytes, target.margin_bytes)
        return self.reserved_bytes + sum(each or 0 for each in beside)


def outcome_of(asked: Asked) -> Outcome:
    """Make a plan and run four steps of it at the limit."""
    target = Target.parse(asked.target, ranks=asked.ranks)
    step = named_steps_at(asked.shape)(batch=asked.batch, seq=asked.seq).step
    plan, problem = plan_problem(
        Inputs(step=step, trace=None, target=target, cost=Roofline.of(target), options=SolveOptions(), progress=False)
    )
    report = Report(problem=problem, plan=plan)
    limit_bytes = plan.target.usable_bytes
    assert limit_bytes is not None
    replay = report.planned or report.baseline
    tables, workspaces = [replay.allocations], convolution_workspaces(problem.trace)
    if workspaces is not None:  # also with the largest that cuDNN may take
        tables.append(with_convolutions(replay.allocations, workspaces))
    runs = [run_at(each, target, limit_bytes) for each in tables]
    reserved_bytes, emptied, failed_step = max(runs, key=lambda run: (run[2] is not None, sum(run[1][1:]), run[0]))
    return Outcome(
        asked=asked,
        plan=plan,
        problem=problem,
        limit_bytes=limit_bytes,
        reserved_bytes=reserved_bytes,
        emptied=emptied,
        failed_step=failed_step,
    )


def run_at(table: AllocationTable, target: Target, limit_bytes: int) -> tuple[int, tuple[int, ...], int | None]:
    """Run steps on a new allocator: what it reserved, how often each emptied the cache, and which one failed."""
    allocator = CachingAllocator(allocator_config(target.device, limit_bytes=limit_bytes))
    process = ProcessEvents(table)
    emptied: list[int] = []
    for number, rows in zip(range(1, STEPS + 1), process.steps(), strict=False):
        before = allocator.retries
        for _, key, requested_bytes in rows:
            if requested_bytes == FREE:
                allocator.free(key)
                continue
            try:
                allocator.malloc(key, requested_bytes, process.streams[key])
            except AllocatorOutOfMemory:
                return allocator.peak_reserved_bytes, (*emptied, allocator.retries - before), number
        emptied.append(allocator.retries - before)
    return allocator.peak_reserved_bytes, tuple(emptied), None


def rows_of(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield a table in Markdown with a row for each plan."""
    yield "| plan | says | peak | reserved | context + NCCL + margin | device | failed | emptied, by step |"
    yield "|---|---|---|---|---|---|---|---|"
    for each in outcomes:
        target, predicted = each.plan.target, each.plan.predicted
        peak = "-" if predicted is None else display_bytes(predicted.peak_bytes)
        says = "fits" if each.says_fits else each.plan.status if predicted is None else f"with care: {predicted.room}"
        beside = " + ".join(
            display_bytes(n_bytes or 0) for n_bytes in (target.context_bytes, target.nccl_bytes, target.margin_bytes)
        )
        failed = "no" if each.failed_step is None else f"step {each.failed_step}"
        cells = [each.asked.name, says, peak, display_bytes(each.reserved_bytes), beside]
        cells += [display_bytes(target.memory_total_bytes), failed, ", ".join(map(str, each.emptied))]
        yield f"| {' | '.join(cells)} |"


def main() -> int:
    """Print the table; 1 when a plan that says it fits does not."""
    outcomes = [outcome_of(asked) for asked in PLANS]
    print("\n".join(rows_of(outcomes)))
    wrong = [each for each in outcomes if each.says_fits and not each.fits]
    print(
        f"\n{sum(each.says_fits for each in outcomes)} of {len(outcomes)} plans say that they fit; wrong: {len(wrong)}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
