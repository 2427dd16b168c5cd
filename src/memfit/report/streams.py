"""When every op, wait and collective of a step runs, as the model of its time has it.

Note [Clock]: ops run one after another. Under sharding collectives run beside them, one after another too, and where
one is needed the device waits for it (`memfit.sharding.schedule`). A wait is as long with a plan as without,
so a recompute moves everything after it by as much; a collective that is under way meanwhile keeps its length.
Copies of what units offload run beside ops too (tradeoff's Note [Offload]). Where one is awaited and not there yet, the
device waits; what copies take from the ops beside them is counted at the same place.
What the host takes for a recomputed unit, beyond its ops, stands before the recompute, though a part of it is
really spent in the first.

A sharded step keeps of its collectives the ops between which each runs. Where going through them in order gives the
exposed time of the step, each has times of its own. Otherwise none are claimed: the exposed time stands at the end of
the step, and a collective has the two times between which it runs.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.analysis import Report
from memfit.cost import CollectiveModel
from memfit.memory import Timeline
from memfit.sharding import Sharding, Transfer

Ms = npt.NDArray[np.float64]
Ns = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The device waits for a collective; `transfer` is None where it is not known for which, and for what collectives
    cost beside waits."""

    transfer: Transfer | None
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWork:
    """What the host does for a unit that is recomputed."""

    unit: str
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """A collective; where it is not `exact`, it runs at some time between these two."""

    transfer: Transfer
    begin_ns: int
    end_ns: int
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """What a unit offloads, on its way to the host or back; `wait` is from when to when the device waits for it."""

    unit: str
    to_host: bool
    size_bytes: int
    begin_ns: int
    end_ns: int
    wait: tuple[int, int] | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Clock:
    """The times of one step. `begins_ns` and `ends_ns` are those of each instant of its timeline."""

    begins_ns: Ns
    ends_ns: Ns
    host: tuple[HostWork, ...]
    waits: tuple[Wait, ...]
    sendings: tuple[Sending, ...]
    copies: tuple[Copy, ...] = ()

    @property
    def end_ns(self) -> int:
        """The end of the step."""
        return int(self.ends_ns[-1])


def build_clock(report: Report, timeline: Timeline) -> Clock:
    """Build the clock of a timeline: when everything runs (Note [Clock])."""
    took_ms = timeline.instant_ms(report.runtime.op_ms)
    at = timeline.step_instants
    first = np.concatenate(([0], at[:-1] + 1))  # of each op the instant at which what comes before it begins
    sharding = report.problem.sharding
    sent = None if sharding is None else _Sent.of(report, sharding)
    waited_ms, copied_ms, host_ms = np.zeros((3, len(took_ms)))
    if sent is not None:
        waited_ms[first] = sent.waited_ms
    copies = _offloaded(report) if timeline is report.planned else []
    for copy in copies:
        copied_ms[first[copy.awaited]] += copy.waits_ms
    again = {run: int(timeline.recompute_instants(run)[0]) for run in range(len(timeline.units))}
    for run, instant in again.items():
        unit = timeline.units[run]
        host_ms[instant] = report.problem.second_run_ms * (unit.end - unit.begin)
    resumes_ms = np.concatenate(([0.0], np.cumsum(waited_ms + copied_ms + host_ms + took_ms)[:-1]))
    resumes_ns, ready_ns = _whole_ns(resumes_ms), _whole_ns(resumes_ms + waited_ms)
    copied_ns = _whole_ns(resumes_ms + waited_ms + copied_ms)
    begins_ns = _whole_ns(resumes_ms + waited_ms + copied_ms + host_ms)
    waits: tuple[Wait, ...] = ()
    sendings: tuple[Sending, ...] = ()
    if sent is not None:
        again_ms = np.cumsum(np.where(timeline.run >= 0, took_ms + host_ms, 0.0) + copied_ms)[at]
        waits = sent.waits(resumes_ms[first], ready_ns[first])
        sendings = sent.sendings(again_ms, resumes_ns[first], ready_ns[first])
    return Clock(
        begins_ns=begins_ns,
        ends_ns=np.append(resumes_ns[1:], begins_ns[-1]),
        host=tuple(
            HostWork(unit=timeline.units[run].name, begin_ns=int(copied_ns[instant]), end_ns=int(begins_ns[instant]))
            for run, instant in again.items()
            if begins_ns[instant] > copied_ns[instant]
        ),
        waits=waits,
        sendings=sendings,
        copies=tuple(_timed_copies(copies, ready_ns[first], copied_ns[first])),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offloaded:
    """A copy: before which op it begins, before which it is awaited, how long it takes, and how long that waits."""

    unit: str
    to_host: bool
    size_bytes: int
    issued: int
    awaited: int
    copy_ms: float
    waits_ms: float


def _offloaded(report: Report) -> list[_Offloaded]:
    """Return the copies of a plan, both ways, in the order in which they begin."""
    plan, problem = report.plan, report.problem
    assert plan is not None
    link, found = plan.offload_link, []
    units = {unit.name: unit for unit in problem.units}
    for entry in plan.checkpoint:
        if not link or not entry.offloaded_bytes:
            continue
        window, n_bytes = problem.windows[entry.unit], entry.offloaded_bytes
        slower_ms = n_bytes * link.compute_s_per_byte * 1e3 / 2
        away_ms, back_ms = (n_bytes / rate * 1e3 for rate in (link.to_host_bytes_per_s, link.to_device_bytes_per_s))
        common: dict[str, Any] = {"unit": entry.unit, "size_bytes": n_bytes}
        found.append(
            _Offloaded(
                to_host=True,
                issued=entry.end,
                awaited=window.gone_at,
                copy_ms=away_ms,
                waits_ms=max(0.0, away_ms - window.forward_ms) + slower_ms,
                **common,
            )
        )
        found.append(
            _Offloaded(
                to_host=False,
                issued=window.back_at,
                awaited=units[entry.unit].backward_begin,
                copy_ms=back_ms,
                waits_ms=max(0.0, back_ms - window.backward_ms) + slower_ms,
                **common,
            )
        )
    return sorted(found, key=lambda copy: copy.issued)


def _timed_copies(copies: Sequence[_Offloaded], ready_ns: Ns, copied_ns: Ns) -> Iterator[Copy]:
    """Yield copies with their times; `ready_ns` and `copied_ns` are before and after the waits ahead of each op."""
    waited: dict[int, int] = {}
    for copy in copies:
        begin_ns = int(copied_ns[copy.issued])
        since_ns = waited.get(copy.awaited, int(ready_ns[copy.awaited]))
        until_ns = min(since_ns + round(copy.waits_ms * 1e6), int(copied_ns[copy.awaited]))
        waited[copy.awaited] = until_ns
        yield Copy(
            unit=copy.unit,
            to_host=copy.to_host,
            size_bytes=copy.size_bytes,
            begin_ns=begin_ns,
            end_ns=begin_ns + max(1, round(copy.copy_ms * 1e6)),
            wait=(since_ns, until_ns) if until_ns > since_ns else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sent:
    """The collectives of a step without recomputes; `begins_ms` is empty where their times are not known.

    `waited_ms` has an entry for each op and for the end of the step, `alone_ms` the times at which these begin.
    """

    transfers: tuple[Transfer, ...]
    begins_ms: Ms
    ends_ms: Ms
    waits_ms: Ms
    waited_ms: Ms
    alone_ms: Ms
    beside_ms: float

    @classmethod
    def of(cls, report: Report, sharding: Sharding) -> _Sent:
        """Go through the collectives in the order in which they are begun and waited for.

        Between the same two ops waits come first here. That is not FSDP2's order everywhere, but no time depends on it:
        a collective begins when the one before it has ended, and so not before a wait for an earlier one is over.
        """
        model, transfers = CollectiveModel(report.target), sharding.transfers
        times = report.runtime.cumulative_ms
        begins_ms, ends_ms, waits_ms = np.zeros((3, len(transfers)))
        waited = free = copied_out = total = 0.0
        pending: list[tuple[int, int]] = []
        for number, transfer in enumerate((*transfers, None)):
            while pending and (transfer is None or pending[0][0] <= transfer.issued):
                op, over = heapq.heappop(pending)
                now = float(times[op]) + waited
                copied_out = max(now, float(ends_ms[over]))
                waits_ms[over] = copied_out - now
                waited += copied_out - now
            if transfer is None:
                break
            now = float(times[transfer.issued]) + waited
            took = model.collective_ms(transfer.kind, transfer.size_bytes)
            begins_ms[number] = max(free, copied_out if transfer.ahead else now)
            ends_ms[number] = free = begins_ms[number] + took
            total += took
            heapq.heappush(pending, (transfer.needed, number))
        waited_ms = np.zeros(len(times))
        if _same(waited + sharding.beside_ms, sharding.exposed_ms) and _same(total, sharding.communication_ms):
            np.add.at(waited_ms, [transfer.needed for transfer in transfers], waits_ms)
            waited_ms[-1] += sharding.beside_ms  # copies, and kernels slowed by collectives, wherever they are
        else:
            begins_ms = ends_ms = waits_ms = np.zeros(0)
            waited_ms[-1] = sharding.exposed_ms
        return cls(
            transfers=transfers,
            begins_ms=begins_ms,
            ends_ms=ends_ms,
            waits_ms=waits_ms,
            waited_ms=waited_ms,
            alone_ms=times + np.cumsum(waited_ms),
            beside_ms=sharding.beside_ms,
        )

    @property
    def exact(self) -> bool:
        """Whether every collective has times of its own."""
        return len(self.begins_ms) == len(self.transfers)

    def waits(self, resumes_ms: Ms, ready_ns: Ns) -> tuple[Wait, ...]:
        """Return the waits before each op, one after another from the end of the op before until the next is ready."""
        if not self.exact:
            begin_ns = int(_whole_ns(resumes_ms[-1]))
            return (Wait(transfer=None, begin_ns=begin_ns, end_ns=int(ready_ns[-1])),)
        by_op: dict[int, list[int]] = defaultdict(list)
        for number in np.flatnonzero(self.waits_ms).tolist():
            by_op[self.transfers[number].needed].append(number)
        found, last = [], len(self.waited_ms) - 1
        for op, numbers in sorted(by_op.items()):
            now_ms = float(resumes_ms[op])
            for number in numbers:
                begin_ns = int(_whole_ns(now_ms))
                now_ms += float(self.waits_ms[number])
                until_ready = number == numbers[-1] and not (op == last and self.beside_ms)
                end_ns = int(ready_ns[op]) if until_ready else int(_whole_ns(now_ms))
                if end_ns > begin_ns:
                    found.append(Wait(transfer=self.transfers[number], begin_ns=begin_ns, end_ns=end_ns))
        if self.beside_ms:
            begin_ns = int(_whole_ns(float(resumes_ms[last]) + float(self.waited_ms[last]) - self.beside_ms))
            found.append(Wait(transfer=None, begin_ns=begin_ns, end_ns=int(ready_ns[last])))
        return tuple(found)

    def sendings(self, again_ms: Ms, resumes_ns: Ns, ready_ns: Ns) -> tuple[Sending, ...]:
        """Return collectives on the clock of a step in which `again_ms` is spent on recomputes until each op."""
        if not self.exact:
            return tuple(
                Sending(
                    transfer=each,
                    begin_ns=int(resumes_ns[each.issued]),
                    end_ns=int(ready_ns[each.needed]),
                    exact=False,
                )
                for each in self.transfers
            )
        before = np.maximum(np.searchsorted(self.alone_ms, self.begins_ms, side="left") - 1, 0)
        shift_ms = again_ms[before]
        begins, ends = _whole_ns(self.begins_ms + shift_ms), _whole_ns(self.ends_ms + shift_ms)
        return tuple(
            Sending(transfer=each, begin_ns=begin, end_ns=end, exact=True)
            for each, begin, end in zip(self.transfers, begins.tolist(), ends.tolist(), strict=True)
        )


def _whole_ns(ms: Ms | float) -> Ns:
    return np.rint(np.asarray(ms) * 1e6).astype(np.int64)


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)
