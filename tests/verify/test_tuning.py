"""`tune`: plans that come near the fastest are run here, and the fastest of them is kept."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import memfit
from memfit.capture import Step
from memfit.engines import offload_store, plan_of_model
from memfit.errors import InputError, StateError
from memfit.hardware import OffloadLink, Target
from memfit.plans import Inputs, Plan, find_alternatives
from memfit.solve import SolveOptions
from memfit.verify import Tuning, tune
from memfit.verify.tuning import race
from tests.plans.test_joint import real_step

pytestmark = pytest.mark.usefixtures("frozen_heap")

OPTIONS = SolveOptions(decide=("loss", "offload"))


def fast_disk() -> Target:
    """A CPU whose disk is said to be as fast as memory."""
    target = Target.parse("cpu")
    disk = OffloadLink(name="disk", to_host_bytes_per_s=1e12, to_device_bytes_per_s=1e12)
    return replace(target, device=replace(target.device, disk=disk))


def tight_budget(target: Target) -> int:
    tight = memfit.plan(real_step(inside=False), target=target, budget="1KiB", progress=False)
    assert tight.minimum_budget_bytes is not None
    return int(tight.minimum_budget_bytes * 1.02)


def offloads(plan: Plan) -> bool:
    return any(entry.offload for entry in plan.checkpoint)


def tuned(step: Step, target: Target, **inputs: Any) -> Tuning:
    return tune(step, target=target, budget=tight_budget(target), options=OPTIONS, progress=False, **inputs)


def test_a_plan_that_is_slower_than_predicted_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is said to be fast, so the plan with the shortest prediction offloads; in truth it takes its time."""
    target = fast_disk()
    first = find_alternatives(
        Inputs.of(real_step(inside=False), target=target, options=OPTIONS), budget=tight_budget(target)
    )
    assert offloads(first[0].plan) and not all(offloads(each.plan) for each in first)
    read = offload_store.read_summed

    def slow_read(*arguments: Any) -> None:
        time.sleep(0.05)
        read(*arguments)

    monkeypatch.setattr(offload_store, "read_summed", slow_read)
    found = tuned(real_step(inside=False), target, rounds=2, steps=2)
    assert not offloads(found.plan)
    note = found.plan.notes[-1]
    assert "run here by turns with" in note and "predicted to be faster" in note
    slow = [each for each in found.tried if offloads(each.plan)]
    assert slow and all(each.measured_ms > found.tried[0].measured_ms + 50 for each in slow)


def test_all_is_left_as_it_was_and_the_plan_runs() -> None:
    step = real_step(inside=False)
    model, optimizer = step.model, step.optimizer
    assert isinstance(model, torch.nn.Module) and isinstance(optimizer, torch.optim.Optimizer)
    plain = copy.deepcopy(model)
    before, torch_state = copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()
    found = tuned(step, fast_disk(), rounds=2, steps=1)
    assert len(found.tried) > 1
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    assert all(each.grad is None for each in model.parameters())
    assert optimizer.state_dict() == before and torch.equal(torch.get_rng_state(), torch_state)
    assert plan_of_model(model) is None
    assert {each.plan.fingerprint for each in found.tried if not each.plan.chunked_loss} == {
        memfit.trace(real_step(inside=False), target="cpu").fingerprint
    }
    check = found.plan.verify(real_step(inside=False), 1, time_tolerance=None)
    assert check.ok, check.findings
    assert Plan.from_json(found.plan.to_json()) == found.plan


def test_what_was_run_is_shown() -> None:
    found = tuned(real_step(inside=False), fast_disk(), rounds=1, steps=1)
    assert [each.measured_ms for each in found.tried] == sorted(each.measured_ms for each in found.tried)
    text = str(found)
    assert "run here, by turns" in text and all(each.label in text for each in found.tried)
    document = json.loads(found.to_json())
    assert [each["label"] for each in document["tried"]] == [each.label for each in found.tried]
    assert document["plan"] == json.loads(found.plan.to_json())


def test_plans_differ_and_fit_and_the_shortest_prediction_is_first() -> None:
    target = fast_disk()
    budget = tight_budget(target)
    found = find_alternatives(Inputs.of(real_step(inside=False), target=target, options=OPTIONS), budget=budget)
    times = [each.plan.predicted.step_ms for each in found if each.plan.predicted is not None]
    assert len(times) == len(found) > 1 and times == sorted(times) and times[-1] <= 1.2 * times[0]
    assert len({(each.plan.checkpoint, bool(each.plan.chunked_loss)) for each in found}) == len(found)
    assert all(each.plan.budget_bytes == budget for each in found)
    alone = memfit.plan(real_step(inside=False), target=target, budget=budget, progress=False)
    if alone.predicted is not None and alone.predicted.step_ms <= 1.2 * times[0]:
        assert alone.checkpoint in [each.plan.checkpoint for each in found]


def test_nothing_is_run_where_nothing_fits_or_one_plan_alone_comes_into_question() -> None:
    found = tune(real_step(inside=False), target="cpu", budget="1KiB", progress=False)
    assert found.plan.status == "infeasible" and len(found.tried) == 1 and not found.tried[0].rounds_ms
    alone = tune(real_step(inside=False), target="cpu", options=SolveOptions(decide=()), progress=False)
    assert alone.plan.status == "optimal" and not alone.tried[0].rounds_ms
    assert "nothing was run" in str(alone)


def test_what_cannot_be_tuned_is_refused() -> None:
    step, target = real_step(inside=False), fast_disk()
    with pytest.raises(InputError, match="this is its trace; give the step"):
        tune(memfit.trace(step, target="cpu"))
    with pytest.raises(InputError, match="rounds is 0"):
        tune(step, target="cpu", rounds=0)
    with pytest.raises(InputError, match="torchrun --nproc-per-node 2"):
        tune(step, target="cpu", ranks=2, progress=False)
    assert isinstance(step.model, torch.nn.Module)
    memfit.plan(step, target="cpu", progress=False).apply(step.model)
    with pytest.raises(StateError, match="call remove on that one first"):
        tuned(step, target)
    with pytest.raises(InputError, match="no GPU that torch can use"):
        tune(real_step(inside=False), target="h100-sxm", budget=tight_budget(target), options=OPTIONS, progress=False)


def clock(times_ms: dict[str, list[float]]) -> tuple[Callable[[str], float], list[str]]:
    """Runners that take these times one after the other, and who ran when."""
    ran: list[str] = []

    def run(name: str) -> float:
        ran.append(name)
        return times_ms[name][ran.count(name) - 1]

    return run, ran


def test_orders_change_and_who_falls_behind_leaves() -> None:
    times_ms = {"slow": [120.0, 130.0], "first": [101.0, 100.0, 100.0], "second": [100.0, 99.0, 98.0]}
    run, ran = clock(times_ms)
    assert race(list(times_ms), run, 3) == list(times_ms.values())
    assert ran == ["slow", "first", "second", "second", "first", "slow", "first", "second"]


def test_no_plan_leaves_after_the_first_round_alone() -> None:
    times_ms = {"cold": [500.0, 99.0, 99.0], "warm": [100.0, 100.0, 100.0]}
    run, _ = clock(times_ms)
    assert race(list(times_ms), run, 3) == list(times_ms.values())


def test_a_plan_without_memory_leaves_at_once() -> None:
    times_ms = {"large": [math.inf], "small": [100.0, 100.0], "tiny": [101.0, 101.0]}
    run, ran = clock(times_ms)
    assert race(list(times_ms), run, 2) == list(times_ms.values())
    assert ran == ["large", "small", "tiny", "tiny", "small"]
    run, _ = clock({"large": [math.inf], "larger": [math.inf]})
    assert race(["large", "larger"], run, 4) == [[math.inf], [math.inf]]
