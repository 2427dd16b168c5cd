"""Levers: what each predicts is what the changed step does."""

from __future__ import annotations

import dataclasses
import gc
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import memfit
from memfit.analysis.explaining import explain
from memfit.analysis.explanation import StepExplanation
from memfit.analysis.levers import Case, Lever
from memfit.analysis.levers.case import LEAST_PART, sort_levers
from memfit.analysis.levers.changed_steps import loss, micro_batch, optimizer, precision
from memfit.analysis.levers.lifetimes import gradients, holding
from memfit.analysis.levers.replanned import checkpointing, sharding
from memfit.analysis.levers.segments import segments
from memfit.analysis.report import Report
from memfit.capture import Category, Step
from memfit.cost import Roofline
from memfit.engines import chunked_cross_entropy
from memfit.hardware import Device, Target
from memfit.hardware.efficiency import Family
from memfit.memory import Timeline, measured, reserved
from memfit.presets import named_steps_at
from memfit.sharding import ShardOptions
from memfit.solve import SolveOptions
from memfit.units import display_ms
from tests.devices import without_workspaces

H100 = without_workspaces()

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("frozen_heap")]

CLASSES, WIDTH = 2048, 32


class Talker(nn.Module):
    """A language model that is mostly head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens).relu())


class Blocks(nn.Module):
    """Blocks of two products; with `keeps`, copies of what goes from one to the next are part of the output."""

    def __init__(self, width: int = 64, layers: int = 4, *, keeps: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)) for _ in range(layers)
        )
        self.keeps = keeps

    def forward(self, x: torch.Tensor) -> Any:
        seen = []
        for layer in self.layers:
            x = x + layer(x)
            seen.append(x.detach().clone())
        return (x.square().mean(), seen) if self.keeps else x.square().mean()


def next_token(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def next_token_in_chunks(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return chunked_cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def talking(**options: Any) -> Step:
    options.setdefault("loss", next_token)
    return Step(lambda: Talker().to(torch.bfloat16), memfit.spec((4, 64), torch.int64), **options)


def explained(step: Any, target: str | Device = H100, **options: Any) -> StepExplanation:
    return explain(step, target=target, progress=False, **options)


def lever(found: StepExplanation, name: str) -> Lever:
    return next(each for each in found.levers if each.name.startswith(name))


def case_of(step: Step, target: str | Device = H100, ranks: int | None = None, budget: int | None = None) -> Case:
    aim = Target.parse(target, ranks=ranks)
    report = Report.of_trace(memfit.trace(step, target=aim), target=aim)
    return Case(report=report, step=step, cost=Roofline.of(aim), budget_bytes=aim.budget_bytes(budget))


def only(family: Callable[[Case], Iterator[Lever]], step: Step, *names: str, **options: Any) -> list[Lever]:
    """The levers of one family, which must have these names."""
    found = list(family(case_of(step, **options)))
    assert [each.name for each in found] == list(names)
    return found


def peak_of(step: Step, target: str | Device = H100) -> int:
    """The peak of a step that is captured afresh."""
    trace = memfit.trace(step, target=target)
    return Timeline.of(trace, trace.hardware.allocator.rounding_bytes).peak_bytes


def step_ms_of(step: Step, target: str | Device = H100) -> float:
    return memfit.plan(step, target=target, progress=False).baseline.step_ms


def test_where_logits_dominate_a_chunked_loss_saves_most_on_one_device() -> None:
    step = talking()
    found = explained(step)
    chunked = lever(found, "chunked loss")
    assert found.at.phase in ("loss", "backward") and found.by_module[0].module == "<loss>"
    alone = [each for each in found.levers if "ranks" not in each.name and "micro-batch" not in each.name]
    assert max(alone, key=lambda each: each.saves_bytes) is chunked
    changed = dataclasses.replace(step, loss=next_token_in_chunks)
    assert chunked.basis == "captured" and chunked.peak_bytes == peak_of(changed)
    assert chunked.costs_ms == pytest.approx(step_ms_of(changed) - found.step_ms, abs=1e-5)


def test_a_loss_that_is_not_called_by_its_name_is_estimated() -> None:
    def own_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return F.nll_loss(F.log_softmax(logits.float().flatten(0, 1), -1), tokens.flatten())

    (chunked,) = only(loss, talking(loss=own_loss), "chunked loss")
    assert chunked.basis == "estimated" and chunked.costs_ms is None and chunked.saves_bytes > 0


def test_the_recipe_of_a_chunked_loss_runs_as_it_is_written() -> None:
    (chunked,) = only(loss, talking(), "chunked loss")
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 5, 7, requires_grad=True), torch.randint(0, 7, (2, 5))
    names: dict[str, Any] = {"memfit": memfit, "logits": logits, "targets": targets}
    exec(chunked.how, names)
    assert torch.allclose(names["loss"], F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    names["loss"].backward()
    assert logits.grad is not None and logits.grad.abs().sum() > 0


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"ignore_index": 3}, {"label_smoothing": 0.1}])
def test_a_chunked_cross_entropy_is_a_cross_entropy(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(37, 11, requires_grad=True), torch.randint(0, 11, (37,))
    whole, parts = F.cross_entropy(logits, targets, **options), chunked_cross_entropy(logits, targets, **options)
    assert torch.allclose(whole, parts)
    (one,) = torch.autograd.grad(whole, logits)
    (other,) = torch.autograd.grad(parts, logits)
    assert torch.allclose(one, other, atol=1e-6)


def test_a_foreach_optimizer_at_the_peak_gives_the_fused_and_the_single_one() -> None:
    step = Step(lambda: Blocks(128, 6), memfit.spec((4, 128)), optimizer=torch.optim.AdamW)
    found = explained(step)
    assert found.at.phase == "optimizer" and found.by_category[Category.TEMPORARY] > 0
    for name, flags in (("fused optimizer", {"fused": True}), ("optimizer one tensor", {"foreach": False})):
        changed = dataclasses.replace(step, optimizer=partial(torch.optim.AdamW, **flags))
        each = lever(found, name)
        assert each.basis == "captured" and each.peak_bytes == peak_of(changed)
        assert each.costs_ms == pytest.approx(step_ms_of(changed) - found.step_ms, abs=1e-5)
    only(optimizer, dataclasses.replace(step, optimizer=partial(torch.optim.AdamW, fused=True)))


def test_the_optimizer_of_a_function_that_runs_the_step_is_estimated() -> None:
    model, batch = Blocks(128, 6), torch.randn(4, 128)
    own = torch.optim.AdamW(model.parameters())

    def train() -> None:
        model(batch).backward()
        own.step()
        own.zero_grad()

    each = lever(explained(train), "fused optimizer")
    fused = Step(lambda: Blocks(128, 6), memfit.spec((4, 128)), optimizer=partial(torch.optim.AdamW, fused=True))
    assert each.basis == "estimated" and each.costs_ms is None
    assert each.peak_bytes == pytest.approx(peak_of(fused), rel=0.01)


def run_without_holding(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    model(batch)[0].backward()
    optimizer.step()
    optimizer.zero_grad()


def test_results_that_only_python_holds_can_be_let_go() -> None:
    step = Step(
        lambda: Blocks(keeps=True), memfit.spec((512, 64)), loss=lambda output, _: output[0], optimizer=torch.optim.SGD
    )
    found = explained(step)
    each = lever(found, "let go")
    assert each.free and each.basis == "estimated"
    assert each.peak_bytes == peak_of(dataclasses.replace(step, loss=None, run=run_without_holding))
    held = [storage for storage in found.largest if storage.holder == "python"]
    assert held and all(storage.born_by == "clone" for storage in held)


@pytest.mark.parametrize("options", [{"set_to_none": False}, {"zero_grad": False}])
def test_gradients_kept_between_steps_can_be_freed(options: dict[str, bool]) -> None:
    step = Step(lambda: Blocks(128), memfit.spec((2048, 128)), optimizer=partial(torch.optim.AdamW, fused=True))
    (each,) = only(gradients, dataclasses.replace(step, **options), "gradients freed by zero_grad")
    assert each.basis == "captured" and each.saves_bytes > 0 and each.peak_bytes == peak_of(step)
    only(gradients, step)


def test_gradients_kept_by_a_loop_of_ones_own_are_estimated() -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    fused = partial(torch.optim.AdamW, fused=True)
    step = Step(lambda: Blocks(128), memfit.spec((2048, 128)), optimizer=fused, run=run)
    (each,) = only(gradients, step, "gradients freed by zero_grad")
    freed = Step(lambda: Blocks(128), memfit.spec((2048, 128)), optimizer=fused)
    assert each.basis == "estimated" and each.peak_bytes == peak_of(freed)


def test_half_a_micro_batch_is_what_its_capture_gives() -> None:
    batch = {"x": memfit.spec((512, 64))}
    step = Step(Blocks, batch)
    (each,) = only(micro_batch, step, "micro-batch of 256 instead of 512")
    changed = Step(Blocks, {"x": memfit.spec((256, 64))}, accumulation_steps=2)
    assert each.basis == "captured" and each.peak_bytes == peak_of(changed)


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (lambda: Step(Blocks, memfit.spec((3, 64))), "3 rows cannot be halved"),
        (lambda: labelled(), "take labels from the batch, or write labels[:len(output)]"),
        (
            lambda: Step(Blocks, memfit.spec((4, 64)), run=lambda model, optimizer, x: model(x).backward()),
            "only a Step",
        ),
    ],
)
def test_what_cannot_be_halved_says_why(step: Any, why: str) -> None:
    case = case_of(step())
    assert list(micro_batch(case)) == []
    assert any("micro-batch" in reason and why in reason for reason in case.left_out)


def labelled() -> Step:
    """A loss with labels of its own, for the whole batch."""
    labels = memfit.spec((8,), torch.int64)
    return Step(lambda: nn.Linear(4, 3), memfit.spec((8, 4)), loss=lambda output, _: F.cross_entropy(output, labels))


def test_bfloat16_leaves_the_model_as_it_was() -> None:
    model = Blocks()
    step = Step(model, memfit.spec((512, 64)), optimizer=torch.optim.AdamW(model.parameters()))
    names = ("bfloat16 compute", "bfloat16 parameters, gradients and state")
    compute, all_of_it = only(precision, step, *names)
    assert compute.peak_bytes == peak_of(dataclasses.replace(step, autocast=torch.bfloat16))
    fresh = Step(lambda: Blocks().to(torch.bfloat16), memfit.spec((512, 64), torch.bfloat16))
    assert all_of_it.peak_bytes == peak_of(fresh) and not all_of_it.same_numbers
    assert all(parameter.dtype is torch.float32 and not parameter.is_meta for parameter in model.parameters())


WIDE = 512
MATRIX_BYTES = 4 * WIDE * WIDE


class Wide(nn.Module):
    """Products alone: at the peak of few rows there are a matrix, its gradient, a buffer and what is reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_sums_in_bfloat16_halve_what_is_reduced_and_nothing_else(autocast: torch.dtype | None) -> None:
    step = Step(Wide, memfit.spec((1, WIDE)), optimizer=torch.optim.SGD, autocast=autocast)
    case = case_of(step, ranks=2)
    summed = next(each for each in precision(case) if each.name == "gradients summed in bfloat16")
    # With autocast the peak moves to where the sum is cast to float32, beside the last whole gradient of the unit,
    # which FSDP2 frees later: half of what is saved otherwise.
    saved = MATRIX_BYTES // 2 if autocast is None else MATRIX_BYTES // 4
    assert summed.saves_bytes == pytest.approx(saved, rel=0.02)
    plan = memfit.plan(
        case.trace, ranks=2, options=SolveOptions(shard=ShardOptions(reduce_dtype="bfloat16")), progress=False
    )
    assert summed.peak_bytes == plan.baseline.peak_bytes and plan.shard is not None
    written = re.search(r"MixedPrecisionPolicy\(.*?\)", summed.how)
    assert written is not None
    policy = eval(written[0], {"MixedPrecisionPolicy": MixedPrecisionPolicy, "torch": torch})
    assert policy.reduce_dtype is torch.bfloat16 and plan.shard.reduce_dtype == "bfloat16"
    assert policy.param_dtype is autocast
    assert plan.shard.param_dtype == (None if autocast is None else "bfloat16")
    assert policy.cast_forward_inputs is (autocast is None), "autocast casts them itself"


@pytest.mark.parametrize(("ranks", "more"), [(None, (2, 4, 8)), (2, (4, 8))])
def test_sharding_over_more_ranks_is_what_a_plan_for_them_says(ranks: int | None, more: tuple[int, ...]) -> None:
    step = Step(lambda: Blocks(256), memfit.spec((64, 256)))
    case = case_of(step, ranks=ranks)
    found = list(sharding(case))
    assert len(found) == len(more)
    for count, each in zip(more, found, strict=True):
        baseline = memfit.plan(case.trace, ranks=count, progress=False).baseline
        assert f"over {count} ranks" in each.name and each.peak_bytes == baseline.peak_bytes
        assert each.costs_ms == pytest.approx(baseline.step_ms - case.step_ms, abs=1e-5)


def test_sharding_one_device_says_what_fsdp2_copies_besides() -> None:
    step = Step(Wide, memfit.spec((1, WIDE)))
    first = next(sharding(case_of(step)))
    device = Target.parse(H100).device
    # two gathers of each matrix, read and written once each, and a gradient copied into a reduction's input
    moved = 4 * (2 * 2 * MATRIX_BYTES + 2 * MATRIX_BYTES)
    took_ms = moved / (device.memory_bandwidth_bytes_per_s * device.efficiency[Family.COPY].bandwidth) * 1e3
    assert f"about {display_ms(took_ms)}, are counted" in first.assumes


def test_ranks_of_one_cpu_share_its_memory() -> None:
    assert only(sharding, Step(lambda: Blocks(256), memfit.spec((64, 256))), target="cpu") == []


def test_checkpointing_for_a_budget_is_the_plan_for_it() -> None:
    step = Step(lambda: Blocks(64, 8), memfit.spec((4096, 64)), optimizer=torch.optim.SGD)
    trace = memfit.trace(step, target=H100)
    budget = int(0.8 * memfit.plan(trace, progress=False).baseline.peak_bytes)
    each = next(checkpointing(case_of(step, budget=budget)))
    plan = memfit.plan(trace, budget=budget, progress=False)
    assert plan.predicted is not None
    assert each.name == "checkpointing for the budget"
    assert each.units == tuple(entry.unit for entry in plan.checkpoint)
    assert each.peak_bytes == plan.predicted.peak_bytes <= budget
    assert each.costs_ms == pytest.approx(plan.predicted.recompute_ms, abs=1e-5)


def test_levers_on_top_of_a_plan_keep_its_policies() -> None:
    step = Step(lambda: Blocks(64, 8), memfit.spec((4096, 64)), optimizer=torch.optim.SGD)
    trace = memfit.trace(step, target=H100)
    whole = memfit.plan(trace, progress=False).baseline.peak_bytes
    plan = memfit.plan(trace, budget=int(0.8 * whole), progress=False)
    assert plan.predicted is not None
    report = Report.of(plan, trace)
    case = Case(report=report, step=None, cost=Roofline.of(report.target), budget_bytes=plan.budget_bytes)
    assert case.effect().peak_bytes == case.peak_bytes == plan.predicted.peak_bytes
    assert case.effect().step_ms == pytest.approx(plan.predicted.step_ms)
    rounded = dataclasses.replace(case.effect(), step_ms=case.step_ms - 1e-6)
    assert case.lever("", "", rounded, "estimated").costs_ms == 0, "times of a plan are rounded unit by unit"
    halved = next(micro_batch(dataclasses.replace(case, step=step)))
    assert halved.peak_bytes < plan.predicted.peak_bytes and halved.saves_bytes > 0


def test_levers_come_free_first_and_then_by_bytes_for_a_millisecond() -> None:
    def made(saves_bytes: int, costs_ms: float | None) -> Lever:
        return Lever(name="", how="", peak_bytes=0, saves_bytes=saves_bytes, costs_ms=costs_ms, basis="captured")

    levers = [made(10, None), made(10, 5.0), made(9, 3.0), made(1, 0.0), made(2, -1.0)]
    assert [(each.saves_bytes, each.costs_ms) for each in sort_levers(levers)] == [
        (2, -1.0),
        (1, 0.0),
        (9, 3.0),
        (10, 5.0),
        (10, None),
    ]


def test_what_saves_little_comes_after_what_costs_time() -> None:
    def made(saves_bytes: int, costs_ms: float | None) -> Lever:
        peak_bytes = 1000 - saves_bytes
        return Lever(
            name="", how="", peak_bytes=peak_bytes, saves_bytes=saves_bytes, costs_ms=costs_ms, basis="captured"
        )

    levers = [made(9, 0.0), made(500, 1.0), made(400, None), made(10, -1.0)]
    assert [each.saves_bytes for each in sort_levers(levers)] == [10, 500, 400, 9]


def test_what_saves_next_to_nothing_is_left_out() -> None:
    found = explained(talking())
    assert found.levers and all(each.saves_bytes >= LEAST_PART * found.peak_bytes for each in found.levers)
    assert all(each.saves_bytes == found.peak_bytes - each.peak_bytes for each in found.levers)
    assert "gradients freed by zero_grad" not in {each.name for each in found.levers}


def measured_peak(step: Step, model: nn.Module) -> int:
    """The peak of a real step on the CPU, with what is there when it begins."""
    made = step.build_optimizer(model)
    for _ in range(2):
        step.execute(model, made, "cpu")
    trace = memfit.trace(dataclasses.replace(step, model=model, optimizer=made), target="cpu")
    gc.collect()
    with measured() as truth:
        step.execute(model, made, "cpu")
    return Timeline.of(trace).start_bytes + truth.peak_bytes


def test_a_chunked_loss_measured_on_the_cpu_peaks_where_its_lever_says() -> None:
    torch.manual_seed(0)
    step = Step(Talker, torch.randint(0, CLASSES, (4, 64)), loss=next_token, optimizer=torch.optim.SGD)
    (chunked,) = only(loss, step, "chunked loss", target="cpu")
    changed = dataclasses.replace(step, loss=next_token_in_chunks)
    assert chunked.basis == "captured"
    assert measured_peak(changed, Talker()) == pytest.approx(chunked.peak_bytes, abs=64)
    assert measured_peak(step, Talker()) - chunked.peak_bytes == pytest.approx(chunked.saves_bytes, abs=64)


def test_results_let_go_of_on_the_cpu_lower_the_measured_peak_as_their_lever_says() -> None:
    model = Blocks(keeps=True)
    step = Step(model, torch.randn(512, 64), loss=lambda output, _: output[0], optimizer=torch.optim.SGD)
    each = next(holding(case_of(step, "cpu")))
    changed = dataclasses.replace(step, loss=None, run=run_without_holding)
    assert measured_peak(changed, model) == pytest.approx(each.peak_bytes, abs=64)
    assert measured_peak(step, model) - each.peak_bytes == pytest.approx(each.saves_bytes, abs=64)


def test_half_a_micro_batch_on_the_cpu_peaks_where_its_lever_says() -> None:
    step = Step(Blocks, torch.randn(512, 64))
    (each,) = only(micro_batch, step, "micro-batch of 256 instead of 512", target="cpu")
    changed = Step(Blocks, torch.randn(256, 64), accumulation_steps=2)
    assert measured_peak(changed, Blocks()) == pytest.approx(each.peak_bytes, abs=64)


def test_expandable_segments_save_what_the_allocator_reserves_and_no_tensor() -> None:
    step = named_steps_at("gpt2")(batch=8, seq=None).step
    case = case_of(step, "h100-sxm", ranks=8)
    device = case.target.device
    (found,) = segments(case)
    grown = dataclasses.replace(device, allocator=dataclasses.replace(device.allocator, expandable_segments=True))
    held = [reserved(case.timeline.allocations, each).peak_reserved_bytes for each in (device, grown)]
    assert found.of_reserved and found.saves_bytes == held[0] - held[1] > 0
    assert found.peak_bytes == case.peak_bytes and found.free and found.option == "--expandable-segments"
    with_them = Target.parse(case.target, expandable_segments=True)
    assert not list(segments(dataclasses.replace(case, report=Report.of_trace(case.trace, target=with_them))))


def test_a_cpu_has_no_segments() -> None:
    step = named_steps_at("gpt2")(batch=1, seq=64).step
    assert not list(segments(case_of(step, "cpu")))
