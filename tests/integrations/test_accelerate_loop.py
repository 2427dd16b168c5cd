"""accelerate's own loop with a plan made before `prepare` and after it: the same losses, within the budget."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from accelerate import Accelerator
from accelerate.state import AcceleratorState

import memfit
from memfit.errors import InputError
from memfit.integrations.accelerate import fsdp_plugin, step
from memfit.plans import Plan
from memfit.sharding import ShardOptions
from memfit.solve import SolveOptions
from tests.integrations import training_loops
from tests.integrations.training_loops import Training, observed

STEPS = 20
_SCALARS_BYTES = 1024


def train(planned: Literal["never", "before", "after"], precision: str, budget: int) -> tuple[Training, Plan | None]:
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
    model: Any = training_loops.build()
    optimizer: Any = training_loops.make_optimizer(model.parameters())
    batch, plan, training = next(iter(training_loops.loader())), None, Training()

    def make_plan() -> Plan:
        return memfit.plan(step(accelerator, model, batch, optimizer), target="cpu", budget=budget, progress=False)

    plan = make_plan() if planned == "before" else None
    inner = model
    model, optimizer, loader = accelerator.prepare(model, optimizer, training_loops.loader())
    plan = make_plan() if planned == "after" else plan
    if plan is not None and plan.status != "infeasible":
        plan.apply(model, optimizer)
    batches = (batch for _ in range(STEPS) for batch in loader)
    torch.manual_seed(2)
    if budget > 1:
        with observed(inner, training):
            while len(training.losses) < STEPS:
                with accelerator.accumulate(model):
                    output = model(**next(batches))
                    accelerator.backward(output.loss)
                    training.losses.append(output.loss.item())
                    optimizer.step()
                    optimizer.zero_grad()
    return training, plan


@pytest.mark.zoo
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_plan_around_prepare_in_either_order(precision: str) -> None:
    _, least = train("before", precision, 1)
    assert least is not None and least.minimum_budget_bytes is not None
    budget = (least.minimum_budget_bytes + least.baseline.peak_bytes) // 2
    plain, _ = train("never", precision, budget)
    assert max(plain.peaks_bytes) > budget
    for order in ("before", "after"):
        found, plan = train(order, precision, budget)
        assert plan is not None and plan.checkpoint
        assert found.losses == plain.losses and len(found.losses) == STEPS
        assert max(found.peaks_bytes) <= budget + _SCALARS_BYTES, found.peaks_bytes


def test_a_plan_that_gathers_otherwise_than_accelerate_is_refused() -> None:
    model: Any = training_loops.build()
    made = memfit.Step(model, next(iter(training_loops.loader())))
    for given, message in (({"prefetch": 2}, "gathers one unit ahead, and this plan 2"), ({"keep_last": 1}, "has one")):
        options = SolveOptions(decide=(), shard=ShardOptions(**given))
        plan = memfit.plan(made, target="h100-sxm", ranks=2, options=options, progress=False)
        with pytest.raises(InputError, match=message + r".*fixed=\('reshard', 'prefetch'\)"):
            fsdp_plugin(plan, model)
