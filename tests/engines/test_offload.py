"""Results that leave for the host: same bits, freed and back at the points that the plan counts with."""

from __future__ import annotations

import copy
import gc
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

import memfit
from memfit.capture import Step
from memfit.cost import Runtime
from memfit.engines import offload_store
from memfit.engines.local import replace_policies
from memfit.engines.offload import OffloadedCall
from memfit.errors import InputError, StateError
from memfit.hardware import Target
from memfit.memory import Timeline, measured
from memfit.plans import Checkpoint, Plan, UnitOp
from memfit.plans.build import build_checkpoint
from memfit.solve import Problem, SolveOptions, minimum_budget_bytes
from memfit.tradeoff import TraceColumns, UnitColumns, find_units
from memfit.tradeoff.policy import build_policy
from tests.engines.engine_cases import both, same
from tests.engines.offloading import Offloading, bytes_left_away, gradients, offload_saved, offload_units, store_of
from tests.engines.test_exact import Blocks, Remembers, Shared, squares
from tests.engines.test_memory import STEPS, Flops

pytestmark = pytest.mark.usefixtures("frozen_heap")

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")


class Wide(nn.Module):
    """Blocks whose results are large beside all else, and a head."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 128), nn.Linear(128, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.sigmoid(self.up(x)))


WIDE = tuple(f"blocks.{number}" for number in range(4))


def wide_step(rows: int = 512) -> Step:
    torch.manual_seed(0)
    return Step(Wide(), torch.randn(rows, 16), loss=squares)


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done with offloaded results, in order: the engine's own methods, with a note of each call."""
    seen: list[str] = []

    def noted(name: str, method: Callable[[OffloadedCall], Any]) -> Callable[..., Any]:
        def call(self: OffloadedCall, *args: Any) -> Any:
            seen.append(f"{name} {self._unit}")
            return method(self, *args)

        return call

    for name in ("begin", "free", "fetch", "restore"):
        monkeypatch.setattr(OffloadedCall, name, noted(name, getattr(OffloadedCall, name)))
    return seen


def test_units_that_offload_everything_give_the_same_bits() -> None:
    step = Step(Blocks(), torch.randn(64, 16), loss=squares, optimizer=torch.optim.AdamW)
    made = offload_units(step, BLOCKS)
    plain, planned, model, _ = both(Blocks, step, made.plan)
    assert same(plain, planned)
    assert store_of(model).extents.end >= sum(made.bytes.values()) > 0
    assert not bytes_left_away(model)


def saving_plan(step: Step, part: float) -> Plan:
    """A plan that saves dear ops, so that recomputes are answered with results that have come back."""
    trace = memfit.trace(step, target="cpu")
    options = SolveOptions(forbid=("<loss>",))
    problem = Problem.of(Runtime.of(trace, Flops()), Target.parse("cpu"), options)
    least = minimum_budget_bytes(problem)
    assert least is not None
    budget = least + int((problem.baseline_bytes - least) * part)
    return offload_saved(memfit.plan(trace, budget=budget, cost=Flops(), options=options, progress=False))


@pytest.mark.parametrize("part", [0.0, 0.3, 0.6])
def test_saved_recomputed_and_offloaded_results_of_one_unit(part: float) -> None:
    step = Step(Blocks(), torch.randn(64, 16), loss=squares, optimizer=torch.optim.AdamW)
    plan = saving_plan(step, part)
    plain, planned, model, _ = both(Blocks, step, plan)
    assert same(plain, planned)
    assert store_of(model).extents.end > 0


def test_calls_of_one_module_and_tied_weights() -> None:
    step = Step(Shared(), torch.randint(0, 11, (8, 6)), loss=squares)
    made = offload_units(step, ("block", "block#1", "block#2"))
    plain, planned, model, _ = both(Shared, step, made.plan)
    assert same(plain, planned)
    assert store_of(model).extents.end > 0


def test_accumulated_gradients() -> None:
    step = Step(Wide(), torch.randn(64, 16), loss=squares, optimizer=torch.optim.SGD, accumulation_steps=3)
    names = tuple(f"blocks.{n}" + (f"#{call}" if call else "") for n in range(4) for call in range(3))
    plain, planned, model, _ = both(Wide, step, offload_units(step, names).plan)
    assert same(plain, planned)
    assert not bytes_left_away(model)


def test_each_point_is_where_the_plan_has_it(points: list[str]) -> None:
    """Also where the next unit has no policy, as blocks.2, and where there is none."""
    step = wide_step(16)
    model = step.build_model()
    nexts = {"blocks.0": "blocks.1", "blocks.1": "blocks.2", "blocks.3": None}
    offload_units(step, tuple(nexts), nexts).plan.apply(model)
    for _ in range(2):  # the run that compiles, and one that is compiled
        points.clear()
        squares(model(step.batch), None).backward()
        # the unit's own backward asks once more for what has come already, which does nothing
        asked = [each for each in points if not each.startswith("fetch")]
        assert asked == [
            "begin blocks.0",
            "free blocks.0",
            "begin blocks.1",
            "free blocks.1",
            "begin blocks.3",
            "free blocks.3",
            "restore blocks.3",
            "restore blocks.1",
            "restore blocks.0",
        ]
        first = {unit: points.index(f"fetch {unit}") for unit in nexts}
        assert points.index("restore blocks.3") < first["blocks.3"] < first["blocks.1"]
        assert first["blocks.1"] < points.index("restore blocks.1")
        assert first["blocks.0"] < points.index("restore blocks.1"), "before the next unit's own is awaited"


def test_the_unit_after_may_be_one_without_a_policy(points: list[str]) -> None:
    step = wide_step(16)
    model = step.build_model()
    plain = copy.deepcopy(model)
    offload_units(step, ("blocks.3",), {"blocks.3": "norm"}).plan.apply(model)
    squares(plain(step.batch), None).backward()
    output = model(step.batch)
    assert points == ["begin blocks.3", "free blocks.3"]
    squares(output, None).backward()
    assert points[2:] == ["fetch blocks.3", "restore blocks.3", "fetch blocks.3"]
    assert all(map(torch.equal, gradients(plain), gradients(model)))


def run_marked(model: nn.Module, x: torch.Tensor) -> None:
    """Run a step with an allocation of an odd size between forward and backward, to find that point in a profile."""
    loss = model(x).square().mean()
    torch.empty(777, dtype=torch.uint8)
    loss.backward()


def test_bytes_are_really_gone_to_the_byte() -> None:
    """At the end of the forward all that was offloaded is missing, no more and no less."""
    step = wide_step()
    made = offload_units(step, WIDE)
    found: dict[bool, list[int]] = {}
    for planned in (False, True):
        model = copy.deepcopy(step.build_model())
        if planned:
            made.plan.apply(model)
        run_marked(model, step.batch)  # compiles
        model.zero_grad()
        with measured() as here:
            run_marked(model, step.batch)
        mark = next(i for i, event in enumerate(here.events) if event.bytes == 777)
        found[planned] = [int(here.timeline_bytes[mark]), here.end_bytes]
    assert found[False][0] - found[True][0] == sum(made.bytes.values()) > 0
    assert found[False][1] == found[True][1], "nothing stays after the step"


@pytest.mark.parametrize("name", ["blocks", "attention"])
def test_saved_results_of_a_recomputed_unit_are_gone_too(name: str) -> None:
    """All that a policy holds because it saves ops: what autograd packs and what it would not have packed."""
    torch.manual_seed(0)
    step = STEPS[name]()
    plan = saving_plan(step, 0.3)
    found = []
    for each in (msgspec.structs.replace(plan, checkpoint=tuple(map(not_offloaded, plan.checkpoint))), plan):
        model = copy.deepcopy(step.build_model())
        each.apply(model)
        run_marked(model, step.batch)  # compiles
        model.zero_grad()
        with measured() as here:
            run_marked(model, step.batch)
        mark = next(i for i, event in enumerate(here.events) if event.bytes == 777)
        found.append(int(here.timeline_bytes[mark]))
    assert found[0] - found[1] == sum(entry.cached_bytes for entry in plan.checkpoint) > 0


def not_offloaded(entry: Checkpoint) -> Checkpoint:
    return msgspec.structs.replace(entry, offload=msgspec.UNSET)


def peak_when_away(made: Offloading, nexts: dict[str, str | None]) -> int:
    """The highest level of the step without what is away, from the end of the next unit until its backward."""
    during = Timeline.of(made.trace).during_bytes.copy()
    units = {unit.name: unit for unit in find_units(made.trace)}
    for name, following in nexts.items():
        point = units[following or name]
        during[point.end : point.backward_begin] -= made.bytes[name]
    return int(during.max())


@pytest.mark.parametrize("last", [None, "norm"])
@pytest.mark.parametrize("rows", [32, 512])
def test_the_measured_peak_is_that_of_the_step_without_what_is_away(rows: int, last: str | None) -> None:
    step = wide_step(rows)
    nexts = dict(zip(WIDE, (*WIDE[1:], last), strict=True))
    made = offload_units(step, WIDE, nexts)
    checked = made.plan.verify(step, steps=1, time_tolerance=None)
    assert checked.exactness.equal
    assert checked.peak.measured_bytes == peak_when_away(made, nexts) < made.plan.baseline.peak_bytes


def test_what_is_alive_does_not_depend_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow store gives the same levels as a fast one, allocation by allocation."""
    step = wide_step()
    made = offload_units(step, WIDE)
    runs = []
    run = offload_store._Job.run
    for delay_s in (0.0, 0.02):
        model = copy.deepcopy(step.build_model())
        made.plan.apply(model)
        run_marked(model, step.batch)
        model.zero_grad()

        def run_late(self: Any, delay_s: float = delay_s) -> None:
            time.sleep(delay_s)
            run(self)

        with monkeypatch.context() as patch:
            patch.setattr(offload_store._Job, "run", run_late)
            with measured() as here:
                run_marked(model, step.batch)
        runs.append(here.timeline_bytes.tolist())
    assert runs[0] == runs[1]


def test_backward_twice_and_gradients_of_some() -> None:
    step = wide_step(64)
    model = step.build_model()
    plain = copy.deepcopy(model)
    offload_units(step, WIDE).plan.apply(model)
    for each in (plain, model):
        loss = squares(each(step.batch), None)
        loss.backward(retain_graph=True)
        loss.backward()
    assert all(map(torch.equal, gradients(plain), gradients(model)))
    some = [torch.autograd.grad(squares(m(step.batch), None), m.blocks[2].up.weight) for m in (plain, model)]
    assert torch.equal(some[0][0], some[1][0])
    assert not bytes_left_away(model)


def test_a_retained_graph_keeps_what_came_back() -> None:
    step = wide_step(64)
    model = step.build_model()
    offload_units(step, WIDE).plan.apply(model)
    loss = squares(model(step.batch), None)
    loss.backward(retain_graph=True)
    store = store_of(model)
    reads = store.submit
    store.submit = lambda work: pytest.fail("something is read again")  # type: ignore[method-assign]
    loss.backward()
    store.submit = reads  # type: ignore[method-assign]


def test_evaluation_between_and_a_forward_without_backward() -> None:
    step = wide_step(64)
    model = step.build_model()
    plain = copy.deepcopy(model)
    offload_units(step, WIDE).plan.apply(model)
    for each in (plain, model):
        output = each(step.batch)
        with torch.no_grad():
            each(step.batch[:3])
        squares(output, None).backward()
        each(step.batch).sum()  # a graph that nobody keeps
        del output
        squares(each(step.batch), None).backward()
    assert all(map(torch.equal, gradients(plain), gradients(model)))
    assert not bytes_left_away(model)


def test_an_exception_in_the_step_leaves_nothing_behind() -> None:
    class Fails(Exception):
        pass

    step = wide_step(64)
    model = step.build_model()
    plain = copy.deepcopy(model)
    offload_units(step, WIDE).plan.apply(model)

    def fail(*_: Any) -> None:
        raise Fails

    for stage in (
        model.blocks[2].register_forward_pre_hook(fail),
        model.blocks[1].down.register_full_backward_hook(fail),
    ):
        with pytest.raises(Fails):
            squares(model(step.batch), None).backward()
        stage.remove()
        model.zero_grad()
        assert not bytes_left_away(model)
    for each in (plain, model):
        squares(each(step.batch), None).backward()
    assert all(map(torch.equal, gradients(plain), gradients(model)))


def test_a_guard_runs_half_a_step_again_under_another_plan() -> None:
    """What a guard does after a step that ended midway: it begins anew, with the policies of another plan."""
    step = wide_step(64)
    made = offload_units(step, WIDE)
    other = offload_units(step, WIDE[1:3])
    model = copy.deepcopy(step.build_model())
    plain = copy.deepcopy(model)
    made.plan.apply(model)
    for plan in (made.plan, other.plan, made.plan):
        for stop_at in (1, 3):
            hook = model.blocks[stop_at].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError()))
            with pytest.raises(MemoryError):
                model(step.batch)
            hook.remove()
            replace_policies(plan, model)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for each in (plain, model):
                    each.zero_grad()
                    squares(each(step.batch), None).backward()
            assert all(map(torch.equal, gradients(plain), gradients(model)))
            assert not bytes_left_away(model)


class Kept(nn.Module):
    """A block whose result is also an output of it, which the model may write to."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.result = torch.sigmoid(self.up(x))
        return self.result


class WritesLater(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Kept() for _ in range(2))
        self.writes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.blocks[0](x)
        if self.writes:
            self.blocks[0].result.detach().add_(1)
        return self.blocks[1](y * 2)


def test_a_result_that_is_written_to_while_it_leaves_is_an_error() -> None:
    torch.manual_seed(0)
    step = Step(WritesLater(), torch.randn(8, 16), loss=squares)
    trace = memfit.trace(step, target="cpu")
    plan = memfit.plan(trace, progress=False)
    unit = next(each for each in find_units(trace) if each.name == "blocks.0")
    columns = TraceColumns.of(trace, np.ones(len(trace.ops)))
    unit_columns = UnitColumns.of(columns, unit)
    entry = build_checkpoint(trace, unit, build_policy(unit_columns, np.zeros(unit_columns.groups, bool)))
    last = unit.end - unit.begin - 1
    result = UnitOp(offset=last, name=trace.ops[unit.end - 1].name, bytes=8 * 16 * 4)
    entry = msgspec.structs.replace(entry, offload=(result,), offload_next="blocks.1")
    model = step.build_model()
    assert isinstance(model, WritesLater)
    msgspec.structs.replace(plan, checkpoint=(entry,)).apply(model)
    squares(model(step.batch), None).backward()
    model.writes = True
    with pytest.raises(StateError, match=r"blocks\.0.*written to in place"):
        model(step.batch)
    model.writes = False
    model.zero_grad()
    squares(model(step.batch), None).backward()


def test_a_plan_is_removed_between_forward_and_backward() -> None:
    step = wide_step(64)
    model = step.build_model()
    plain = copy.deepcopy(model)
    before = set(threading.enumerate())  # the threads themselves: a number is given again once its thread has ended
    made = offload_units(step, WIDE)
    made.plan.apply(model)
    loss = squares(model(step.batch), None)
    threads = [each for each in threading.enumerate() if each not in before and each.name.startswith("memfit-offload")]
    assert threads
    made.plan.remove(model)
    loss.backward()
    squares(plain(step.batch), None).backward()
    assert all(map(torch.equal, gradients(plain), gradients(model)))
    del loss
    gc.collect()
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive(), "the store goes with its last user, and its threads with it"


def test_a_module_with_a_cache_offloads_from_its_tape() -> None:
    step = Step(Remembers(), torch.randn(2, 8, 16), loss=squares)
    plan = saving_plan(step, 0.3)
    plain, planned, model, _ = both(Remembers, step, plan)
    assert same(plain, planned)
    assert store_of(model).extents.end > 0


def test_other_shapes_than_planned() -> None:
    step = wide_step(64)
    model = step.build_model()
    plain = copy.deepcopy(model)
    offload_units(step, WIDE).plan.apply(model)
    for rows in (64, 32, 48, 80, 96):
        for each in (plain, model):
            squares(each(torch.ones(rows, 16)), None).backward()
    assert all(map(torch.equal, gradients(plain), gradients(model)))


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    step = wide_step(16)
    made = offload_units(step, WIDE)
    model = step.build_model()
    monkeypatch.setenv("MEMFIT_OFFLOAD", "/no/such/folder")
    with pytest.raises(InputError, match="MEMFIT_OFFLOAD"):
        made.plan.apply(model)
    assert "forward" not in model.blocks[0].__dict__
    monkeypatch.delenv("MEMFIT_OFFLOAD")
    first, *others = made.plan.checkpoint
    lost = msgspec.structs.replace(first, offload_next="blocks.9")
    with pytest.raises(InputError, match=r"'blocks\.9' runs, and the model has no such module"):
        msgspec.structs.replace(made.plan, checkpoint=(lost, *others)).apply(model)
    both_ways = msgspec.structs.replace(first, dropped=((first.offload[0].offset, 0),))  # type: ignore[index]
    with pytest.raises(InputError, match=r"offloaded .*dropped"):
        Plan.from_json(msgspec.structs.replace(made.plan, checkpoint=(both_ways, *others)).to_json())
    made.plan.apply(model)
