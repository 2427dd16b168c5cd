"""One unit as a problem of its own: its ops, the groups they fall into, the storages they make.

Everything is relative to the unit's first op. Note [Rules]: what a policy may do.

1. Of what autograd packs, discardable storages are dropped whose op runs again; everything else is held, also
   what such an op makes besides. When backward needs the first dropped tensor, the unit runs again from its
   beginning until the last of them has been packed: that op is the stop. Ops up to the stop run again, unless
   they are saved: these return the result that was kept.
2. Views run again always. They take their own time and no memory.
3. An op that writes to a storage of the unit goes with the op that made it, and so does an op that read the
   storage before: they are saved together or run again together. Random ops are one such group too.
4. What writes to a storage older than the unit cannot run again, nor can what read it before, nor what draws from
   a generator of the step's own: it is forced to be saved. A result that is overwritten after the unit cannot be
   saved: it is fixed to run again. An op that is both cannot be reached: the stop comes before it.
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

from memfit.capture import NEVER
from memfit.tradeoff.facts import PICOSECONDS, Facts, Flags, Ints, Times
from memfit.tradeoff.units import Unit


class Role(IntEnum):
    """What saving its op does to a storage's bytes; `LOOSE` ones come from no op and are never saved."""

    FRESH = 0
    KEPT = 1
    DISCARDABLE = 2
    LOOSE = 3


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One unit. `ties` are pairs of ops of one group; columns from `size` on are of the storages it makes.

    `ends` is the op after which a storage goes when the unit runs again; for a discardable one it is beyond the
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
    def of(cls, facts: Facts, unit: Unit) -> Problem:
        """Cut a unit out of a trace."""
        begin, end, backward = unit.begin, unit.end, unit.backward_begin
        count = end - begin
        low, high = np.searchsorted(facts.forward_alloc_at, (begin, end))
        own = facts.forward_storages[low:high]
        released = np.where(facts.released[own] == NEVER, len(facts.trace.ops), facts.released[own])
        alloc_at = facts.forward_alloc_at[low:high] - begin
        free_after = facts.free_after[own]
        held = (free_after == NEVER) | (free_after >= backward)
        only_here = (
            (facts.first_saver[own] >= begin)
            & (facts.last_saver[own] < end)
            & (facts.packed[own] < end)
            & (facts.last_read[own] < end)
            & (free_after != NEVER)
            & (free_after < unit.backward_end)
            & ~facts.cached[own]
            & (released < end)
        )
        role = np.where(held, np.where(only_here, Role.DISCARDABLE, Role.KEPT), Role.FRESH)
        role[~facts.made[own]] = Role.LOOSE
        ends = np.where(held, np.clip(released - begin, alloc_at, count - 1), free_after - begin)
        ends[role == Role.DISCARDABLE] = count
        inputs = lost_inputs(facts, unit)
        ends[(role == Role.LOOSE) & held & (facts.first_saver[own] != NEVER)] = count - 1
        forced, fixed, ties = _constraints(facts, begin, end, backward)
        fixed[alloc_at[(facts.last_write[own] >= end) & facts.made[own]]] = True
        return cls(
            signature=facts.signature[begin:end],
            ms=facts.op_ms[begin:end],
            view=facts.view[begin:end],
            random=facts.random[begin:end],
            workspace=facts.workspace[begin:end],
            forced=forced,
            fixed=fixed & ~facts.view[begin:end],
            ties=ties,
            size=facts.size[own],
            alloc_at=alloc_at,
            ends=np.minimum(ends, count),
            role=role,
            need=np.where(role == Role.DISCARDABLE, facts.packed[own] - begin, NEVER),
            gone=np.minimum(np.where(role == Role.DISCARDABLE, np.maximum(released - begin, alloc_at), ends), count),
            input_size=facts.size[inputs],
            input_ends=np.minimum(facts.free_after[inputs] - begin, count),
        )

    @property
    def input_bytes(self) -> int:
        """Bytes of the inputs that must be held for the second run."""
        return int(self.input_size.sum())

    @cached_property
    def digest(self) -> bytes:
        """Equal for units that differ in nothing that matters."""
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
        """The number of each op's group, in the order of their first ops; `NEVER` for views."""
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
        found = np.full(len(parent), NEVER)
        found[~self.view] = np.unique(roots[~self.view], return_inverse=True)[1]
        return found

    @cached_property
    def groups(self) -> int:
        """How many groups there are."""
        return int(self.group.max(initial=NEVER)) + 1


def _constraints(facts: Facts, begin: int, end: int, backward: int) -> tuple[Flags, Flags, Ints]:
    """Which ops cannot run again, which must because they write to what is made anew, and which go together."""
    forced = facts.pinned[begin:end].copy()
    fixed = np.zeros(end - begin, bool)
    low, high = np.searchsorted(facts.write_op, (begin, end))
    op, storage = facts.write_op[low:high], facts.write_storage[low:high]
    made = facts.alloc_at[storage]
    forced[op[made < begin] - begin] = True
    fixed[op[(made >= begin) & ~facts.made[storage]] - begin] = True
    inside = made >= begin
    ties = np.stack((made[inside], op[inside]), axis=1)
    low, high = np.searchsorted(facts.stale[:, 0], (begin, end))
    if low < high:
        reader, storage, writer = facts.stale[low:high].T
        made = facts.alloc_at[storage]
        forced[reader[(made < begin) & (writer < backward)] - begin] = True
        inside = (made >= begin) & (writer < end)
        ties = np.concatenate((ties, np.stack((made[inside], reader[inside]), axis=1)))
    return forced, fixed, np.ascontiguousarray(ties - begin)


def lost_inputs(facts: Facts, unit: Unit) -> Ints:
    """Storages that a unit reads or is called with and that would be gone when it runs again.

    So is a buffer to which the forward binds another tensor.
    """
    low, high = np.searchsorted(facts.read_op, (unit.begin, unit.end))
    given = facts.trace.calls[unit.call].inputs if unit.call != NEVER else ()
    inputs = np.unique(np.concatenate((facts.read_storage[low:high], np.array(given, np.int64))))
    free_after = facts.free_after[inputs]
    gone = (free_after != NEVER) & (free_after < unit.backward_begin)
    return inputs[(facts.alloc_at[inputs] < unit.begin) & gone]
