"""Which call of the forward each recomputation of an existing activation checkpoint repeats."""

from __future__ import annotations

from collections import defaultdict

from memfit.capture import NEVER, ModuleCall, Phase, Trace


def repeats(trace: Trace) -> dict[int, int]:
    """Of each module call in backward the call of the forward that it runs again.

    The outermost ones repeat the call of the same module whose backward ends soonest after they begin, or, when the
    forward had no gradients, the last one not repeated so far. What they call repeats what was called there.
    """
    forward: dict[str, list[int]] = defaultdict(list)
    children: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, call in enumerate(trace.calls):
        if call.phase is not Phase.BACKWARD:
            forward[call.module].append(index)
        children[call.parent][call.module].append(index)
    found: dict[int, int] = {}
    for index, call in enumerate(trace.calls):
        if call.phase is not Phase.BACKWARD:
            continue
        if call.parent in found:
            again = children[found[call.parent]][call.module]
            number = children[call.parent][call.module].index(index)
            found[index] = again[number] if number < len(again) else found[call.parent]
        else:
            chosen = _outermost(trace, call, forward[call.module], found)
            if chosen != NEVER:
                found[index] = chosen
    return found


def _outermost(trace: Trace, call: ModuleCall, candidates: list[int], found: dict[int, int]) -> int:
    under_way = [each for each in candidates if trace.calls[each].backward_end > call.begin]
    if under_way:
        return min(under_way, key=lambda each: trace.calls[each].backward_end)
    repeated = set(found.values())
    return next((each for each in reversed(candidates) if each not in repeated), NEVER)
