"""The summary that people read: totals that add up, verdicts, places and names."""

from __future__ import annotations

from memfit.capture import Category, Phase, Trace
from memfit.hardware import Target
from memfit.memory import Fit, MemorySummary, summarize
from tests.memory.synthetic import call, make, op, parameter, storage

MIB, GIB = 1 << 20, 1 << 30
H100 = Target.parse("h100-sxm").device


def step(activation_bytes: int) -> Trace:
    return make(
        ops=(
            op(makes=(1,), call=1, source=1, name="aten.mm.default"),
            op(Phase.BACKWARD, reads=(1,), makes=(2,), call=1, source=2, name="aten.mm.default"),
            op(Phase.OPTIMIZER),
        ),
        storages=(
            storage(10 * GIB, category=Category.PARAMETER, name="a.weight", module="a"),
            storage(activation_bytes, alloc_at=0, free_after=1, call=1, module="a"),
            storage(10 * GIB, alloc_at=1, free_after=2, category=Category.GRADIENT, name="a.weight", module="a"),
        ),
        calls=(call("", 0, 1, (1, 2)), call("a", 0, 1, (1, 2), parent=0)),
        parameters=(parameter("a.weight", 0, 2),),
        sources=("", "model.py:1 forward", "model.py:2 forward"),
        device="h100-sxm",
        device_type="cuda",
    )


def test_parts_add_up_and_overheads_stay_apart() -> None:
    summary = summarize(step(5 * GIB))
    assert isinstance(summary, MemorySummary)
    assert sum(summary.peak_by_category.values()) == summary.peak_bytes == 25 * GIB
    assert summary.start_bytes == 10 * GIB
    assert summary.peak_reserved_bytes == 25 * GIB
    assert summary.overhead_bytes == H100.context_bytes > 0
    assert summary.needed_bytes == 25 * GIB + H100.context_bytes
    assert summary.free_bytes == H100.memory_total_bytes - summary.needed_bytes
    assert (summary.fit, summary.failing) == (Fit.FITS, None)


def test_peak_and_largest_have_places_and_names() -> None:
    summary = summarize(step(5 * GIB))
    assert (summary.peak.op, summary.peak.phase, summary.peak.module) == (1, "backward", "a")
    assert (summary.peak.name, summary.peak.source) == ("aten.mm.default", "model.py:2 forward")
    assert [(each.name, each.category) for each in summary.largest] == [
        ("a.weight", Category.PARAMETER),
        ("a.weight", Category.GRADIENT),
        ("aten.mm.default", Category.ACTIVATION),
    ]
    assert (summary.largest[2].module, summary.largest[2].source) == ("a", "model.py:1 forward")


def test_step_that_is_too_large_names_the_op_that_fails() -> None:
    summary = summarize(step(65 * GIB))
    assert summary.fit is Fit.TOO_LARGE
    assert summary.failing is not None
    assert (summary.failing.op, summary.failing_step) == (1, 1)
    assert summary.free_bytes < 0


def test_same_trace_fits_a_larger_device() -> None:
    assert summarize(step(65 * GIB), target="b200").fit is Fit.FITS


def on_h100(*sizes: int) -> Trace:
    """A step of ops that each make one storage and free it."""
    return make(
        ops=tuple(op(makes=(number,)) for number in range(len(sizes))),
        storages=tuple(storage(size, alloc_at=number, free_after=number) for number, size in enumerate(sizes)),
        device="h100-sxm",
        device_type="cuda",
    )


def test_a_cache_that_only_the_first_step_empties_is_no_harm() -> None:
    summary = summarize(on_h100(40 * GIB, 50 * GIB))
    assert summary.peak_bytes == 50 * GIB and summary.peak_reserved_bytes == 90 * GIB > H100.memory_total_bytes
    assert summary.fit is Fit.FITS


def test_between_the_margin_and_what_no_device_has_a_step_may_fit() -> None:
    memory = H100.rank_memory
    assert summarize(on_h100(memory.usable_bytes - 20 * MIB)).fit is Fit.FITS
    assert summarize(on_h100(memory.usable_bytes + 20 * MIB)).fit is Fit.MARGIN
    assert summarize(on_h100(memory.available_bytes - 20 * MIB)).fit is Fit.MARGIN
    assert summarize(on_h100(memory.available_bytes + 20 * MIB)).fit is Fit.TIGHT
    assert summarize(on_h100(memory.most_bytes - 20 * MIB)).fit is Fit.TIGHT
    too_large = summarize(on_h100(memory.most_bytes + 20 * MIB))
    assert too_large.fit is Fit.TOO_LARGE and too_large.failing is not None


def test_cpu_has_no_overheads_and_reserves_what_it_allocates() -> None:
    summary = summarize(make(ops=(op(),), storages=(storage(3),)))
    assert summary.overheads == ()
    assert summary.peak_reserved_bytes == summary.peak_allocated_bytes == summary.needed_bytes == 3
