"""A plan for another step is refused, with what differs."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.capture import Trace
from memfit.errors import InputError
from memfit.plans import Plan, PlanMismatch, ShardedUnit, ShardPlan
from tests.plans.plan_cases import Case, Stack, captured


@pytest.fixture(scope="module")
def case() -> Case:
    return Case.of(captured())


@pytest.fixture(scope="module")
def plan(case: Case) -> Plan:
    return case.plan(case.chosen("layers.0", "layers.1") + case.chosen("<loss>"))


def refused(plan: Plan, trace: Trace) -> str:
    with pytest.raises(PlanMismatch) as caught:
        plan.check(trace)
    assert isinstance(caught.value, InputError)
    message = str(caught.value)
    assert message.startswith("the plan was made for another step:\n  - ")
    assert "what to do: plan this step again" in message
    assert all(difference in message for difference in caught.value.differences[:12])
    return message


def test_a_plan_is_for_its_own_step(plan: Plan) -> None:
    plan.check(captured())
    Plan.from_json(plan.to_json()).check(captured())


class Plainer(Stack):
    """Lacks two parameters and has one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Identity()
        self.layers[2].up.bias = None
        self.extra = nn.Parameter(torch.zeros(3))


def frozen() -> nn.Module:
    model = Stack()
    model.layers[1].up.weight.requires_grad_(False)
    return model


OTHER: list[tuple[Callable[[], Trace], list[str]]] = [
    (lambda: captured(rows=64), ["tensor 0 of the batch is float32[64, 64] here and float32[128, 64] in the plan"]),
    (
        lambda: captured(lambda: Stack(layers=3)),
        [
            "layers has 3 numbered parts with parameters here and 4 in the plan",
            "the step has ",
        ],
    ),
    (
        lambda: captured(lambda: Stack(width=32), width=32),
        [
            "parameters layers.0-3.up.weight (4) are float32[128, 32] here and float32[256, 64] in the plan",
            "parameter head.weight is float32[32, 32] here and float32[64, 64] in the plan",
            "tensor 0 of the batch is float32[128, 32] here and float32[128, 64] in the plan",
        ],
    ),
    (
        lambda: captured(Plainer),
        [
            "parameter tail.weight, float32[64, 64], is in the plan and not here",
            "parameter layers.2.up.bias, float32[256], is in the plan and not here",
            "parameter extra, float32[3], is here and not in the plan",
        ],
    ),
    (
        lambda: captured(frozen),
        ["parameter layers.1.up.weight is float32[256, 64] frozen here and float32[256, 64] in"],
    ),
    (
        lambda: captured(lambda: Stack(tied=True)),
        [
            "parameter head.weight is float32[64, 64] also called tail.weight here and float32[64, 64] in the plan",
            "parameter tail.weight, float32[64, 64], is in the plan and not here",
        ],
    ),
    (
        lambda: captured(lambda: Stack().to(torch.bfloat16), autocast=torch.bfloat16),
        [
            "autocast is bfloat16 here and off in the plan",
            "parameter head.weight is bfloat16[64, 64] here and float32[64, 64] in the plan",
        ],
    ),
    (lambda: captured(target="a100-sxm-80gb"), ["the device is a100-sxm-80gb here and h100-sxm in the plan"]),
    (lambda: captured(optimizer=torch.optim.SGD), ["the optimizer is SGD here and AdamW in the plan"]),
]


@pytest.mark.parametrize(("other", "expected"), OTHER, ids=[expected[0][:50] for _, expected in OTHER])
def test_another_step_is_refused_with_what_differs(plan: Plan, other: Callable[[], Trace], expected: list[str]) -> None:
    message = refused(plan, other())
    for difference in expected:
        assert difference in message


def test_parameters_of_missing_layers_are_not_listed(plan: Plan) -> None:
    assert "parameter" not in refused(plan, captured(lambda: Stack(layers=2))).replace("parts with parameters", "")


def test_another_number_of_inputs_is_refused(plan: Plan) -> None:
    document = json.loads(plan.to_json())
    document["trace"]["inputs"].append([[3], "int64", 24])
    message = refused(Plan.from_json(json.dumps(document)), captured())
    assert "the batch has 1 tensors here and 2 in the plan" in message


def edited(plan: Plan, part: str, value: Any) -> Plan:
    document = json.loads(plan.to_json())
    document["trace"][part] = value
    return Plan.from_json(json.dumps(document))


def test_another_torch_is_refused(plan: Plan, case: Case) -> None:
    here = case.trace.torch.partition("+")[0]
    assert f"torch is {here} here and 2.9.1 in the plan" in refused(edited(plan, "torch", "2.9.1"), case.trace)


def test_another_build_of_the_same_torch_is_not(plan: Plan, case: Case) -> None:
    assert "+" not in plan.trace.torch
    plan.check(msgspec.structs.replace(case.trace, torch=plan.trace.torch + "+cu999"))


def test_another_number_of_threads_is_refused_on_cpu() -> None:
    case = Case.of(captured(target="cpu"))
    plan = case.plan(case.chosen("layers.0"))
    message = refused(edited(plan, "threads", plan.trace.threads + 7), case.trace)
    assert "the number of threads (torch.set_num_threads, OMP_NUM_THREADS) is" in message


def test_another_op_in_a_unit_is_named(plan: Plan, case: Case) -> None:
    class Relu(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer.down(F.relu(layer.up(layer.norm(x))))
            return self.tail(self.head(x))

    assert "unit 'layers.0' is no module call" in refused(plan, captured(Relu))
    renamed = Plan.from_json(plan.to_json().replace("aten.gelu.default", "aten.silu.default"))
    message = refused(renamed, case.trace)
    assert "op 3 of unit 'layers.0' is aten.gelu.default here and aten.silu.default in the plan" in message


def test_a_difference_that_a_plan_does_not_keep_is_still_refused(plan: Plan) -> None:
    class Swapped(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.head(self.tail(x))

    message = refused(plan, captured(Swapped))
    assert "in places that a plan does not keep (fingerprint" in message


def test_another_version_of_memfit_is_named_when_nothing_else_explains(plan: Plan, case: Case) -> None:
    document = {**json.loads(plan.to_json()), "memfit": "0.0.1", "fingerprint": "0" * 64}
    assert "and 0.0.1 in the plan" in refused(Plan.from_json(json.dumps(document)), case.trace)


def test_a_sharded_module_that_is_not_there_is_named(case: Case) -> None:
    units = (ShardedUnit(module="layers.9", reshard_after_forward=True),)
    plan = case.plan(case.chosen("layers.0"), shard=ShardPlan(ranks=1, units=units, prefetch=1))
    assert "module 'layers.9', which the plan shards, is not in the model" in refused(plan, case.trace)


def test_long_lists_are_cut(plan: Plan) -> None:
    error = PlanMismatch([f"difference {number}" for number in range(40)])
    assert "and 28 more" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


class Dropping(nn.Module):
    """A block that drops, unless told not to."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(64, 64), nn.Dropout(drop), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(F.gelu(self.up(x))))


def test_another_number_of_ops_names_the_first_that_differs() -> None:
    def model(drop: float) -> nn.Module:
        return nn.Sequential(Dropping(drop), Dropping(drop))

    case = Case.of(captured(lambda: model(0.1)))
    message = refused(case.plan(case.chosen("0", "1")), captured(lambda: model(0.0)))
    assert "the step has " in message
    assert "the first op that differs, of those that the plan keeps, is op " in message
    assert "native_dropout.default, op " in message and "of unit '0', in the plan" in message


def test_one_of_several_models_is_told_how_to_give_all_of_them() -> None:
    student, teacher, batch = (
        nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)),
        nn.Linear(8, 8),
        torch.ones(16, 8),
    )
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)

    def train() -> None:
        F.mse_loss(student(batch), teacher(batch).detach()).backward()
        optimizer.step()
        optimizer.zero_grad()

    plan = memfit.plan(train, target="cpu", budget="1GiB", progress=False)
    together = nn.ModuleDict({"student": student, "teacher": teacher})
    with pytest.raises(PlanMismatch) as caught:
        plan.apply(student, optimizer)
    (difference,) = caught.value.differences
    assert "this is student alone, and the plan is for student, teacher together" in difference
    assert 'plan.apply(torch.nn.ModuleDict({"student": student, "teacher": teacher}), optimizer)' in difference
    assert plan.apply(together, optimizer)[0] is together
    plan.remove(together)


def test_another_model_is_not_taken_for_a_part() -> None:
    student, teacher, batch = nn.Linear(8, 8), nn.Linear(8, 8), torch.ones(16, 8)
    plan = memfit.plan(
        lambda: F.mse_loss(student(batch), teacher(batch)).backward(), target="cpu", budget="1GiB", progress=False
    )
    with pytest.raises(PlanMismatch) as caught:
        plan.apply(nn.Linear(8, 4))
    assert not any("ModuleDict" in each for each in caught.value.differences)


def test_a_loss_module_does_not_stand_between_a_training_function_and_its_model() -> None:
    model, criterion = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), nn.MSELoss()
    batch = torch.ones(16, 8)
    plan = memfit.plan(lambda: criterion(model(batch), batch).backward(), target="cpu", budget="1GiB", progress=False)
    assert plan.apply(model) is not None
    plan.remove(model)
