"""Memory by module against a step worked out by hand, a brute-force computation, and real captures."""

from __future__ import annotations

import cProfile

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from memfit import Step, trace
from memfit.capture import AFTER_STEP, BEFORE_STEP, NO_INDEX, Category, Phase, Trace
from memfit.memory import Snapshot, Timeline, call_memory, module_memory
from memfit.memory.modules import RangePeak
from tests.memory.synthetic import call, make, module, op, parameter, storage, traces

OWNED = (Category.PARAMETER, Category.BUFFER, Category.OPTIMIZER_STATE)


def by_hand() -> Trace:
    """`a` then `b` inside the model; `a` keeps 64 for backward, makes 100 for `b` and 8 for nobody."""
    return make(
        ops=(
            op(reads=(0, 4), makes=(5, 6), call=1),
            op(reads=(5, 6), makes=(7,), call=1, workspace=3),
            op(reads=(1, 7), makes=(8,), call=2),
            op(Phase.BACKWARD, reads=(8,), makes=(9,), call=2),
            op(Phase.BACKWARD, reads=(9, 5), makes=(10,), call=1),
        ),
        storages=(
            storage(1000, category=Category.PARAMETER),
            storage(2000, category=Category.PARAMETER),
            storage(4000, category=Category.OPTIMIZER_STATE),
            storage(40, category=Category.BUFFER),
            storage(10, category=Category.INPUT),
            storage(64, alloc_at=0, free_after=4, call=1),
            storage(8, alloc_at=0, free_after=1, category=Category.TEMPORARY, call=1),
            storage(100, alloc_at=1, free_after=3, call=1),
            storage(1, alloc_at=2, free_after=3, call=2),
            storage(2000, alloc_at=3, category=Category.GRADIENT, call=2),
            storage(1000, alloc_at=4, category=Category.GRADIENT, call=1),
        ),
        calls=(
            call("", 0, 3, (3, 5)),
            call("a", 0, 2, (4, 5), parent=0),
            call("b", 2, 3, (3, 4), parent=0),
        ),
        modules=(
            module(""),
            module("a", (0,), (3,)),
            module("b", (1,)),
            module("list"),
            module("list.tied", (0,)),
        ),
        parameters=(parameter("a.weight", 0, 10), parameter("b.weight", 1, 9, (2,))),
    )


def test_what_modules_own_counts_children_and_shared_storages_once() -> None:
    modules = module_memory(Timeline.of(by_hand()))
    model, a, b, tied = modules[""], modules["a"], modules["b"], modules["list.tied"]
    assert model.parameter_bytes == 3000
    assert (model.buffer_bytes, model.gradient_bytes, model.optimizer_state_bytes) == (40, 3000, 4000)
    assert (a.parameter_bytes, a.buffer_bytes, a.gradient_bytes, a.optimizer_state_bytes) == (1000, 40, 1000, 0)
    assert (b.parameter_bytes, b.gradient_bytes, b.optimizer_state_bytes) == (2000, 2000, 4000)
    assert tied.parameter_bytes == modules["list"].parameter_bytes == 1000
    assert not tied.calls


def test_calls_are_as_worked_out_by_hand() -> None:
    _, a, b = call_memory(Timeline.of(by_hand()))
    assert (a.activation_bytes, a.input_bytes, a.output_bytes, a.temporary_bytes) == (164, 10, 100, 11)
    assert (b.activation_bytes, b.input_bytes, b.output_bytes, b.temporary_bytes) == (1, 100, 1, 0)
    assert a.before_forward.total_bytes == 7050
    assert a.forward_peak == Snapshot(
        op=1,
        total_bytes=7050 + 64 + 8 + 100 + 3,
        by_category={
            Category.PARAMETER: 3000,
            Category.BUFFER: 40,
            Category.ACTIVATION: 164,
            Category.TEMPORARY: 11,
            Category.OPTIMIZER_STATE: 4000,
            Category.INPUT: 10,
        },
    )
    assert a.after_forward.total_bytes == 7050 + 164
    assert b.before_backward is not None
    assert b.before_backward.total_bytes == 7050 + 165
    assert b.after_backward is not None
    assert b.after_backward.total_bytes == 7050 + 64 + 2000
    assert a.backward_peak is not None
    assert a.backward_peak.total_bytes == 7050 + 64 + 3000


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.data())
def test_range_peak_is_the_first_of_the_largest(values: list[int], data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, len(values) - 1))
    end = data.draw(st.integers(begin + 1, len(values)))
    found = RangePeak(np.array(values))(np.array([begin]), np.array([end]))
    assert found.tolist() == [begin + int(np.argmax(values[begin:end]))]


@given(traces())
def test_calls_equal_a_brute_force_computation(trace: Trace) -> None:
    timeline = Timeline.of(trace)
    for number, (each, got) in enumerate(zip(trace.calls, call_memory(timeline), strict=True)):
        inside = range(each.begin, each.end)
        outlives = [
            n
            for n, s in enumerate(trace.storages)
            if s.alloc_at != BEFORE_STEP
            and number in trace.ancestors(s.call)
            and (s.free_after == AFTER_STEP or s.free_after >= each.end)
            if s.free_after == AFTER_STEP or s.free_after >= s.alloc_at
        ]
        held = [n for n in outlives if trace.storages[n].category is Category.ACTIVATION]
        assert got.activation_bytes == _sum(trace, held)
        reads = {ref.storage for k in inside for ref in trace.ops[k].inputs}
        older = {n for n in reads if trace.storages[n].alloc_at < each.begin}
        assert got.input_bytes == _sum(trace, [n for n in older if trace.storages[n].category not in OWNED])
        later = {
            ref.storage
            for k in range(each.end, len(trace.ops))
            if trace.ops[k].phase is Phase.FORWARD or trace.ops[k].call != NO_INDEX
            for ref in trace.ops[k].inputs
        }
        outputs = {n for n in outlives if n in later}
        if not outputs and inside:
            last = {ref.storage for ref in trace.ops[each.end - 1].outputs}
            outputs = {
                n
                for n in last
                if trace.storages[n].free_after == AFTER_STEP or trace.storages[n].free_after >= each.end
            }
        assert got.output_bytes == _sum(trace, outputs)
        assert got.before_forward.total_bytes == timeline.before_bytes[each.begin]
        assert got.after_forward.total_bytes == timeline.before_bytes[each.end]
        assert got.forward_peak.total_bytes == _peak(timeline, each.begin, each.end)
        assert sum(got.forward_peak.by_category.values()) == got.forward_peak.total_bytes
        if each.backward_begin == NO_INDEX:
            assert got.backward_peak is got.before_backward is got.after_backward is None
        else:
            assert got.backward_peak is not None
            assert got.backward_peak.total_bytes == _peak(timeline, each.backward_begin, each.backward_end)


def _sum(trace: Trace, storages: object) -> int:
    return sum(trace.storages[n].bytes for n in set(storages))  # type: ignore[call-overload]


def _peak(timeline: Timeline, begin: int, end: int) -> int:
    return int(timeline.during_bytes[begin:end].max()) if begin < end else int(timeline.before_bytes[begin])


class Twice(nn.Module):
    """Calls one layer twice, the second time under checkpointing when asked to."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return checkpoint(self.layer, x, use_reentrant=False) if self.recompute else self.layer(x)


def captured(model: nn.Module, **options: object) -> dict[str, object]:
    step = Step(model, torch.randn(8, 16), loss=lambda out, _: out.square().mean(), **options)  # type: ignore[arg-type]
    return module_memory(Timeline.of(trace(step, target="cpu")))  # type: ignore[return-value]


def test_module_called_twice_holds_the_activations_of_both_calls() -> None:
    layer = captured(Twice())["layer"]
    first, second = layer.calls  # type: ignore[attr-defined]
    hidden, out = 8 * 32 * 4, 8 * 16 * 4
    assert first.activation_bytes == second.activation_bytes == 2 * hidden + out
    assert layer.activation_bytes == 2 * (2 * hidden + out)  # type: ignore[attr-defined]
    assert (second.input_bytes, second.output_bytes) == (out, out)


def test_recomputation_is_a_call_of_its_own_and_not_added_to_what_is_held() -> None:
    layer = captured(Twice(recompute=True))["layer"]
    first, second, again = layer.calls  # type: ignore[attr-defined]
    assert again.phase is Phase.BACKWARD
    assert second.activation_bytes == second.output_bytes == 8 * 16 * 4
    assert first.activation_bytes > second.activation_bytes
    assert layer.activation_bytes == first.activation_bytes + second.activation_bytes  # type: ignore[attr-defined]


def test_passes_of_an_accumulated_step_do_not_add_up() -> None:
    once = captured(Twice())["layer"]
    thrice = captured(Twice(), accumulation_steps=3)["layer"]
    assert len(thrice.calls) == 6  # type: ignore[attr-defined]
    assert thrice.activation_bytes == once.activation_bytes  # type: ignore[attr-defined]


def work(layers: int) -> int:
    """How many Python calls the table of a deep model takes."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(layers)))
    step = Step(model, torch.randn(2, 8), loss=lambda out, _: out.sum(), optimizer=None)
    captured_trace = trace(step, target="cpu")
    profiler = cProfile.Profile()
    profiler.runcall(lambda: module_memory(Timeline.of(captured_trace)))
    return sum(entry.callcount for entry in profiler.getstats())


def test_work_grows_with_the_number_of_calls_and_no_faster() -> None:
    assert work(160) < 2.3 * work(80)
