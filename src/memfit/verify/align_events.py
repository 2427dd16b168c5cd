"""Align measured allocations with predicted ones, to tell what fills a measured peak.

Note [Alignment]: the allocator's events say how many bytes, when and in which ops, not what for. A step makes its
allocations in the order that was predicted, with others in between that no trace has (numbers made tensors, scratch of
kernels). So both sequences are aligned such that the most are paired with equal ones in this order, of the
same op rather than of another, large ones before small ones, and few predicted ones are left out. Between those,
allocations of one size are paired in whatever order they come, and what was not predicted counts as
temporary, in the module that ran.

Note [Written over]: `torch.nn.functional.linear` adds its bias in place, but not while something watches its ops, as a
capture does. So a result without a partner may have been written over an input of its op, of the same size, that
was predicted to go with the op; the partner of that input is then the result.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from memfit.capture import BEFORE_STEP, NO_INDEX, AllocatorEvent, Category
from memfit.memory import CATEGORIES, Timeline, events
from memfit.verify.measure import Rise

_WINDOW = 2048
"""How many of either are aligned at once; the first half of that is final."""
_NEAR = (0, 1, 2, 4, 8)
"""How far from its place in the order one may stand, tried one after the other."""
_SAME_OP, _LEFT_OUT = 4, 2
"""The weight of a pair of the same op, and the cost of leaving a predicted one out; a pair of different ops weighs 1.
Twice the bytes weigh one more."""

Place = tuple[Category, str]
"""What an allocation is for: its category and its module."""


@dataclass(slots=True)
class Filling:
    """Bytes at a peak by category and by module; what belongs to no module has the empty path."""

    by_category: Counter[Category] = field(default_factory=Counter)
    by_module: Counter[str] = field(default_factory=Counter)

    def add(self, place: Place, n_bytes: int) -> None:
        """Count an allocation, or with negative bytes the end of one."""
        self.by_category[place[0]] += n_bytes
        self.by_module[place[1]] += n_bytes


class Places:
    """What each allocation of a predicted step is for."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        storages = timeline.trace.storages
        self._module = [
            storages[each].module if each != NO_INDEX else "" for each in timeline.allocations.storage.tolist()
        ]
        self._row = timeline.allocations.row.tolist()
        self._alloc_at = timeline.allocations.alloc_at.tolist()
        self._going: dict[int, list[int]] = defaultdict(list)
        for number, instant in enumerate(timeline.allocations.free_after.tolist()):
            self._going[instant].append(number)

    def of(self, number: int) -> Place:
        """Return the place of an allocation by its number."""
        return CATEGORIES[self._row[number]], self._module[number]

    def running(self, number: int) -> str:
        """Return the module that ran when this was allocated."""
        return self.timeline.module_of(self._alloc_at[number])

    def op(self, number: int) -> str:
        """Return the op that allocates it, as torch's profiler calls it; empty for what no op does."""
        ops, op = self.timeline.trace.ops, int(self.timeline.op[self._alloc_at[number]])
        return "::".join(ops[op].name.split(".")[:2]) if op < len(ops) else ""

    def written_over(self, number: int) -> Iterator[int]:
        """Yield inputs of the op that makes this one, of the same size, that are freed with the op."""
        timeline, instant = self.timeline, self._alloc_at[number]
        size, storage = timeline.allocations.size_bytes, timeline.allocations.storage
        op = int(timeline.op[instant])
        read = (
            {ref.storage for ref in timeline.trace.ops[op].inputs} - {NO_INDEX} if op < len(timeline.trace.ops) else ()
        )
        for other in self._going[instant]:
            if other != number and size[other] == size[number] and int(storage[other]) in read:
                yield other

    def made(self) -> list[tuple[int, int]]:
        """Return number and bytes of everything the step allocates, in order; workspaces come and go within an op."""
        count, alloc_at = len(self._alloc_at), self._alloc_at
        return [
            (event.key, event.requested_bytes)
            for event in events(self.timeline.allocations)
            if event.requested_bytes > 0 and event.key < count and alloc_at[event.key] != BEFORE_STEP
        ]

    def at(self, instant: int) -> Filling:
        """Return what is predicted to be there at an instant, workspace included; -1 is the start of the step."""
        table, rounding = self.timeline.allocations, self.timeline.rounding_bytes
        filling = Filling()
        for key in self.timeline.alive_at(instant).tolist():
            filling.add(self.of(key), _rounded(int(table.size_bytes[key]), rounding))
        if 0 <= instant < table.instants:
            workspace = _rounded(int(table.workspace_bytes[instant]), rounding)
            filling.add((Category.TEMPORARY, self.timeline.module_of(instant)), workspace)
        return filling


def find_filling(places: Places, rise: Rise, resident: Filling) -> Filling:
    """Return what fills the measured peak, given what is there when the step begins.

    As in a prediction, results of the op that runs there count as such, also when at its highest point it has scratch
    in their place.
    """
    made = places.made()
    earlier, own = _align_events(places, made, rise.before), _align_events(places, made, rise.events)
    found = Filling(Counter(resident.by_category), Counter(resident.by_module))
    alive: dict[int, tuple[AllocatorEvent, _Aligned]] = {}
    for event, each in zip(rise.before, earlier, strict=True):
        if event.bytes > 0:
            alive[event.address] = (event, each)
        else:
            alive.pop(event.address, None)
    for event, each in zip(rise.events[: rise.peak_event + 1], own, strict=False):
        if event.bytes > 0:
            alive[event.address] = (event, each)
            found.add(each.place, event.bytes)
        elif event.bytes < 0:
            _, each = alive.pop(event.address, (event, _NOBODY))
            found.add(each.place, event.bytes)
    if rise.peak_event >= 0 and own[rise.peak_event].number is None:
        place = own[rise.peak_event].place
        left = sum(event.bytes for event, each in alive.values() if each.number is None and each.place == place)
        for each, n_bytes in _still_to_come(places, rise, own):
            moved = min(n_bytes, left)
            found.add(place, -moved)
            found.add(each.place, moved)
            left -= moved
    return found


class _Aligned(NamedTuple):
    """The predicted allocation that a measured one is aligned with, None for none, and what it is for."""

    number: int | None
    place: Place


_NOBODY = _Aligned(None, (Category.TEMPORARY, ""))


def _still_to_come(places: Places, rise: Rise, own: Sequence[_Aligned]) -> Iterator[tuple[_Aligned, int]]:
    """Yield results that the op at the peak allocates after it."""
    within = rise.events[rise.peak_event].ops
    for event, each in zip(rise.events[rise.peak_event + 1 :], own[rise.peak_event + 1 :], strict=True):
        if event.bytes <= 0 or each.number is None:
            continue
        op = places.op(each.number)
        if op not in within or event.ops[: within.index(op) + 1] != within[: within.index(op) + 1]:
            return
        yield each, event.bytes


def _align_events(places: Places, made: Sequence[tuple[int, int]], events: Sequence[AllocatorEvent]) -> list[_Aligned]:
    """Return, for each allocation among the events, the predicted one that it is aligned with; frees have none."""
    kept = [
        (index, within)
        for (index, event), within in zip(
            ((index, event) for index, event in enumerate(events) if event.bytes > 0),
            find_outlived_ops(events),
            strict=True,
        )
        if within or not event.ops
    ]
    pairs = align_sizes(
        [events[index].bytes for index, _ in kept],
        [n_bytes for _, n_bytes in made],
        [within for _, within in kept],
        [places.op(number) for number, _ in made],
    )
    numbers = {index: made[pair][0] for (index, _), pair in zip(kept, pairs, strict=True) if pair >= 0}
    numbers |= _results(places, made, numbers)
    ahead = deque(sorted(numbers))
    found, last = [], None
    for index, event in enumerate(events):
        if index in numbers:
            last = numbers[ahead.popleft()]
            found.append(_Aligned(last, places.of(last)))
            continue
        following = numbers[ahead[0]] if ahead else None
        near = following if following is not None and places.op(following) in event.ops else last
        found.append(_Aligned(None, (Category.TEMPORARY, "" if near is None else places.running(near))))
    return found


def _results(places: Places, made: Sequence[tuple[int, int]], numbers: dict[int, int]) -> dict[int, int]:
    """Return the results that were written over aligned allocations (Note [Written over]), by event."""
    at = {number: index for index, number in numbers.items()}
    return {
        at[other]: number
        for number, _ in made
        if number not in at
        for other in places.written_over(number)
        if other in at
    }


def find_outlived_ops(events: Sequence[AllocatorEvent]) -> list[tuple[str, ...]]:
    """Return, for each allocation among the events, the ops that it happened in and outlived.

    What is freed within an op is scratch of it, not its result.
    """
    found: list[tuple[str, ...]] = []
    alive: dict[int, int] = {}
    for event in events:
        if event.bytes > 0:
            alive[event.address] = len(found)
            found.append(event.ops)
        elif event.address in alive:
            number = alive.pop(event.address)
            same = zip(found[number], event.ops, strict=False)
            found[number] = found[number][sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], same)) :]
    return found


def align_sizes(
    measured: Sequence[int],
    predicted: Sequence[int],
    within: Sequence[tuple[str, ...]] | None = None,
    ops: Sequence[str] | None = None,
) -> list[int]:
    """Return the index of the predicted size that each measured one is aligned with, or -1 (Note [Alignment]).

    `within` are the ops that each measured one may be a result of (`find_outlived_ops`), `ops` the op of each predicted
    one.
    """
    found = [-1] * len(measured)
    here, there = np.asarray(measured, np.int64), np.asarray(predicted, np.int64)
    same_op = _same_op(within or [()] * len(measured), ops or [""] * len(predicted))
    magnitude = np.ceil(np.log2(there + 1.0)).astype(np.int64)
    i = j = 0
    while i < len(measured) and j < len(predicted):
        rows, columns = slice(i, i + _WINDOW), slice(j, j + _WINDOW)
        equal = here[rows, None] == there[None, columns]
        worth = np.where(same_op(rows, columns), _SAME_OP, 1) * equal * magnitude[None, columns]
        pairs = _heaviest(worth, _LEFT_OUT * magnitude[columns])
        final = _WINDOW if i + _WINDOW >= len(measured) and j + _WINDOW >= len(predicted) else _WINDOW // 2
        pairs = [(row, column) for row, column in pairs if row < final and column < final]
        for row, column in pairs:
            found[i + row] = j + column
        row, column = pairs[-1] if pairs and final < _WINDOW else (final - 1, final - 1)
        i, j = i + row + 1, j + column + 1
    _out_of_order(measured, predicted, found)
    return found


def _same_op(within: Sequence[tuple[str, ...]], ops: Sequence[str]) -> Callable[[slice, slice], np.ndarray]:
    """Return a function that masks the pairs of allocations, of a part of each side, that happen in the same op."""
    outer, inner = {each: row for row, each in enumerate(dict.fromkeys(within))}, dict.fromkeys(ops)
    table = np.array([[op in each for op in inner] for each in outer], bool).reshape(len(outer), len(inner))
    column = {each: number for number, each in enumerate(inner)}
    rows = np.array([outer[each] for each in within], np.int64)
    columns = np.array([column[each] for each in ops], np.int64)
    return lambda part, other: table[rows[part, None], columns[None, other]]


def _heaviest(weight: np.ndarray, left_out: np.ndarray) -> list[tuple[int, int]]:
    """Return ascending pairs of rows and columns of the highest total weight; a weight of 0 is no pair.

    Columns before the last pair that have no partner cost what `left_out` says.
    """
    height, width = weight.shape
    gain = np.where(weight > 0, weight + left_out, 0)
    best = np.zeros((height + 1, width + 1), np.int64)  # and what all columns up to there would cost
    for row in range(height):
        np.maximum.accumulate(np.maximum(best[row, 1:], best[row, :-1] + gain[row]), out=best[row + 1, 1:])
    found = []
    row, column = height, int((best[height] - np.concatenate(([0], np.cumsum(left_out)))).argmax())
    while row and column:
        if best[row, column] == best[row - 1, column]:
            row -= 1
        elif best[row, column] == best[row, column - 1]:
            column -= 1
        else:
            row, column = row - 1, column - 1
            found.append((row, column))
    return found[::-1]


def _out_of_order(measured: Sequence[int], predicted: Sequence[int], found: list[int]) -> None:
    """Pair those without a partner with equal ones that are left over nearby, the nearest first."""
    left: dict[int, list[int]] = defaultdict(list)
    for other in sorted(set(range(len(predicted))).difference(found)):
        left[predicted[other]].append(other)
    after, before = len(predicted), -1
    between = []
    for place in range(len(found) - 1, -1, -1):
        after = found[place] if found[place] >= 0 else after
        between.append((place, after))
    alone = []
    for place, after in reversed(between):
        before = found[place] if found[place] >= 0 else before
        if found[place] < 0 and left.get(measured[place]):
            alone.append((place, before, after))
    for far in _NEAR:
        for place, before, after in alone:
            others = left[measured[place]]
            at = bisect.bisect_left(others, before - far)
            if found[place] < 0 and at < len(others) and others[at] <= after + far:
                found[place] = others.pop(at)


def _rounded(n_bytes: int, rounding_bytes: int) -> int:
    return -(-n_bytes // rounding_bytes) * rounding_bytes
