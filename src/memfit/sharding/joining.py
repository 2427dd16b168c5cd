"""Which neighbouring small units are gathered and reduced together, as the planner and the runtime both decide it.

A collective of a few kilobytes takes as long as one of a hundred, and so do the hooks around it. Units that are tiny
are therefore joined into buckets, as DDP does with gradients: their parameters lie in one flat tensor, which is
gathered when the first of them is called and freed after the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

BUCKET_CAP_BYTES = 1 << 20
"""The largest bucket unless a schedule says otherwise: fast links send it in about the time that they take to begin."""

_LEAST_BUCKETS = 16
"""Of a model whose units are all tiny no bucket has more than this part, so that there is something to overlap."""


class JoinableUnit(NamedTuple):
    """What decides whether a unit is joined: its path, its gathered bytes, and its options, which must be the same."""

    path: str
    gathered_bytes: int
    options: object


def join_neighbours(units: Sequence[JoinableUnit], cap_bytes: int) -> list[list[int]]:
    """Return the numbers of units that are gathered together, in order; most are alone.

    Units are given in the order of the model's modules, without the root. Those are joined that follow each other in
    one parent, with the same options, up to `cap_bytes` and one part in 16 of all.
    """
    limit = min(cap_bytes, sum(unit.gathered_bytes for unit in units) // _LEAST_BUCKETS)
    joined: list[list[int]] = []
    filled = 0
    for number, unit in enumerate(units):
        before = units[number - 1] if number else None
        filled += unit.gathered_bytes
        alike = before is not None and _parent(before.path) == _parent(unit.path) and before.options == unit.options
        if alike and filled <= limit:
            joined[-1].append(number)
        else:
            joined.append([number])
            filled = unit.gathered_bytes
    return joined


def _parent(path: str) -> str:
    return path.rpartition(".")[0]
