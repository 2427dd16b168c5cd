"""Plans made of units, policies and estimates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from memfit.errors import InputError
from memfit.plans import peak_at
from memfit.tradeoff import Policy
from tests.plans import plan_cases
from tests.plans.plan_cases import Case, Stack, captured


@pytest.fixture(scope="module")
def case() -> Case:
    return Case.of(captured())


def test_entries_say_what_the_policy_does(case: Case) -> None:
    for place in range(1, len(case.frontiers["layers.1"].policies)):
        ((unit, policy),) = case.chosen("layers.1", place=place)
        (entry,) = case.plan([(unit, policy)]).checkpoint
        assert (entry.unit, entry.module, entry.kind, entry.call) == ("layers.1", "layers.1", "Block", 0)
        assert (entry.begin, entry.end, entry.stop) == (unit.begin, unit.end, policy.stop)
        assert tuple(op.offset for op in entry.saved_ops) == policy.saved
        assert tuple(op.offset for op in entry.recomputed_ops) == policy.recomputed
        for op in (*entry.saved_ops, *entry.recomputed_ops):
            assert op.name == case.trace.ops[unit.begin + op.offset].name
            births = [each.bytes for each in case.trace.storages if each.alloc_at == unit.begin + op.offset]
            assert op.bytes == sum(births)
        assert entry.discarded_bytes == policy.discarded_bytes
        assert entry.cached_bytes == policy.cached_bytes
        assert entry.recompute_peak_bytes == policy.recompute_peak_bytes
        assert entry.recompute_ms == pytest.approx(policy.recompute_ms, abs=1e-6)


def test_discard_ratio_is_the_share_that_goes(case: Case) -> None:
    everything = case.plan(case.chosen("layers.1")).checkpoint[0]
    assert everything.discard_ratio == 1.0
    part = case.plan(case.chosen("layers.1", place=1)).checkpoint[0]
    discardable = case.frontiers["layers.1"].discardable_bytes
    assert part.discard_ratio == pytest.approx(part.discarded_bytes / discardable, abs=1e-6)
    assert 0 < part.discard_ratio < 1


def test_second_calls_have_their_own_entries() -> None:
    case = Case.of(captured(lambda: Stack(layers=2, twice=True)))
    plan = case.plan(case.chosen("layers.1", "layers.1#1"))
    assert [(entry.unit, entry.module, entry.call) for entry in plan.checkpoint] == [
        ("layers.1", "layers.1", 0),
        ("layers.1#1", "layers.1", 1),
    ]
    plan.check(case.trace)


def test_the_loss_is_an_entry_without_a_module(case: Case) -> None:
    plan = case.plan(case.chosen("<loss>"))
    (entry,) = plan.checkpoint
    assert entry.is_loss and (entry.module, entry.call, entry.kind) == ("", 0, "loss")
    plan.check(case.trace)


def test_entries_are_in_the_order_in_which_units_run(case: Case) -> None:
    shuffled = case.plan(case.chosen("<loss>", "layers.2", "layers.0"))
    assert [entry.unit for entry in shuffled.checkpoint] == ["layers.0", "layers.2", "<loss>"]


def test_units_inside_each_other_are_refused(case: Case) -> None:
    with pytest.raises(InputError, match=r"units '' and 'layers\.0' have ops in common"):
        case.plan(case.chosen("", "layers.0", place=1))


def test_policies_that_do_nothing_are_left_out(case: Case) -> None:
    nothing: Policy = case.frontiers["layers.1"].policies[0]
    plan = case.plan([*case.chosen("layers.0"), (case.unit("layers.1"), nothing)])
    assert [entry.unit for entry in plan.checkpoint] == ["layers.0"]


def test_noise_in_the_last_digits_does_not_show(case: Case) -> None:
    chosen = case.chosen("layers.0", "layers.1")
    noisy = [
        (unit, replace(policy, recompute_ms=float(np.nextafter(policy.recompute_ms, np.inf))))
        for unit, policy in chosen
    ]
    assert case.plan(noisy).to_json() == case.plan(chosen).to_json()


def test_a_plan_above_its_budget_is_never_made(case: Case) -> None:
    with pytest.raises(InputError, match=r"the plan is inconsistent: predicted\.peak_bytes"):
        case.plan(case.chosen("layers.0"), budget_bytes=4096, minimum_budget_bytes=None)


def test_infinite_bounds_are_refused(case: Case) -> None:
    with pytest.raises(InputError, match="bound_ms is missing"):
        case.plan(case.chosen("layers.0"), bound_ms=float("inf"))


def test_a_peak_at_a_view_names_the_next_op_that_does_something(case: Case) -> None:
    ops = case.trace.ops
    views = [op for op in range(len(ops) - 1) if ops[op].view and not ops[op + 1].view]
    assert views
    for view in views:
        at = peak_at(case.trace, view)
        same = ops[view].phase is ops[view + 1].phase
        assert (at.op, at.name) == ((view + 1, ops[view + 1].name) if same else (view, ops[view].name))
    assert peak_at(case.trace, -1).phase == "before the step"


def test_two_captures_give_one_document() -> None:
    assert plan_cases.usual_plan().to_json() == plan_cases.usual_plan().to_json()
