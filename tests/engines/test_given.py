"""What `apply` is given: what belongs to another plan is refused, and what runs otherwise is said once."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from memfit.capture import Step
from memfit.errors import InputError
from memfit.plans import Plan, PlanMismatch
from memfit.solve import SolveOptions
from tests.engines.engine_cases import plan_for, run_steps
from tests.engines.test_exact import Blocks, squares

VECTORS = torch.randn(6, 16)


@pytest.fixture(scope="module")
def plan() -> Plan:
    options = SolveOptions(force=("blocks.0", "blocks.1"))
    return plan_for(Step(Blocks(), VECTORS, loss=squares), options=options)


def test_an_optimizer_of_another_class_is_refused(plan: Plan) -> None:
    model = Blocks()
    with pytest.raises(PlanMismatch, match="the optimizer is SGD here and AdamW in the plan"):
        plan.apply(model, torch.optim.SGD(model.parameters(), lr=0.1))
    plan.apply(model, torch.optim.AdamW(model.parameters()))


def test_an_optimizer_of_another_model_is_refused(plan: Plan) -> None:
    model, extra = Blocks(), nn.Linear(3, 2, bias=False)
    with pytest.raises(PlanMismatch, match=r"steps .* parameters that are not this model's"):
        plan.apply(model, torch.optim.AdamW(Blocks().parameters()))
    count = len(list(model.parameters())) + 1
    with pytest.raises(PlanMismatch, match=rf"steps 1 of {count} .*not this model's, first a float32\[2, 3\]; make it"):
        plan.apply(model, torch.optim.AdamW([*model.parameters(), *extra.parameters()]))


def test_a_wrapped_model_is_told_what_to_apply_to(plan: Plan) -> None:
    with pytest.raises(InputError, match=r"wrapped in DataParallel.*apply the plan to model\.module"):
        plan.apply(nn.DataParallel(Blocks()))


def test_autocast_that_the_plan_does_not_have_is_said_once_and_where_the_user_is(plan: Plan) -> None:
    model = Blocks()
    plan.apply(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_steps(Step(model, VECTORS, loss=squares, autocast=torch.bfloat16), model, None, 2)
    said = [each for each in caught if "does not run as planned" in str(each.message)]
    assert len(said) == 1
    assert "autocast is bfloat16 here and off in the plan" in str(said[0].message)
    assert said[0].filename.endswith("test_exact.py")  # where the model calls its blocks


def test_autocast_that_only_the_plan_has_is_said_too() -> None:
    step = Step(Blocks(), VECTORS, loss=squares, autocast=torch.bfloat16)
    plan, model = plan_for(step, options=SolveOptions(force=("blocks.0",))), Blocks()
    plan.apply(model)
    with pytest.warns(UserWarning, match="autocast is off here and bfloat16 in the plan"):
        run_steps(Step(model, VECTORS, loss=squares), model, None, 1)


def test_optimizers_are_found_inside_what_libraries_wrap_them_in(plan: Plan) -> None:
    accelerate, lightning = pytest.importorskip("accelerate"), pytest.importorskip("lightning")
    from lightning.fabric.wrappers import _FabricOptimizer
    from lightning.pytorch.core.optimizer import LightningOptimizer

    assert lightning is not None
    strategy = lightning.Fabric(accelerator="cpu").strategy
    for wrap in (
        accelerate.Accelerator(cpu=True).prepare_optimizer,
        LightningOptimizer,
        lambda optimizer: _FabricOptimizer(optimizer, strategy),
    ):
        model = Blocks()
        optimizer = wrap(torch.optim.AdamW(model.parameters()))
        assert plan.apply(model, optimizer) == (model, optimizer)
        plan.remove(model)
        with pytest.raises(PlanMismatch, match="the optimizer is SGD"):
            plan.apply(model, [optimizer, wrap(torch.optim.SGD(model.parameters(), lr=0.1))])
    with pytest.raises(InputError, match="or a list of them, not a str"):
        plan.apply(Blocks(), ["adam"])  # type: ignore[list-item]
