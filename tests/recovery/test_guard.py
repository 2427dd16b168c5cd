"""The guard in this process: watching, drift, and what it refuses."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.engines import plan_of_model
from memfit.plans.record import InputRecord
from memfit.recovery import Drift, OutOfMemory
from memfit.recovery.drift import find_different, list_tensors
from memfit.verify.faults import is_out_of_memory, parse_asked_bytes

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("frozen_heap")]


class Stack(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Case:
    def __init__(self, rows: int = 256) -> None:
        torch.manual_seed(0)
        self.model = Stack()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.x = torch.randn(rows, 32)
        step = memfit.Step(self.model, self.x, loss=lambda output, _: output.square().mean(), optimizer=self.optimizer)
        self.trace = memfit.trace(step, target="cpu")
        least = memfit.plan(self.trace, budget="1B", progress=False).minimum_budget_bytes
        self.plan = memfit.plan(self.trace, budget=least, progress=False)

    def apply(self) -> Case:
        self.plan.apply(self.model, self.optimizer)
        return self

    def train(self, x: torch.Tensor | None = None, times: int = 1) -> None:
        for _ in range(times):
            self.model(self.x if x is None else x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def ask_for_too_much() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


@pytest.fixture
def case() -> Any:
    made = Case().apply()
    yield made
    applied = plan_of_model(made.model)
    if applied is not None:
        applied.plan.remove(made.model)


def test_a_guard_with_plan_and_model_counts_steps_and_leaves_no_hooks(case: Case) -> None:
    with memfit.guard(case.plan, case.model) as guard:
        for _ in range(3):
            case.train()
        with torch.no_grad():
            case.model(case.x)
    assert guard.steps == 3 and guard.plan is case.plan
    assert guard.peak_bytes is None and (guard.growth_bytes is None or guard.growth_bytes >= 0)
    assert not case.model._forward_pre_hooks
    case.train()
    assert guard.steps == 3


def test_steps_under_a_guard_are_the_same_as_without(case: Case) -> None:
    other = Case()
    with memfit.guard(case.plan, case.model, optimizer=case.optimizer, step=case.trace, copies=True) as guard:
        torch.manual_seed(1)
        for _ in range(3):
            guard.step(case.train)
    torch.manual_seed(1)
    for _ in range(3):
        other.train()
    mine, theirs = case.model.state_dict(), other.model.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_out_of_memory_without_a_step_is_explained_from_the_plan_alone(case: Case) -> None:
    case.model.layers[1].register_forward_hook(lambda *_: ask_for_too_much())
    with pytest.raises(OutOfMemory) as caught, memfit.guard(case.plan, case.model):
        case.train()
    error = caught.value
    assert isinstance(error, RuntimeError) and isinstance(error, memfit.MemfitError) and not error.restored
    assert isinstance(error.__cause__, RuntimeError) and error.explanation.asked_bytes == 1 << 60
    text = str(error)
    assert "failed in forward, in layers.1" in text
    assert "what the plan expected at the highest point of the step" in text
    assert "give guard step= and optimizer=" in text
    case.model.layers[1]._forward_hooks.clear()
    case.train()


def test_other_errors_pass_as_they_are(case: Case) -> None:
    with pytest.raises(KeyError), memfit.guard(case.plan, case.model, optimizer=case.optimizer) as guard:
        guard.step(lambda: {}["missing"])


def test_a_failed_step_takes_gradients_buffers_and_generators_back(case: Case) -> None:
    def fail() -> None:
        case.model(torch.randn(256, 32)).square().mean().backward()
        ask_for_too_much()

    buffers = {name: each.clone() for name, each in case.model.named_buffers()}
    state = torch.get_rng_state()
    guard = memfit.guard(case.plan, case.model, optimizer=case.optimizer)
    with guard, pytest.raises(OutOfMemory) as caught:
        guard.step(fail)
    assert caught.value.restored
    assert all(torch.equal(each, buffers[name]) for name, each in case.model.named_buffers())
    assert all(each.grad is None for each in case.model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("accumulates", [True, False])
def test_gradients_that_outlive_steps_need_copies(case: Case, accumulates: bool) -> None:
    def fail() -> None:
        case.model(case.x).square().mean().backward()
        ask_for_too_much()

    case.model(case.x).square().mean().backward()
    before = [each.grad.clone() for each in case.model.parameters() if each.grad is not None]
    guard = memfit.guard(case.plan, case.model, optimizer=case.optimizer, accumulates=accumulates)
    with guard, pytest.raises(OutOfMemory) as caught:
        guard.step(fail)
    after = [each.grad for each in case.model.parameters() if each.grad is not None]
    assert caught.value.restored == accumulates
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True)) == accumulates


@pytest.mark.parametrize("fused", [False, True])
def test_with_copies_a_step_that_fails_after_the_optimizer_is_taken_back(fused: bool) -> None:
    """Fused kernels raise no counter of what they write to."""
    case = Case()
    case.optimizer.param_groups[0]["fused"] = fused
    case.apply()

    def fail() -> None:
        case.train()
        ask_for_too_much()

    with memfit.guard(
        case.plan, case.model, optimizer=case.optimizer, step=case.trace, copies=True, retries=0
    ) as guard:
        guard.step(case.train)
        before = [each.clone() for each in (*case.model.parameters(), *states(case.optimizer))]
        with pytest.raises(OutOfMemory) as caught:
            guard.step(fail)
    after = [*case.model.parameters(), *states(case.optimizer)]
    assert caught.value.restored and len(before) == len(after)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    case.plan.remove(case.model)


def states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [each for state in optimizer.state.values() for each in state.values()]


def test_replan_swaps_the_plan_between_steps() -> None:
    case = Case()
    roomy = memfit.plan(case.trace, budget=case.plan.baseline.peak_bytes, progress=False)
    roomy.apply(case.model, case.optimizer)
    with memfit.guard(roomy, case.model, optimizer=case.optimizer, step=case.trace) as guard:
        guard.step(case.train)
        found = guard.replan(case.plan.budget_bytes)
        guard.step(case.train)
    applied = plan_of_model(case.model)
    assert guard.plan is found and applied is not None and applied.plan is found
    assert found.checkpoint == case.plan.checkpoint != roomy.checkpoint
    found.remove(case.model)


def test_a_longer_batch_is_told_once_with_the_growth_of_the_process() -> None:
    """Rows enough that the process's own peak shows them."""
    case = Case(rows=1 << 17).apply()
    with memfit.guard(case.plan, case.model, optimizer=case.optimizer) as guard:
        case.train(times=2)
        assert guard.drifts == ()
        with pytest.warns(memfit.recovery.PlanDrift) as caught:
            case.train(torch.randn(1 << 19, 32), times=2)
    assert [(each.kind, each.step) for each in guard.drifts] == [("growth", 3)] and len(caught) == 1
    assert "float32[524288, 32] in place of float32[131072, 32]" in str(caught[0].message)
    assert str(caught[0].message).startswith("the process grew by")
    assert guard.drifts[0].measured_bytes is not None and guard.drifts[0].measured_bytes > case.plan.budget_bytes
    assert guard.peak_bytes is None and "the process grew by" in repr(guard)
    case.plan.remove(case.model)


def test_other_inputs_are_told_when_the_meter_is_too_coarse_for_their_peak(case: Case) -> None:
    guard = memfit.guard(case.plan, case.model, optimizer=case.optimizer)
    with guard, pytest.warns(memfit.recovery.PlanDrift, match=r"float32\[512, 32\] in place of") as caught:
        case.train(torch.randn(512, 32), times=3)
    assert [each.kind for each in guard.drifts] == ["inputs"] and len(caught) == 1


def test_out_of_memory_with_a_longer_batch_is_planned_for_that_batch() -> None:
    case = Case()
    step = memfit.Step(case.model, case.x, loss=lambda output, _: output.square().mean(), optimizer=case.optimizer)
    roomy = memfit.plan(case.trace, budget=case.plan.baseline.peak_bytes, progress=False)
    roomy.apply(case.model, case.optimizer)
    longer, attempts = torch.randn(300, 32), []

    def train() -> None:
        attempts.append(roomy)
        case.train(longer)
        if len(attempts) == 1:
            ask_for_too_much()

    guard = memfit.guard(roomy, case.model, optimizer=case.optimizer, step=step, copies=True)
    with guard, warnings.catch_warnings():
        warnings.simplefilter("ignore", memfit.recovery.PlanDrift)
        guard.step(train)
    assert len(attempts) == 2 and guard.plan.budget_bytes == roomy.budget_bytes
    assert [each.shape for each in guard.plan.trace.inputs] == [(300, 32)]
    assert guard.plan.checkpoint and not roomy.checkpoint
    guard.plan.remove(case.model)


@pytest.mark.parametrize("retries", [1, 3])
def test_plans_are_tightened_down_to_the_lowest_peak_before_the_guard_gives_up(retries: int) -> None:
    """Where little is expected yet, as in the first op, no plan takes less than that; the step may still fit."""
    case = Case()
    roomy = memfit.plan(case.trace, budget=case.plan.baseline.peak_bytes, progress=False)
    roomy.apply(case.model, case.optimizer)
    attempts: list[memfit.Plan] = []

    def hopeless() -> None:
        attempts.append(guard.plan)
        case.train()

    handle = case.model.norm.register_forward_pre_hook(lambda *_: ask_for_too_much())
    guard = memfit.guard(roomy, case.model, optimizer=case.optimizer, step=case.trace, retries=retries)
    with guard, pytest.raises(OutOfMemory) as caught:
        guard.step(hopeless)
    handle.remove()
    assert 2 <= len(attempts) <= retries + 1 and attempts[-1] is guard.plan
    assert guard.plan.checkpoint == case.plan.checkpoint
    assert "it ran with the lowest peak that any plan of this step has" in caught.value.explanation.history[-1]
    assert "a lower budget" not in str(caught.value)
    guard.plan.remove(case.model)


def test_a_batch_that_no_plan_brings_under_the_budget_is_run_with_the_lowest_peak_that_it_can_have(case: Case) -> None:
    step = memfit.Step(case.model, case.x, loss=lambda output, _: output.square().mean(), optimizer=case.optimizer)
    roomy = memfit.plan(case.trace, budget=case.plan.baseline.peak_bytes, progress=False)
    case.plan.remove(case.model)
    roomy.apply(case.model, case.optimizer)
    longer, attempts = torch.randn(2048, 32), []

    def train() -> None:
        attempts.append(guard.plan)
        case.train(longer)
        if guard.plan.trace.inputs[0].shape != (2048, 32):
            ask_for_too_much()

    with (
        memfit.guard(roomy, case.model, optimizer=case.optimizer, step=step, copies=True) as guard,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", memfit.recovery.PlanDrift)
        guard.step(train)
    least = memfit.plan(step.with_batch(longer), target="cpu", budget="1B", progress=False).minimum_budget_bytes
    assert len(attempts) == 2 and guard.plan.budget_bytes == least > roomy.budget_bytes


def test_a_process_that_does_not_grow_says_nothing_about_the_peak() -> None:
    """Pages that malloc has kept are there before; smaller inputs are told as what they are."""
    case = Case(rows=1 << 17).apply()
    guard = memfit.guard(case.plan, case.model, optimizer=case.optimizer)
    with guard, pytest.warns(memfit.recovery.PlanDrift):
        case.train(torch.randn(512, 32), times=3)
    assert [each.kind for each in guard.drifts] == ["inputs"]
    case.plan.remove(case.model)


def test_what_filled_the_memory_has_what_malloc_took_from_pages_that_it_had_kept(case: Case) -> None:
    held: list[torch.Tensor] = []
    failing = False

    def hoard(*_: Any) -> None:
        held.extend(torch.ones(10_000) for _ in range(512))
        if failing:
            ask_for_too_much()

    case.model.layers[0].register_forward_hook(hoard)
    with memfit.guard(case.plan, case.model):
        case.train()
    pinned = torch.ones(10_000)  # so that malloc keeps the pages before it
    held.clear()
    failing = True
    with pytest.raises(OutOfMemory) as caught, memfit.guard(case.plan, case.model, optimizer=case.optimizer):
        case.train()
    assert pinned.numel()
    explanation, size = caught.value.explanation, 512 * 40_000
    rest = explanation.by_category["activations and temporaries"]
    assert explanation.total_bytes is not None and size < rest < 1.2 * size
    assert explanation.by_category["optimizer state"] > 0 and explanation.uncounted == ()


def test_optimizer_state_that_the_guard_does_not_know_is_said_not_to_be_counted(case: Case) -> None:
    case.train()
    case.model.layers[1].register_forward_hook(lambda *_: ask_for_too_much())
    with pytest.raises(OutOfMemory) as caught, memfit.guard(case.plan, case.model):
        case.train()
    assert "not counted here: the optimizer's state (give guard optimizer=)" in str(caught.value)


def test_a_function_that_runs_the_step_is_a_step(case: Case) -> None:
    model, optimizer, x = case.model, case.optimizer, case.x

    def train() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    case.plan.remove(model)
    plan = memfit.plan(train, target="cpu", budget=case.plan.baseline.peak_bytes, progress=False)
    plan.check(train)
    plan.apply(model, optimizer)
    with memfit.guard(plan, model, optimizer=optimizer, step=train) as guard:
        guard.step(train)
    assert guard.steps == 1 and guard.drifts == ()
    with pytest.raises(memfit.InputError, match="guard takes the step that is run, not a int"):
        memfit.guard(plan, model, step=3)  # type: ignore[arg-type]


def test_a_guard_inside_a_guard_of_the_same_model_is_refused(case: Case) -> None:
    with memfit.guard(case.plan, case.model) as guard:
        with (
            pytest.raises(memfit.MemfitError, match="another guard watches this model"),
            memfit.guard(case.plan, case.model),
        ):
            pass
        case.train()
    assert guard.steps == 1
    with memfit.guard(case.plan, case.model):
        pass


def test_drift_in_words() -> None:
    drift = Drift(kind="lower", step=4, measured_bytes=1 << 20, planned_bytes=1 << 21, inputs=())
    assert str(drift).startswith("the peak of step 4 is 1.00 MiB, lower than the 2.00 MiB of the plan")


def test_inputs_are_matched_with_those_of_the_plan() -> None:
    planned = (
        InputRecord(shape=(4, 8), dtype="int64", bytes=256),
        InputRecord(shape=None, dtype=None, bytes=16),
    )
    same = {"tokens": torch.zeros(4, 8, dtype=torch.int64), "unread": torch.zeros(4), "flag": True}
    longer = {"tokens": torch.zeros(4, 9, dtype=torch.int64), "mask": torch.zeros(3)}
    assert find_different(list_tensors(same), planned) == ()
    assert find_different(list_tensors(longer), planned) == ("int64[4, 9] in place of int64[4, 8]",)


def test_tensors_that_no_trace_has_are_not_other_inputs() -> None:
    """One that is given twice, the number of tokens that a trainer adds, and all where a function was planned."""
    x = torch.zeros(4, 8, dtype=torch.int64)
    planned = (InputRecord(shape=(4, 8), dtype="int64", bytes=256),)
    count = torch.tensor(32)
    assert find_different(list_tensors({"input_ids": x, "labels": x, "num_items_in_batch": count}), planned) == ()
    assert find_different(list_tensors({"input_ids": x, "labels": x.clone()}), planned) == ()
    assert find_different(list_tensors({"input_ids": x, "labels": x}), ()) == ()
    longer = torch.zeros(4, 9, dtype=torch.int64)
    assert len(find_different(list_tensors({"input_ids": longer, "labels": longer, "count": count}), planned)) == 1


def test_rows_of_a_tensor_that_was_planned_whole_are_not_other_inputs() -> None:
    table = torch.zeros(100, 8)
    whole = (InputRecord(shape=(100, 8), dtype="float32", bytes=3200),)
    rows = (InputRecord(shape=(10, 8), dtype="float32", bytes=3200),)
    assert find_different(list_tensors(table[:10]), whole) == ()
    assert find_different(list_tensors(table[:10]), rows) == ()
    assert find_different(list_tensors(table[:20]), rows) == ("float32[20, 8] in place of float32[10, 8]",)


def test_a_guard_is_refused_for_a_model_without_the_plan() -> None:
    case = Case()
    with pytest.raises(memfit.MemfitError, match=r"does not run a plan; call plan\.apply"):
        memfit.guard(case.plan, case.model).__enter__()
    with pytest.raises(memfit.InputError, match="tolerance is 0"):
        memfit.guard(case.plan, case.model, tolerance=0)
    with pytest.raises(memfit.InputError, match=r"an nn\.Module, not a str"):
        memfit.guard(case.plan, "model")  # type: ignore[arg-type]
    with pytest.raises(memfit.MemfitError, match="not at work"):
        memfit.guard(case.plan, case.model, optimizer=case.optimizer).step(case.train)


@pytest.mark.parametrize(
    ("message", "size"),
    [
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12", 4096),
        ("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79 GiB", 3 << 29),
        ("CUDA out of memory. Tried to allocate 20.00 MiB.", 20 << 20),
        ("std::bad_alloc", None),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", None),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", None),
    ],
)
def test_errors_of_allocators_are_recognised_with_what_was_asked_for(message: str, size: int | None) -> None:
    assert is_out_of_memory(RuntimeError(message)) and parse_asked_bytes(RuntimeError(message)) == size
    assert not is_out_of_memory(ValueError(message))
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError(message))
