"""The layout of device, allocator and link files, and how they become Device, AllocatorRules and Link."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from memfit.errors import InputError
from memfit.hardware.device import (
    AllocatorRules,
    CollectiveRate,
    Device,
    DeviceType,
    Link,
    OffloadLink,
    Provenance,
    Rates,
    Sustained,
)
from memfit.hardware.efficiency import Efficiency, EngineTimes, Family, FamilyEfficiency, HostTimes
from memfit.hardware.rank_memory import check_margin

T = TypeVar("T", bound=msgspec.Struct)


class FigureTable(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A table of a data file; unknown keys are errors."""


class Source(FigureTable, frozen=True):
    """A document. `seen` is how its figure was read: installed, stored, measured or recalled."""

    title: str
    publisher: str
    date: str
    seen: str = "recalled"


class Figure(FigureTable, frozen=True):
    """One figure and where it comes from. An estimate says why it is one."""

    value: int | float | str | bool
    source: str = ""
    estimate: bool = False
    reason: str = ""


Number = int | float | Figure
Text = str | Figure


class MemoryTable(FigureTable, frozen=True):
    total_bytes: int | str | Figure
    bandwidth_bytes_per_s: Number


class FlopsTable(FigureTable, frozen=True):
    fp32: Number
    tf32: Number | None = None
    fp16: Number | None = None
    bf16: Number | None = None
    fp8: Number | None = None
    int8: Number | None = None
    fp64: Number | None = None


class ComputeTable(FigureTable, frozen=True):
    capability: Text | None = None
    multiprocessors: int | Figure | None = None
    shared_memory_per_block_bytes: int | Figure | None = None
    threads: int | Figure | None = None
    l2_cache_bytes: int | Figure | None = None


class SustainedTable(FigureTable, frozen=True):
    vector: Number | None = None
    matrix: Number | None = None
    bandwidth: Number | None = None
    long_run: Number | None = None
    long_run_half: Number | None = None


class OverheadsTable(FigureTable, frozen=True):
    context_bytes: int | Figure
    blas_workspace_bytes: int | Figure
    blaslt_workspace_bytes: int | Figure
    context_low_bytes: int | Figure | None = None
    context_high_bytes: int | Figure | None = None


CollectiveName = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "send"]


class CollectiveTable(FigureTable, frozen=True):
    bandwidth_bytes_per_s: Number
    latency_ms: Number


class LinkTable(FigureTable, frozen=True):
    kind: str
    bandwidth_bytes_per_s: Number
    latency_ms: Number
    generation: int | None = None
    lanes: int | None = None
    copy_bytes_per_s: Number | None = None
    collectives: dict[CollectiveName, CollectiveTable] = {}


class DiskTable(FigureTable, frozen=True):
    write_bytes_per_s: Number
    read_bytes_per_s: Number
    compute_s_per_byte: Number | None = None


class LinksTable(FigureTable, frozen=True):
    host: str | LinkTable
    inter_node: str | LinkTable
    ranks_per_node: int | Figure
    peer: str | LinkTable | None = None
    disk: DiskTable | None = None


class AllocatorTable(FigureTable, frozen=True):
    rounding_bytes: Number
    small_limit_bytes: Number
    small_segment_bytes: Number
    large_segment_bytes: Number
    large_limit_bytes: Number
    large_rounding_bytes: Number
    expandable_segments: bool | Figure
    margin: Number


class FamilyTable(FigureTable, frozen=True):
    compute: Number
    bandwidth: Number
    overhead_ms: Number


class HostTable(FigureTable, frozen=True):
    forward_ms: Number
    backward_ms: Number
    optimizer_ms: Number
    view_ms: Number
    call_ms: Number
    second_run_ms: Number | None = None
    convolution_ms: Number | None = None


class EfficiencyTable(FigureTable, frozen=True):
    host: HostTable | None = None
    matrix_large: FamilyTable | None = None
    matrix_small: FamilyTable | None = None
    matrix_unaligned: FamilyTable | None = None
    matrix_simt: FamilyTable | None = None
    attention: FamilyTable | None = None
    attention_backward: FamilyTable | None = None
    convolution: FamilyTable | None = None
    recurrent: FamilyTable | None = None
    norm: FamilyTable | None = None
    elementwise: FamilyTable | None = None
    transcendental: FamilyTable | None = None
    optimizer: FamilyTable | None = None
    embedding: FamilyTable | None = None
    indexing: FamilyTable | None = None
    reduction: FamilyTable | None = None
    copy: FamilyTable | None = None
    random: FamilyTable | None = None
    other: FamilyTable | None = None
    half: dict[Family, FamilyTable] = {}


EngineName = Literal["fsdp2", "sharded", "fsdp2-half", "sharded-half"]


class EngineTable(FigureTable, frozen=True):
    slowdown: Number
    collective_ms: Number
    waiting: Number
    second_run_ms: Number
    offload_s_per_byte: Number | None = None


class DeviceFile(FigureTable, frozen=True):
    name: str
    title: str
    vendor: str
    type: DeviceType
    allocator: str
    memory: MemoryTable
    flops: FlopsTable
    links: LinksTable
    overheads: OverheadsTable
    compute: ComputeTable = ComputeTable()
    sustained: SustainedTable = SustainedTable()
    efficiency: EfficiencyTable = EfficiencyTable()
    engines: dict[EngineName, EngineTable] = {}
    aliases: list[str] = []
    notes: str = ""
    sources: dict[str, Source] = {}


class AllocatorsFile(FigureTable, frozen=True):
    allocators: dict[str, AllocatorTable]
    sources: dict[str, Source] = {}


class LinksFile(FigureTable, frozen=True):
    links: dict[str, LinkTable]
    sources: dict[str, Source] = {}


class EfficiencyFile(FigureTable, frozen=True):
    cpu: EfficiencyTable
    cuda: EfficiencyTable
    sources: dict[str, Source] = {}


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file, or say which file is not one."""
    try:
        return msgspec.toml.decode(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read the device file {path}: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise InputError(f"{path} is not valid TOML: {error}") from error


def convert(raw: Mapping[str, Any], kind: type[T], where: str) -> T:
    """Check a decoded file against its layout; the error names the file, the key and what to write."""
    try:
        return msgspec.convert(raw, kind, strict=True)
    except msgspec.ValidationError as error:
        message = re.sub(r" - at `\$\.?(.*)`$", r" (key \1)", str(error)).replace("Struct", "table")
        raise InputError(
            f"{where}: {message}. A figure is a number or {{ value = ..., source = 'key of [sources]' }}; "
            "docs/design/hardware.md has the whole layout"
        ) from error


class Reader:
    """Takes figures out of one file and keeps where each came from."""

    def __init__(self, where: str, sources: Mapping[str, Source]) -> None:
        self.where = where
        self.sources = sources
        self.provenance: list[Provenance] = []

    def value(self, key: str, figure: Any) -> Any:
        """Return the figure's value; its source is recorded under `key`."""
        if not isinstance(figure, Figure):
            self._record(key, Source(title="given without a source", publisher="the user", date=""), False, "")
            return figure
        if figure.estimate and not figure.reason:
            raise InputError(f"{self.where}: {key} is an estimate without a reason; add reason = '...'")
        if not figure.source and not figure.estimate:
            raise InputError(f"{self.where}: {key} has no source; add source = '...' or estimate = true with a reason")
        if figure.source and figure.source not in self.sources:
            known = ", ".join(sorted(self.sources)) or "none"
            raise InputError(f"{self.where}: {key} cites {figure.source!r}, which is not in [sources] (there: {known})")
        source = self.sources.get(figure.source, Source(title="estimate", publisher="memfit", date=""))
        self._record(key, source, figure.estimate, figure.reason)
        return figure.value

    def number(self, key: str, figure: Any) -> float:
        """Return a figure that must be a number above zero."""
        value = self.value(key, figure)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise InputError(f"{self.where}: {key} is {value!r}; write a number above zero")
        return float(value)

    def whole(self, key: str, figure: Any, *, least: int = 1) -> int:
        """Return a figure that must be a whole number, such as bytes."""
        value = self.value(key, figure)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"{self.where}: {key} is {value!r}; write a whole number of at least {least}")
        return value

    def _record(self, key: str, source: Source, estimate: bool, reason: str) -> None:
        self.provenance.append(
            Provenance(
                key=key,
                source=source.title,
                publisher=source.publisher,
                date=source.date,
                seen=source.seen,
                estimate=estimate,
                reason=reason,
            )
        )


def build_allocators(raw: Mapping[str, Any], where: str) -> dict[str, AllocatorRules]:
    """Build the allocator rules of a file, by name."""
    file = convert(raw, AllocatorsFile, where)
    reader = Reader(where, file.sources)
    return {name: _allocator(name, table, reader) for name, table in file.allocators.items()}


def build_links(raw: Mapping[str, Any], where: str) -> dict[str, Link]:
    """Build the named links of a file."""
    file = convert(raw, LinksFile, where)
    reader = Reader(where, file.sources)
    return {name: _link(name, table, reader) for name, table in file.links.items()}


def build_efficiencies(raw: Mapping[str, Any], where: str) -> dict[str, Efficiency]:
    """Build the usual efficiency of each type of device; every family must be there."""
    file = convert(raw, EfficiencyFile, where)
    reader = Reader(where, file.sources)
    usual = {}
    for kind, table in (("cpu", file.cpu), ("cuda", file.cuda)):
        families, host, half = _efficiency(table, reader, kind)
        missing = [family.value for family in Family if family not in families]
        if missing or host is None:
            raise InputError(f"{where}: [{kind}] lacks {', '.join(missing) or 'host'}; write a table for each")
        usual[kind] = Efficiency(families=tuple(families.values()), host=host, half=half)
    return usual


def build_device(
    raw: Mapping[str, Any],
    where: str,
    links: Mapping[str, Link],
    allocators: Mapping[str, AllocatorRules],
    efficiencies: Mapping[str, Efficiency],
) -> Device:
    """Build a device from its decoded file; what it says of efficiency replaces the usual figures of its type."""
    file = convert(raw, DeviceFile, where)
    reader = Reader(where, file.sources)
    if file.allocator not in allocators:
        raise InputError(f"{where}: unknown allocator {file.allocator!r}; choose one of {', '.join(allocators)}")

    def link(key: str, given: str | LinkTable) -> Link:
        if isinstance(given, LinkTable):
            return _link(f"{file.name} {key}", given, reader)
        if given not in links:
            raise InputError(f"{where}: links.{key} is {given!r}; choose one of {', '.join(links)}, or write a table")
        return links[given]

    flops = {name: getattr(file.flops, name) for name in FlopsTable.__struct_fields__}
    usual = efficiencies[file.type]
    families, host, half = _efficiency(file.efficiency, reader, "efficiency")
    compute, overheads = file.compute, file.overheads
    optional = {
        name: None if figure is None else reader.whole(f"compute.{name}", figure)
        for name in ("multiprocessors", "shared_memory_per_block_bytes", "threads", "l2_cache_bytes")
        for figure in [getattr(compute, name)]
    }
    return Device(
        name=file.name,
        title=file.title,
        vendor=file.vendor,
        type=file.type,
        aliases=tuple(file.aliases),
        memory_total_bytes=_total_bytes(reader, file.memory.total_bytes),
        memory_bandwidth_bytes_per_s=reader.number("memory.bandwidth_bytes_per_s", file.memory.bandwidth_bytes_per_s),
        flops_per_s=Rates(**{name: reader.number(f"flops.{name}", f) for name, f in flops.items() if f is not None}),
        host_link=link("host", file.links.host),
        peer_link=None if file.links.peer is None else link("peer", file.links.peer),
        inter_node_link=link("inter_node", file.links.inter_node),
        disk=None if file.links.disk is None else _disk(file.links.disk, reader),
        ranks_per_node=reader.whole("links.ranks_per_node", file.links.ranks_per_node),
        allocator=allocators[file.allocator],
        context_bytes=reader.whole("overheads.context_bytes", overheads.context_bytes, least=0),
        blas_workspace_bytes=reader.whole("overheads.blas_workspace_bytes", overheads.blas_workspace_bytes, least=0),
        blaslt_workspace_bytes=reader.whole(
            "overheads.blaslt_workspace_bytes", overheads.blaslt_workspace_bytes, least=0
        ),
        **_context_range(reader, overheads),
        compute_capability=None if compute.capability is None else _capability(reader, compute.capability),
        **optional,
        sustained=Sustained(
            **{
                name: reader.number(f"sustained.{name}", figure)
                for name in SustainedTable.__struct_fields__
                if (figure := getattr(file.sustained, name)) is not None
            }
        ),
        efficiency=Efficiency(
            families=tuple(families.get(each.family, each) for each in usual.families),
            host=host or usual.host,
            half=half or usual.half,
        ),
        engines=tuple(_engine(name, table, reader) for name, table in file.engines.items()),
        notes=file.notes,
        provenance=tuple(reader.provenance),
    )


def _allocator(name: str, table: AllocatorTable, reader: Reader) -> AllocatorRules:
    sizes = [field for field in AllocatorTable.__struct_fields__ if field.endswith("_bytes")]
    return AllocatorRules(
        name=name,
        **{field: reader.whole(f"allocators.{name}.{field}", getattr(table, field)) for field in sizes},
        expandable_segments=bool(reader.value(f"allocators.{name}.expandable_segments", table.expandable_segments)),
        margin=check_margin(reader.value(f"allocators.{name}.margin", table.margin)),
    )


def _context_range(reader: Reader, table: OverheadsTable) -> dict[str, int]:
    """Return the lowest and the highest context, where a file has them."""
    return {
        name: reader.whole(f"overheads.{name}", figure, least=0)
        for name in ("context_low_bytes", "context_high_bytes")
        if (figure := getattr(table, name)) is not None
    }


def _efficiency(
    table: EfficiencyTable, reader: Reader, key: str
) -> tuple[dict[Family, FamilyEfficiency], HostTimes | None, tuple[FamilyEfficiency, ...]]:
    """Return the families of a table, the host's times, and the families of 16-bit numbers."""

    def read(family: Family, given: FamilyTable, key: str) -> FamilyEfficiency:
        names = FamilyTable.__struct_fields__
        figures = {name: reader.number(f"{key}.{family.value}.{name}", getattr(given, name)) for name in names}
        return FamilyEfficiency(family=family, **figures)

    tables: dict[Family, FamilyTable | None] = {family: getattr(table, family.value) for family in Family}
    families = {family: read(family, given, key) for family, given in tables.items() if given is not None}
    half = tuple(read(family, given, f"{key}.half") for family, given in table.half.items())
    if table.host is None:
        return families, None, half
    host = {
        name: reader.number(f"{key}.host.{name}", figure)
        for name in HostTable.__struct_fields__
        if (figure := getattr(table.host, name)) is not None
    }
    return families, HostTimes(**host), half


def _engine(name: str, table: EngineTable, reader: Reader) -> EngineTimes:
    figures = {each: getattr(table, each) for each in EngineTable.__struct_fields__}
    known = {each: figure for each, figure in figures.items() if figure is not None}
    return EngineTimes(
        engine=name, **{each: reader.number(f"engines.{name}.{each}", figure) for each, figure in known.items()}
    )


def _link(name: str, table: LinkTable, reader: Reader) -> Link:
    return Link(
        name=name,
        kind=table.kind,
        generation=table.generation,
        lanes=table.lanes,
        bandwidth_bytes_per_s=reader.number(f"links.{name}.bandwidth_bytes_per_s", table.bandwidth_bytes_per_s),
        latency_ms=reader.number(f"links.{name}.latency_ms", table.latency_ms),
        measured_copy_bytes_per_s=None
        if table.copy_bytes_per_s is None
        else reader.number(f"links.{name}.copy_bytes_per_s", table.copy_bytes_per_s),
        collectives=tuple(
            CollectiveRate(
                kind=kind,
                bandwidth_bytes_per_s=reader.number(
                    f"links.{name}.{kind}.bandwidth_bytes_per_s", of.bandwidth_bytes_per_s
                ),
                latency_ms=reader.number(f"{key}.latency_ms", of.latency_ms),
            )
            for kind, of in table.collectives.items()
            for key in [f"links.{name}.collectives.{kind}"]
        ),
    )


def _disk(table: DiskTable, reader: Reader) -> OffloadLink:
    return OffloadLink(
        name="disk",
        to_host_bytes_per_s=reader.number("links.disk.write_bytes_per_s", table.write_bytes_per_s),
        to_device_bytes_per_s=reader.number("links.disk.read_bytes_per_s", table.read_bytes_per_s),
        compute_s_per_byte=0.0
        if table.compute_s_per_byte is None
        else reader.number("links.disk.compute_s_per_byte", table.compute_s_per_byte),
    )


def _total_bytes(reader: Reader, figure: Any) -> int:
    if figure == "machine" or (isinstance(figure, Figure) and figure.value == "machine"):
        reader.value("memory.total_bytes", figure)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return reader.whole("memory.total_bytes", figure)


def _capability(reader: Reader, figure: Text) -> tuple[int, int]:
    value = reader.value("compute.capability", figure)
    match = re.fullmatch(r"(\d+)\.(\d+)", str(value))
    if match is None:
        raise InputError(f"{reader.where}: compute.capability is {value!r}; write for example '9.0'")
    return int(match[1]), int(match[2])
