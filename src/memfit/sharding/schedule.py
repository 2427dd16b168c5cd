"""When the units of a sharded step act, in the order of FSDP2's hooks."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from memfit.capture import NEVER
from memfit.sharding.units import Pass, ShardUnit


class Act(enum.IntEnum):
    """What happens between two ops, in the order in which it does when several meet there."""

    AFTER_BACKWARD = 0
    END_OF_PASS = 1
    AFTER_FORWARD = 2
    BEFORE_FORWARD = 3
    BEFORE_BACKWARD = 4


class Acting(NamedTuple):
    """An act before op `moment`, of the unit with this number; of all units at the end of a pass."""

    moment: int
    act: Act
    unit: int


def actings(units: Sequence[ShardUnit], passes: Sequence[Pass]) -> list[Acting]:
    """Every act of the step in order.

    Where runs of units lie in one another, the outer one begins first and ends last. The backward of an outer run that
    has ops after the inner one begins first too; if it has none, both wait for the gradient of the same tensor, and the
    inner one asked for it first.
    """
    found: list[tuple[tuple[int, int, int, int], Acting]] = []

    def note(moment: int, act: Act, unit: int, first: int = 0, second: int = 0) -> None:
        found.append(((moment, act, first, second), Acting(moment, act, unit)))

    for number, unit in enumerate(units):
        for call in unit.calls:
            note(call.begin, Act.BEFORE_FORWARD, number, call.depth)
            note(call.end, Act.AFTER_FORWARD, number, -call.depth)
            if call.backward_begin != NEVER:
                note(call.backward_begin, Act.BEFORE_BACKWARD, number, -call.end, -call.depth)
                if call.reduces:
                    note(call.backward_end, Act.AFTER_BACKWARD, number, -call.depth)
    for each in passes:
        note(each.end, Act.END_OF_PASS, NEVER)
    return [acting for _, acting in sorted(found, key=lambda pair: pair[0])]
