"""The time for which a stage of a pipeline waits for the others: its bubble.

Every rank computes in the order of the schedule, each action when the one that it depends on is done and its result has
arrived. The step ends with the last of them: a rank that is done earlier waits for the next step's first micro-batch.

Note [Stages that were not captured]: a capture has one rank of the pipeline, with one stage or several. A stage that
was captured has its own times, the mean of its micro-batches. Where several ranks were captured, all of them are known;
`search` captures the first and the last, since the last has the head and the loss. A stage that nobody captured is
taken to be like those that were and are not the last, or like the last where there is no other. So of a plan for one
rank the other stages are like its own. What a plan recomputes is part of a rank's backwards, the same of each.

With equal stages, one a rank, and no transfers this is the known part of the step, (p - 1) / (m + p - 1) of p stages
and m micro-batches, for GPipe and 1F1B alike.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from memfit.capture import PipelineRun
from memfit.cost import Runtime
from memfit.errors import InputError

_KINDS = ("F", "B", "I", "W")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """How long the actions of a captured rank's stages take: milliseconds by stage and kind."""

    run: PipelineRun
    by_stage: dict[int, dict[str, float]]
    transfer_ms: float = 0.0
    """Of what one stage sends another."""

    def with_recompute(self, recompute_ms: float) -> StageTimes:
        """Return the times of a rank that recomputes for so long in all backwards of a run together."""
        backwards = sum(_Action.parse(each).kind in ("B", "I") for each in self.run.order[self.run.rank])
        added = recompute_ms / backwards if backwards else 0.0
        by_stage = {
            stage: {kind: ms + (added if kind in ("B", "I") else 0.0) for kind, ms in found.items()}
            for stage, found in self.by_stage.items()
        }
        return replace(self, by_stage=by_stage)


def find_stage_times(
    run: PipelineRun, runtime: Runtime, waits: Mapping[int, float], transfer_ms: float = 0.0
) -> StageTimes | None:
    """Return the times of a captured rank's stages; None for a schedule that does not tell its order.

    `waits` are milliseconds for which collectives inside of a stage are waited for, by the op before which they are.
    """
    if not run.order or not run.actions:
        return None
    return StageTimes(run=run, by_stage=_mean_ms(run, runtime, waits), transfer_ms=transfer_ms)


def find_bubbles(ranks: Sequence[StageTimes]) -> list[Bubble]:
    """Return the bubbles of captured ranks of one pipeline (Note [Stages that were not captured])."""
    run = ranks[0].run
    if any((each.run.order, each.run.stages) != (run.order, run.stages) for each in ranks):
        raise InputError("ranks of one pipeline run different schedules; capture them with the same mesh and step")
    known = {stage: times for each in ranks for stage, times in each.by_stage.items()}
    like = [times for stage, times in known.items() if stage < run.stages - 1] or list(known.values())
    other = {kind: sum(times[kind] for times in like) / len(like) for kind in _KINDS}
    stage_ms = [known.get(stage, other) for stage in range(run.stages)]
    orders = [[_Action.parse(each) for each in order] for order in run.order]
    run_ms = simulate(orders, stage_ms, max(each.transfer_ms for each in ranks))
    own_ms = (sum(stage_ms[each.stage][each.kind] for each in orders[rank.run.rank]) for rank in ranks)
    return [Bubble(run_ms=run_ms, waited_ms=max(0.0, run_ms - own)) for own in own_ms]


def simulate(orders: Sequence[Sequence[_Action]], stage_ms: Sequence[Mapping[str, float]], transfer_ms: float) -> float:
    """Return when the last rank is done, each with its actions in order; `stage_ms` has the times of each stage."""
    stages = len(stage_ms)
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
                now[rank] = max(now[rank], ready_ms) + stage_ms[action.stage][action.kind]
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


def _mean_ms(run: PipelineRun, runtime: Runtime, waits: Mapping[int, float]) -> dict[int, dict[str, float]]:
    """Return how long an action of each stage and kind takes. What follows it, such as the loss, is part of it."""
    times = runtime.cumulative_ms
    moments = np.array(sorted(waits))
    summed = np.concatenate(([0.0], np.cumsum([waits[moment] for moment in moments.tolist()])))
    found: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number, action in enumerate(run.actions):
        end = run.actions[number + 1].begin if number + 1 < len(run.actions) else action.end
        first, last = np.searchsorted(moments, (action.begin, end)) if len(moments) else (0, 0)
        took = float(times[end] - times[action.begin] + summed[last] - summed[first])
        found[action.stage][action.kind].append(took)
    return {stage: _complete({k: sum(each) / len(each) for k, each in kinds.items()}) for stage, kinds in found.items()}


def _complete(mean: dict[str, float]) -> dict[str, float]:
    """Add kinds of actions that this rank does not have, and others may."""
    mean.setdefault("F", 0.0)
    if "B" not in mean:
        mean["B"] = mean.get("I", 0.0) + mean.get("W", 0.0)
    for kind in ("I", "W"):  # on ranks that divide a backward: products for inputs and for weights are alike
        mean.setdefault(kind, mean["B"] / 2)
    return mean
