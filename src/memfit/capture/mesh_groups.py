"""Which dimensions of a mesh a process group runs along: sizes alone do not say, a mesh of 8 x 8 has two kinds of 8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from memfit.torch_private.distributed import group_ranks


class MeshGroups:
    """Names the dimensions of process groups on a mesh, whose ranks count up along its last dimension first."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = dict(sizes)
        self._known: dict[tuple[int, ...], tuple[str, ...]] = {}

    def dims_of(self, group: Any) -> tuple[str, ...]:
        """Return the dimensions that a group of the first rank runs along; none for a group that is no part of them.

        A dimension of one rank is along every group, and in none of them.
        """
        ranks = tuple(sorted(group_ranks(group)))
        if ranks not in self._known:
            self._known[ranks] = find_dims(self._sizes, ranks)
        return self._known[ranks]


def find_dims(sizes: Mapping[str, int], ranks: Sequence[int]) -> tuple[str, ...]:
    """Return the dimensions along which these ranks differ, if the ranks are all that do so and else none."""
    if not ranks or max(ranks) >= prod(sizes.values()):
        return ()
    places = np.unravel_index(np.asarray(ranks), tuple(sizes.values()))
    found = tuple(name for name, place in zip(sizes, places, strict=True) if len(set(place.tolist())) > 1)
    return found if prod(sizes[name] for name in found) == len(ranks) else ()
