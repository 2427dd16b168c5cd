"""What holds an allocation at an instant: only what is still to come counts, and Python where it outlives autograd."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memfit
from memfit.analysis.holders import Holders
from memfit.analysis.report import Report
from memfit.capture import AFTER_STEP, NO_INDEX, Phase, Step, Trace
from memfit.memory import Timeline
from memfit.solve import SolveOptions

ROWS = 1024


class Twice(nn.Module):
    """Tanh's result is saved by tanh and by the layer after it; the model may keep it, or a graph that never runs."""

    def __init__(self, *, keeps: bool = False, beside: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 64)
        self.keeps, self.beside = keeps, beside
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.clear()
        h = torch.tanh(self.first(x))
        if self.keeps:
            self.kept.append(h)
        if self.beside:
            self.kept.append(torch.sigmoid(h * 3).sum())
        return self.second(h).square().mean()


def timeline_of(model: nn.Module) -> Timeline:
    step = Step(model, memfit.spec((ROWS, 64)), optimizer=torch.optim.SGD)
    return Report.of_trace(memfit.trace(step, target="h100-sxm")).baseline


def op_of(trace: Trace, name: str, phase: Phase = Phase.FORWARD) -> int:
    return next(number for number, op in enumerate(trace.ops) if op.name == name and op.phase is phase)


def made_by(trace: Trace, op: int) -> int:
    return next(number for number, storage in enumerate(trace.storages) if storage.alloc_at == op)


def backward_of(trace: Trace, op: int) -> list[int]:
    return [number for number, each in enumerate(trace.ops) if each.forward_op == op and each.phase is Phase.BACKWARD]


def test_a_backward_that_is_over_holds_nothing() -> None:
    timeline = timeline_of(Twice())
    trace = timeline.trace
    tanh = op_of(trace, "aten.tanh.default")
    storage = made_by(trace, tanh)
    layer = max(trace.storages[storage].saved_by)
    assert trace.storages[storage].saved_by == (tanh, layer)
    while_both = Holders(timeline, backward_of(trace, layer)[0]).of_storage(storage)
    assert while_both[0] == "autograd" and ", and of 1 more" in while_both[1]
    one_over = Holders(timeline, backward_of(trace, tanh)[0]).of_storage(storage)
    assert one_over[0] == "autograd" and "backward of tanh" in one_over[1] and "more" not in one_over[1]


@pytest.mark.parametrize("keeps", [False, True])
def test_what_python_keeps_longer_than_autograd_is_held_by_both(keeps: bool) -> None:
    timeline = timeline_of(Twice(keeps=keeps))
    trace = timeline.trace
    tanh = op_of(trace, "aten.tanh.default")
    storage = made_by(trace, tanh)
    assert (trace.storages[storage].released == AFTER_STEP) == keeps
    kind, held_by = Holders(timeline, backward_of(trace, tanh)[0]).of_storage(storage)
    assert kind == "autograd" and held_by.startswith("saved for the backward of tanh")
    assert ("held by Python" in held_by) == keeps and ("beyond the step" in held_by) == keeps


def test_a_name_that_lives_until_the_backward_is_over_says_until_when() -> None:
    """The function that runs the step has a name for what tanh makes, and gives it up before the optimizer's step."""
    layers = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        assert isinstance(model, nn.Sequential)
        h = model[1](model[0](batch))
        model[2](h).square().mean().backward()
        del h
        optimizer.step()
        optimizer.zero_grad()

    step = Step(layers, memfit.spec((ROWS, 64)), optimizer=torch.optim.SGD, run=run)
    trace = memfit.trace(step, target="h100-sxm")
    tanh = op_of(trace, "aten.tanh.default")
    storage = made_by(trace, tanh)
    last = max(number for number, op in enumerate(trace.ops) if op.phase is Phase.BACKWARD)
    assert trace.storages[storage].released == last
    held_by = Holders(Report.of_trace(trace).baseline, backward_of(trace, tanh)[0]).of_storage(storage)[1]
    assert held_by.endswith(f"until op {last}")


def test_a_graph_whose_backward_never_runs_is_held_by_autograd_not_by_python() -> None:
    timeline = timeline_of(Twice(beside=True))
    trace = timeline.trace
    sigmoid = op_of(trace, "aten.sigmoid.default")
    storage = made_by(trace, sigmoid)
    assert not backward_of(trace, sigmoid)
    kind, held_by = Holders(timeline, timeline.peak_instant).of_storage(storage)
    assert kind == "autograd" and "backward of sigmoid" in held_by and "no op runs after this" in held_by


def test_the_gradient_that_the_backward_begins_with_stays_until_its_end() -> None:
    timeline = timeline_of(Twice())
    trace = timeline.trace
    storage = made_by(trace, op_of(trace, "aten.ones_like.default", Phase.BACKWARD))
    free_after = trace.storages[storage].free_after
    readers = [number for number, op in enumerate(trace.ops) if storage in {ref.storage for ref in op.inputs}]
    assert readers[-1] < free_after - 1
    kind, held_by = Holders(timeline, readers[-1] + 1).of_storage(storage)
    assert kind == "backward" and "about to be freed" not in held_by
    assert "the backward began with" in held_by and held_by.endswith(f"until op {free_after}")
    assert "about to be freed" in Holders(timeline, free_after).of_storage(storage)[1]


def test_in_a_second_run_what_is_over_in_the_step_is_over() -> None:
    """While the first layer runs again, the backward of all layers after it is over."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(3)))
    step = Step(layers, memfit.spec((ROWS, 64)), loss=lambda output, _: output.square().mean())
    trace = memfit.trace(step, target="h100-sxm")
    plan = memfit.plan(trace, options=SolveOptions(force=("0", "1")), progress=False)
    timeline = Report.of(plan, trace).planned
    assert timeline is not None and [unit.name for unit in timeline.units] == ["1", "0"]
    instant = int(timeline.recompute_instants(1)[-1])
    holders = Holders(timeline, instant)
    assert holders.now == timeline.units[1].backward_begin
    there = [timeline.allocation(number) for number in timeline.alive_at(instant).tolist()]
    results = [each for each in there if each.storage != NO_INDEX and trace.storages[each.storage].alloc_at >= 0]
    first_made = [each.storage for each in results if each.remade is None]
    assert first_made
    for storage in first_made:
        saved_by = trace.storages[storage].saved_by
        over = all(max(backward_of(trace, saver), default=NO_INDEX) < holders.now for saver in saved_by)
        kind, held_by = holders.of_storage(storage)
        assert (kind == "autograd" and not over) or kind != "autograd", held_by
        assert "which runs" not in held_by
