"""`tune`: plans that come near the fastest are run here, and the fastest of them is kept."""

from __future__ import annotations

import copy
import functools
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
from memfit.errors import InputError, MissingFeatureError, StateError
from memfit.hardware import OffloadLink, Target
from memfit.plans import Alternative, Inputs, Plan, find_alternatives
from memfit.sharding import ShardOptions
from memfit.solve import SolveOptions
from memfit.verify import Tuning, tune
from memfit.verify.tuning import keep_fastest, race
from tests.plans.test_joint import out_of_reach, real_step
from tests.plans.test_offload_plans import Block, step_of

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
        time.sleep(0.1)
        read(*arguments)

    monkeypatch.setattr(offload_store, "read_summed", slow_read)
    found = tuned(real_step(inside=False), target, rounds=2, steps=2)
    assert not offloads(found.plan)
    note = found.plan.notes[-1]
    assert "run here by turns with" in note and "predicted to be faster" in note
    slow = [each for each in found.tried if offloads(each.plan)]
    assert slow and all(min(each.rounds_ms) > min(found.tried[0].rounds_ms) + 50 for each in slow)


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
    fastest_ms = min(each.measured_ms for each in found.tried)
    assert fastest_ms <= found.tried[0].measured_ms <= 1.005 * fastest_ms
    text = str(found)
    assert (
        "run here, by turns" in text
        and f"kept: {found.tried[0].label}" in text
        and all(each.label in text for each in found.tried)
    )
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
    times_ms = {"slow": [100.0, 112.0], "first": [101.0, 100.0, 100.0], "second": [100.0, 99.0, 98.0]}
    run, ran = clock(times_ms)
    assert race(list(times_ms), run, 3) == (list(times_ms.values()), [1, 2])
    assert ran == ["slow", "first", "second", "second", "first", "slow", "first", "second"]


def test_the_first_round_does_not_count() -> None:
    """The plan that runs first is cold; it neither leaves for that nor is another one kept in its place."""
    times_ms = {"cold": [500.0, 99.0], "warm": [100.0, 120.0]}
    run, _ = clock(times_ms)
    times, stayed = race(list(times_ms), run, 4)
    assert (times, stayed) == (list(times_ms.values()), [0])
    assert keep_fastest(two_plans(), times, stayed).tried[0].label == "predicted"


def test_a_plan_without_memory_leaves_at_once_and_is_not_kept() -> None:
    times_ms = {"large": [math.inf], "small": [100.0, 100.0], "tiny": [101.0, 101.0]}
    run, ran = clock(times_ms)
    assert race(list(times_ms), run, 2) == (list(times_ms.values()), [1, 2])
    assert ran == ["large", "small", "tiny", "tiny", "small"]
    times_ms = {"large": [90.0, 90.0, math.inf], "small": [100.0, 98.0, 98.0]}
    run, _ = clock(times_ms)
    found = keep_fastest(two_plans(), *race(list(times_ms), run, 4))
    assert found.tried[0].label == "other" and "ran out of memory" in found.plan.notes[-1]
    assert "out of memory" in str(found)
    run, _ = clock({"large": [math.inf], "larger": [math.inf]})
    with pytest.raises(StateError, match="all ran out of memory"):
        keep_fastest(two_plans(), *race(["large", "larger"], run, 4))


def test_a_plan_that_is_kept_for_its_time_is_not_called_proven() -> None:
    first, second = (each.plan for each in two_plans())
    assert first.status == second.status == "optimal" and first.predicted is not None and second.predicted is not None
    assert first.predicted.step_ms < second.predicted.step_ms
    kept = keep_fastest(two_plans(), [[100.0], [99.0]], [0, 1]).plan
    assert kept.status == "feasible" and kept.bound_ms == first.bound_ms and kept.gap is not None and kept.gap > 0
    assert kept.checkpoint == second.checkpoint and Plan.from_json(kept.to_json()) == kept
    within_noise = keep_fastest(two_plans(), [[100.0], [99.6]], [0, 1]).plan
    assert within_noise.checkpoint == first.checkpoint and within_noise.status == "optimal"


@functools.cache
def two_plans() -> list[Alternative]:
    """A plan, and one that is predicted to be slower, under one budget."""
    found = alternatives(OPTIONS)
    return [replace(found[0], label="predicted"), replace(found[-1], label="other")]


def alternatives(options: SolveOptions, step: Step | None = None, budget: int | None = None) -> list[Alternative]:
    target = fast_disk()
    given = Inputs.of(real_step(inside=False) if step is None else step, target=target, options=options)
    return find_alternatives(given, budget=tight_budget(target) if budget is None else budget)


def test_a_loss_that_cannot_be_in_chunks_is_no_error() -> None:
    step = replace(real_step(inside=False), loss=out_of_reach)
    found = alternatives(SolveOptions(decide="loss"), step, 4 << 20)
    assert found and all(not each.plan.chunked_loss for each in found)


@pytest.mark.parametrize("chunks", [1, 4])
def test_chunks_of_the_loss_that_were_given_stay(chunks: int) -> None:
    found = alternatives(SolveOptions(decide=("loss", "offload"), loss_chunks=chunks))
    assert {each.plan.chunked_loss.chunks if each.plan.chunked_loss else 1 for each in found} == {chunks}


def test_a_decision_that_is_asked_for_by_its_own_option_is_compared_too() -> None:
    plain = memfit.plan(step_of(Block), target="cpu", budget="1KiB", progress=False)
    assert plain.minimum_budget_bytes is not None
    budget = (plain.minimum_budget_bytes + plain.baseline.peak_bytes) // 2
    found = alternatives(SolveOptions(offload=True), step_of(Block), budget)
    assert offloads(found[0].plan) and not all(offloads(each.plan) for each in found)


def test_offloading_all_that_is_hidden_is_compared_too() -> None:
    plain = memfit.plan(step_of(Block), target="cpu", budget="1KiB", progress=False)
    budget = plain.baseline.peak_bytes - 1
    found = alternatives(SolveOptions(decide=("offload",)), step_of(Block), budget)
    by_hand = memfit.plan(
        step_of(Block),
        target=fast_disk(),
        budget=budget,
        options=SolveOptions(decide=(), offload="hidden"),
        progress=False,
    )
    assert offloads(by_hand) and by_hand.checkpoint in [each.plan.checkpoint for each in found]


def test_a_divided_batch_that_was_not_tried_is_told() -> None:
    with pytest.raises(MissingFeatureError, match="micro-batches is run by your own loop"):
        tune(real_step(inside=False), target="cpu", options=SolveOptions(decide="micro_batch"), progress=False)
    options = SolveOptions(decide="all")
    found = tune(real_step(inside=False), target="cpu", budget="1KiB", options=options, progress=False)
    assert found.plan.status == "infeasible" and "micro-batches" in found.plan.notes[-1]


def test_steps_that_memfit_does_not_shard_are_refused_before_they_are_planned() -> None:
    ddp = SolveOptions(shard=ShardOptions(parallel="ddp"))
    with pytest.raises(MissingFeatureError, match="parallel='ddp' replicates"):
        tune(real_step(inside=False), target="cpu", ranks=2, options=ddp, progress=False)
    with pytest.raises(MissingFeatureError, match="wrapped by its own code"):
        tune(real_step(inside=False), target="cpu", mesh={"dp": 2}, progress=False)
