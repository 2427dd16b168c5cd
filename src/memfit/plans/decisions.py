"""What a plan decided, what each decision saves and costs, and how long the step would take without it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from memfit.plans.joint import JointSearch
from memfit.plans.record import Decision
from memfit.plans.settings import Answer, Setting, base_ms, describe_reshard, describe_units
from memfit.sharding import ShardOptions
from memfit.solve import solve
from memfit.text import counted

_GIB = 1 << 30


def find_decisions(joint: JointSearch) -> list[Decision]:
    """Return what the best answer decides; settings are compared with those without the decision, solved too."""
    found = list(_in_program(joint.best))
    for kind, what, other in _settings_without(joint):
        found += _against(joint, kind, what, other)
    if joint.segments_saved_bytes is not None:
        found.append(build_decision("segments", "expandable", joint.segments_saved_bytes, 0.0))
    return found


def drop_small_gains(joint: JointSearch, worth: float) -> None:
    """Take back decisions of the best answer while the step takes at most this part longer without them.

    The one that gains least goes first, and what has gone does not come back. Checkpointing is none of them: without it
    the step may not fit. Nor is another implementation of the optimizer's step: it is the same work in fewer kernels.
    Offload that `SolveOptions(offload=...)` asked for stays.
    """
    most_ms = joint.best.step_ms * (1.0 + worth)
    kinds = joint.kinds - {"optimizer"}
    options = joint.first.problem.options
    keeps = options.offload == "hidden" or (options.offload and "offload" not in (options.decide or ()))
    offloads = _offloads(joint.best) and not keeps
    while joint.best.solved.choice is not None and not joint.is_late:
        without = [joint.bounds.answer(other) for kind, _, other in _settings_without(joint) if kind in kinds]
        others = [joint.bounds.exact(each) for each in without if each is not None]
        if not offloads and not keeps:
            others = [_without_offload(each) if _offloads(each) else each for each in others]
        elif offloads:
            others.append(_without_offload(joint.best))
        fitting = [each for each in others if each.solved.choice is not None and each.step_ms <= most_ms]
        if not fitting:
            return
        joint.best = min(fitting, key=lambda each: each.step_ms)
        offloads = offloads and _offloads(joint.best)


def _offloads(answer: Answer) -> bool:
    return any(policy.offload for _, policy in answer.solved.chosen)


def _without_offload(answer: Answer) -> Answer:
    problem = answer.problem.without_offload()
    solved = solve(problem, answer.solved.budget_bytes)
    return replace(answer, problem=problem, solved=solved, reservation=None)


def _settings_without(joint: JointSearch) -> Iterator[tuple[str, str, Setting]]:
    """Yield the kinds of decisions that the best setting takes, what it decides, and the setting without each."""
    setting, given = joint.best.setting, joint.first.problem.options.shard
    variant = setting.variant
    if variant.chunked is not None:
        yield "loss", f"{variant.chunked.chunks} chunks", replace(setting, variant=replace(variant, chunked=None))
    if variant.implementation is not None:
        yield "optimizer", variant.implementation, replace(setting, variant=replace(variant, implementation=None))
    if variant.parts > 1:
        yield "micro_batch", f"{variant.parts} micro-batches", replace(setting, variant=replace(variant, parts=1))
    if setting.shard is not None:
        for kind, what, shard in _changes(setting.shard, given):
            yield kind, what, replace(setting, shard=None if shard == given else shard)


def price_ms_per_gib(joint: JointSearch) -> float | None:
    """Return what a little less budget would add to the step, for each GiB; None where nothing fits it."""
    best = joint.best
    if best.solved.choice is None or not best.solved.recompute_ms:
        return None if best.solved.choice is None else 0.0
    less = min(_GIB, best.solved.budget_bytes // 64)
    solved = solve(best.problem, best.solved.budget_bytes - less)
    if solved.choice is None:
        return None
    return max(0.0, solved.recompute_ms - best.solved.recompute_ms) * _GIB / less


def _in_program(best: Answer) -> Iterator[Decision]:
    """Yield what the solver decided: which units recompute, and which offload."""
    solved = best.solved
    dropping = [policy for _, policy in solved.chosen if policy.stop >= 0]
    if dropping:
        dropped = sum(policy.discarded_bytes for _, policy in solved.chosen)
        recompute_ms = max(0.0, solved.recompute_ms - solved.exposed_offload_ms)
        yield build_decision("checkpoint", counted(len(dropping), "unit"), dropped, recompute_ms)
    away = [policy for _, policy in solved.chosen if policy.offload]
    if away:
        moved = sum(policy.offloaded_bytes for policy in away)
        without = solve(best.problem.without_offload(), solved.budget_bytes)
        without_ms = None if without.choice is None else best.base_ms + without.recompute_ms
        what = counted(len(away), "unit")
        yield build_decision("offload", what, moved, solved.exposed_offload_ms, without_ms=without_ms)


def _changes(shard: ShardOptions, given: ShardOptions) -> Iterator[tuple[str, str, ShardOptions]]:
    """Yield the kinds of decisions in which a sharding differs from the given one, and the sharding without each."""
    if shard.units != given.units:
        yield "units", describe_units(shard), replace(shard, units=given.units)
    if shard.replicas != given.replicas:
        yield "replicas", f"{shard.replicas} replicas", replace(shard, replicas=given.replicas)
    if shard.prefetch != given.prefetch:
        yield "prefetch", f"{counted(shard.prefetch, 'unit')} ahead", replace(shard, prefetch=given.prefetch)
    if shard.cpu_offload != given.cpu_offload:
        yield "cpu_offload", "shards on the host", replace(shard, cpu_offload=given.cpu_offload)
    if (shard.keep_last, shard.reshard_after_forward) != (given.keep_last, given.reshard_after_forward):
        other = replace(shard, keep_last=given.keep_last, reshard_after_forward=given.reshard_after_forward)
        yield "reshard", describe_reshard(shard), other


def _against(joint: JointSearch, kind: str, what: str, other: Setting) -> list[Decision]:
    """Return a decision with its difference to another setting, which is captured and solved where it was not."""
    here, budget_bytes = joint.best.problem, joint.best.solved.budget_bytes
    if budget_bytes == joint.budget_bytes:
        found = joint.bounds.answer(other)
        without = None if found is None else joint.bounds.exact(found)
    else:  # lowered, for the allocator's room
        problem = joint.problems.of(other)
        solved = None if problem is None else solve(problem, budget_bytes, minimum=False)
        without = None if problem is None or solved is None else Answer(problem=problem, solved=solved, setting=other)
    if without is None:
        return []
    saves = without.problem.replay(()).peak_bytes - here.replay(()).peak_bytes
    without_ms = None if without.solved.choice is None else without.step_ms
    return [build_decision(kind, what, saves, base_ms(here) - without.base_ms, without_ms=without_ms)]


def build_decision(kind: str, setting: str, saves_bytes: int, costs_ms: float, **fields: Any) -> Decision:
    """Build a decision, with its price where it has one."""
    if saves_bytes > 0 and costs_ms >= 0:
        fields["ms_per_gib"] = costs_ms * _GIB / saves_bytes
    return Decision(kind=kind, setting=setting, saves_bytes=int(saves_bytes), costs_ms=costs_ms, **fields)  # type: ignore[arg-type]
