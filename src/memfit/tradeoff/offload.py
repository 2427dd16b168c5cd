"""Frontiers with offload: which results of a unit leave for the host between its forward and its backward.

Note [Offload]: what a unit offloads is copied to the host from the end of its forward on, on a stream of its own, and
freed on the device at the end of the forward of the next unit, where the compute stream waits for the copy. It comes
back, allocated and begun when the backward of that next unit begins, and awaited when the unit's own backward begins.
The next unit is the next call of a module under the same parent that saves tensors for its backward, which begins with
the first op that asks for one of them.

So copies have the time of the ops between: `OffloadWindow.forward_ms` from the end of the unit to the end of the next,
`backward_ms` from the next unit's backward to the unit's own. With n bytes offloaded,

    exposed_ms = max(0, n / to_host - forward_ms) + max(0, n / to_device - backward_ms) + n * compute_s_per_byte

where the last is what copies take from the ops beside them (`OffloadLink`): nothing on a GPU. Both copies of a unit
have the link alone, since those of its neighbours have been awaited when they begin. Time in which the next unit is
recomputed, or a rank waits for others, would hide more; it is not counted.

A unit may offload what it holds for its backward and nobody else does: of each policy the discardable storages that
stay, and those that are newly held and would have been gone with the forward. What one op makes leaves together, so an
op is left out of which somebody else holds a result. Inputs that a checkpointed unit holds are not among them. The time
depends on the sum of bytes alone, so that of each policy the undominated points are sums of subsets: the largest that
costs nothing, and all larger ones.

Offload is offered on one level of nested units: that through which most bytes can be hidden, each for as long as it is
gone. Units on two levels would copy at the same time, and neither would have the link alone.

Note [Host memory]: a rank's host takes what all units offload at once, each storage in a pinned buffer, which torch's
host allocator rounds up to a power of two. Where a limit is given, policies are left out until no choice of those that
are left can exceed it: the units that gain most offload, each at most so much that most is hidden for longest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from memfit.capture import NO_INDEX, Trace
from memfit.errors import InputError
from memfit.hardware import OffloadLink
from memfit.memory import Flags, Ints, Offload, Unit
from memfit.tradeoff.columns import PICOSECONDS, Times, TraceColumns
from memfit.tradeoff.frontier import Frontier
from memfit.tradeoff.pareto import thin_out
from memfit.tradeoff.policy import Policy, Role, UnitColumns
from memfit.tradeoff.units import find_units

ITEMS = 24
"""The results of so many ops are chosen one by one; smaller ones leave together."""
SUMS = 8192
"""The most sums of subsets that are kept; beyond them a frontier is no longer exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadWindow:
    """The unit during whose forward and backward another one's results are copied, and how long these take.

    `gone_ms` is the time of the ops between them.
    """

    next: Unit
    forward_ms: float
    backward_ms: float
    gone_ms: float = 0.0

    @property
    def gone_at(self) -> int:
        """The op before which offloaded storages are freed."""
        return self.next.end

    @property
    def back_at(self) -> int:
        """The op ahead of which they are allocated once more."""
        return self.next.backward_begin

    def exposed_ms(self, n_bytes: Ints, link: OffloadLink) -> Times:
        """Return how long compute waits for copies of so many bytes, both ways, and how much longer they make it."""
        away = n_bytes / link.to_host_bytes_per_s * 1e3 - self.forward_ms
        back = n_bytes / link.to_device_bytes_per_s * 1e3 - self.backward_ms
        slower = n_bytes * (link.compute_s_per_byte * 1e3)
        return np.asarray(np.maximum(away, 0.0) + np.maximum(back, 0.0) + slower, dtype=np.float64)

    def hidden_bytes(self, link: OffloadLink) -> int:
        """Return how many bytes can leave and come back without a wait."""
        away = self.forward_ms * link.to_host_bytes_per_s
        return int(min(away, self.backward_ms * link.to_device_bytes_per_s) / 1e3)


def find_windows(trace: Trace, op_ms: Times, units: Sequence[Unit]) -> dict[str, OffloadWindow]:
    """Return the windows of units whose next unit's backward begins before their own, by name.

    The loss has none: it is no call. Nor has the last call under a parent.
    """
    if trace.pipelines:
        return {}  # other micro-batches run between a unit's forward and its backward
    siblings: dict[int, list[Unit]] = defaultdict(list)
    for unit in units:
        if unit.call != NO_INDEX:
            siblings[trace.calls[unit.call].parent].append(unit)
    saving = np.unique([op for storage in trace.storages for op in storage.saved_by])
    elapsed = np.concatenate(([0.0], np.cumsum(op_ms)))
    found = {}
    for group in siblings.values():
        group.sort(key=lambda unit: unit.begin)
        for place, unit in enumerate(group):
            later = (each for each in group[place + 1 :] if each.begin >= unit.end)
            after = next((each for each in later if _saves(each, saving)), None)
            if after is None or not after.end < after.backward_begin < unit.backward_begin:
                continue
            # Rounded: equal layers differ in the last digits of a sum, and share a frontier.
            forward_ms = float(elapsed[after.end] - elapsed[unit.end])
            backward_ms = float(elapsed[unit.backward_begin] - elapsed[after.backward_begin])
            found[unit.name] = OffloadWindow(
                next=after,
                forward_ms=round(forward_ms, 6),
                backward_ms=round(backward_ms, 6),
                gone_ms=float(elapsed[after.backward_begin] - elapsed[after.end]),
            )
    return found


def _saves(unit: Unit, saving: Ints) -> bool:
    low, high = np.searchsorted(saving, (unit.begin, unit.end))
    return bool(low < high)


def choose_level(
    units: Sequence[Unit], windows: Mapping[str, OffloadWindow], gains: Mapping[str, float]
) -> dict[str, OffloadWindow]:
    """Return the windows of one level of nested units: that with the largest sum of gains.

    Nor does one offload beside a unit that contains another of that level: their copies would share the link, and those
    stay that gain more.
    """
    ordered = sorted((each for each in units if each.name in windows), key=lambda each: (each.begin, -each.end))
    best: list[tuple[float, tuple[str, ...]]] = [(0, ())] * len(ordered)
    inside: list[list[int]] = [[] for _ in ordered]
    roots: list[int] = []
    around: list[int] = []
    for number, unit in enumerate(ordered):
        while around and ordered[around[-1]].end < unit.end:
            around.pop()
        while around and ordered[around[-1]].end <= unit.begin:
            around.pop()
        (inside[around[-1]] if around else roots).append(number)
        around.append(number)
    for number in range(len(ordered) - 1, -1, -1):  # those inside come after those around them
        own = gains[ordered[number].name]
        parts = sum(best[child][0] for child in inside[number])
        names = tuple(name for child in inside[number] for name in best[child][1])
        best[number] = (own, (ordered[number].name,)) if own >= parts else (parts, names)
    chosen = {name for root in roots for name in best[root][1]}
    level: list[Unit] = []
    for unit in sorted(ordered, key=lambda each: (-gains[each.name], each.begin)):
        beside = windows[unit.name].next
        if unit.name in chosen and not any(
            _is_inside(each, beside) or _is_inside(unit, windows[each.name].next) for each in level
        ):
            level.append(unit)
    return {unit.name: windows[unit.name] for unit in sorted(level, key=lambda each: each.begin)}


def _is_inside(unit: Unit, outer: Unit) -> bool:
    return outer.begin <= unit.begin and unit.end <= outer.end and unit.name != outer.name


def add_offload(
    frontier: Frontier,
    unit_columns: UnitColumns,
    window: OffloadWindow,
    link: OffloadLink,
    *,
    points: int,
    least_bytes: int = 1,
) -> Frontier:
    """Return a unit's frontier with policies that offload: its own policies, and at most `points` others.

    The others are the Pareto set of freed bytes against added time over the policies of the frontier and the subsets of
    what stays under each (Note [Offload]). Results of less than `least_bytes` stay.
    """
    made: list[tuple[Policy, _Subsets]] = []
    freed, time, number, total = [], [], [], []
    for place, policy in enumerate(frontier.policies):
        free_bytes = 0 if link.compute_s_per_byte else window.hidden_bytes(link)
        subsets = _Subsets(offloadable(unit_columns, policy), free_bytes, least_bytes)
        sums = subsets.sums
        made.append((policy, subsets))
        freed.append(policy.discarded_bytes + sums)
        time.append(_picoseconds(policy.recompute_ms + window.exposed_ms(sums, link)))
        number.append(np.full(len(sums), place))
        total.append(sums)
    freed, time, number, total = (np.concatenate(each) for each in (freed, time, number, total))
    order = np.lexsort((total, time, -freed))  # of equal points the one that copies least
    keep = np.ones(len(order), bool)
    keep[1:] = time[order][1:] < np.minimum.accumulate(time[order])[:-1]
    order = order[keep][::-1]
    order = order[thin_out(freed[order], time[order], points)]
    others = [_offloading(*made[int(number[each])], int(total[each]), window, link) for each in order if total[each]]
    return replace(
        frontier,
        policies=tuple(sorted((*frontier.policies, *others), key=lambda policy: (policy.freed_bytes, policy.added_ms))),
        exact=frontier.exact and all(subsets.exact for _, subsets in made),
    )


def offloadable(unit_columns: UnitColumns, policy: Policy) -> Ints:
    """Return, for each op, the bytes of its results that stay under a policy for the unit's backward alone.

    None of an op of which somebody else holds a result.
    """
    stays = _staying(unit_columns, policy)
    role, alloc_at = unit_columns.role, unit_columns.alloc_at
    n_bytes = np.zeros(len(unit_columns.view), np.int64)
    np.add.at(n_bytes, alloc_at[stays], unit_columns.size[stays])
    outlives = (role == Role.FRESH) & (unit_columns.gone >= len(unit_columns.view))
    n_bytes[alloc_at[(role == Role.KEPT) | outlives]] = 0
    n_bytes[unit_columns.fixed] = 0  # what is overwritten after the unit has another value then
    return n_bytes


def _staying(unit_columns: UnitColumns, policy: Policy) -> Flags:
    """Return the storages that are held under a policy because of the unit's backward, or of its recompute."""
    role, alloc_at = unit_columns.role, unit_columns.alloc_at
    saved = np.zeros(len(unit_columns.view), bool)
    saved[list(policy.saved)] = True
    newly_held = (role == Role.FRESH) & (alloc_at <= policy.stop)
    return ((role == Role.DISCARDABLE) | newly_held) & saved[alloc_at]


def build_offloads(
    columns: TraceColumns,
    chosen: Iterable[tuple[Unit, Policy]],
    windows: Mapping[str, OffloadWindow] | None = None,
) -> list[Offload]:
    """Return what policies offload (memory's Note [Allocations under a plan]); `windows` are those of all units."""
    offloading = [each for each in chosen if each[1].offload]
    if offloading and windows is None:
        windows = find_windows(columns.trace, columns.op_ms, find_units(columns.trace))
    for unit, _ in offloading:
        if unit.name not in (windows or {}):
            raise InputError(f"{unit.name!r} offloads, and no unit after it would copy beside it; plan the step again")
    return [_build_offload(columns, unit, policy, (windows or {})[unit.name]) for unit, policy in offloading]


def host_bytes(unit_columns: UnitColumns, policy: Policy) -> int:
    """Return what the host of a GPU takes for what a policy offloads (Note [Host memory])."""
    leaves = _leaving(unit_columns, policy)
    return sum(1 << (each - 1).bit_length() for each in unit_columns.size[leaves].tolist())


def limit_offload(
    frontiers: Sequence[Frontier],
    taken: Sequence[Sequence[int]],
    windows: Sequence[OffloadWindow],
    link: OffloadLink,
    limit_bytes: int,
) -> list[Frontier]:
    """Return the frontiers without policies, so that no choice among the rest takes more than a limit of the host.

    `taken` is what each policy of each frontier takes there. The same cap is tried for all units, those first whose
    bytes are gone for longest; the best cap is the one under which most is hidden, each byte for as long as it is gone.
    """
    order = sorted(range(len(frontiers)), key=lambda unit: -windows[unit].gone_ms)
    hidden = [window.hidden_bytes(link) for window in windows]

    def most_within(cap: int) -> tuple[float, int, dict[int, int]]:
        """Return the worth of giving each unit up to `cap`, how much is left, and what each gets."""
        left, worth, given = limit_bytes, 0.0, {}
        for unit in order:
            most = max((each for each in taken[unit] if each <= min(cap, left)), default=0)
            given[unit], left = most, left - most
            worth += windows[unit].gone_ms * min(most, hidden[unit])
        return worth, left, given

    caps = sorted({each for policies in taken for each in policies})
    _, _, given = max((most_within(cap) for cap in caps), key=lambda found: (found[0], -found[1]))
    limited: dict[tuple[int, int], Frontier] = {}  # units that share a frontier still do where they get the same
    for unit, frontier in enumerate(frontiers):
        within = (place for place, each in enumerate(taken[unit]) if each <= given[unit])
        policies = tuple(frontier.policies[place] for place in within)
        limited.setdefault((id(frontier), given[unit]), replace(frontier, policies=policies))
    return [limited[id(frontier), given[unit]] for unit, frontier in enumerate(frontiers)]


def _leaving(unit_columns: UnitColumns, policy: Policy) -> Flags:
    """Return the storages that a policy offloads."""
    return _staying(unit_columns, policy) & np.isin(unit_columns.alloc_at, policy.offload)


def _build_offload(columns: TraceColumns, unit: Unit, policy: Policy, window: OffloadWindow) -> Offload:
    low, high = np.searchsorted(columns.forward_alloc_at, (unit.begin, unit.end))
    own = columns.forward_storages[low:high]
    unit_columns = UnitColumns.of(columns, unit)
    able = offloadable(unit_columns, policy)
    unknown = [op for op in policy.offload if op >= len(able) or not able[op]]
    if unknown:
        raise InputError(f"op {unknown[0]} of {unit.name!r} has nothing to offload; plan the step again")
    leaves = _leaving(unit_columns, policy)
    return Offload(unit=unit, storages=own[leaves], gone_at=window.gone_at, back_at=window.back_at)


class _Subsets:
    """The sums of subsets of some ops' bytes that matter: the largest that costs nothing, and all larger ones."""

    def __init__(self, op_bytes: Ints, free_bytes: int, least_bytes: int) -> None:
        ops = np.flatnonzero(op_bytes >= max(least_bytes, 1))
        ops = ops[np.argsort(-op_bytes[ops], kind="stable")]
        self._items = [(each.reshape(1), int(op_bytes[each])) for each in ops[: ITEMS - 1]]
        if len(ops) >= ITEMS:
            self._items.append((ops[ITEMS - 1 :], int(op_bytes[ops[ITEMS - 1 :]].sum())))
        self.exact = len(ops) <= ITEMS
        self._lists = [np.zeros(1, np.int64)]
        for _, size in self._items:
            longer = np.unique(np.concatenate((self._lists[-1], self._lists[-1] + size)))
            if len(longer) > SUMS:
                self.exact = False
                longer = longer[np.unique(np.linspace(0, len(longer) - 1, SUMS).astype(np.int64))]
            self._lists.append(longer)
        sums = self._lists[-1]
        first = int(np.searchsorted(sums, free_bytes, "right")) - 1
        self.sums: Ints = np.unique(np.concatenate((sums[:1], sums[max(first, 0) :])))

    def ops_of(self, total: int) -> tuple[int, ...]:
        """Return the ops of a subset with this sum: without smaller ones where the larger ones do."""
        found: list[int] = []
        for (ops, size), before in zip(reversed(self._items), reversed(self._lists[:-1]), strict=True):
            place = int(np.searchsorted(before, total))
            if place < len(before) and before[place] == total:
                continue
            found += ops.tolist()
            total -= size
        return tuple(sorted(found))


def _offloading(policy: Policy, subsets: _Subsets, total: int, window: OffloadWindow, link: OffloadLink) -> Policy:
    return replace(
        policy,
        offload=subsets.ops_of(total),
        offloaded_bytes=total,
        exposed_ms=float(window.exposed_ms(np.array([total]), link)[0]),
    )


def _picoseconds(ms: Times) -> Ints:
    return np.rint(ms * PICOSECONDS).astype(np.int64)
