"""print(plan): what is checkpointed and why, before and after, how tight."""

from __future__ import annotations

import io
import re

import msgspec
import pytest
from rich.console import Console

import memfit
from memfit.hardware import Target
from memfit.plans import Plan, ShardedUnit, ShardPlan, UnitOp
from memfit.units import display_bytes, display_ms
from tests.plans.plan_cases import Case, Stack, captured


@pytest.fixture(scope="module")
def case() -> Case:
    return Case.of(captured())


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")


def line_of(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(start))


def test_memory_and_time_before_and_after(case: Case) -> None:
    plan = case.plan(case.chosen("layers.0", "layers.1"))
    shown = str(plan)
    assert plan.predicted is not None
    for estimate in (plan.baseline, plan.predicted):
        assert display_bytes(estimate.peak_bytes) in line_of(shown, "peak")
        assert display_bytes(estimate.peak_reserved_bytes) in line_of(shown, "reserved")
        assert display_ms(estimate.step_ms) in line_of(shown, "step")
    assert display_ms(plan.predicted.recompute_ms) in line_of(shown, "  recomputing")
    assert "highest with the plan: the second run of layers.1" in shown
    at = plan.baseline.peak_at
    assert f"highest without a plan: {at.phase}, {at.name.split('.')[1]}" in shown
    for category, n_bytes in plan.baseline.peak_by_category.items():
        assert display_bytes(n_bytes) in line_of(shown, category.value)


def test_micro_batches_with_the_same_policy_are_one_row() -> None:
    step = memfit.Step(Stack, memfit.spec((64, 64)), accumulation_steps=4, loss=lambda output, _: output.sum())
    names = [f"layers.{number}" for number in range(3)]
    plan = memfit.plan(step, target="cpu", options=memfit.solve.SolveOptions(force=tuple(names)), progress=False)
    assert len(plan.checkpoint) == 12 and {entry.call for entry in plan.checkpoint} == {0, 1, 2, 3}
    shown = str(plan)
    assert len(re.findall(r"^layers\.", shown, flags=re.MULTILINE)) == 2, "once in each table"
    assert "layers.0-2, each of 4 runs" in shown and "checkpointed: 12 units" in shown
    later = [entry for entry in plan.checkpoint if entry.call]
    assert "layers.0-2#1-3" in str(msgspec.structs.replace(plan, checkpoint=tuple(later)))


def test_how_tight_it_is(case: Case) -> None:
    plan = case.plan(case.chosen("layers.0", "layers.1"))
    shown = str(plan)
    over = plan.baseline.peak_bytes - plan.budget_bytes
    assert f"budget {display_bytes(plan.budget_bytes)}: optimal" in shown
    assert f"without a plan the step is {display_bytes(over)} above the budget" in shown
    assert f"the smallest budget that works is {display_bytes(plan.minimum_budget_bytes or 0)}" in shown
    assert "the plan leaves 4.00 KiB to spare; no plan under this budget is faster (proven)" in shown


def test_the_first_line_is_the_verdict_of_the_page(case: Case) -> None:
    fits, hopeless = str(case.plan(case.chosen("layers.0"))), str(case.infeasible())
    assert fits.startswith("fits: peak ") and fits.splitlines()[0].endswith(" a step")
    assert hopeless.startswith("does not fit: no plan keeps the step within 1.00 MiB")
    assert "take care" not in fits


def test_what_the_allocator_reserves_beyond_the_budget_is_told(case: Case) -> None:
    plan = case.plan(case.chosen("layers.0"))
    usable = Target.parse(case.trace.device).usable_bytes

    def reserving(size_bytes: int) -> list[str]:
        assert plan.predicted is not None
        predicted = msgspec.structs.replace(plan.predicted, peak_reserved_bytes=size_bytes)
        return str(msgspec.structs.replace(plan, predicted=predicted)).splitlines()

    more = reserving(usable)
    assert more[0].startswith("fits: ") and f"of {display_bytes(usable)} for them" in more[1]
    too_much = reserving(usable + (1 << 30))
    assert too_much[0].startswith("fits the budget, with care: ")
    assert too_much[1].startswith(f"take care: the caching allocator would reserve {display_bytes(usable + (1 << 30))}")


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_step_that_fits_as_it_is_has_one_column_and_says_so(case: Case, ranks: int) -> None:
    shown = str(memfit.plan(case.trace, ranks=ranks, progress=False))
    assert "nothing needs to be checkpointed: " in shown and "with the plan" not in shown
    assert "recomputing" not in shown and ("waiting for communication" in shown) == (ranks > 1)
    peaks = re.findall(r"[KMG]iB", line_of(shown, "peak"))
    assert len(peaks) == 1


def test_an_unproven_plan_shows_its_bound_and_gap(case: Case) -> None:
    bound_ms = case.baseline.step_ms
    shown = str(case.plan(case.chosen("layers.0"), status="feasible", gap=0.125, bound_ms=bound_ms))
    assert f"no plan has a step below {display_ms(bound_ms)} (proven), gap 12.50%" in shown


def test_equal_layers_are_one_row(case: Case) -> None:
    plan = case.plan(case.chosen("layers.0", "layers.1", "layers.2") + case.chosen("layers.3", place=1))
    shown = str(plan)
    row = line_of(shown, "layers.0-2 ")
    assert re.search(r"layers\.0-2 Block +│ +3 │", row) and "100%" in row
    assert display_bytes(plan.checkpoint[0].discarded_bytes) in row
    assert re.search(r"layers\.0-2 +│ +nothing │", shown)
    kept = [line for line in shown.splitlines() if line.startswith("layers.3 ")][1]
    assert plan.checkpoint[3].saved_ops
    assert display_bytes(plan.checkpoint[3].cached_bytes) in kept
    assert plan.checkpoint[3].saved_ops[0].name.split(".")[1] in kept


def test_what_is_kept_is_named_by_its_bytes_not_by_how_often(case: Case) -> None:
    plan = case.plan(case.chosen("layers.0"))
    ops = (("aten.mul.Tensor", 64), ("aten.mul.Tensor", 64), ("aten.mm.default", 4096), ("aten.gelu.default", 512))
    saved = tuple(UnitOp(offset=offset, name=name, bytes=size) for offset, (name, size) in enumerate(ops))
    entry = msgspec.structs.replace(plan.checkpoint[0], saved_ops=saved, cached_bytes=4736)
    shown = str(msgspec.structs.replace(plan, checkpoint=(entry,)))
    assert re.search(r"layers\.0 +│ +4\.62 KiB │ mm, gelu, 2 mul\.Tensor", shown)


@pytest.mark.parametrize("columns", [60, 80, 100, 160])
def test_nothing_is_wider_than_the_terminal_says(case: Case, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for plan in (case.plan(case.chosen("layers.0", "layers.1")), case.infeasible()):
        assert max(map(len, str(plan).splitlines())) <= columns


def test_rows_are_not_broken_at_eighty_columns(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = case.plan(case.chosen("layers.0", "layers.1", "layers.2"))
    monkeypatch.setenv("COLUMNS", "80")
    tables = [line for line in str(plan).splitlines() if "│" in line]
    monkeypatch.setenv("COLUMNS", "200")
    assert tables == [line for line in str(plan).splitlines() if "│" in line]


def test_on_several_ranks_the_comparison_is_with_the_sharded_step(case: Case) -> None:
    shard = ShardPlan(ranks=8, units=(ShardedUnit(module="", reshard_after_forward=False),), prefetch=1)
    shown = str(case.plan(case.chosen("layers.0"), target=Target.parse(case.trace.device, ranks=8), shard=shard))
    assert "8 ranks" in shown and "only sharded, the step is" in shown and "highest when only sharded" in shown
    assert "without a plan" not in shown


def test_second_calls_are_told_apart() -> None:
    case = Case.of(captured(lambda: Stack(layers=2, twice=True)))
    shown = str(case.plan(case.chosen("layers.0", "layers.1", "layers.0#1", "layers.1#1")))
    assert line_of(shown, "layers.0-1, each of 2 runs ")
    assert line_of(str(case.plan(case.chosen("layers.0#1", "layers.1#1"))), "layers.0-1#1 ")


def test_an_infeasible_plan_says_what_would_work(case: Case) -> None:
    shown = str(case.infeasible())
    assert "budget 1.00 MiB: infeasible" in shown
    assert "no plan fits this budget; the smallest that works is 3.00 MiB, 2.00 MiB more" in shown
    assert "3.00 MiB" in line_of(shown, "peak") and "2.00 MiB" in line_of(shown, "optimizer state")
    assert "nothing gets below 3.00 MiB here: " in shown
    assert "what would help" in shown and "offload" not in shown, "levers are for explain to work out"
    assert "note: a note" in shown
    assert "with the plan" not in shown and "checkpointed" not in shown


def test_sharding_shows_its_settings(case: Case) -> None:
    units = tuple(ShardedUnit(module=f"layers.{number}", reshard_after_forward=number < 2) for number in range(4))
    shard = ShardPlan(ranks=1, units=units, prefetch=2, reduce_dtype="float32")
    shown = str(case.plan(case.chosen("layers.0"), shard=shard))
    assert "sharded by 1: 4 units, 2 gathered ahead" in shown
    assert "gathered from forward to backward: layers.2-3" in shown
    assert "reduce_dtype: float32" in shown


def test_brackets_are_shown_as_they_are(case: Case) -> None:
    plan = msgspec.structs.replace(case.plan(case.chosen("layers.0")), notes=("a [bold]note[/bold]",))
    assert "note: a [bold]note[/bold]" in str(plan)


def test_a_console_prints_it_too(case: Case) -> None:
    console = Console(file=io.StringIO(), width=60, record=True)
    console.print(case.plan(case.chosen("layers.0")))
    assert "layers.0" in console.export_text()


def test_repr_is_one_short_line(case: Case) -> None:
    plan: Plan = case.plan(case.chosen("layers.0"))
    assert repr(plan).startswith("Plan(optimal for ") and "1 unit checkpointed" in repr(plan)
    assert "2 units checkpointed" in repr(case.plan(case.chosen("layers.0", "layers.1")))
    hopeless = repr(case.infeasible())
    assert hopeless.startswith("Plan(infeasible for 1.00 MiB on 1 x h100-sxm, the smallest budget that works is 3.00 M")
    assert max(len(repr(plan)), len(hopeless)) < 150
