"""The trade-offs of checkpointing that module statistics hold: fitted, by call, and by module over its calls."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from typing import Any

from memfit.capture import Phase, Trace
from memfit.compat.curve import tradeoff_curve
from memfit.compat.sac import SACTradeOffStats


def fitted(estimator: Any) -> dict[str, SACTradeOffStats]:
    """What a SAC estimator, PyTorch's or memfit's, has fitted, and fits of the rest, by its names of modules.

    Equal layers are fitted once. PyTorch's own fit needs another package.
    """
    known: dict[str, SACTradeOffStats] = {}
    found: dict[str, SACTradeOffStats] = dict(estimator.sac_mod_tradeoff_stats)
    for name, stats in estimator.sac_mod_stats.items():
        if name not in found:
            key = repr(stats)
            if key not in known:
                known[key] = tradeoff_curve(stats, estimator.sac_mod_greedy_order_meta[name])
            found[name] = known[key]
    return found


def call_numbers(trace: Trace) -> dict[int, int]:
    """Of each call of the forward, how many calls of the same module came before it."""
    counts: Counter[str] = Counter()
    numbers: dict[int, int] = {}
    for index, call in enumerate(trace.calls):
        if call.phase is not Phase.BACKWARD:
            numbers[index] = counts[call.module]
            counts[call.module] += 1
    return numbers


def numbered(name: str, number: int) -> str:
    """The name of a module's call: the first has the module's own."""
    return f"{name}#{number}" if number else name


def by_call(trace: Trace, sac: Mapping[str, SACTradeOffStats]) -> dict[int, SACTradeOffStats]:
    """By the number of the call in the trace what is given by the names of units."""
    numbers = call_numbers(trace).items()
    found = {call: sac.get(numbered(trace.calls[call].module, number)) for call, number in numbers}
    return {call: each for call, each in found.items() if each is not None}


def by_module(trace: Trace, sac: Mapping[str, SACTradeOffStats]) -> dict[str, SACTradeOffStats]:
    """By path: the shape of the first call's trade-off, the time of all calls, the bytes of those of one pass."""
    calls = by_call(trace, sac)
    members: dict[str, list[int]] = {}
    for call in calls:
        members.setdefault(trace.calls[call].module, []).append(call)
    passes = _backward_begins(trace)
    summed: dict[str, SACTradeOffStats] = {}
    for path, alike in members.items():
        memory: Counter[int] = Counter()
        for call in alike:
            memory[bisect_right(passes, trace.calls[call].begin)] += calls[call].sac_memory
        summed[path] = dataclasses.replace(
            calls[alike[0]],
            sac_memory=max(memory.values()),
            sac_runtime=sum(calls[call].sac_runtime for call in alike),
        )
    return summed


def _backward_begins(trace: Trace) -> list[int]:
    phases = [op.phase for op in trace.ops]
    return [
        index
        for index, phase in enumerate(phases)
        if phase is Phase.BACKWARD and (index == 0 or phases[index - 1] is not Phase.BACKWARD)
    ]
