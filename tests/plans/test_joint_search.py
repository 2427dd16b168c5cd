"""The search over settings: bounds are true, and the answer is that of trying every setting, all kinds at once."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import memfit
from memfit.capture import Step, trace
from memfit.cost import Roofline, Runtime
from memfit.hardware import OffloadLink, Target, load_device
from memfit.plans import joint as joint_search
from memfit.plans import settings as plan_settings
from memfit.plans.decisions import drop_small_gains, find_decisions
from memfit.plans.joint import WORTH, JointSearch
from memfit.plans.settings import Answer, Setting
from memfit.sharding import FlatOptions, Schedule, Sharding, ShardOptions, UnitOptions, shard, transfer_times
from memfit.solve import DECISIONS, Limits, Problem, SolveOptions, solve

pytestmark = pytest.mark.usefixtures("frozen_heap")
CALM = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
SAME_MS = 1e-4


class Reader(nn.Module):
    """Blocks of two layers between an embedding and a head."""

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, classes, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    """Two layers and what is between them, beside their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


def next_token(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@dataclass(frozen=True)
class Instance:
    """A small step, its ranks, and how much of what lies between the smallest and the largest budget it may use."""

    width: int
    depth: int
    classes: int
    rows: int
    ranks: int
    part: float

    def search(self, *, time_limit_s: float = math.inf, of_least: float | None = None, **options: float) -> JointSearch:
        """Return the search; `of_least` gives it a part of the smallest budget in place of the instance's own."""
        step = Step(
            lambda: Reader(self.width, self.depth, self.classes),
            memfit.spec((self.rows, 64), torch.int64),
            loss=next_token,
        )
        target = Target.parse("h100-sxm", ranks=self.ranks)
        cost = Roofline.of(target)
        limited = SolveOptions(decide="all", limits=Limits(time_limit_s=time_limit_s))
        problem = Problem.of(Runtime.of(trace(step, target=target), cost), target, limited)
        least = problem.min_budget
        assert least is not None
        budget = int(least.peak_bytes + self.part * (problem.baseline_bytes - least.peak_bytes))
        budget = budget if of_least is None else int(of_least * least.peak_bytes)
        first = Answer(problem=problem, solved=solve(problem, budget))
        return JointSearch(first, step, cost, DECISIONS, **options)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def few_choices() -> Iterator[None]:
    """Two or three choices of each kind, so that all combinations can be tried."""
    choices = {"CHUNKS": (4,), "PREFETCH": (1, 0), "KEPT": (0, 1), "PARTS": (2,)}
    fewer = {"implementations_of_step": lambda step: ("single",)}
    with mock.patch.multiple(plan_settings, **choices, **fewer):
        yield


instances = st.builds(
    Instance,
    width=st.sampled_from([64, 256, 512]),
    depth=st.integers(2, 3),
    classes=st.sampled_from([100, 2000, 8000]),
    rows=st.sampled_from([2, 4]),
    ranks=st.sampled_from([1, 4, 16]),
    part=st.sampled_from([0.0, 0.2, 0.6]),
)


def check_against_every_setting(instance: Instance) -> None:
    joint = instance.search(worth=0.0, together=10**6)
    nodes = joint.nodes()
    rough = {node: joint.bounds.rough_ms(*node) for node in nodes}
    early = {node: joint.bounds.before_capture_ms(*node, 1) for node in nodes}
    every = instance.search(worth=0.0)
    fastest = every.first.step_ms
    for variant, family in nodes:
        smallest = every.bounds.answer(Setting(variant=variant, shard=family.least))
        for member in family.members:
            setting = Setting(variant=variant, shard=member)
            answer = every.bounds.answer(setting)
            if answer is None or smallest is None:
                continue
            assert rough[variant, family] <= answer.step_ms + SAME_MS, setting
            assert early[variant, family] <= answer.step_ms + SAME_MS, setting
            assert smallest.solved.bound_ms <= answer.solved.recompute_ms + SAME_MS, setting
            assert answer.problem.bound_ms(every.budget_bytes) <= answer.solved.recompute_ms + SAME_MS, setting
            if answer.solved.choice is not None:
                assert every.bounds.least_bytes(setting) <= every.budget_bytes, setting
            fastest = min(fastest, answer.step_ms)
    found = joint.run()
    assert abs(found.step_ms - fastest) <= SAME_MS
    assert found.solved.replay is None or found.solved.replay.peak_bytes <= joint.budget_bytes
    usual = instance.search(together=10**6).run()
    assert fastest - SAME_MS <= usual.step_ms <= fastest * (1 + WORTH) + SAME_MS
    assert usual.solved.gap == 0.0
    rounds = instance.search(together=0).run()
    assert rounds.step_ms <= every.first.step_ms + SAME_MS


@pytest.mark.parametrize(
    "instance",
    [
        Instance(width=256, depth=2, classes=2000, rows=2, ranks=1, part=0.2),
        Instance(width=512, depth=2, classes=100, rows=2, ranks=4, part=0.2),
    ],
)
def test_the_answer_is_that_of_trying_every_setting(instance: Instance) -> None:
    check_against_every_setting(instance)


@pytest.mark.zoo
@settings(CALM, max_examples=20)
@given(instances, st.sampled_from([("single",), ("fused",), ("single", "fused")]))
@example(Instance(width=256, depth=3, classes=2000, rows=4, ranks=4, part=0.6), ("single", "foreach", "fused"))
def test_on_random_steps_the_answer_is_that_of_trying_every_setting(instance: Instance, ways: tuple[str, ...]) -> None:
    with mock.patch.object(plan_settings, "implementations_of_step", return_value=ways):
        check_against_every_setting(instance)


def test_the_time_limit_of_a_search_counts_from_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that waited, or was asked for bounds first, has all of its time: it finds what another one finds."""
    instance = Instance(width=256, depth=2, classes=2000, rows=2, ranks=1, part=0.2)
    waiting = instance.search(time_limit_s=1e6)
    now = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: now() + 1e7)
    found = waiting.run()
    assert math.isinf(waiting.bound_ms)
    assert found.step_ms == pytest.approx(instance.search().run().step_ms)


@pytest.mark.parametrize(("ranks", "classes"), [(1, 2000), (4, 100)])
def test_where_nothing_fits_the_plan_is_the_one_that_needs_least(ranks: int, classes: int) -> None:
    """Its smallest budget is the least of all settings, and no bound of a setting is above what it needs."""
    instance = Instance(width=256, depth=2, classes=classes, rows=2, ranks=ranks, part=0.0)
    joint = instance.search(of_least=0.05)
    found = joint.run()
    assert found.solved.choice is None
    needed = []
    for variant, family in joint.nodes():
        setting = Setting(variant=variant, shard=family.least)
        problem = joint.problems.of(setting)
        if problem is not None:
            assert problem.min_budget is not None
            needed.append(problem.min_budget.peak_bytes)
            assert joint.bounds.least_bytes(setting) <= needed[-1], setting
    assert found.solved.minimum_budget_bytes == min(needed)


def test_a_setting_is_found_that_fits_where_the_step_as_it_is_does_not() -> None:
    instance = Instance(width=64, depth=2, classes=8000, rows=4, ranks=1, part=-0.2)
    joint = instance.search()
    assert joint.first.solved.choice is None
    found = joint.run()
    assert found.solved.choice is not None
    assert found.step_ms == pytest.approx(instance.search(worth=0.0, together=10**6).run().step_ms)


def test_an_answer_that_was_cut_off_is_solved_again_only_where_more_is_asked() -> None:
    """It says no more than its cutoff: a lower one is known to hold, a higher one and none are not."""
    joint = Instance(width=512, depth=3, classes=100, rows=4, ranks=4, part=0.0).search(worth=0.0)
    bounds, setting = joint.bounds, Setting(shard=replace(joint.first.problem.options.shard, keep_last=1))
    optimum_ms = solve(joint.problems.of(setting), joint.budget_bytes).recompute_ms  # type: ignore[arg-type]
    assert optimum_ms > 0.0
    cut = bounds.answer(setting, cutoff_ms=0.5 * optimum_ms)
    assert cut is not None and bounds.is_cut_off(setting)
    assert cut.solved.bound_ms >= 0.5 * optimum_ms - SAME_MS
    assert bounds.answer(setting, cutoff_ms=0.25 * optimum_ms) is cut
    higher = bounds.answer(setting, cutoff_ms=0.75 * optimum_ms)
    assert higher is not None and bounds.is_cut_off(setting)
    assert higher.solved.bound_ms >= 0.75 * optimum_ms - SAME_MS
    whole = bounds.answer(setting)
    assert whole is not None and not bounds.is_cut_off(setting)
    assert whole.solved.recompute_ms == pytest.approx(optimum_ms)
    assert bounds.answer(setting, cutoff_ms=0.5 * optimum_ms) is whole


def test_of_equal_units_the_last_are_the_ones_to_keep() -> None:
    """Any other units take at least as much at every peak, and save at most one gather's time more."""
    instance = Instance(width=256, depth=4, classes=100, rows=4, ranks=16, part=0.5)
    problem = instance.search().first.problem
    runtime = Runtime.of(problem.trace, Roofline.of(problem.target))
    names = [f"blocks.{number}" for number in range(instance.depth)]

    def kept(chosen: tuple[str, ...]) -> Sharding:
        flat = FlatOptions(schedule=Schedule(), units={name: UnitOptions(keep=True) for name in chosen})
        return shard(problem.timeline, runtime, problem.target, ShardOptions(engine="sharded"), flat=flat)

    for count in range(1, instance.depth):
        last = kept(tuple(names[-count:]))
        gather_ms = max(transfer_times(last.runtime, problem.target, last.schedule)[0])
        for chosen in itertools.combinations(names, count):
            other = kept(chosen)
            assert last.peak_bytes <= other.peak_bytes, chosen
            assert last.exposed_ms <= other.exposed_ms + gather_ms, chosen


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_decision_says_how_long_the_step_takes_without_it(ranks: int) -> None:
    """Each decision of a plan is undone, all others held, and the step planned anew: that is what it says."""
    instance = Instance(width=512, depth=3, classes=8000, rows=4, ranks=ranks, part=0.2)
    joint = instance.search(loss_chunks=4)
    best = joint.run()
    decisions = {decision.kind: decision for decision in find_decisions(joint)}
    assert "loss" in decisions
    undone = replace(best.setting, variant=replace(best.setting.variant, chunked=None))
    problem = instance.search().problems.of(undone)
    assert problem is not None
    without = Answer(problem=problem, solved=solve(problem, joint.budget_bytes))
    said = decisions["loss"].without_ms
    if without.solved.choice is None:
        assert said is None
    else:
        assert said == pytest.approx(without.step_ms)
    if "offload" in decisions:
        alone = solve(best.problem.without_offload(), joint.budget_bytes)
        expected = None if alone.choice is None else pytest.approx(best.base_ms + alone.recompute_ms)
        assert decisions["offload"].without_ms == expected
        assert all(not policy.offload for _, policy in alone.chosen)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("worth", [0.02, 0.2, 1e6])
def test_decisions_that_gain_too_little_are_taken_back(ranks: int, worth: float) -> None:
    joint = Instance(width=256, depth=3, classes=8000, rows=4, ranks=ranks, part=0.1).search(worth=0.0)
    joint.run()
    found = joint.best
    drop_small_gains(joint, worth)
    left, most_ms = joint.best, found.step_ms * (1 + worth)
    assert left.solved.choice is not None and left.step_ms <= most_ms
    assert left.solved.replay is not None and left.solved.replay.peak_bytes <= joint.budget_bytes
    kinds = {each.kind: each for each in find_decisions(joint)}
    for kind, decision in kinds.items():
        if kind not in ("checkpoint", "segments"):
            assert decision.without_ms is None or decision.without_ms > most_ms - SAME_MS, kind
    if worth > 1:
        assert all(decision.without_ms is None for kind, decision in kinds.items() if kind != "checkpoint")
        assert left.setting != found.setting or not found.setting.variant.chunked


def test_a_plan_that_leaves_a_small_gain_is_not_called_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(Reader(64, 4, 100), torch.randint(0, 100, (16, 64)), loss=next_token)
    disk = OffloadLink(name="disk", to_host_bytes_per_s=1e12, to_device_bytes_per_s=1e12)
    target = Target.parse(replace(load_device("cpu"), disk=disk))
    alone = memfit.plan(step, target=target, budget="1B", options=SolveOptions(decide=()), progress=False)
    assert alone.minimum_budget_bytes is not None
    budget = (alone.minimum_budget_bytes + alone.baseline.peak_bytes) // 2
    asked = {"target": target, "budget": budget, "options": SolveOptions(decide=("offload",)), "progress": False}
    plans = []
    for worth in (0.0, 1e3):
        monkeypatch.setattr(joint_search, "WORTH_ON_CPU", worth)
        plans.append(memfit.plan(step, **asked))  # type: ignore[arg-type]
    fastest, left = plans
    assert any(entry.offload for entry in fastest.checkpoint) and fastest.status == "optimal"
    assert not any(entry.offload for entry in left.checkpoint)
    assert left.predicted is not None and fastest.predicted is not None and left.bound_ms is not None
    assert left.bound_ms <= fastest.predicted.step_ms + SAME_MS < left.predicted.step_ms
    assert left.status == "feasible" and left.gap
    assert any("are not taken" in note for note in left.notes)
