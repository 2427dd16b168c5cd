"""A plan beside what really happens: what is measured, what is reported, and that nothing is left changed."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import json
import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import memfit
from memfit.capture.kernels import AllocatorEvent
from memfit.engines import plan_of_model
from memfit.engines.attachment import attached
from memfit.errors import InputError, StateError
from memfit.memory import measured
from memfit.plans import PlanMismatch
from memfit.solve import SolveOptions
from memfit.verify import Verification
from memfit.verify import verifying as verifying_module
from memfit.verify.align_events import align_sizes, find_outlived_ops
from memfit.verify.exactness import host_copy
from memfit.verify.verification import BytesCheck, MsCheck
from tests.verify import verified_steps
from tests.verify.verified_steps import Block, Counting, Failing, Forgetful, Hoarding, find_step, planned
from tests.zoo.zoo_models import STEPS

pytestmark = pytest.mark.slow


def state_of(step: memfit.Step) -> dict:
    """Everything of a step that verify could change, copied."""
    model, optimizer = step.model, step.optimizer
    assert isinstance(model, torch.nn.Module)
    found = {
        "attributes": {name: set(vars(module)) for name, module in model.named_modules()},
        "values": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": {n: (id(p.grad), None if p.grad is None else p.grad.clone()) for n, p in model.named_parameters()},
        "identities": [id(each) for each in (*model.parameters(), *model.buffers())],
        "versions": [each._version for each in model.parameters()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "parameter hooks": [each._post_accumulate_grad_hooks for each in model.parameters()],
        "forwards": [type(module).forward for module in model.modules()],
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),
        "backward": torch.autograd.backward,
        "planned": [attached(module) is not None for module in model.modules()],
    }
    if isinstance(optimizer, torch.optim.Optimizer):
        found["optimizer"] = copy.deepcopy(optimizer.state_dict())
        found["optimizer hooks"] = dict(optimizer._optimizer_step_post_hooks)
    return found


def assert_same(one: object, other: object, where: str = "state") -> None:
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where  # type: ignore[arg-type]
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where  # type: ignore[attr-defined]
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")  # type: ignore[index]
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where  # type: ignore[arg-type]
        for place, (mine, theirs) in enumerate(zip(one, other, strict=True)):  # type: ignore[call-overload]
            assert_same(mine, theirs, f"{where}[{place}]")
    else:
        assert one == other, where


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit", "resnet", "mlp"])
def test_real_models_do_what_their_plans_say(name: str) -> None:
    torch.manual_seed(0)
    step = STEPS[name]()
    plan = planned(step, 0.5)
    found = plan.verify(step, steps=1, time_tolerance=None)
    assert found.ok, str(found)
    assert found.exactness is not None and found.exactness.equal and found.exactness.gradients > 0
    assert found.peak.measured_bytes == found.peak.predicted_bytes <= plan.budget_bytes
    assert found.baseline_peak is not None
    assert found.baseline_peak.measured_bytes == plan.baseline.peak_bytes
    assert sum(each.measured_bytes for each in found.by_category) == found.peak.measured_bytes
    assert sum(each.measured_bytes for each in found.by_module) == found.peak.measured_bytes
    assert sum(each.predicted_bytes for each in found.by_module) == found.replayed_peak_bytes
    assert [each for each in (*found.by_category, *found.by_module) if each.difference_bytes] == []
    assert found.step.measured_ms > 0 and found.baseline_step is not None


def test_gradients_that_a_step_starts_with_are_part_of_its_peak() -> None:
    """The step frees them itself, which the profiler alone would not see."""

    def run(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: tuple) -> None:
        optimizer.zero_grad(set_to_none=True)
        model(*batch).backward()
        optimizer.step()

    plain = find_step()
    step = dataclasses.replace(plain, optimizer=torch.optim.SGD(plain.build_model().parameters(), lr=0.1), run=run)
    found = planned(step, 0.5).verify(step, steps=1, time_tolerance=None)
    assert found.ok, str(found)
    assert found.peak.measured_bytes == found.peak.predicted_bytes


@pytest.mark.parametrize("trained", [False, True])
def test_everything_is_left_as_it_was_found(trained: bool) -> None:
    plain = find_step()
    model = plain.build_model()
    step = dataclasses.replace(plain, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))
    plan = planned(step)
    if trained:
        step.execute(model, step.optimizer, "cpu")  # type: ignore[arg-type]
        model(*step.batch).backward()
    assert bool(step.optimizer.state) is trained  # type: ignore[union-attr]
    before = state_of(step)
    assert plan.verify(step, steps=1, time_tolerance=None).ok
    assert_same(before, state_of(step))


def test_a_plan_made_before_the_first_step_is_for_later_ones_too_and_the_other_way_round() -> None:
    plain = find_step()
    step = dataclasses.replace(plain, optimizer=torch.optim.AdamW(plain.build_model().parameters()))
    step.execute(step.build_model(), step.optimizer, "cpu")  # type: ignore[arg-type]
    later = planned(step)
    assert later.verify(find_step(), steps=1, time_tolerance=None).ok
    assert planned(plain).verify(step, steps=1, time_tolerance=None).ok


def test_an_exception_in_the_step_leaves_everything_as_it_was_found() -> None:
    plain = find_step(Failing)
    step = dataclasses.replace(plain, optimizer=torch.optim.AdamW(plain.build_model().parameters()))
    plan = planned(step)
    for calls in (2, 7, 20, 31):
        before = state_of(step)
        Failing.fails_in = calls
        try:
            with pytest.raises(ZeroDivisionError, match="this block fails"):
                plan.verify(step, steps=1)
        finally:
            Failing.fails_in = 10**6
        assert_same(before, state_of(step))


def test_a_plan_that_is_applied_already_is_verified_and_stays_applied() -> None:
    step = find_step()
    model, plan, other = step.build_model(), planned(step), planned(step, 0.8)
    plan.apply(model)
    applied = plan_of_model(model)
    before = state_of(step)
    assert plan.verify(step, steps=1, time_tolerance=None).ok
    after = state_of(step)
    for each in (before, after):
        each.pop("forwards")  # of planned classes; made anew
    assert_same(before, after)
    assert plan_of_model(model) is applied
    with pytest.raises(StateError, match="another plan"):
        other.verify(step)
    plan.remove(model)


def test_a_wrong_prediction_is_reported_with_the_module() -> None:
    step = find_step()
    plan = planned(step)
    assert plan.predicted is not None
    lower = msgspec.structs.replace(plan.predicted, peak_bytes=int(plan.predicted.peak_bytes * 0.8))
    found = msgspec.structs.replace(plan, predicted=lower).verify(step, steps=1, time_tolerance=None)
    assert not found.ok and not found.peak_agrees
    assert found.memory_differs_most is not None
    assert found.memory_differs_most.name == found.peak_module
    shown = " ".join(str(found).split())
    assert "from its prediction" in shown and "its document was changed" in shown


def first_row(found: Verification, title: str) -> list[str]:
    """The cells of the first row of a table."""
    lines = str(found).splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith(title))
    return [cell.strip() for cell in lines[start + 3].split("│")]


def test_a_module_that_holds_what_was_not_predicted_is_named() -> None:
    step = find_step(Hoarding)
    found = planned(step, 0.9).verify(step, steps=1, time_tolerance=None)
    assert not found.ok and found.memory_differs_most is not None
    assert found.memory_differs_most.name.startswith("layers.")
    assert found.memory_differs_most.difference_bytes >= 1 << 18
    assert f"{found.memory_differs_most.name} differs most" in " ".join(str(found).split())
    assert first_row(found, "at the peak, by module")[0] == found.memory_differs_most.name


def test_a_time_that_is_not_as_predicted_is_reported_with_the_module() -> None:
    step = find_step()
    plan = planned(step)
    assert plan.predicted is not None
    endless = msgspec.structs.replace(plan.predicted, step_ms=1e9)
    found = msgspec.structs.replace(plan, predicted=endless).verify(step, steps=1)
    assert not found.ok and found.only_time_differs and found.time_differs_most is not None
    assert found.time_differs_most.name in dict(step.build_model().named_modules())
    assert "memfit calibrate" in " ".join(found.findings)
    assert first_row(found, "own forward, by module")[0] == (found.time_differs_most.name or "(model)")


def test_a_module_that_counts_its_calls_is_reported() -> None:
    step = find_step(Counting)
    plan = planned(step)
    assert any(entry.module.startswith("layers") for entry in plan.checkpoint)
    found = plan.verify(step, steps=1, time_tolerance=None)
    assert not found.ok and found.exactness is not None
    worst = found.exactness.first("gradient")
    assert worst is not None and worst.largest > 0
    assert worst.name in dict(step.build_model().named_parameters())
    assert found.exactness.reproducible is True
    assert "runs again" in " ".join(found.findings)
    assert all(layer.calls == 0 for layer in step.build_model().layers)  # type: ignore[union-attr]


def test_a_step_that_is_never_the_same_is_reported_as_such() -> None:
    step = find_step(Forgetful)
    found = planned(step, 1.0).verify(step, steps=1, time_tolerance=None)
    assert not found.ok and found.exactness is not None and found.exactness.reproducible is False
    assert found.exactness.first("loss") is not None


def test_the_step_without_the_plan_is_left_out_where_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying_module, "free_bytes", lambda device_type: 1)
    step = find_step()
    found = planned(step).verify(step, steps=1, time_tolerance=None)
    assert found.ok and found.exactness is None and found.baseline_peak is None and found.baseline_step is None
    assert (
        found.skipped is not None and "1 B are free" in found.skipped and found.skipped in " ".join(str(found).split())
    )


def test_a_plan_for_another_step_is_refused_before_anything_runs() -> None:
    plan = planned(find_step())
    longer = dataclasses.replace(find_step(Failing), batch=(torch.randn(65, 32), torch.randint(0, 10, (65,))))
    with pytest.raises(PlanMismatch, match="65"):
        plan.verify(longer)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"batch": (memfit.spec((64, 32)), memfit.spec((64,), torch.int64))}, "memfit.spec"),
        ({"model": find_step().build_model().eval()}, "model.train"),
    ],
)
def test_what_cannot_be_run_is_refused(change: dict, says: str) -> None:
    step = find_step()
    plan = planned(step)
    with pytest.raises(InputError, match=says):
        plan.verify(dataclasses.replace(step, **change))
    with pytest.raises(InputError, match="steps is 0"):
        plan.verify(step, steps=0)
    with pytest.raises(InputError, match="verify takes the step"):
        plan.verify(step.model)


def test_an_infeasible_plan_is_refused() -> None:
    step = find_step()
    with pytest.raises(InputError, match="infeasible"):
        memfit.plan(step, target="cpu", budget="1B", progress=False).verify(step)


def test_a_model_given_as_a_callable_is_built() -> None:
    step = dataclasses.replace(find_step(), model=verified_steps.Stack)
    before = torch.get_rng_state()
    found = planned(step).verify(step, steps=1, time_tolerance=None)
    assert found.ok and torch.equal(before, torch.get_rng_state())


def test_a_verification_is_json() -> None:
    step = find_step()
    found = planned(step).verify(step, steps=1, time_tolerance=None)
    assert isinstance(found, Verification)
    read = json.loads(found.to_json())
    assert read["ok"] is True and read["findings"] == []
    assert read["peak"] == {
        "name": "peak",
        "predicted_bytes": found.peak.predicted_bytes,
        "measured_bytes": found.peak.measured_bytes,
    }
    assert read == json.loads(json.dumps(found.to_dict()))


def test_sequences_are_walked_side_by_side() -> None:
    predicted = [8, 16, 24, 32, 40, 48, 56, 64, 72, 80]
    assert align_sizes(predicted, predicted) == list(range(10))
    with_more = [8, 16, 1, 2, *predicted[2:]]
    assert align_sizes(with_more, predicted) == [0, 1, -1, -1, *range(2, 10)]
    with_less = [8, 16, *predicted[4:]]
    assert align_sizes(with_less, predicted) == [0, 1, *range(4, 10)]
    assert align_sizes([16, 8, *predicted[2:]], predicted) == [1, 0, *range(2, 10)]
    assert align_sizes([3, 3], predicted) == [-1, -1]


def test_allocations_stand_beside_those_of_the_same_op_and_past_many_that_nobody_predicted() -> None:
    predicted = [64, 64, 256] * 1500
    ops = ["aten::bmm", "aten::add", "aten::mm"] * 1500
    measured = [8, 64, 64, 4, 64, 256, 8, 4] * 1500
    within = [(), ("aten::isneginf",), ("aten::matmul", "aten::bmm"), (), ("aten::add",), ("aten::mm",), (), ()] * 1500
    found = align_sizes(measured, predicted, within, ops)
    assert found == [
        pair for layer in range(1500) for pair in (-1, -1, 3 * layer, -1, 3 * layer + 1, 3 * layer + 2, -1, -1)
    ]


def test_what_is_freed_within_an_op_is_no_result_of_it() -> None:
    def event(n_bytes: int, address: int, *ops: str) -> AllocatorEvent:
        return AllocatorEvent(bytes=n_bytes, address=address, ops=ops)

    events = [
        event(8, 1, "node", "aten::conv", "aten::empty"),
        event(8, 2, "node", "aten::conv"),
        event(-8, 1, "node", "aten::conv"),
        event(8, 1, "node", "aten::conv"),
        event(-8, 1, "node", "aten::conv"),
        event(-8, 2, "node"),
    ]
    assert find_outlived_ops(events) == [("aten::empty",), ("aten::conv",), ()]


def test_a_plan_that_changes_the_optimizers_step_is_compared_with_the_step_as_it_was_given() -> None:
    few = (torch.randn(2, 32), torch.randint(0, 10, (2,)))  # so that the peak is in the optimizer
    step = find_step(optimizer=functools.partial(torch.optim.AdamW, lr=0.1, foreach=True)).with_batch(few)
    plan = memfit.plan(
        step, target="cpu", budget=planned(step).budget_bytes - 1, options=SolveOptions(optimizer=True), progress=False
    )
    assert plan.optimizer is not None
    found = plan.verify(step, steps=1, time_tolerance=None)
    assert found.ok, str(found)
    assert found.peak.measured_bytes == found.peak.predicted_bytes
    assert found.baseline_peak is not None
    assert found.baseline_peak.measured_bytes == found.baseline_peak.predicted_bytes


def test_dropout_is_part_of_what_is_compared() -> None:
    step = find_step(Block)
    found = planned(step).verify(step, steps=1, time_tolerance=None)
    assert found.exactness is not None and found.exactness.equal
    assert any(isinstance(module, torch.nn.Dropout) for module in step.build_model().modules())


def test_differences_are_parts_of_what_was_predicted() -> None:
    step = MsCheck(name="step", predicted_ms=15.6, measured_ms=89.4)
    assert step.error == pytest.approx(73.8 / 15.6)
    peak = BytesCheck(name="peak", predicted_bytes=100, measured_bytes=150)
    assert peak.error == 0.5
    assert BytesCheck(name="new", predicted_bytes=0, measured_bytes=1).error == float("inf")
    assert BytesCheck(name="none", predicted_bytes=0, measured_bytes=0).error == 0.0


def test_verifying_runs_few_steps_and_parses_no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    step = find_step()
    plan = planned(step, 0.5)
    runs, parsed = [], []
    execute, parse = memfit.Step.execute, torch.autograd.profiler.profile._parse_kineto_results

    def counted(self: memfit.Step, *args: Any) -> None:
        runs.append(args)
        execute(self, *args)

    def noted(*args: Any, **kwargs: Any) -> Any:
        parsed.append(args)
        return parse(*args, **kwargs)

    monkeypatch.setattr(memfit.Step, "execute", counted)
    monkeypatch.setattr(torch.autograd.profiler.profile, "_parse_kineto_results", noted)
    plan.verify(step, steps=1, time_tolerance=None)
    assert len(runs) == 1 + 3 + 3 + 2 + 2  # captured; with the plan; without it; timed; modules timed
    assert not parsed, "the profiler made objects of events that nobody reads"


def test_copies_of_values_are_no_events_of_the_allocator() -> None:
    tensors = [torch.randn(64, 64).t(), torch.randn(8).bfloat16(), torch.tensor(2.5), torch.zeros(0, 3)]
    with measured() as truth:
        copies = [host_copy(each) for each in tensors]
    assert not truth.events
    for tensor, copied in zip(tensors, copies, strict=True):
        assert copied.dtype is tensor.dtype and torch.equal(copied, tensor)


def test_the_garbage_collector_is_left_as_found() -> None:
    step = find_step()
    plan = planned(step, 0.5)
    plan.verify(step, steps=1, time_tolerance=None)
    assert gc.get_freeze_count() == 0 and gc.isenabled()
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        plan.verify(step, steps=1, time_tolerance=None)
        assert gc.get_freeze_count() > frozen // 2  # fewer: objects die
    finally:
        gc.unfreeze()
