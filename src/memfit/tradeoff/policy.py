"""What a policy of a unit may do, and what it does: bytes, time, and the peak while the unit is recomputed.

Everything is relative to the unit's first op. Note [Rules]: what a policy may do.

1. Of what autograd packs, discardable storages are dropped whose op is recomputed; everything else is held, also
   what such an op makes besides. When backward needs the first dropped tensor, the unit is recomputed from its
   beginning until the last of them has been packed: that op is the stop. Ops up to the stop are recomputed,
   unless they are saved: these return the result that was kept.
2. Views are recomputed always. They take their own time and no memory.
3. An op that writes to a storage of the unit goes with the op that made it, and so does an op that read the
   storage before: they are saved together or recomputed together. Random ops are one such group too.
4. What writes to a storage older than the unit cannot be recomputed, nor can what read it before, nor what draws from
   a generator of the step's own: it is forced to be saved. A result that is overwritten after the unit cannot be
   saved: it is fixed to be recomputed. An op that is both cannot be reached: the stop comes before it.
5. Only what the unit's own ops save, nobody reads later in the forward and nobody else holds is discardable.
   What is held anyway costs nothing to save; what autograd never saved costs its bytes. Copies of parameters
   that autocast made are held anyway: its cache has them until it ends.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import pairwise

import numpy as np

from memfit.capture import AFTER_STEP, NO_INDEX
from memfit.memory import Flags, Ints, Recompute, Unit
from memfit.tradeoff.columns import PICOSECONDS, Times, TraceColumns


class Role(IntEnum):
    """What saving its op does to a storage's bytes; `LOOSE` ones come from no op and are never saved."""

    FRESH = 0
    KEPT = 1
    DISCARDABLE = 2
    LOOSE = 3


@dataclass(frozen=True, kw_only=True)
class UnitColumns:
    """Columns of one unit. `ties` are pairs of ops of one group; columns from `size` on are of the storages it makes.

    `ends` is the op after which a storage goes in a recompute; for a discardable one it is beyond the
    last; for a number that an op keeps for its backward it is the last op of the run. `need` is the op after which a
    discardable storage has been packed. `gone` is the op of the first run after which a storage leaves when autograd
    does not hold it. The last two columns are of inputs that must be held: sizes, and ops after which they would go.
    """

    signature: Ints
    ms: Times
    view: Flags
    random: Flags
    workspace: Ints
    forced: Flags
    fixed: Flags
    ties: Ints
    size: Ints
    alloc_at: Ints
    ends: Ints
    role: Ints
    need: Ints
    gone: Ints
    input_size: Ints
    input_ends: Ints

    @classmethod
    def of(cls, columns: TraceColumns, unit: Unit) -> UnitColumns:
        """Cut a unit out of the columns of a trace."""
        begin, end, backward = unit.begin, unit.end, unit.backward_begin
        count = end - begin
        low, high = np.searchsorted(columns.forward_alloc_at, (begin, end))
        own = columns.forward_storages[low:high]
        released = np.where(columns.released[own] == AFTER_STEP, len(columns.trace.ops), columns.released[own])
        alloc_at = columns.forward_alloc_at[low:high] - begin
        free_after = columns.free_after[own]
        held = (free_after == AFTER_STEP) | (free_after >= backward)
        only_here = (
            (columns.first_saver[own] >= begin)
            & (columns.last_saver[own] < end)
            & (columns.packed[own] < end)
            & (columns.last_read[own] < end)
            & (free_after != AFTER_STEP)
            & (free_after < unit.backward_end)
            & ~columns.cached[own]
            & (released < end)
        )
        role = np.where(held, np.where(only_here, Role.DISCARDABLE, Role.KEPT), Role.FRESH)
        role[~columns.made[own]] = Role.LOOSE
        ends = np.where(held, np.clip(released - begin, alloc_at, count - 1), free_after - begin)
        ends[role == Role.DISCARDABLE] = count
        inputs = lost_inputs(columns, unit)
        ends[(role == Role.LOOSE) & held & (columns.first_saver[own] != NO_INDEX)] = count - 1
        forced, fixed, ties = _constraints(columns, begin, end, backward)
        fixed[alloc_at[(columns.last_write[own] >= end) & columns.made[own]]] = True
        return cls(
            signature=columns.signature[begin:end],
            ms=columns.op_ms[begin:end],
            view=columns.view[begin:end],
            random=columns.random[begin:end],
            workspace=columns.workspace[begin:end],
            forced=forced,
            fixed=fixed & ~columns.view[begin:end],
            ties=ties,
            size=columns.size[own],
            alloc_at=alloc_at,
            ends=np.minimum(ends, count),
            role=role,
            need=np.where(role == Role.DISCARDABLE, columns.packed[own] - begin, NO_INDEX),
            gone=np.minimum(np.where(role == Role.DISCARDABLE, np.maximum(released - begin, alloc_at), ends), count),
            input_size=columns.size[inputs],
            input_ends=np.minimum(columns.free_after[inputs] - begin, count),
        )

    @property
    def input_bytes(self) -> int:
        """Bytes of the inputs that must be held for the recompute."""
        return int(self.input_size.sum())

    @cached_property
    def digest(self) -> bytes:
        """A hash, equal for units that differ in nothing that matters."""
        content = hashlib.blake2b(digest_size=20)
        for column in (self.signature, self.forced, self.fixed, self.ties, self.size, self.alloc_at):
            content.update(column.tobytes())
            content.update(b"|")
        for column in (self.ends, self.role, self.need, self.gone, self.input_size, self.input_ends):
            content.update(column.tobytes())
            content.update(b"|")
        return content.digest()

    @cached_property
    def picoseconds(self) -> Ints:
        """Times as whole numbers."""
        return np.rint(self.ms * PICOSECONDS).astype(np.int64)

    @cached_property
    def group(self) -> Ints:
        """The number of each op's group, in the order of their first ops; `NO_INDEX` for views."""
        parent = list(range(len(self.ms)))

        def root(op: int) -> int:
            while parent[op] != op:
                parent[op] = parent[parent[op]]
                op = parent[op]
            return op

        random = np.flatnonzero(self.random).tolist()
        for one, other in (*self.ties.tolist(), *pairwise(random)):
            low, high = sorted((root(one), root(other)))
            parent[high] = low
        roots = np.array([root(op) for op in range(len(parent))], np.int64)
        found = np.full(len(parent), NO_INDEX)
        found[~self.view] = np.unique(roots[~self.view], return_inverse=True)[1]
        return found

    @cached_property
    def groups(self) -> int:
        """How many groups there are."""
        return int(self.group.max(initial=NO_INDEX)) + 1


def _constraints(columns: TraceColumns, begin: int, end: int, backward: int) -> tuple[Flags, Flags, Ints]:
    """Return which ops must be saved, which recomputed because they write to what is made anew, and the ties."""
    forced = columns.pinned[begin:end].copy()
    fixed = np.zeros(end - begin, bool)
    low, high = np.searchsorted(columns.write_op, (begin, end))
    op, storage = columns.write_op[low:high], columns.write_storage[low:high]
    made = columns.alloc_at[storage]
    forced[op[made < begin] - begin] = True
    fixed[op[(made >= begin) & ~columns.made[storage]] - begin] = True
    inside = made >= begin
    ties = np.stack((made[inside], op[inside]), axis=1)
    low, high = np.searchsorted(columns.stale[:, 0], (begin, end))
    if low < high:
        reader, storage, writer = columns.stale[low:high].T
        made = columns.alloc_at[storage]
        forced[reader[(made < begin) & (writer < backward)] - begin] = True
        inside = (made >= begin) & (writer < end)
        ties = np.concatenate((ties, np.stack((made[inside], reader[inside]), axis=1)))
    return forced, fixed, np.ascontiguousarray(ties - begin)


def lost_inputs(columns: TraceColumns, unit: Unit) -> Ints:
    """Return storages that a unit reads or is called with and that would be gone when it is recomputed.

    So is a buffer to which the forward binds another tensor.
    """
    low, high = np.searchsorted(columns.read_op, (unit.begin, unit.end))
    given = columns.trace.calls[unit.call].inputs if unit.call != NO_INDEX else ()
    inputs = np.unique(np.concatenate((columns.read_storage[low:high], np.array(given, np.int64))))
    free_after = columns.free_after[inputs]
    gone = (free_after != AFTER_STEP) & (free_after < unit.backward_begin)
    return inputs[(columns.alloc_at[inputs] < unit.begin) & gone]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Which ops of a unit are saved and which recomputed, as offsets from the unit's first op.

    `dropped` are the storages that are dropped, each as the op that makes it and its place among the new storages of
    that op: a tensor that autograd packs is dropped when its storage is one of these, all others are held. `stop` is
    the last op of the recompute, -1 when there is none. `discarded_bytes` is what backward no longer finds, less what
    is newly held; `cached_bytes` is what is held because of this policy. `recompute_peak_bytes` is the highest point of
    the recompute above the level just before the unit's backward. `profile` is what changes while the unit runs for
    the first time: after an op, by so many bytes.

    `offload` are ops whose results stay for backward and leave for the host; they take `offloaded_bytes`, and
    `exposed_ms` of their copies are not hidden by compute (offload.py, Note [Offload]).
    """

    saved: tuple[int, ...]
    recomputed: tuple[int, ...]
    dropped: tuple[tuple[int, int], ...]
    stop: int
    discarded_bytes: int
    cached_bytes: int
    recompute_ms: float
    recompute_peak_bytes: int
    profile: tuple[tuple[int, int], ...] = ()
    offload: tuple[int, ...] = ()
    offloaded_bytes: int = 0
    exposed_ms: float = 0.0

    @property
    def freed_bytes(self) -> int:
        """What is gone from the device between forward and backward once copies have left."""
        return self.discarded_bytes + self.offloaded_bytes

    @property
    def added_ms(self) -> float:
        """What the policy adds to the step."""
        return self.recompute_ms + self.exposed_ms

    @property
    def changes_nothing(self) -> bool:
        """Whether the unit runs as it would without a plan."""
        return self.stop < 0 and not self.offload


def build_policy(unit_columns: UnitColumns, dropped: Flags) -> Policy:
    """Return the policy that recomputes these groups and saves all others."""
    group, role = unit_columns.group, unit_columns.role
    offsets = np.arange(len(group))
    discardable = role == Role.DISCARDABLE
    owned = discardable | (role == Role.FRESH)
    of_dropped = np.zeros(len(role), bool)
    of_dropped[owned] = dropped[group[unit_columns.alloc_at[owned]]]
    stop = int(unit_columns.need[discardable & of_dropped].max(initial=-1))
    reached = offsets <= stop
    runs = reached & (unit_columns.view | dropped[group] if unit_columns.groups else unit_columns.view)
    carries = np.zeros(len(group), bool)
    carries[unit_columns.alloc_at[discardable]] = True
    newly_held = int(unit_columns.size[(role == Role.FRESH) & ~of_dropped & (unit_columns.alloc_at <= stop)].sum())
    gone = int(unit_columns.size[discardable & of_dropped].sum())
    kept = int(unit_columns.size[discardable & ~of_dropped].sum())
    return Policy(
        saved=tuple(np.flatnonzero(np.where(reached, ~runs, carries)).tolist()),
        recomputed=tuple(np.flatnonzero(runs).tolist()),
        dropped=_results(unit_columns, discardable & of_dropped),
        stop=stop,
        discarded_bytes=gone - newly_held - unit_columns.input_bytes if stop >= 0 else 0,
        cached_bytes=kept + newly_held,
        recompute_ms=float(unit_columns.ms[runs].sum()),
        recompute_peak_bytes=_peak_bytes(unit_columns, runs, stop),
        profile=_profile(unit_columns, discardable & of_dropped, (role == Role.FRESH) & ~of_dropped, stop)
        if stop >= 0
        else (),
    )


def _profile(unit_columns: UnitColumns, dropped: Flags, held: Flags, stop: int) -> tuple[tuple[int, int], ...]:
    """Return the bytes that leave early because they are dropped, and those that stay because they are held, by op."""
    count = len(unit_columns.ms)
    change = np.zeros(count + 1, np.int64)
    np.subtract.at(change, unit_columns.gone[dropped], unit_columns.size[dropped])
    newly = held & (unit_columns.alloc_at <= stop)
    np.add.at(change, unit_columns.gone[newly], unit_columns.size[newly])
    np.add.at(change, unit_columns.input_ends, unit_columns.input_size)
    return tuple((int(op), int(change[op])) for op in np.flatnonzero(change[: count - 1]))


def _results(unit_columns: UnitColumns, chosen: Flags) -> tuple[tuple[int, int], ...]:
    """Return storages by the op that makes them and their place among the new storages of that op."""
    made = np.flatnonzero(unit_columns.role != Role.LOOSE)
    alloc_at = unit_columns.alloc_at[made]
    place = np.arange(len(made)) - np.searchsorted(alloc_at, alloc_at)
    picked = chosen[made]
    return tuple(zip(alloc_at[picked].tolist(), place[picked].tolist(), strict=True))


def _peak_bytes(unit_columns: UnitColumns, runs: Flags, stop: int) -> int:
    """Return the highest point of a recompute: results as they come and go, and the workspace of each op."""
    if stop < 0:
        return 0
    made = runs[unit_columns.alloc_at] & (unit_columns.ends >= unit_columns.alloc_at)
    change = np.zeros(len(runs) + 2, np.int64)
    np.add.at(change, unit_columns.alloc_at[made], unit_columns.size[made])
    np.add.at(change, unit_columns.ends[made] + 1, -unit_columns.size[made])
    level = np.cumsum(change)[: stop + 1]
    return int((level + np.where(runs, unit_columns.workspace, 0)[: stop + 1]).max(initial=0))


def build_recompute(columns: TraceColumns, unit: Unit, policy: Policy) -> Recompute:
    """Return what a policy changes in the allocations of the step (memory's Note [Allocations under a plan])."""
    unit_columns = UnitColumns.of(columns, unit)
    low, high = np.searchsorted(columns.forward_alloc_at, (unit.begin, unit.end))
    own = columns.forward_storages[low:high]
    saved, runs = np.zeros((2, len(unit_columns.view)), bool)
    saved[list(policy.saved)] = True
    runs[list(policy.recomputed)] = True
    held, discardable = saved[unit_columns.alloc_at], unit_columns.role == Role.DISCARDABLE
    newly_held = own[(unit_columns.role == Role.FRESH) & held & (unit_columns.alloc_at <= policy.stop)]
    dropped = own[discardable & ~held]
    made = runs[unit_columns.alloc_at] & (unit_columns.ends >= unit_columns.alloc_at)
    return Recompute(
        unit=unit,
        ops=unit.begin + np.array(policy.recomputed, np.int64),
        held=np.concatenate((newly_held, lost_inputs(columns, unit))),
        dropped=dropped,
        dropped_after=np.maximum(columns.released[dropped], columns.alloc_at[dropped]),
        remade=own[made],
        remade_at=unit.begin + unit_columns.alloc_at[made],
        remade_until=unit.begin + unit_columns.ends[made],
        replaces=discardable[made],
    )
