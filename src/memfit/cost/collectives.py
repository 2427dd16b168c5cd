"""The figures of the collective model, read from data/collectives.toml: links, libraries, algorithms, protocols."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

import msgspec

from memfit.errors import InputError
from memfit.hardware import Device, Figure, Link, Reader, Source, Target


class Collective(str, enum.Enum):
    """What a group of ranks does together, and what `n_bytes` counts."""

    ALL_GATHER = "all_gather"
    """Every rank gets everybody's part; `n_bytes` is the gathered result."""
    REDUCE_SCATTER = "reduce_scatter"
    """Every rank gets its part of the sum; `n_bytes` is one rank's whole input."""
    ALL_REDUCE = "all_reduce"
    """Every rank gets the whole sum; `n_bytes` is one rank's buffer."""
    BROADCAST = "broadcast"
    """Every rank gets the first one's buffer; `n_bytes` is that buffer."""
    ALL_TO_ALL = "all_to_all"
    """Every rank gives each a part; `n_bytes` is one rank's whole input, its own part included."""
    SEND = "send"
    """The first rank sends to the second; `n_bytes` is the message."""

    @classmethod
    def parse(cls, kind: Collective | str) -> Collective:
        """The collective of that name."""
        try:
            return cls(kind)
        except ValueError:
            raise InputError(f"unknown collective {kind!r}; choose one of {', '.join(k.value for k in cls)}") from None


class Algorithm(str, enum.Enum):
    """How the ranks pass the data on."""

    RING = "ring"
    TREE = "tree"
    DIRECT = "direct"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFigures:
    """What collectives make of a link."""

    efficiency: float
    shared_by_node: bool
    meshed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolFigures:
    """One way to pass a message on. The inter-node figures are None where it is not used between nodes."""

    name: str
    base_ms: float
    intra_hop: float
    intra_bandwidth: float
    inter_hop: float | None
    inter_bandwidth: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFigures:
    """A communication library: what a call costs, which algorithms it has, and their protocols, plainest first.

    `slowdown` is what kernels lose of the time in which a collective runs beside them, to its multiprocessors and
    memory traffic.
    """

    name: str
    launch_ms: float
    algorithms: Mapping[Collective, tuple[Algorithm, ...]]
    protocols: Mapping[Algorithm, tuple[ProtocolFigures, ...]]
    instead: Mapping[Collective, Collective]
    slowdown: float = 0.0

    def run_as(self, kind: Collective) -> Collective:
        """The collective that the library really runs for this one."""
        return self.instead.get(kind, kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFigures:
    """All of the file."""

    links: Mapping[str, LinkFigures]
    backends: Mapping[str, BackendFigures]

    def link(self, link: Link) -> LinkFigures:
        """The figures of a link: by its name, else by its kind, else those of an unknown one."""
        return self.links.get(link.name) or self.links.get(link.kind) or self.links["other"]

    def backend(self, device: Device) -> BackendFigures:
        """The library that PyTorch uses on a device."""
        if device.type == "cpu":
            return self.backends["gloo"]
        return self.backends["rccl" if device.vendor == "AMD" else "nccl"]


class _Table(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    pass


class _Link(_Table, frozen=True):
    efficiency: Figure
    shared_by_node: bool = False
    meshed: bool = False


class _Protocol(_Table, frozen=True):
    base_ms: float
    intra_hop: float
    intra_bandwidth: float
    source: str
    inter_hop: float | None = None
    inter_bandwidth: float | None = None
    estimate: bool = False
    reason: str = ""


class _Backend(_Table, frozen=True):
    launch_ms: Figure
    algorithms: dict[Collective, tuple[Algorithm, ...]]
    ring: dict[str, _Protocol]
    tree: dict[str, _Protocol]
    direct: dict[str, _Protocol]
    instead: dict[Collective, Collective] = {}
    slowdown: Figure | None = None


class _File(_Table, frozen=True):
    links: dict[str, _Link]
    backends: dict[str, _Backend]
    sources: dict[str, Source]


@cache
def collective_figures() -> CollectiveFigures:
    """The shipped figures."""
    file = resources.files("memfit.cost") / "data" / "collectives.toml"
    return read_collective_figures(file.read_bytes(), "collectives.toml")


def read_collective_figures(text: bytes, where: str) -> CollectiveFigures:
    """Figures from TOML. Unknown keys, figures without a source and estimates without a reason are refused."""
    try:
        file = msgspec.toml.decode(text, type=_File)
    except msgspec.DecodeError as error:
        raise InputError(f"{where}: {error}; docs/design/collectives.md has the layout") from error
    reader = Reader(where, file.sources)
    if "other" not in file.links:
        raise InputError(f"{where}: links.other is missing; it stands for every link without figures of its own")
    return CollectiveFigures(
        links={name: _link_figures(name, table, reader) for name, table in file.links.items()},
        backends={name: _backend_figures(name, table, reader) for name, table in file.backends.items()},
    )


def _link_figures(name: str, table: _Link, reader: Reader) -> LinkFigures:
    efficiency = reader.number(f"links.{name}.efficiency", table.efficiency)
    if efficiency > 1:
        raise InputError(f"{reader.where}: links.{name}.efficiency is {efficiency}; write a share of at most 1")
    return LinkFigures(efficiency=efficiency, shared_by_node=table.shared_by_node, meshed=table.meshed)


def _backend_figures(name: str, table: _Backend, reader: Reader) -> BackendFigures:
    rows = {Algorithm.RING: table.ring, Algorithm.TREE: table.tree, Algorithm.DIRECT: table.direct}
    missing = [k.value for k in Collective if not table.algorithms.get(table.instead.get(k, k))]
    if missing:
        raise InputError(f"{reader.where}: backends.{name} has no algorithm for {', '.join(missing)}; add one")
    return BackendFigures(
        name=name,
        launch_ms=reader.number(f"backends.{name}.launch_ms", table.launch_ms),
        algorithms=table.algorithms,
        protocols={
            algorithm: tuple(
                _protocol_figures(protocol, row, f"backends.{name}.{algorithm.value}.{protocol}", reader)
                for protocol, row in protocols.items()
            )
            for algorithm, protocols in rows.items()
        },
        instead=table.instead,
        slowdown=0.0 if table.slowdown is None else reader.number(f"backends.{name}.slowdown", table.slowdown),
    )


def _protocol_figures(name: str, row: _Protocol, key: str, reader: Reader) -> ProtocolFigures:
    def number(field: str, value: float) -> float:
        cited = Figure(value=value, source=row.source, estimate=row.estimate, reason=row.reason)
        return reader.number(f"{key}.{field}", cited)

    if (row.inter_hop is None) != (row.inter_bandwidth is None) or row.base_ms < 0:
        raise InputError(f"{reader.where}: {key} needs base_ms of 0 or more, and both inter_ figures or neither")
    return ProtocolFigures(
        name=name,
        base_ms=row.base_ms,
        intra_hop=number("intra_hop", row.intra_hop),
        intra_bandwidth=number("intra_bandwidth", row.intra_bandwidth),
        inter_hop=None if row.inter_hop is None else number("inter_hop", row.inter_hop),
        inter_bandwidth=None if row.inter_bandwidth is None else number("inter_bandwidth", row.inter_bandwidth),
    )


# -- The run time of a collective from a target's links: latency and bandwidth of rings, trees and direct messages ----
#
#     time = launch + base + hops inside x latency + hops between x latency + transfer
#
# The transfer is what passes through the busiest link inside a node and the busiest between nodes: where the
# algorithm is pipelined the slower of the two counts, otherwise their sum. Every rank has its own link between
# nodes, so a group with k ranks on a node enters and leaves that node through k links.


AlgorithmChoice = Algorithm | Literal["best", "ring", "tree", "direct"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that communicate: on how many nodes they lie, and how many of them on each."""

    nodes: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node"):
            check_whole(f"a group's {name}", getattr(self, name), least=1)

    @property
    def ranks(self) -> int:
        """How many ranks there are in all."""
        return self.nodes * self.ranks_per_node

    @classmethod
    def of(cls, target: str | Device | Target) -> Group:
        """All ranks of the target."""
        target = Target.parse(target)
        return cls(nodes=target.nodes, ranks_per_node=_ranks_per_node(target))

    @classmethod
    def shard(cls, target: str | Device | Target, ranks: int) -> Group:
        """One of the groups of `ranks` consecutive ranks: the inner dimension of a mesh."""
        target = Target.parse(target)
        return _spread(target, _divided(target, ranks), stride=1)

    @classmethod
    def spaced(cls, target: str | Device | Target, ranks: int, stride: int) -> Group:
        """One of the groups of `ranks` ranks that lie `stride` apart: any dimension of a mesh."""
        return _spread(Target.parse(target), ranks, stride=stride)

    @classmethod
    def replicate(cls, target: str | Device | Target, shard_ranks: int) -> Group:
        """One of the groups of every `shard_ranks`-th rank, with the same shard: the outer dimension of a mesh."""
        target = Target.parse(target)
        return _spread(target, target.ranks // _divided(target, shard_ranks), stride=shard_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What an algorithm asks of the links: hops in a row, and shares of `n_bytes` through one rank's link."""

    intra_hops: int
    inter_hops: int
    intra_share: float
    inter_share: float
    pipelined: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveEstimate:
    """The parts of a collective's time, and how it runs."""

    kind: Collective
    algorithm: Algorithm
    protocol: str
    launch_ms: float
    latency_ms: float
    transfer_ms: float

    @property
    def total_ms(self) -> float:
        """From the call to the result."""
        return self.launch_ms + self.latency_ms + self.transfer_ms


@dataclass(frozen=True, slots=True, init=False)
class CollectiveModel:
    """The collectives of one target; a device by itself is one rank, which has nothing to communicate."""

    target: Target

    def __init__(self, target: str | Device | Target) -> None:
        object.__setattr__(self, "target", Target.parse(target))

    def collective_ms(
        self,
        kind: Collective | str,
        n_bytes: int,
        group: Group | None = None,
        *,
        algorithm: AlgorithmChoice = "best",
    ) -> float:
        """Milliseconds from the call to the result; 0 for one rank or no bytes."""
        return self.estimate(kind, n_bytes, group, algorithm=algorithm).total_ms

    def estimate(
        self,
        kind: Collective | str,
        n_bytes: int,
        group: Group | None = None,
        *,
        algorithm: AlgorithmChoice = "best",
    ) -> CollectiveEstimate:
        """The fastest way, as the library's own tuner would choose, among all algorithms or those of `algorithm`."""
        asked, group = Collective.parse(kind), self._group(group)
        check_whole("n_bytes", n_bytes, least=0)
        ways = [
            (chosen, protocol)
            for chosen in self._algorithms(asked, algorithm)
            for protocol in self.backend.protocols[chosen]
            if group.nodes == 1 or protocol.inter_hop is not None
        ]
        if group.ranks == 1 or n_bytes == 0:
            chosen, protocol = ways[0]
            return CollectiveEstimate(
                kind=asked, algorithm=chosen, protocol=protocol.name, launch_ms=0.0, latency_ms=0.0, transfer_ms=0.0
            )
        estimates = [self._time(asked, n_bytes, group, chosen, protocol) for chosen, protocol in ways]
        return min(estimates, key=lambda estimate: estimate.total_ms)

    @property
    def backend(self) -> BackendFigures:
        """The library that runs the target's collectives."""
        return collective_figures().backend(self.target.device)

    def algorithms(self, kind: Collective | str) -> tuple[Algorithm, ...]:
        """The algorithms that the target's library has for a collective."""
        return self._algorithms(Collective.parse(kind), "best")

    def intra_bandwidth_bytes_per_s(self, group: Group, kind: Collective | None = None) -> float:
        """What one rank reaches of the link inside a node, in a kind of collective where that was measured."""
        link = self._intra_link(kind)
        figures = collective_figures().link(link)
        reached = link.bandwidth_bytes_per_s * figures.efficiency
        if figures.meshed and link.lanes:
            reached *= min(1.0, max(group.ranks_per_node - 1, 1) / link.lanes)
        return reached

    def inter_bandwidth_bytes_per_s(self) -> float:
        """What one rank reaches of the link between nodes while all ranks of its node communicate."""
        link = self.target.inter_node_link
        figures = collective_figures().link(link)
        users = _ranks_per_node(self.target) if figures.shared_by_node else 1
        return link.bandwidth_bytes_per_s * figures.efficiency / users

    def _time(
        self, kind: Collective, n_bytes: int, group: Group, algorithm: Algorithm, protocol: ProtocolFigures
    ) -> CollectiveEstimate:
        needed = traffic(self.backend.run_as(kind), algorithm, group)
        latency_ms = protocol.base_ms
        inside = between = 0.0
        if needed.intra_hops:
            latency_ms += needed.intra_hops * self._intra_link(kind).latency_ms * protocol.intra_hop
        if needed.intra_share:
            inside = needed.intra_share / (self.intra_bandwidth_bytes_per_s(group, kind) * protocol.intra_bandwidth)
        if needed.inter_share and protocol.inter_hop is not None and protocol.inter_bandwidth is not None:
            latency_ms += needed.inter_hops * self.target.inter_node_link.latency_ms * protocol.inter_hop
            between = needed.inter_share / (self.inter_bandwidth_bytes_per_s() * protocol.inter_bandwidth)
        return CollectiveEstimate(
            kind=kind,
            algorithm=algorithm,
            protocol=protocol.name,
            launch_ms=self.backend.launch_ms,
            latency_ms=latency_ms,
            transfer_ms=(max(inside, between) if needed.pipelined else inside + between) * n_bytes * 1e3,
        )

    def _intra_link(self, kind: Collective | None) -> Link:
        link = self.target.intra_node_link
        return link if kind is None else link.of_collective(kind.value)

    def _group(self, group: Group | None) -> Group:
        whole = Group.of(self.target)
        if group is None:
            return whole
        if group.nodes > whole.nodes or group.ranks_per_node > whole.ranks_per_node:
            raise InputError(
                f"{group} does not lie in a target with {whole.ranks_per_node} ranks on each of {whole.nodes} nodes; "
                "make it with Group.of, Group.shard or Group.replicate"
            )
        return group

    def _algorithms(self, kind: Collective, algorithm: AlgorithmChoice) -> tuple[Algorithm, ...]:
        backend = self.backend
        known = backend.algorithms[backend.run_as(kind)]
        if algorithm == "best":
            return known
        if algorithm not in known:
            given = algorithm.value if isinstance(algorithm, Algorithm) else algorithm
            names = ", ".join(repr(one.value) for one in known)
            raise InputError(f"{backend.name} has no algorithm {given!r} for {kind.value}; choose 'best' or {names}")
        return (Algorithm(algorithm),)


def collective_ms(
    kind: Collective | str,
    n_bytes: int,
    target: str | Device | Target,
    *,
    group: Group | None = None,
    algorithm: AlgorithmChoice = "best",
) -> float:
    """Milliseconds of a collective among the ranks of a target, or of a group of them."""
    return CollectiveModel(target).collective_ms(kind, n_bytes, group, algorithm=algorithm)


def traffic(kind: Collective, algorithm: Algorithm, group: Group) -> Traffic:
    """What a collective by an algorithm asks of the links of a group of two ranks or more.

    Rings are flat: of the hops that a part makes, one for each other node is between nodes. A tree all-reduce is a
    chain inside each node and a double binary tree between nodes; a tree broadcast is binomial and not pipelined.
    """
    ranks, nodes, local = group.ranks, group.nodes, group.ranks_per_node
    if algorithm is Algorithm.RING:
        rounds = 2 if kind is Collective.ALL_REDUCE else 1
        share = 1.0 if kind is Collective.BROADCAST else rounds * (ranks - 1) / ranks
        return _through(group, rounds * (ranks - nodes), rounds * (nodes - 1), share)
    if algorithm is Algorithm.TREE and kind is Collective.ALL_REDUCE:
        return _through(group, 2 * (local - 1), 2 * _depth(nodes), 2.0)
    if algorithm is Algorithm.TREE:
        inside, between = _depth(local), _depth(nodes)
        return Traffic(intra_hops=inside, inter_hops=between, intra_share=inside, inter_share=between, pipelined=False)
    far = nodes > 1
    if kind is Collective.SEND:
        return Traffic(intra_hops=int(not far), inter_hops=int(far), intra_share=float(not far), inter_share=float(far))
    return Traffic(
        intra_hops=int(not far),
        inter_hops=int(far),
        intra_share=(local - 1) / ranks,
        inter_share=(ranks - local) / ranks,
    )


def check_whole(what: str, value: object, *, least: int) -> None:
    """Refuse what is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{what} is {value!r}; give a whole number of at least {least}")


def _through(group: Group, intra_hops: int, inter_hops: int, share: float) -> Traffic:
    """Traffic of `share` that runs through all ranks of a node, and between nodes over all their links at once."""
    return Traffic(
        intra_hops=intra_hops,
        inter_hops=inter_hops,
        intra_share=share if group.ranks_per_node > 1 else 0.0,
        inter_share=share / group.ranks_per_node if group.nodes > 1 else 0.0,
    )


def _depth(n: int) -> int:
    return (n - 1).bit_length()


def _ranks_per_node(target: Target) -> int:
    return min(target.ranks, target.ranks_per_node)


def _divided(target: Target, ranks: int) -> int:
    check_whole("a group's ranks", ranks, least=1)
    if target.ranks % ranks:
        raise InputError(f"{target.ranks} ranks do not divide into groups of {ranks}; give a divisor of {target.ranks}")
    return ranks


def _spread(target: Target, ranks: int, *, stride: int) -> Group:
    """The group of `ranks` ranks that lie `stride` apart."""
    local = _ranks_per_node(target)
    reach = ranks * stride
    if reach <= local and local % reach == 0:
        return Group(nodes=1, ranks_per_node=ranks)
    if stride >= local and stride % local == 0:
        return Group(nodes=ranks, ranks_per_node=1)
    if local % stride == 0 and reach % local == 0:
        return Group(nodes=reach // local, ranks_per_node=local // stride)
    raise InputError(
        f"groups of {ranks} ranks, {stride} apart, lie unevenly on nodes of {local}; "
        f"choose a divisor or a multiple of {local}"
    )
