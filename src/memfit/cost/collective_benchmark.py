"""The run time of collectives as measured over a real process group, and the link that would explain it."""

from __future__ import annotations

import math
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from memfit.cost.collectives import Collective, Group, check_whole, collective_figures, traffic
from memfit.errors import InputError, StateError
from memfit.hardware import Link
from memfit.units import KiB, MiB

SCHEMA = 1
DEFAULT_SIZES = (4 * KiB, 64 * KiB, MiB, 16 * MiB)
_TRAINING = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE)
_ITEM_BYTES = 4
_LEAST_LATENCY_MS = 1e-6
"""A device file wants a latency above zero."""


class CollectiveTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured point; `Collective` says what `n_bytes` counts."""

    kind: Collective
    n_bytes: int
    ms: float


class CollectiveTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured collectives of one group, and what they were measured on."""

    backend: str
    device: str
    nodes: int
    ranks_per_node: int
    torch: str
    threads: int
    times: tuple[CollectiveTime, ...]
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise InputError(f"schema {self.schema} is not {SCHEMA}; measure again")
        bad = [point for point in self.times if not (point.n_bytes > 0 and 0 < point.ms < math.inf)]
        if bad:
            raise InputError(f"{bad[0].ms} ms for {bad[0].n_bytes} bytes is not a time; measure again")
        few = [kind.value for kind in self.kinds if len(self.points(kind)[0]) < 2]
        if few or not self.times:
            raise InputError(f"{', '.join(few) or 'every collective'} needs two sizes or more; measure again")

    @property
    def group(self) -> Group:
        """The ranks that were measured."""
        return Group(nodes=self.nodes, ranks_per_node=self.ranks_per_node)

    @property
    def kinds(self) -> tuple[Collective, ...]:
        """The collectives that were measured."""
        return tuple(dict.fromkeys(point.kind for point in self.times))

    def points(self, kind: Collective) -> tuple[list[int], list[float]]:
        """Bytes and milliseconds of one collective, by bytes."""
        found = {point.n_bytes: point.ms for point in self.times if point.kind is kind}
        return sorted(found), [found[n_bytes] for n_bytes in sorted(found)]

    def collective_ms(self, kind: Collective | str, n_bytes: int, group: Group | None = None) -> float:
        """Milliseconds: straight lines between measured sizes, a fit of latency and bandwidth beyond them."""
        kind = Collective.parse(kind)
        check_whole("n_bytes", n_bytes, least=0)
        if n_bytes == 0 or (group is not None and group.ranks == 1):
            return 0.0
        if group is not None and group != self.group:
            raise InputError(f"{self.group} was measured, not {group}; measure that group, or use the model")
        sizes, ms = self.points(kind)
        if not sizes:
            known = ", ".join(one.value for one in self.kinds)
            raise InputError(f"{kind.value} was not measured (there: {known}); measure it, or use the model")
        latency_ms, ms_per_byte = fit_line(sizes, ms)
        if n_bytes > sizes[-1]:
            return ms[-1] + (n_bytes - sizes[-1]) * ms_per_byte
        first = min(latency_ms, ms[0])
        return float(np.interp(n_bytes, [0, *sizes], [first, *ms]))

    def to_json(self) -> bytes:
        """A document that `from_json` reads."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, document: bytes | str) -> CollectiveTimes:
        """Times written by `to_json`; a document that is anything else is refused."""
        try:
            return msgspec.json.decode(document, type=cls)
        except msgspec.DecodeError as error:
            raise InputError(f"these are not measured collectives: {error}") from error


class CollectiveBenchmark:
    """Measures collectives over a process group. Every rank of it must make the same calls; all get the same times."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
        repetitions: int = 9,
        warmup: int = 2,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise StateError("there is no process group to measure; run under torchrun and call init_process_group")
        check_whole("repetitions", repetitions, least=1)
        check_whole("warmup", warmup, least=0)
        self.group = group
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise InputError("this rank is not in the group; measure on the ranks of the group only")
        self.backend = dist.get_backend(group)
        self.ranks = dist.get_world_size(group)
        if self.ranks < 2:
            raise InputError("a group of one rank has no collectives to measure; start two ranks or more")
        self.device = torch.device(device) if device is not None else _usual_device(self.backend)
        self.repetitions = repetitions
        self.warmup = warmup

    def measure(
        self, kinds: Iterable[Collective | str] = tuple(Collective), sizes: Sequence[int] = DEFAULT_SIZES
    ) -> CollectiveTimes:
        """Times of `kinds` at `sizes`, which are rounded up to whole elements on every rank.

        A time is the median over repetitions of the slowest rank's, each repetition after a barrier.
        """
        wanted = [Collective.parse(kind) for kind in kinds]
        for n_bytes in sizes:
            check_whole("a size in bytes", n_bytes, least=1)
        step = _ITEM_BYTES * self.ranks
        rounded = sorted({-(-n_bytes // step) * step for n_bytes in sizes})
        if not wanted or len(rounded) < 2 or rounded[0] < step:
            raise InputError(
                f"{len(wanted)} collectives of sizes {list(sizes)}; give one or more, and two sizes above 0"
            )
        nodes, ranks_per_node = self._layout((wanted, rounded, self.repetitions, self.warmup))
        return CollectiveTimes(
            backend=self.backend,
            device=self.device.type,
            nodes=nodes,
            ranks_per_node=ranks_per_node,
            torch=str(torch.__version__),
            threads=torch.get_num_threads(),
            times=tuple(
                CollectiveTime(kind=kind, n_bytes=n_bytes, ms=self._measure(kind, n_bytes))
                for kind in wanted
                for n_bytes in rounded
            ),
        )

    def _measure(self, kind: Collective, n_bytes: int) -> float:
        run = self._operation(kind, n_bytes)
        for _ in range(self.warmup):
            run()
        times = torch.zeros(self.repetitions, dtype=torch.float64)
        for index in range(self.repetitions):
            dist.barrier(self.group)
            times[index] = self._timed(run)
        times = times.to(self.device)
        dist.all_reduce(times, op=dist.ReduceOp.MAX, group=self.group)
        return statistics.median(times.tolist())

    def _timed(self, run: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            begin = time.perf_counter()
            run()
            return (time.perf_counter() - begin) * 1e3
        torch.cuda.synchronize(self.device)
        begin_event, end_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin_event.record()
        run()
        end_event.record()
        end_event.synchronize()
        return begin_event.elapsed_time(end_event)

    def _operation(self, kind: Collective, n_bytes: int) -> Callable[[], object]:
        group = self.group
        whole = torch.zeros(n_bytes // _ITEM_BYTES, device=self.device)
        part = torch.zeros(whole.numel() // self.ranks, device=self.device)
        if kind is Collective.ALL_GATHER:
            # The names before PyTorch 2.13.
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            return lambda: gather(whole, part, group=group)
        if kind is Collective.REDUCE_SCATTER:
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            return lambda: scatter(part, whole, group=group)
        if kind is Collective.ALL_REDUCE:
            return lambda: dist.all_reduce(whole, group=group)
        if kind is Collective.BROADCAST:
            return lambda: dist.broadcast(whole, group=group, group_src=0)
        if kind is Collective.ALL_TO_ALL:
            received = torch.empty_like(whole)
            return lambda: dist.all_to_all_single(received, whole, group=group)
        if self.rank == 0:
            return lambda: dist.send(whole, group=group, group_dst=1)
        if self.rank == 1:
            return lambda: dist.recv(whole, group=group, group_src=0)
        return lambda: None

    def _layout(self, request: object) -> tuple[int, int]:
        """Nodes and ranks on each, by host name, after a check that all ranks measure the same."""
        answers: list[tuple[str, object]] = [("", None)] * self.ranks
        dist.all_gather_object(answers, (socket.gethostname(), request), group=self.group)
        if any(other != request for _, other in answers):
            raise InputError("the ranks were asked to measure different things; give all of them the same arguments")
        hosts = [host for host, _ in answers]
        counts = {hosts.count(host) for host in hosts}
        if len(counts) > 1:
            raise InputError(f"the nodes have {sorted(counts)} ranks of the group; measure with as many on each")
        return len(set(hosts)), counts.pop()


def fit_line(sizes: Sequence[float], ms: Sequence[float]) -> tuple[float, float]:
    """Latency in ms and ms per byte, neither below 0, with the least squares of the relative errors."""
    return _fit([[1.0, size] for size in sizes], ms, [1 / one for one in ms])


def fit_link(
    times: CollectiveTimes, *, name: str = "measured", kinds: Iterable[Collective | str] | None = None
) -> Link:
    """The link with which the model best explains the times of a group inside one node, or with one rank on each.

    Without `kinds`, those that sharded training uses count, where measured. The link's kind is 'measured': what it
    says is what collectives reach, so that the model takes nothing off it.
    """
    group = times.group
    if group.nodes > 1 and group.ranks_per_node > 1:
        raise InputError(
            f"{group} uses links inside and between nodes at once; measure inside one node, or one rank on each"
        )
    backends = collective_figures().backends
    if times.backend not in backends:
        raise InputError(f"no figures for the backend {times.backend!r}; known are {', '.join(backends)}")
    backend = backends[times.backend]
    rows, rest, weights = [], [], []
    for kind in _kinds_to_fit(times, kinds):
        run = backend.run_as(kind)
        algorithm = backend.algorithms[run][0]
        needed, plain = traffic(run, algorithm, group), backend.protocols[algorithm][0]
        hops = needed.intra_hops + needed.inter_hops
        share = needed.intra_share + needed.inter_share
        for n_bytes, ms in zip(*times.points(kind), strict=True):
            rows.append([float(hops), share * n_bytes])
            rest.append(ms - backend.launch_ms - plain.base_ms)
            weights.append(1 / ms)
    if not rows:
        raise InputError(
            f"none of the collectives asked for was measured; measured are {[k.value for k in times.kinds]}"
        )
    latency_ms, ms_per_byte = _fit(rows, rest, weights)
    if ms_per_byte <= 0:
        raise InputError("the times do not grow with the bytes, so that they say no bandwidth; measure larger sizes")
    return Link(
        name=name,
        kind="measured",
        bandwidth_bytes_per_s=1e3 / ms_per_byte,
        latency_ms=max(latency_ms, _LEAST_LATENCY_MS),
    )


def _kinds_to_fit(times: CollectiveTimes, kinds: Iterable[Collective | str] | None) -> list[Collective]:
    if kinds is not None:
        return [Collective.parse(kind) for kind in kinds]
    return [kind for kind in times.kinds if kind in _TRAINING] or list(times.kinds)


def _fit(rows: Sequence[Sequence[float]], ms: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """The two factors, neither below 0, that bring the rows nearest to their times."""
    columns, weight = np.asarray(rows, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    # The second column is bytes: brought to the size of the first, so that the squares keep their digits.
    scale = columns.max(axis=0)
    weighted, wanted = columns / scale * weight[:, None], np.asarray(ms, dtype=np.float64) * weight
    first, second = np.linalg.lstsq(weighted, wanted, rcond=None)[0]
    if first < 0 or second < 0:
        alone = [max(0.0, float(column @ wanted / (column @ column))) for column in weighted.T]
        errors = [float(((c * factor - wanted) ** 2).sum()) for c, factor in zip(weighted.T, alone, strict=True)]
        first, second = (alone[0], 0.0) if errors[0] < errors[1] else (0.0, alone[1])
    return float(first / scale[0]), float(second / scale[1])


def _usual_device(backend: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
