"""Random programs: module trees with a mirrored backward, levels, and frontiers that some units share."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
from hypothesis import strategies as st

from memfit.capture import NO_INDEX
from memfit.memory import Bytes
from memfit.solve.program import Choice, Program, build_candidates
from memfit.tradeoff import Frontier, OffloadWindow, Policy, Unit

LENGTH = 24
NOTHING = Policy(
    saved=(),
    recomputed=(),
    dropped=(),
    stop=-1,
    discarded_bytes=0,
    cached_bytes=0,
    recompute_ms=0.0,
    recompute_peak_bytes=0,
)


@st.composite
def programs(draw: st.DrawFn, *, layers: bool = False) -> Program:
    """A program of at most five candidates; with `layers`, several that share one frontier."""
    shared = [draw(frontiers()) for _ in range(2)]
    spans = _layer_spans(draw(st.integers(2, 4)), draw(st.booleans())) if layers else draw(nested_spans())
    units, chosen = [], []
    for number, (begin, end) in enumerate(spans):
        units.append(_unit(f"unit{number}", begin, end))
        if layers:
            chosen.append(shared[1] if end - begin < 3 else shared[0])
        else:
            chosen.append(draw(st.sampled_from(shared)) if draw(st.booleans()) else draw(frontiers()))
    forced = frozenset(unit.name for unit in units if draw(st.integers(0, 9)) == 0)
    during = np.array(draw(st.lists(st.integers(20, 100), min_size=2 * LENGTH + 1, max_size=2 * LENGTH + 1)))
    if layers:  # memory rises to the end of the forward and falls again
        during = during // 4 + 4 * np.minimum(np.arange(2 * LENGTH + 1), np.arange(2 * LENGTH, -1, -1))
    before = np.minimum(np.concatenate(([during[0]], during[:-1])), during)
    budget = draw(st.integers(20, int(during.max())))
    scale = 1 << 20
    return Program(before * scale, during * scale, budget * scale, build_candidates(units, chosen, forced=forced))


@st.composite
def near_equal_layers(draw: st.DrawFn, *, equal: bool = False) -> Program:
    """Layers with a module inside each, all in one container; each has the frontier of the others, or nearly."""
    count = draw(st.integers(2, 3))
    size = LENGTH // count
    whole, layer, inner = (draw(frontiers(most=2)) for _ in range(3))
    units, chosen = [], []
    if draw(st.booleans()):
        units.append(_unit("model", 0, LENGTH - draw(st.integers(0, 1))))
        chosen.append(whole)
    for number in range(count):
        begin, end = number * size, (number + 1) * size - draw(st.integers(1, 2))
        units.append(_unit(f"layer{number}", begin, end))
        chosen.append(layer if equal else draw(nearly(layer)))
        units.append(_unit(f"layer{number}.inner", begin + 1, draw(st.sampled_from((begin + 3, end)))))
        chosen.append(inner if equal else draw(nearly(inner)))
    slope = 4 * np.minimum(np.arange(2 * LENGTH + 1), np.arange(2 * LENGTH, -1, -1))
    during = slope + np.array(draw(st.lists(st.integers(5, 25), min_size=len(slope), max_size=len(slope))))
    return _program(draw, during, units, chosen)


@st.composite
def many_layers(draw: st.DrawFn) -> Program:
    """Eight nearly equal layers under a budget for about half of what they keep: too many plans to try all."""
    layer = draw(frontiers())
    units = [_unit(f"layer{number}", 3 * number, 3 * number + 3) for number in range(8)]
    chosen = [draw(nearly(layer)) for _ in units]
    kept = sum(each.discardable_bytes for each in chosen) >> 20
    slope = kept * np.minimum(np.arange(2 * LENGTH + 1), np.arange(2 * LENGTH, -1, -1)) // LENGTH
    during = slope + 100
    budget = int(during.max()) - draw(st.integers(1, max(1, kept // 2)))
    before = np.minimum(np.concatenate(([during[0]], during[:-1])), during)
    return Program(before << 20, during << 20, budget << 20, build_candidates(units, chosen))


@st.composite
def programs_of_two_passes(draw: st.DrawFn) -> Program:
    """Two forwards, each with its own backward, as when gradients are accumulated."""
    half = LENGTH // 2
    units, chosen = [], []
    for first in (0, LENGTH):
        for begin, end in ((0, half // 2), (half // 2, half)):
            unit = _unit("unit", first + begin, first + end)
            units.append(replace(unit, backward_begin=first + LENGTH - end, backward_end=first + LENGTH - begin))
            chosen.append(draw(frontiers()))
    during = np.array(draw(st.lists(st.integers(20, 100), min_size=2 * LENGTH + 1, max_size=2 * LENGTH + 1)))
    return _program(draw, during, units, chosen)


@st.composite
def unmirrored_programs(draw: st.DrawFn) -> Program:
    """Programs whose backward runs the units in any order."""
    program = draw(programs() | programs(layers=True) | near_equal_layers(equal=True))
    again = draw(st.permutations(range(LENGTH + 1, 2 * LENGTH)))
    candidates = tuple(
        replace(candidate, unit=replace(candidate.unit, backward_begin=op))
        for candidate, op in zip(program.candidates, again, strict=False)
    )
    return Program(program.before, program.during, program.budget_bytes, candidates)


@st.composite
def offloading_programs(draw: st.DrawFn, *, mirrored: bool = True) -> Program:
    """Units one after another, some with two inside, that may drop, offload or both; with any order of the backward.

    Either the outer or the inner ones offload. Some have nothing to give up: copies beside them are no node's business.
    """
    count = draw(st.integers(2, 3))
    size, inner = LENGTH // count, draw(st.booleans())
    units, chosen, pairs = [], [], []
    if draw(st.booleans()):
        units.append(_unit("model", 0, LENGTH))
        chosen.append(draw(frontiers(most=1)))
    outer = []
    for number in range(count):
        begin, end = number * size + draw(st.integers(0, 1)), (number + 1) * size - draw(st.integers(0, 1))
        outer.append(_unit(f"layer{number}", begin, end))
        parts = [_unit(f"layer{number}.a", begin + 1, begin + 3), _unit(f"layer{number}.b", begin + 3, end)]
        parts = parts if draw(st.booleans()) else []
        useful = bool(parts) or draw(st.integers(0, 3)) > 0
        units += [outer[-1], *parts]
        chosen.append(draw(offloading_frontiers() if useful and not inner else frontiers(most=2 if useful else 0)))
        chosen += [
            draw(offloading_frontiers() if inner and place == 0 else frontiers(most=1)) for place in range(len(parts))
        ]
        pairs += [tuple(parts)] if inner and parts else []
    pairs += [] if inner else list(pairwise(outer))
    if not mirrored:
        again = dict(
            zip((unit.name for unit in units), draw(st.permutations(range(LENGTH + 1, 2 * LENGTH))), strict=False)
        )
        units = [replace(unit, backward_begin=again[unit.name]) for unit in units]
        by_name = {unit.name: unit for unit in units}
        pairs = [(by_name[one.name], by_name[other.name]) for one, other in pairs]
    windows = {
        one.name: OffloadWindow(next=other, forward_ms=1.0, backward_ms=1.0)
        for one, other in pairs
        if other.end < other.backward_begin < one.backward_begin
    }
    slope = 3 * np.minimum(np.arange(2 * LENGTH + 1), np.arange(2 * LENGTH, -1, -1))
    during = slope + np.array(draw(st.lists(st.integers(20, 60), min_size=len(slope), max_size=len(slope))))
    before = np.minimum(np.concatenate(([during[0]], during[:-1])), during)
    budget = draw(st.integers(20, int(during.max())))
    found = build_candidates(units, chosen, windows=windows)
    return Program(before << 20, during << 20, budget << 20, found)


@st.composite
def offloading_frontiers(draw: st.DrawFn) -> Frontier:
    """Policies that drop, offload or do both, by growing bytes."""
    policies = []
    for _ in range(draw(st.integers(1, 3))):
        dropped, offloaded = draw(st.sampled_from(((1, 0), (0, 1), (1, 1), (0, 1))))
        dropped, offloaded = dropped * draw(st.integers(1, 30)), offloaded * draw(st.integers(1, 30))
        policies.append(
            Policy(
                saved=(),
                recomputed=(0,) if dropped else (),
                dropped=((0, 0),) if dropped else (),
                stop=0 if dropped else -1,
                discarded_bytes=dropped << 20,
                cached_bytes=0,
                recompute_ms=float(draw(st.integers(1, 30))) if dropped else 0.0,
                recompute_peak_bytes=draw(st.integers(0, 30)) << 20 if dropped else 0,
                profile=draw(profiles()) if dropped else (),
                offload=(1,) if offloaded else (),
                offloaded_bytes=offloaded << 20,
                exposed_ms=float(draw(st.integers(0, 9))) if offloaded else 0.0,
            )
        )
    policies.sort(key=lambda policy: (policy.freed_bytes, policy.added_ms))
    return Frontier(policies=tuple(policies), exact=True, discardable_bytes=policies[-1].freed_bytes)


def _program(draw: st.DrawFn, during: Bytes, units: list[Unit], chosen: list[Frontier]) -> Program:
    before = np.minimum(np.concatenate(([during[0]], during[:-1])), during)
    budget = draw(st.integers(20, int(during.max())))
    scale = 1 << 20
    return Program(before * scale, during * scale, budget * scale, build_candidates(units, chosen))


@st.composite
def nearly(draw: st.DrawFn, frontier: Frontier) -> Frontier:
    """The frontier itself, or one that differs a little in bytes and times."""
    if draw(st.booleans()):
        return frontier
    policies = tuple(
        replace(
            policy,
            discarded_bytes=policy.discarded_bytes + draw(st.integers(0, 3)) * 512,
            recompute_ms=policy.recompute_ms + draw(st.integers(0, 3)) / 1024,
        )
        for policy in frontier.policies
    )
    return replace(frontier, policies=policies)


@st.composite
def frontiers(draw: st.DrawFn, *, most: int = 3) -> Frontier:
    """Policies by growing bytes and time."""
    count = draw(st.integers(min(1, most), most))
    if not count:
        return Frontier(policies=(NOTHING,), exact=True, discardable_bytes=0)
    freed = sorted(draw(st.lists(st.integers(1, 40), min_size=count, max_size=count, unique=True)))
    times = sorted(draw(st.lists(st.integers(0, 30), min_size=count, max_size=count, unique=True)))
    policies = tuple(
        Policy(
            saved=(),
            recomputed=(0,),
            dropped=((0, 0),),
            stop=0,
            discarded_bytes=n << 20,
            cached_bytes=0,
            recompute_ms=float(ms),
            recompute_peak_bytes=draw(st.integers(0, 50)) << 20,
            profile=draw(profiles()),
        )
        for n, ms in zip(freed, times, strict=True)
    )
    return Frontier(policies=policies, exact=True, discardable_bytes=freed[-1] << 20)


@st.composite
def nested_spans(draw: st.DrawFn) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    while len(spans) < 5:
        begin = draw(st.integers(0, LENGTH - 1))
        end = draw(st.integers(begin + 1, LENGTH))
        crossing = any(b < begin < e < end or begin < b < end < e for b, e in spans)
        if not crossing and (begin, end) not in spans:
            spans.append((begin, end))
        elif draw(st.booleans()):
            break
    return spans


def _layer_spans(count: int, inner: bool) -> list[tuple[int, int]]:
    size = LENGTH // count
    spans = [(number * size, (number + 1) * size) for number in range(count)]
    return spans + ([(begin + 1, begin + 3) for begin, _ in spans[:2]] if inner else [])


def _unit(name: str, begin: int, end: int) -> Unit:
    again = 2 * LENGTH - end
    return Unit(
        name=name,
        module=name,
        kind="Module",
        call=0,
        begin=begin,
        end=end,
        backward_begin=again,
        backward_end=2 * LENGTH - begin,
    )


def every_plan(program: Program) -> list[Choice]:
    """All choices without one unit inside another and with those that are forced."""
    choices = (
        np.array(policies, np.int64)
        for policies in product(*(range(-1, len(candidate.policies)) for candidate in program.candidates))
    )
    return [
        choice
        for choice in choices
        if not program.nested(choice)
        and all(choice[i] != NO_INDEX for i, candidate in enumerate(program.candidates) if candidate.forced)
    ]


def best_by_trying_all(program: Program) -> float | None:
    """The least recompute time of all plans that hold, by going through them; None when there is none."""
    best = None
    for policies in product(*(range(-1, len(candidate.policies)) for candidate in program.candidates)):
        choice = np.array(policies, np.int64)
        if holds(program, choice):
            ms = sum(
                candidate.policies[policy].recompute_ms + candidate.policies[policy].exposed_ms
                for candidate, policy in zip(program.candidates, policies, strict=True)
                if policy != NO_INDEX
            )
            best = ms if best is None else min(best, ms)
    return best


def holds(program: Program, choice: Choice) -> bool:
    """The rules of Note [Rows of a plan], word for word."""
    chosen = [
        (candidate.unit, candidate.policies[policy])
        for candidate, policy in zip(program.candidates, choice.tolist(), strict=True)
        if policy != NO_INDEX
    ]
    if any(c.forced and p == NO_INDEX for c, p in zip(program.candidates, choice.tolist(), strict=True)):
        return False
    copies = [
        (candidate.window, candidate.policies[policy].offloaded_bytes)
        for candidate, policy in zip(program.candidates, choice.tolist(), strict=True)
        if policy != NO_INDEX and candidate.window is not None
    ]
    for one, _ in chosen:
        for other, _ in chosen:
            if one is not other and one.begin <= other.begin and other.end <= one.end:
                return False
    for op in range(len(program.during)):
        lacking = sum(p.discarded_bytes for unit, p in chosen if unit.end <= op < unit.backward_begin)
        lacking += sum(n for window, n in copies if window.next.end <= op < window.next.backward_begin)
        changed = sum(
            n_bytes
            for unit, p in chosen
            if unit.begin <= op < unit.end
            for after, n_bytes in p.profile
            if unit.begin + after < op
        )
        if program.during[op] + changed - lacking > program.budget_bytes:
            return False
    for unit, policy in chosen:
        lacking = sum(
            p.discarded_bytes
            for other, p in chosen
            if other is unit or other.end <= unit.backward_begin - 1 < other.backward_begin
        )
        begin = unit.backward_begin  # what comes back here is there before the unit is recomputed
        lacking += sum(n for window, n in copies if window.next.end <= begin < window.next.backward_begin)
        if program.before[unit.backward_begin] - lacking + policy.recompute_peak_bytes > program.budget_bytes:
            return False
    return True


@st.composite
def profiles(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    """What changes while a unit runs for the first time: mostly less, sometimes more."""
    ops = sorted(draw(st.lists(st.integers(0, 6), max_size=3, unique=True)))
    return tuple((op, draw(st.integers(-30, 10)) << 20) for op in ops)
