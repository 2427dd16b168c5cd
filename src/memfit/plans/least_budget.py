"""Where a step does not fit as it is: a setting that fits, or the one that needs the least memory.

Note [Least budget]: every setting has a lower bound of what it needs, from minimums that are known (`least_bytes` of
`setting_bounds.py`). The lowest bound is taken out of a queue. Its problem is built, and one run through the dynamic
program says whether a plan meets the budget, or needs less than the least so far; only then is its minimum found. The
search ends with the first setting that fits, or when no bound is below the least: few settings are captured, and fewer
minimums found.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from memfit.plans.setting_bounds import SettingBounds
from memfit.plans.settings import Answer, Family, Setting, StepVariant


def find_least_budget(
    bounds: SettingBounds,
    best: Answer,
    nodes: Iterable[tuple[StepVariant, Family]],
    is_late: Callable[[], bool],
) -> Answer:
    """Return a setting of these nodes that fits, or the one that needs least; at the time limit the best so far."""
    least = best.problem.min_budget
    if least is None:
        return best
    least_bytes = least.peak_bytes
    bounds.minimums[best.setting] = least.bound_bytes
    ordered = sorted(nodes, key=lambda node: _by_memory(*node))
    settings = [Setting(variant=variant, shard=family.least) for variant, family in ordered]
    queue = [(bounds.least_bytes(setting), number) for number, setting in enumerate(settings)]
    heapq.heapify(queue)
    while queue:
        bound_bytes, number = heapq.heappop(queue)
        if bound_bytes >= least_bytes or is_late():
            break
        setting = settings[number]
        better_bytes = bounds.least_bytes(setting)
        if better_bytes > bound_bytes:
            heapq.heappush(queue, (better_bytes, number))
            continue
        problem = bounds.problems.of(setting)
        if problem is None or setting in bounds.minimums:
            continue
        if problem.can_meet(bounds.budget_bytes):
            answer = bounds.answer(setting)
            if answer is not None and answer.solved.choice is not None:
                return answer
        if not problem.can_meet(least_bytes - 1):
            bounds.minimums[setting] = least_bytes
            continue
        found = problem.min_budget
        if found is None:
            continue
        bounds.minimums[setting] = found.bound_bytes
        if found.peak_bytes < least_bytes:
            least_bytes, best = found.peak_bytes, bounds.answer(setting, minimum=True) or best
    return best


def _by_memory(variant: StepVariant, family: Family) -> tuple[int | bool, ...]:
    """Order settings of which nothing is known: those first that are likely to need least."""
    chunks = 1 if variant.chunked is None else variant.chunked.chunks
    shard = family.least
    sharding = (False, 0, 0) if shard is None else (not shard.cpu_offload, shard.replicas, shard.prefetch)
    return (-variant.parts, -chunks, variant.implementation is not None, *sharding)
