"""What a plan's decisions do over a step: lanes of recomputes, chunks of the loss, copies and collectives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from memfit.analysis import Report
from memfit.capture import find_softmaxes
from memfit.cost import Collective
from memfit.memory import Timeline
from memfit.paths import module_label
from memfit.report.streams import Clock

LANES = {
    "recompute": "recomputed",
    "chunk": "the loss, in chunks",
    "away": "offloaded to the host",
    "back": "brought back from the host",
    "gather": "all-gather of parameters",
    "reduce": "reduce-scatter of gradients",
}
"""By key, what a lane shows, in the order in which they are drawn."""
_COLLECTIVES = {Collective.ALL_GATHER: "gather", Collective.REDUCE_SCATTER: "reduce"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something in a lane: of which unit, how many bytes, from when to when."""

    what: str
    size_bytes: int
    begin_ns: int
    end_ns: int


def build_lanes(report: Report, timeline: Timeline, clock: Clock) -> dict[str, list[Span]]:
    """Return the spans of each lane that a step has, by key of `LANES`."""
    found: dict[str, list[Span]] = defaultdict(list)
    found["recompute"] += _recomputes(report, timeline, clock)
    found["chunk"] += find_chunks(report, timeline, clock)
    for copy in clock.copies:
        span = Span(
            what=module_label(copy.unit), size_bytes=copy.size_bytes, begin_ns=copy.begin_ns, end_ns=copy.end_ns
        )
        found["away" if copy.to_host else "back"].append(span)
    for sending in clock.sendings:
        if sending.exact and sending.transfer.kind in _COLLECTIVES:
            transfer = sending.transfer
            found[_COLLECTIVES[transfer.kind]].append(
                Span(
                    what=module_label(transfer.module),
                    size_bytes=transfer.size_bytes,
                    begin_ns=sending.begin_ns,
                    end_ns=sending.end_ns,
                )
            )
    return {key: found[key] for key in LANES if found[key]}


def _recomputes(report: Report, timeline: Timeline, clock: Clock) -> Iterator[Span]:
    """Yield units that are recomputed, with the bytes that they had dropped."""
    dropped = {} if report.plan is None else {entry.unit: entry.discarded_bytes for entry in report.plan.checkpoint}
    for run, unit in enumerate(timeline.units):
        instants = timeline.recompute_instants(run)
        if len(instants):
            begin_ns, end_ns = int(clock.begins_ns[instants[0]]), int(clock.ends_ns[instants[-1]])
            what = module_label(unit.name)
            yield Span(what=what, size_bytes=dropped.get(unit.name, 0), begin_ns=begin_ns, end_ns=end_ns)


def find_chunks(report: Report, timeline: Timeline, clock: Clock) -> Iterator[Span]:
    """Yield the chunks of a loss in the forward, and those that the backward computes again, with a chunk's bytes."""
    plan, trace = report.plan, timeline.trace
    if plan is None or not plan.chunked_loss:
        return
    forward = find_softmaxes(trace, plan.chunked_loss.classes)
    places = {index for index, _ in forward}
    chunks, at = plan.chunked_loss.chunks, timeline.step_instants
    counts = {False: 0, True: 0}
    for index, op in enumerate(trace.ops):
        if not forward or op.name != forward[0][1].name or op.inputs[0].shape[-1] != plan.chunked_loss.classes:
            continue
        again = index not in places
        place = counts[again] % chunks
        counts[again] += 1
        near = range(index + 1, min(index + _NEAR, len(trace.ops)))
        last = next((later for later in near if trace.ops[later].name.startswith(_END[again])), index)
        yield Span(
            what=f"chunk {chunks - place if again else place + 1} of {chunks}",
            size_bytes=sum(trace.storages[ref.storage].bytes for ref in op.outputs),
            begin_ns=int(clock.begins_ns[at[index]]),
            end_ns=int(clock.ends_ns[at[last]]),
        )


_END = {False: "aten.nll_loss", True: "aten._log_softmax_backward"}
"""The last op of a chunk over its logits: in the forward, and when the backward computes it again."""
_NEAR = 40
"""It comes within so many ops."""
