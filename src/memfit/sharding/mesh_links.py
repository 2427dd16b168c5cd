"""Where the groups of a mesh lie on the nodes of a target, and so which links their collectives have.

Ranks count up along the last dimension of a mesh first, and nodes are filled in the order of the ranks: groups along
the last dimension are neighbours inside a node as long as a node holds them, those along the first are as far apart as
there are ranks in the others together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import numpy as np

from memfit.capture import CollectiveCall
from memfit.cost import Collective, Group
from memfit.hardware import Target


def group_of(mesh: Mapping[str, int], call: CollectiveCall, target: Target) -> Group | None:
    """Return where the ranks of a collective lie; None for all of the target. A message goes from one to the next."""
    if call.kind == Collective.SEND.value:
        return Group.spaced(target, 2, call.stride)
    if call.ranks in (0, target.ranks):
        return None
    if call.dims:
        return group_along(tuple(mesh.items()), call.dims, min(target.ranks, target.ranks_per_node))
    return Group.spaced(target, call.ranks, call.stride)  # a group of the step's own, which is no part of its mesh


@cache
def group_along(sizes: tuple[tuple[str, int], ...], dims: tuple[str, ...], ranks_per_node: int) -> Group:
    """Return how the groups along some dimensions of a mesh lie on nodes; of several ways, that on the most nodes."""
    shape = tuple(size for _, size in sizes)
    nodes = np.arange(math.prod(shape)).reshape(shape) // ranks_per_node
    along = [axis for axis, (name, _) in enumerate(sizes) if name in dims]
    groups = np.moveaxis(nodes, along, range(len(along))).reshape(math.prod(shape[axis] for axis in along), -1)
    spread = max(len(set(column)) for column in groups.T.tolist())
    return Group(nodes=spread, ranks_per_node=-(-len(groups) // spread))
