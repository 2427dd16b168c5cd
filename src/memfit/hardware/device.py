"""What memfit knows of one device: memory, rates, links, allocator rules and fixed overheads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from memfit.hardware.efficiency import HALF_BYTES, Efficiency, EngineTimes
from memfit.hardware.rank_memory import ByteRange, RankMemory
from memfit.units import display_bytes

DeviceType = Literal["cpu", "cuda"]

_RATE_OF_DTYPE = {
    "float64": "fp64",
    "double": "fp64",
    "complex128": "fp64",
    "float32": "fp32",
    "float": "fp32",
    "complex64": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "int8": "int8",
    "uint8": "int8",
}
RATE_NAMES = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp64")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRate:
    """What one kind of collective was measured to make of a link."""

    kind: str
    bandwidth_bytes_per_s: float
    latency_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way for data to leave the device. Bandwidth is per direction, latency is per hop of a ring.

    Libraries copy and allocate on the way, each collective in its own way: `collectives` has those that were measured.
    """

    name: str
    kind: str
    bandwidth_bytes_per_s: float
    latency_ms: float
    generation: int | None = None
    lanes: int | None = None
    collectives: tuple[CollectiveRate, ...] = ()
    measured_copy_bytes_per_s: float | None = None
    """What copies from and to pinned host memory were seen to reach, where that was published."""

    @property
    def copy_bytes_per_s(self) -> float:
        """What copies from and to pinned host memory reach, each way."""
        return self.measured_copy_bytes_per_s or self.bandwidth_bytes_per_s

    def copy_ms(self, n_bytes: int) -> float:
        """Return the time to copy `n_bytes` from or to pinned host memory."""
        return self.latency_ms + n_bytes / self.copy_bytes_per_s * 1e3

    def of_collective(self, kind: str) -> Link:
        """Return the link as a kind of collective finds it."""
        for rate in self.collectives:
            if rate.kind == kind:
                return replace(self, bandwidth_bytes_per_s=rate.bandwidth_bytes_per_s, latency_ms=rate.latency_ms)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadLink:
    """Where saved tensors are offloaded to: a GPU's host, or a disk for a CPU. Bytes a second each way.

    `compute_s_per_byte` is how much longer ops take beside the copies, for a byte that goes there and back: copies of a
    CPU need its cores and its memory, those of a GPU have engines of their own.
    """

    name: str
    to_host_bytes_per_s: float
    to_device_bytes_per_s: float
    compute_s_per_byte: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorRules:
    """The constants of PyTorch's caching allocator, or of plain malloc when everything is 1."""

    name: str
    rounding_bytes: int
    small_limit_bytes: int
    small_segment_bytes: int
    large_segment_bytes: int
    large_limit_bytes: int
    large_rounding_bytes: int
    expandable_segments: bool
    margin: float = 0.0
    """How much more than predicted it may reserve, as a part of that: what was seen on real devices."""

    @property
    def caches(self) -> bool:
        """Whether freed memory stays with the allocator."""
        return self.small_segment_bytes > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Dense peak operations per second by number format; None where the hardware has no such path."""

    fp32: float
    tf32: float | None = None
    fp16: float | None = None
    bf16: float | None = None
    fp8: float | None = None
    int8: float | None = None
    fp64: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sustained:
    """What long runs reach of the sheet's rates, where power or memory allow less or more than other devices do.

    `vector` is for float32 and float64, `matrix` for the matrix units, `bandwidth` for the memory. A family's parts
    are multiplied by them. `long_run` is what steps that follow one another keep of the rates that a kernel has by
    itself: the clock of a GPU falls when power runs out, the caches of a CPU are colder.
    """

    vector: float = 1.0
    matrix: float = 1.0
    bandwidth: float = 1.0
    long_run: float = 1.0
    long_run_half: float | None = None
    """The same for ops on 16-bit numbers, where it was measured by itself."""

    def kept_by(self, item_bytes: int) -> float:
        """Return what a step keeps of the rates of ops on numbers of so many bytes."""
        return self.long_run_half if item_bytes == HALF_BYTES and self.long_run_half is not None else self.long_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where one figure comes from."""

    key: str
    source: str
    publisher: str
    date: str
    seen: str
    estimate: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Device:
    """One device as a single rank sees it. Every figure's source is in `provenance`."""

    name: str
    title: str
    vendor: str
    type: DeviceType
    aliases: tuple[str, ...]
    memory_total_bytes: int
    memory_bandwidth_bytes_per_s: float
    flops_per_s: Rates
    host_link: Link
    peer_link: Link | None
    inter_node_link: Link
    ranks_per_node: int
    allocator: AllocatorRules
    context_bytes: int
    blas_workspace_bytes: int
    blaslt_workspace_bytes: int
    efficiency: Efficiency
    compute_capability: tuple[int, int] | None = None
    multiprocessors: int | None = None
    shared_memory_per_block_bytes: int | None = None
    threads: int | None = None
    l2_cache_bytes: int | None = None
    sustained: Sustained = Sustained()
    context_low_bytes: int | None = None
    context_high_bytes: int | None = None
    disk: OffloadLink | None = None
    """The disk that a CPU offloads to, where `memfit calibrate` has measured one."""
    engines: tuple[EngineTimes, ...] = ()
    """What engines that shard take beyond the ops, where `memfit calibrate` has measured it on several ranks."""
    notes: str = ""
    provenance: tuple[Provenance, ...] = ()

    def __repr__(self) -> str:
        return f"Device({self.name!r}: {self.title}, {display_bytes(self.memory_total_bytes)})"

    @property
    def intra_node_link(self) -> Link:
        """The link to the other devices of the node: the peer link, or the host link where there is none."""
        return self.peer_link or self.host_link

    @property
    def offload_link(self) -> OffloadLink | None:
        """The link over which saved tensors are offloaded; None for a CPU whose disk was not measured."""
        if self.type == "cpu":
            return self.disk
        rate = self.host_link.copy_bytes_per_s
        return OffloadLink(name=self.host_link.name, to_host_bytes_per_s=rate, to_device_bytes_per_s=rate)

    def engine(self, name: str, *, half: bool = False) -> EngineTimes | None:
        """Return what was measured of an engine on ranks of this device, with parameters of 16 bits if asked for."""
        known = {each.engine: each for each in self.engines}
        return (known.get(f"{name}-half") if half else None) or known.get(name)

    @property
    def context(self) -> ByteRange:
        """What was seen of the context, which a process holds outside the caching allocator."""
        low, high = self.context_low_bytes, self.context_high_bytes
        if low is None or high is None or not low <= self.context_bytes <= high:  # a figure of the user's own
            return ByteRange.exactly(self.context_bytes)
        return ByteRange(low_bytes=low, expected_bytes=self.context_bytes, high_bytes=high)

    @property
    def rank_memory(self) -> RankMemory:
        """What a rank alone has of the device, by the usual figures (Note [What a rank has])."""
        return RankMemory(
            device_bytes=self.memory_total_bytes,
            context=self.context,
            nccl=ByteRange.exactly(0),
            margin=self.allocator.margin,
        )

    @property
    def usable_bytes(self) -> int:
        """What tensors of a rank alone may take: total memory less the context and the margin."""
        return self.rank_memory.usable_bytes

    def with_expandable_segments(self, expandable: bool = True) -> Device:
        """Return the device with an allocator whose segments grow, or do not."""
        return replace(self, allocator=replace(self.allocator, expandable_segments=expandable))

    def peak_flops_per_s(self, dtype: object, *, tf32: bool = False) -> float:
        """Return the peak rate for a dtype (`torch.bfloat16`, 'bfloat16', 'bf16'); the fp32 rate where it has none.

        With `tf32`, float32 products run at the TF32 rate where the device has one.
        """
        return getattr(self.flops_per_s, self.rate_name(dtype, tf32=tf32))

    def rate_name(self, dtype: object, *, tf32: bool = False) -> str:
        """Which of the device's rates a dtype runs at, such as 'bf16'; 'fp32' where it has none of its own."""
        name = str(dtype).removeprefix("torch.")
        if name.startswith("float8"):
            name = "fp8"
        name = _RATE_OF_DTYPE.get(name, name)
        if name == "fp32" and tf32:
            name = "tf32"
        known = name in RATE_NAMES and getattr(self.flops_per_s, name) is not None
        return name if known else "fp32"
