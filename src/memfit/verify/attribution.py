"""What fills a measured peak: measured allocations are known by the predicted ones that they stand beside.

Note [Beside]: the allocator's events say how many bytes and when, not what for. A step makes its allocations in the
order that was predicted, so the two sequences are walked side by side by their sizes. Where they part, the nearest
place is sought from which both go on alike. Before it, allocations of one size stand beside each other in whatever
order they come, and what was not predicted counts as temporary, in the module that ran.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from memfit.memory import CATEGORIES
from memfit.solve import PlannedTimeline, planned_events
from memfit.trace import NEVER, Category
from memfit.trace.allocations import AllocatorEvent
from memfit.verify.peak import Rise

_WINDOW = 48
_RUN = 6

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

    def __init__(self, timeline: PlannedTimeline) -> None:
        self.timeline = timeline
        storages = timeline.trace.storages
        self._module = [storages[each].module if each != NEVER else "" for each in timeline.planned.storage.tolist()]
        self._row = timeline.lives.row.tolist()
        self._born = timeline.lives.born.tolist()

    def of(self, number: int) -> Place:
        """Of an allocation by its number."""
        return CATEGORIES[self._row[number]], self._module[number]

    def running(self, number: int) -> str:
        """The module that ran when this was allocated."""
        return self.timeline.module_of(self._born[number])

    def made(self) -> list[tuple[int, int]]:
        """Number and bytes of everything that the step allocates, in order; workspaces come and go within an op."""
        count, born = len(self._born), self._born
        return [
            (event.key, event.requested_bytes)
            for event in planned_events(self.timeline)
            if event.requested_bytes > 0 and event.key < count and born[event.key] != NEVER
        ]

    def at(self, instant: int) -> Filling:
        """What is predicted to be there at an instant, workspace included; -1 is the start of the step."""
        lives, rounding = self.timeline.lives, self.timeline.rounding_bytes
        if instant == NEVER:
            alive = lives.born == NEVER
        else:
            alive = (lives.born <= instant) & ((lives.dies == NEVER) | (lives.dies >= instant))
        filling = Filling()
        for key in np.flatnonzero(alive).tolist():
            filling.add(self.of(key), _rounded(int(lives.size_bytes[key]), rounding))
        if 0 <= instant < lives.instants:
            workspace = _rounded(int(lives.workspace_bytes[instant]), rounding)
            filling.add((Category.TEMPORARY, self.timeline.module_of(instant)), workspace)
        return filling


def filled(places: Places, rise: Rise, resident: Filling) -> Filling:
    """What fills the measured peak, given what is there when the step begins."""
    made = places.made()
    earlier = _named(places, made, rise.before)
    own = _named(places, made, rise.events)
    found = Filling(Counter(resident.by_category), Counter(resident.by_module))
    alive = {event.address: place for event, place in zip(rise.before, earlier, strict=True) if event.bytes > 0}
    for event, place in zip(rise.events[: rise.peak_event + 1], own, strict=False):
        if event.bytes > 0:
            alive[event.address] = place
            found.add(place, event.bytes)
        elif event.bytes < 0:
            found.add(alive.pop(event.address, (Category.TEMPORARY, "")), event.bytes)
    return found


def _named(places: Places, made: Sequence[tuple[int, int]], events: Iterable[AllocatorEvent]) -> list[Place]:
    """What each allocation among the events is for; frees have a place that nobody asks for."""
    events = list(events)
    mallocs = [index for index, event in enumerate(events) if event.bytes > 0]
    pairs = beside([events[index].bytes for index in mallocs], [n_bytes for _, n_bytes in made])
    found: list[Place] = [(Category.TEMPORARY, "")] * len(events)
    last = None
    for index, pair in zip(mallocs, pairs, strict=True):
        if pair >= 0:
            last = made[pair][0]
            found[index] = places.of(last)
        elif last is not None:
            found[index] = (Category.TEMPORARY, places.running(last))
    return found


def beside(measured: Sequence[int], predicted: Sequence[int]) -> list[int]:
    """For each measured size the index of the predicted one that it stands beside, -1 for none (Note [Beside])."""
    found = [-1] * len(measured)
    i = j = 0
    while i < len(measured) and j < len(predicted):
        if measured[i] == predicted[j]:
            found[i] = j
            i, j = i + 1, j + 1
            continue
        k, m = _resumed(measured, predicted, i, j)
        for place, other in _same_sizes(measured, predicted, range(i, k), range(j, m)):
            found[place] = other
        i, j = k, m
    return found


def _same_sizes(
    measured: Sequence[int], predicted: Sequence[int], here: range, there: range
) -> Iterable[tuple[int, int]]:
    """Pairs of equal sizes in parts that are not alike, in whatever order they come."""
    waiting: dict[int, list[int]] = defaultdict(list)
    for other in reversed(there):
        waiting[predicted[other]].append(other)
    for place in here:
        if waiting.get(measured[place]):
            yield place, waiting[measured[place]].pop()


def _resumed(measured: Sequence[int], predicted: Sequence[int], i: int, j: int) -> tuple[int, int]:
    """The nearest pair of places from which both go on alike."""
    for distance in range(1, _WINDOW):
        for skipped in range(distance + 1):
            k, m = i + skipped, j + distance - skipped
            ahead = measured[k : k + _RUN]
            if ahead and ahead == predicted[m : m + _RUN]:
                return k, m
    return min(i + 1, len(measured)), min(j + 1, len(predicted))


def _rounded(n_bytes: int, rounding_bytes: int) -> int:
    return -(-n_bytes // rounding_bytes) * rounding_bytes
