"""The figures of the collective model, read from data/collectives.toml: links, libraries, algorithms, protocols."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

import msgspec

from memfit.errors import InputError
from memfit.hardware import Device, Link
from memfit.hardware.schema import Figure, Reader, Source


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
    """A communication library: what a call costs, which algorithms it has, and their protocols, plainest first."""

    name: str
    launch_ms: float
    algorithms: Mapping[Collective, tuple[Algorithm, ...]]
    protocols: Mapping[Algorithm, tuple[ProtocolFigures, ...]]
    instead: Mapping[Collective, Collective]

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
