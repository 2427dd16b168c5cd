"""What each dimension of a mesh does to a step: its collectives, their time, and what they leave at the peak."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memfit.capture import NO_INDEX, Category, Trace
from memfit.cost import CollectiveModel
from memfit.sharding import group_of, transfer_times

if TYPE_CHECKING:
    from memfit.analysis.report import Report
    from memfit.memory import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshDimension:
    """The groups along one dimension of a mesh, or along several together; none for groups that are no part of it.

    `nodes` are the nodes that such a group lies on. `sent_bytes` are the buffers of its collectives in one step,
    `exposed_ms` what these add to the step: waits, a pipeline's bubble, and what they take of kernels that run beside
    them. `at_peak_bytes` is what they made that is there at the peak. `without_peak_bytes` and `without_step_ms` are
    those of the step on the mesh without this dimension, with the same batch on every data-parallel rank and the same
    plan as nearly as it can be; None where that was not captured.
    """

    dims: tuple[str, ...]
    size: int
    nodes: int
    collectives: int
    by_kind: dict[str, int] = field(default_factory=dict)
    sent_bytes: int
    communication_ms: float
    exposed_ms: float
    at_peak_bytes: int
    without_peak_bytes: int | None = None
    without_step_ms: float | None = None

    @property
    def name(self) -> str:
        """The dimensions in words."""
        return " x ".join(self.dims) or "others"


def find_dimensions(report: Report, timeline: Timeline) -> tuple[MeshDimension, ...]:
    """Return what each dimension does in a step that was captured on its mesh, the most exposed first."""
    sharding, trace, target = report.problem.sharding, report.trace, report.target
    if sharding is None or not trace.mesh:
        return ()
    model = CollectiveModel(target)
    spent = {  # messages of a pipeline's schedule are no transfers: stages wait for each other, which is its bubble
        call.op: (model.collective_ms(call.kind, call.bytes, group_of(trace.mesh, call, target)), 0.0, 0.0)
        for call in trace.collectives
    }
    took, waited = transfer_times(sharding.runtime, target, sharding.schedule)
    moving = [model.estimate(each.kind, each.size_bytes, each.group).transfer_ms for each in sharding.transfers]
    # kernels lose time to collectives that run beside them, and none to those that they wait for
    hidden = [1.0 - wait_ms / ms if ms else 0.0 for ms, wait_ms in zip(took, waited, strict=True)]
    beside = [ms * max(0.0, part) for ms, part in zip(moving, hidden, strict=True)]
    slowed = sharding.beside_ms / sum(beside) if sum(beside) else 0.0
    for number, each in enumerate(sharding.transfers):
        spent[each.issued] = took[number], waited[number], slowed * beside[number]
    made = _made(trace)
    alive = set(timeline.allocations.storage[timeline.alive_at(timeline.peak_instant)].tolist())
    groups: dict[tuple[tuple[str, ...], int], list[int]] = defaultdict(list)
    for number, call in enumerate(trace.collectives):
        if call.ranks > 1:
            groups[call.dims, call.ranks].append(number)
    found = []
    for (dims, ranks), numbers in groups.items():
        calls = [trace.collectives[number] for number in numbers]
        lies = group_of(trace.mesh, calls[0], target)
        kinds: dict[str, int] = defaultdict(int)
        for call in calls:
            kinds[call.kind] += 1
        bubble_ms = sharding.bubble_ms if "send" in kinds else 0.0
        left = {storage for number in numbers for storage in made[number]} & alive
        found.append(
            MeshDimension(
                dims=dims,
                size=ranks,
                nodes=target.nodes if lies is None else lies.nodes,
                collectives=len(calls),
                by_kind=dict(sorted(kinds.items())),
                sent_bytes=sum(call.bytes for call in calls),
                communication_ms=sum(spent[call.op][0] for call in calls),
                exposed_ms=sum(spent[call.op][1] + spent[call.op][2] for call in calls) + bubble_ms,
                at_peak_bytes=sum(trace.storages[storage].bytes for storage in left),
            )
        )
    return tuple(sorted(found, key=lambda each: -each.exposed_ms))


def _made(trace: Trace) -> list[set[int]]:
    """Return the storages that each collective writes, and the parameters that are filled from a gather's result."""
    found = []
    for call in trace.collectives:
        op = trace.ops[call.op]
        own = {ref.storage for ref in op.outputs if ref.storage != NO_INDEX}
        if op.name.startswith("c10d.") and call.kind == "all_gather":
            filled = next((each for each in trace.ops[call.op + 1 :] if each.name.startswith(_COPY_OUT)), None)
            refs = () if filled is None else (*filled.inputs, *filled.outputs)
            own |= {ref.storage for ref in refs if _is_gathered(trace, ref.storage)}
        found.append(own)
    return found


_COPY_OUT = "fsdp.split_with_sizes_copy"


def _is_gathered(trace: Trace, storage: int) -> bool:
    return storage != NO_INDEX and trace.storages[storage].category is Category.GATHERED_PARAMETER
