"""The time for which a stage of a pipeline waits for the others: its bubble.

A capture has one rank of the pipeline. The others are taken to be like it: a forward or backward of a micro-batch takes
as long in every stage as it takes, on average, in those that were captured. Every rank then computes in the order
of the schedule, each action when the one that it depends on is done and its result has arrived. The step ends with the
last of them: a rank that is done earlier waits for the next step's first micro-batch.

With one stage a rank and no transfers this is the known part of the step, (p - 1) / (m + p - 1) of p stages and m
micro-batches, for GPipe and 1F1B alike.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from memfit.capture import PipelineRun
from memfit.cost import Runtime
from memfit.errors import InputError

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubble:
    """A run of a schedule: how long it takes, and for how much of that this rank has nothing to compute."""

    run_ms: float
    waited_ms: float


@dataclass(frozen=True, slots=True)
class _Action:
    stage: int
    kind: str
    microbatch: int

    @classmethod
    def parse(cls, text: str) -> _Action:
        found = _ACTION.fullmatch(text)
        if found is None:
            raise InputError(f"a schedule has {text!r} in it; actions are written as in 1F0")
        return cls(int(found[1]), found[2], int(found[3]))


def find_bubble(run: PipelineRun, runtime: Runtime, waits: Mapping[int, float], transfer_ms: float) -> Bubble | None:
    """Return the bubble of a run; None for a schedule that does not tell its order.

    `waits` are milliseconds for which collectives inside of a stage are waited for, by the op before which they are.
    """
    if not run.order or not run.actions:
        return None
    kind_ms = _mean_ms(run, runtime, waits)
    orders = [[_Action.parse(each) for each in order] for order in run.order]
    run_ms = simulate(orders, run.stages, kind_ms, transfer_ms)
    own_ms = sum(kind_ms[each.kind] for each in orders[run.rank])
    return Bubble(run_ms=run_ms, waited_ms=max(0.0, run_ms - own_ms))


def simulate(
    orders: Sequence[Sequence[_Action]], stages: int, kind_ms: Mapping[str, float], transfer_ms: float
) -> float:
    """Return when the last rank is done, each with its actions in order."""
    rank_of = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    done: dict[tuple[int, str, int], float] = {}
    now, place = [0.0] * len(orders), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while place[rank] < len(order):
                action = order[place[rank]]
                ready_ms = _ready_ms(action, stages, rank_of, done, transfer_ms)
                if ready_ms is None:
                    break  # another rank must go on first
                now[rank] = max(now[rank], ready_ms) + kind_ms[action.kind]
                # the gradient of a stage's inputs is there after B, or after I alone
                kind = "B" if action.kind == "I" else action.kind
                done[action.stage, kind, action.microbatch] = now[rank]
                place[rank] += 1
                moved = True
    if any(place[rank] < len(order) for rank, order in enumerate(orders)):
        raise InputError("the schedule of the pipeline never ends: its ranks wait for each other")
    return max(now)


def _ready_ms(
    action: _Action,
    stages: int,
    rank_of: Mapping[int, int],
    done: Mapping[tuple[int, str, int], float],
    transfer_ms: float,
) -> float | None:
    """Return when what an action needs has arrived; None while nobody has computed it."""
    if action.kind == "W" or (action.kind == "F" and action.stage == 0):
        return 0.0
    if action.kind == "F":
        needed, kind = action.stage - 1, "F"
    elif action.stage == stages - 1:
        needed, kind = action.stage, "F"
    else:
        needed, kind = action.stage + 1, "B"
    ready_ms = done.get((needed, kind, action.microbatch))
    if ready_ms is None:
        return None
    return ready_ms + (0.0 if rank_of[needed] == rank_of[action.stage] else transfer_ms)


def _mean_ms(run: PipelineRun, runtime: Runtime, waits: Mapping[int, float]) -> dict[str, float]:
    """Return how long an action of each kind takes here. What follows it, such as the loss, is part of it."""
    times = runtime.cumulative_ms
    moments = np.array(sorted(waits))
    summed = np.concatenate(([0.0], np.cumsum([waits[moment] for moment in moments.tolist()])))
    found: dict[str, list[float]] = defaultdict(list)
    for number, action in enumerate(run.actions):
        end = run.actions[number + 1].begin if number + 1 < len(run.actions) else action.end
        first, last = np.searchsorted(moments, (action.begin, end)) if len(moments) else (0, 0)
        found[action.kind].append(float(times[end] - times[action.begin] + summed[last] - summed[first]))
    mean = {kind: sum(each) / len(each) for kind, each in found.items()}
    if "B" not in mean:
        mean["B"] = mean.get("I", 0.0) + mean.get("W", 0.0)
    for kind in ("I", "W"):  # on ranks that divide a backward: products for inputs and for weights are alike
        mean.setdefault(kind, mean["B"] / 2)
    return mean
