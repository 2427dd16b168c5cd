"""What is known about each module of a step, under the keys of PyTorch's `ilp_utils`.

Sizes are bytes and times milliseconds, children included. Note [Several calls]: of a module that is called
more than once, `act_fw_per_module`, `input_per_module`, `output_per_module` and the times are sums over its
calls (the sizes over those of one forward pass, the largest such sum when gradients are accumulated over
several). The four levels `grad_total`, `act_total`, `act_bw_per_module` and `act_grad_per_module` are of one
and the same call, the one at which their sum without `act_bw_per_module` is highest.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import TypedDict, overload

import numpy as np
from numpy.typing import NDArray

from memfit import units
from memfit.errors import InputError


class ModOrder(TypedDict):
    """The modules in the order in which forward and backward begin and end; every call is listed."""

    fw_pre_order: list[str]
    bw_pre_order: list[str]
    fw_post_order: list[str]
    bw_post_order: list[str]


class ModRuntime(TypedDict):
    """One module's milliseconds in forward and in backward."""

    fw: float
    bw: float


class ModStats(TypedDict):
    """One module (Note [Several calls]). The levels are 0 for a module of which nothing runs in backward."""

    fqn: str
    param_per_module: int
    grad_per_module: int
    """Gradients of its parameters; frozen ones have none."""
    grad_total: int
    """Gradients of the whole model that exist when the module's backward begins."""
    act_fw_per_module: int
    """What its forward leaves for backward, without its input and output."""
    act_bw_per_module: int
    """What is left of forward, of the whole model, at the peak of the module's backward."""
    act_grad_per_module: int
    """What the module's backward has added at its peak: gradients of activations, temporaries, and the parameter
    gradients made by the innermost module that runs at that moment."""
    act_total: int
    """What forward has made and not freed when the module's forward ends: its own, its input, all before it."""
    input_per_module: int
    output_per_module: int
    fw_runtime_per_module: float
    bw_runtime_per_module: float
    is_leaf: bool
    """Whether there is nothing to choose: the module has no trade-off and cannot be checkpointed."""
    sac_runtime: float
    """The time to recompute all of it."""
    sac_memory: int
    """The bytes of all results in it that can be recomputed, also of those that autograd does not keep."""
    n_segments: int
    """The pieces of the line fitted to the trade-off; their slopes, intercepts and ends follow."""
    slopes: list[float]
    intercepts: list[float]
    breakpoints: list[float]
    tradeoff_curve: OrderedDict[float, float]
    """Share of `sac_memory` discarded to share of `sac_runtime` spent, in greedy order."""


class ModuleInfo(TypedDict):
    """The modules of a step, in forward order, and the orders they run in."""

    mod_order: ModOrder
    mod_stats: list[ModStats]


# -- Names of modules compared component by component, and bytes as the prototypes show them --------------------------


def is_submodule(name_descendant: str, name_ancestor: str) -> bool:
    """Return whether one module lies inside another and is not the same; everything lies inside the empty path."""
    if not name_ancestor:
        return bool(name_descendant)
    return name_descendant.startswith(name_ancestor + ".")


def is_self_or_submodule(name_descendant: str, name_ancestor: str) -> bool:
    """Return whether one module lies inside another or is the same."""
    return name_descendant == name_ancestor or is_submodule(name_descendant, name_ancestor)


def display_bytes(b: int, unit: str = "MiB") -> str:
    """Show bytes in 'bytes', 'KiB', 'MiB', 'GiB' or 'TiB'."""
    return units.display_bytes(b, unit)


# -- The modules of a step as a tree: `Graph`, made from a `ModuleInfo` -----------------------------------------------
#
# Note [Ancestors]: sorted by the components of their names, a module and all that lies inside it are neighbours,
# whatever the order they ran in. Two integers for each node, its place in that order and where its descendants end,
# therefore hold the whole ancestor relation.


class Node(ModStats):
    """One module of the graph."""

    index: int
    """Its place in forward pre-order."""
    pos_fw_post_order: int
    """Its place in forward post-order."""


class AncestorMatrix:
    """`matrix[i][j]` or `matrix[i, j]` is 1 when node j is node i or lies inside it, else 0 (Note [Ancestors])."""

    def __init__(self, names: Iterable[str]) -> None:
        parts = [_components(name) for name in names]
        self._order = sorted(range(len(parts)), key=parts.__getitem__)
        self._place = [0] * len(parts)
        self._end = [len(parts)] * len(parts)
        open_nodes: list[int] = []
        for place, node in enumerate(self._order):
            self._place[node] = place
            while open_nodes and parts[node][: len(parts[open_nodes[-1]])] != parts[open_nodes[-1]]:
                self._end[open_nodes.pop()] = place
            open_nodes.append(node)

    @property
    def shape(self) -> tuple[int, int]:
        """Nodes by nodes."""
        return (len(self._place), len(self._place))

    def __len__(self) -> int:
        return len(self._place)

    @overload
    def __getitem__(self, key: tuple[int, int]) -> int: ...
    @overload
    def __getitem__(self, key: int) -> AncestorRow: ...
    def __getitem__(self, key: int | tuple[int, int]) -> AncestorRow | int:
        if isinstance(key, tuple):
            return int(self._place[key[0]] <= self._place[key[1]] < self._end[key[0]])
        return AncestorRow(self, range(len(self))[key])

    def descendants(self, node: int) -> list[int]:
        """Return the nodes inside a node, without itself, in forward pre-order."""
        return sorted(self._order[self._place[node] + 1 : self._end[node]])

    def ancestors(self, node: int) -> list[int]:
        """Return the nodes around a node, without itself, in forward pre-order."""
        return [outer for outer in range(len(self)) if outer != node and self[outer, node]]

    def toarray(self) -> NDArray[np.float64]:
        """Return all of it as an array of 0 and 1."""
        place, end = np.array(self._place, np.int64), np.array(self._end, np.int64)
        return ((place[:, None] <= place) & (place < end[:, None])).astype(np.float64)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> NDArray[np.float64]:
        return self.toarray().astype(dtype or np.float64)


class AncestorRow:
    """What lies inside one node: 1 for itself and its descendants, else 0."""

    __slots__ = ("_matrix", "_node")

    def __init__(self, matrix: AncestorMatrix, node: int) -> None:
        self._matrix = matrix
        self._node = node

    def __len__(self) -> int:
        return len(self._matrix)

    def __getitem__(self, descendant: int) -> int:
        return self._matrix[self._node, descendant]


class Graph:
    """The modules of a step in forward pre-order, with who lies inside whom by name.

    `n` is accepted for code written for the prototype, whose matrix needed it.
    """

    def __init__(self, n: int = 0) -> None:
        self.nodes: list[Node] = []
        self.name2node: dict[str, Node] = {}
        self.fw_post_order: list[str] = []
        self._matrix: AncestorMatrix | None = None

    def __repr__(self) -> str:
        return f"Graph({len(self.nodes)} modules)"

    def add_node(self, node: Node) -> None:
        """Add the next module in forward pre-order."""
        if node["fqn"] in self.name2node:
            raise InputError(f"the graph has a module {node['fqn']!r} already; add each once, its calls summed")
        self.nodes.append(node)
        self.name2node[node["fqn"]] = node
        self._matrix = None

    @property
    def ad_matrix(self) -> AncestorMatrix:
        """Who lies inside whom; it follows the names of the nodes and cannot be written to."""
        if self._matrix is None:
            self._matrix = AncestorMatrix(node["fqn"] for node in self.nodes)
        return self._matrix

    @property
    def roots(self) -> list[Node]:
        """The modules that lie inside no other: the model, or each of several models."""
        roots: list[Node] = []
        for node in sorted(self.nodes, key=lambda node: _components(node["fqn"])):
            if not roots or not is_self_or_submodule(node["fqn"], roots[-1]["fqn"]):
                roots.append(node)
        return sorted(roots, key=lambda node: node["index"])


def parse_module_info(module_info: ModuleInfo) -> Graph:
    """Build the tree of modules, in forward order whatever the order of the statistics, which are not changed.

    A module called more than once stands where its first call begins and where its last call ends.
    """
    statistics = _by_name(module_info["mod_stats"])
    pre_order = list(dict.fromkeys(module_info["mod_order"]["fw_pre_order"]))
    post_order = list(dict.fromkeys(reversed(module_info["mod_order"]["fw_post_order"])))[::-1]
    for order, names in (("fw_pre_order", pre_order), ("fw_post_order", post_order)):
        _same(order, set(names), statistics)
    place = {name: position for position, name in enumerate(post_order)}
    graph = Graph(len(pre_order))
    graph.fw_post_order = post_order
    for index, name in enumerate(pre_order):
        graph.add_node(Node(**statistics[name], index=index, pos_fw_post_order=place[name]))
    return graph


def get_peak_memory_runtime_baseline(graph: Graph) -> tuple[int, float]:
    """Return peak bytes and compute milliseconds without sharding or checkpointing, from the modules' statistics.

    Parameters, gradients, activations and their gradients count; buffers, the batch and optimizer state do not.
    `Timeline.peak_bytes` of a trace is the exact peak of everything.
    """
    if not graph.nodes:
        raise InputError("the graph has no modules; make it with parse_module_info, or add_node")
    roots = graph.roots
    parameter_bytes = sum(node["param_per_module"] for node in roots)
    above_bytes = max(node["grad_total"] + node["act_grad_per_module"] + node["act_total"] for node in graph.nodes)
    compute_ms = sum(node["fw_runtime_per_module"] + node["bw_runtime_per_module"] for node in roots)
    return parameter_bytes + above_bytes, compute_ms


def _components(name: str) -> tuple[str, ...]:
    return tuple(name.split(".")) if name else ()


def _by_name(mod_stats: list[ModStats]) -> dict[str, ModStats]:
    counts = Counter(stats["fqn"] for stats in mod_stats)
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise InputError(f"mod_stats has {_some(repeated)} more than once; give one entry for each module")
    return {stats["fqn"]: stats for stats in mod_stats}


def _same(order: str, names: set[str], statistics: dict[str, ModStats]) -> None:
    without_stats = [name for name in names if name not in statistics]
    if without_stats:
        raise InputError(
            f"mod_order['{order}'] has {_some(without_stats)}, which mod_stats has not; "
            "leave modules without statistics, such as a loss, out of the orders"
        )
    without_place = [name for name in statistics if name not in names]
    if without_place:
        raise InputError(
            f"mod_stats has {_some(without_place)}, which mod_order['{order}'] has not; "
            "take orders and statistics from the same step"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in sorted(names)[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
