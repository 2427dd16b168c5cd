"""Predicted step times of joint plans beside those of checkpointing alone, at three budgets for each model.

    python benchmarks/joint_predictions.py                       all of it, the table of docs/design/joint.md
    python benchmarks/joint_predictions.py llama3-8b@8 --decide all

For each model: the step without a limit, then at three budgets, from a little above the smallest that checkpointing can
meet up to what a device has, the plan that only checkpoints and the plan that decides more. Every plan must be proven
(gap 0), be at least as fast, and take at most a minute of this machine; the last line says whether all did.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

import memfit
from memfit.plans import Inputs, Plan, plan_problem
from memfit.presets import step_at
from memfit.solve import DECISIONS, SolveOptions, minimum_budget_bytes
from memfit.units import GiB, display_bytes

TARGET = "h100-sxm"
MOST_SECONDS = 60.0
PARTS = (0.1, 0.4, 0.8)
"""Budgets, between the smallest of checkpointing alone and what the step takes, or the device has, without a plan."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model on so many ranks, with a batch for each."""

    title: str
    ranks: int
    step: Callable[[], memfit.Step]
    budgets: tuple[int, ...] = ()


def unet_step(batch: int = 16) -> memfit.Step:
    """The denoiser of Stable Diffusion 1.5 at 512 x 512, by diffusers' own defaults of that model."""
    from diffusers import UNet2DConditionModel

    def build() -> torch.nn.Module:
        return UNet2DConditionModel(
            sample_size=64, cross_attention_dim=768, attention_head_dim=8, block_out_channels=(320, 640, 1280, 1280)
        )

    inputs = {
        "sample": memfit.spec((batch, 4, 64, 64)),
        "timestep": memfit.spec((batch,), torch.int64),
        "encoder_hidden_states": memfit.spec((batch, 77, 768)),
    }
    return memfit.Step(build, inputs, loss=lambda output, batch: output.sample.square().mean(), autocast=torch.bfloat16)


CASES = {
    "llama3-8b@8": Case("Llama 3 8B, 2 x 8192", 8, lambda: step_at("llama3-8b", batch=2)),
    "llama3-8b@64": Case("Llama 3 8B, 2 x 8192", 64, lambda: step_at("llama3-8b", batch=2)),
    "llama3-70b@64": Case("Llama 3 70B, 1 x 8192", 64, lambda: step_at("llama3-70b", batch=1)),
    "llama3-70b@8": Case("Llama 3 70B, 1 x 8192", 8, lambda: step_at("llama3-70b", batch=1)),
    "mixtral-8x7b@64": Case("Mixtral 8x7B, 1 x 8192", 64, lambda: step_at("mixtral-8x7b", batch=1)),
    "vit-huge@1": Case("ViT-H/14, 128 images", 1, lambda: step_at("vit-huge", batch=128)),
    "unet@1": Case("Stable Diffusion 1.5's UNet, 16 images", 1, unet_step),
    "llama3-405b@512": Case("Llama 3.1 405B, 1 x 8192", 512, lambda: step_at("llama3-405b", batch=1)),
}


@dataclass(frozen=True, slots=True)
class Point:
    """One budget of a case: both plans, and how long planning took, with capture."""

    case: Case
    budget_bytes: int
    alone: Plan
    joint: Plan
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether the joint plan is proven, as fast as the other, and was found within a minute."""
        alone, joint = self.alone.predicted, self.joint.predicted
        if joint is None:
            return alone is None and self.seconds <= MOST_SECONDS
        faster = alone is None or joint.step_ms <= alone.step_ms + 1e-3
        return faster and self.joint.gap == 0 and self.seconds <= MOST_SECONDS

    @property
    def row(self) -> str:
        """A row of the table."""
        whole = self.alone.baseline.step_ms

        def above(plan: Plan) -> str:
            if plan.predicted is None:
                return "does not fit"
            return f"{plan.predicted.step_ms:.1f} ms, {plan.predicted.step_ms / whole - 1:+.2%}"

        decided = [f"{each.kind} ({each.setting})" for each in self.joint.decisions or () if each.kind != "checkpoint"]
        cells = (
            self.case.title,
            str(self.case.ranks),
            display_bytes(self.budget_bytes),
            f"{whole:.1f} ms",
            above(self.alone),
            above(self.joint),
            ", ".join(decided) or "-",
            f"{self.seconds:.0f} s",
        )
        return f"| {' | '.join(cells)} |"


def run_case(case: Case, decide: tuple[str, ...]) -> Iterator[Point]:
    """Plan one case at its budgets."""
    step = case.step()
    alone = Inputs.of(step, target=TARGET, ranks=case.ranks, progress=False, options=SolveOptions(decide=()))
    problem = alone.problem()
    alone = Inputs.of(problem.trace, target=TARGET, ranks=case.ranks, progress=False, options=SolveOptions(decide=()))
    least, most = minimum_budget_bytes(problem), min(problem.baseline_bytes, problem.target.available_bytes)
    assert least is not None
    budgets = case.budgets or tuple(int(least + part * (most - least)) for part in PARTS)
    if least >= most:  # checkpointing alone does not fit at all
        budgets = case.budgets or (most,)
    for budget in budgets:
        found, _ = plan_problem(alone, budget=budget)
        began = time.perf_counter()
        options = SolveOptions(decide=decide)  # type: ignore[arg-type]
        inputs = Inputs.of(step, target=TARGET, ranks=case.ranks, progress=False, options=options)
        joint, _ = plan_problem(inputs, budget=budget)
        yield Point(case, budget, found, joint, time.perf_counter() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--decide", nargs="*", default=["exact", "loss"], help=f"exact, all, or {', '.join(DECISIONS)}")
    parser.add_argument("--budget", type=float, nargs="*", default=[], help="GiB, in place of the three")
    given = parser.parse_args()
    print("| model | ranks | budget | no limit | checkpointing alone | joint | decided | planned in |")
    print("|---|---|---|---|---|---|---|---|")
    slow, count = [], 0
    for name in given.cases or CASES:
        case = CASES[name]
        if given.budget:
            case = Case(case.title, case.ranks, case.step, tuple(int(each * GiB) for each in given.budget))
        for point in run_case(case, tuple(given.decide)):
            print(point.row, flush=True)
            count += 1
            if not point.ok:
                slow.append(f"{name} in {display_bytes(point.budget_bytes)}")
    print(f"{count - len(slow)} of {count} joint plans proven, as fast, within {MOST_SECONDS:.0f} s", *slow, sep="; ")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
