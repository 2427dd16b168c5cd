"""Plans for small models, made of real traces and frontiers; as a script, the document of one of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.capture import Category, Step, Trace
from memfit.cost import Roofline, Runtime
from memfit.hardware import Target
from memfit.memory import summarize
from memfit.plans import Blocker, Estimate, Plan, Prediction, build_plan, peak_at
from memfit.tradeoff import Frontiers, Policy, Unit, build_frontiers

DEVICE = "h100-sxm"


class Block(nn.Module):
    """A feed-forward block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks and a head; with `twice`, the blocks run a second time."""

    def __init__(self, width: int = 64, layers: int = 4, *, twice: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, width, bias=False)
        self.tail = nn.Linear(width, width, bias=False)
        if tied:
            self.tail.weight = self.head.weight
        self.twice = twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2 if self.twice else 1):
            for layer in self.layers:
                x = layer(x)
        return self.tail(self.head(x))


def captured(
    build: Callable[[], nn.Module] = Stack,
    *,
    rows: int = 128,
    width: int = 64,
    target: str = DEVICE,
    **options: Any,
) -> Trace:
    options.setdefault("loss", lambda output, _: F.gelu(output).square().mean())
    return memfit.trace(Step(build, memfit.spec((rows, width)), **options), target=target)


@dataclass(frozen=True)
class Case:
    """A step, its times and its frontiers."""

    trace: Trace
    runtime: Runtime
    frontiers: Frontiers

    @classmethod
    def of(cls, trace: Trace) -> Case:
        runtime = Runtime.of(trace, Roofline())
        return cls(trace, runtime, build_frontiers(trace, runtime.op_ms))

    def unit(self, name: str) -> Unit:
        return next(unit for unit in self.frontiers.units if unit.name == name)

    def chosen(self, *names: str, place: int = -1) -> list[tuple[Unit, Policy]]:
        """These units with one of their policies, the one that frees most unless told."""
        return [(self.unit(name), self.frontiers[name].policies[place]) for name in names]

    @property
    def baseline(self) -> Estimate:
        summary = summarize(self.trace)
        return Estimate(
            peak_bytes=summary.peak_bytes,
            peak_reserved_bytes=summary.peak_reserved_bytes,
            step_ms=self.runtime.total_ms,
            peak_by_category=summary.peak_by_category,
            peak_at=peak_at(self.trace, summary.peak.op),
        )

    def plan(self, checkpoint: list[tuple[Unit, Policy]], **changes: Any) -> Plan:
        """A plan whose figures follow from the policies; that they are right is the solver's business."""
        baseline = self.baseline
        recompute_ms = sum(policy.recompute_ms for _, policy in checkpoint)
        step_ms = baseline.step_ms + recompute_ms
        peak_bytes = baseline.peak_bytes - sum(policy.discarded_bytes for _, policy in checkpoint)
        values: dict[str, Any] = {
            "target": Target.parse(self.trace.device),
            "budget_bytes": peak_bytes + 4096,
            "status": "optimal",
            "gap": 0.0,
            "bound_ms": step_ms,
            "minimum_budget_bytes": peak_bytes,
            "checkpoint": checkpoint,
            "baseline": baseline,
            "predicted": Prediction(
                peak_bytes=peak_bytes,
                peak_reserved_bytes=peak_bytes,
                step_ms=step_ms,
                peak_by_category={},
                peak_at=peak_at(self.trace, baseline.peak_at.op, second_run_of=checkpoint[-1][0].name),
                recompute_ms=recompute_ms,
                exposed_communication_ms=0.0,
            ),
        }
        return build_plan(self.trace, **{**values, **changes})

    def infeasible(self) -> Plan:
        blocker = Blocker(
            peak_bytes=3 << 20,
            peak_by_category={Category.PARAMETER: 1 << 20, Category.OPTIMIZER_STATE: 2 << 20},
            peak_at=peak_at(self.trace, self.baseline.peak_at.op),
        )
        return build_plan(
            self.trace,
            target=Target.parse(self.trace.device),
            baseline=self.baseline,
            status="infeasible",
            gap=None,
            bound_ms=None,
            predicted=None,
            checkpoint=[],
            budget_bytes=1 << 20,
            minimum_budget_bytes=3 << 20,
            blocker=blocker,
            notes=("a note",),
        )


def usual_plan() -> Plan:
    case = Case.of(captured())
    return case.plan(case.chosen("layers.0", "layers.1", "layers.2") + case.chosen("<loss>"))


if __name__ == "__main__":
    sys.stdout.write(usual_plan().to_json())
