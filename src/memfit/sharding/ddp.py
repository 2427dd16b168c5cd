"""What DistributedDataParallel adds to a step: gradient buckets, and the time of their all-reduces.

Note [DDP]: every rank has all parameters, gradients and optimizer state. The reducer (torch/csrc/distributed/c10d/
reducer.cpp) keeps a flat copy of all gradients in buckets, from the wrapping of the model on. After the first backward
they are filled in the order in which gradients arrive, the first up to 1 MiB, the others up to `bucket_cap_mb`, each
with the gradient that passes its limit. A gradient is copied into its bucket when it arrives; a full bucket is
all-reduced while the backward goes on, one bucket after another, and copied back into the gradients when the backward
has ended. With `gradient_as_bucket_view` gradients are views of the buckets: what autograd makes is freed once it has
been copied there, and nothing is copied back. Of accumulated micro-batches only the last is reduced (`no_sync`).
The buffers of the model are sent from rank 0 before the forward, as one flat copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memfit.capture import BEFORE_STEP, NO_INDEX, Category, Trace
from memfit.cost import Collective, Runtime
from memfit.errors import InputError
from memfit.hardware import Device, Family, Target
from memfit.memory import Stream, Timeline
from memfit.sharding.allocations import Levels
from memfit.sharding.gradients import WholeGradient, whole_gradients, zeroed_gradients
from memfit.sharding.options import FIRST_BUCKET_BYTES, ShardDtypes, ShardOptions, elements, item_bytes
from memfit.sharding.result import Sharding
from memfit.sharding.schedule import Event, EventKind, ShardSchedule, Transfer, communication, slowed_ms
from memfit.sharding.units import Pass, find_passes

_OWN = ShardDtypes(shard=None, param=None, reduce=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients that are all-reduced together once the last of them has arrived, with op `ready`."""

    size_bytes: int
    ready: int


def replicate(timeline: Timeline, runtime: Runtime, target: Target, options: ShardOptions) -> Sharding:
    """The step as one rank of a replicated model sees it (Note [DDP])."""
    trace = runtime.trace
    passes = find_passes(trace)
    gradients = whole_gradients(trace, {}, passes, _OWN)
    levels = Levels(timeline)
    buckets = assign_buckets(trace, gradients, passes, options)
    as_view = options.gradient_as_bucket_view
    for number, storage in enumerate(trace.storages):
        if storage.category is Category.COMMUNICATION and storage.alloc_at == BEFORE_STEP:
            levels.take(number)  # a model that was wrapped already when it was captured
    for bucket in buckets:
        levels.make(Category.GRADIENT if as_view else Category.COMMUNICATION, bucket.size_bytes, BEFORE_STEP)
    if as_view:
        _move_into_buckets(levels, trace, gradients)
    _send_buffers(levels, trace, passes)
    before, during = levels.levels()
    schedule = _reductions(buckets, passes)
    reduced_ms, waited_ms = communication(runtime, target, schedule)
    copied_ms = _copies_ms(sum(bucket.size_bytes for bucket in buckets), target.device, back=not as_view)
    beside_ms = copied_ms + slowed_ms(schedule.transfers, target, reduced_ms, waited_ms)
    return Sharding(
        runtime=runtime,
        before_by_row=before,
        during_by_row=during,
        units=(),
        removed=levels.removed,
        allocations=levels.allocations,
        schedule=schedule,
        communication_ms=reduced_ms + copied_ms,
        exposed_ms=waited_ms + beside_ms,
        beside_ms=beside_ms,
        shard_dtype=None,
        param_dtype=None,
        reduce_dtype=None,
        buckets=tuple(bucket.size_bytes for bucket in buckets),
    )


def assign_buckets(
    trace: Trace, gradients: Sequence[WholeGradient], passes: Sequence[Pass], options: ShardOptions
) -> tuple[Bucket, ...]:
    """The buckets in the order in which they are reduced, filled as `compute_bucket_assignment_by_size` does."""
    last: dict[int, WholeGradient] = {}
    for gradient in gradients:
        if gradient.parameter not in last or last[gradient.parameter].arrived < gradient.arrived:
            last[gradient.parameter] = gradient
    lost = [each.names[0] for number, each in enumerate(trace.parameters) if each.trainable and number not in last]
    if lost and passes:
        raise InputError(
            f"{lost[0]!r} is trained and gets no gradient in this step, which DDP refuses unless it is wrapped with "
            "find_unused_parameters=True, which is not planned; freeze it with requires_grad_(False)"
        )
    limits = (FIRST_BUCKET_BYTES, options.bucket_cap_bytes) if options.first_bucket_is_small else None
    found: list[Bucket] = []
    open_buckets: dict[str, tuple[int, int]] = {}
    emitted: dict[str, int] = {}
    for gradient in sorted(last.values(), key=lambda each: (each.arrived, -each.parameter)):
        parameter = trace.parameters[gradient.parameter]
        size, ready = open_buckets.get(parameter.dtype, (0, 0))
        size, ready = size + elements(parameter) * item_bytes(parameter.dtype), max(ready, gradient.arrived)
        limit = options.bucket_cap_bytes if limits is None else limits[min(emitted.get(parameter.dtype, 0), 1)]
        if size >= limit:
            found.append(Bucket(size_bytes=size, ready=ready))
            emitted[parameter.dtype] = emitted.get(parameter.dtype, 0) + 1
            open_buckets.pop(parameter.dtype, None)
        else:
            open_buckets[parameter.dtype] = size, ready
    found += [Bucket(size_bytes=size, ready=ready) for size, ready in open_buckets.values()]
    return tuple(found)


def _move_into_buckets(levels: Levels, trace: Trace, gradients: Sequence[WholeGradient]) -> None:
    """What autograd makes of a gradient goes once it is in its bucket; one from an earlier step is there already.

    Micro-batches before the last leave buckets alone (`no_sync`): what they have made stays until the gradient of the
    last one has been added to it.
    """
    last: dict[int, int] = {}
    for gradient in gradients:
        last[gradient.parameter] = max(last.get(gradient.parameter, 0), gradient.arrived)
    for parameter in trace.parameters:
        if parameter.gradient != NO_INDEX and trace.storages[parameter.gradient].alloc_at == BEFORE_STEP:
            levels.take(parameter.gradient)
    for storage in zeroed_gradients(trace):
        levels.take(storage)
    for gradient in gradients:
        kept = trace.parameters[gradient.parameter].gradient
        if kept in gradient.storages and not levels.has_taken(kept):
            levels.take(kept)
            made = levels.make(Category.GRADIENT, trace.storages[kept].bytes, gradient.alloc_at, by_op=True)
            levels.end(made, last[gradient.parameter] + 1)


def _send_buffers(levels: Levels, trace: Trace, passes: Sequence[Pass]) -> None:
    """The flat copy in which buffers are sent, there only while that is done."""
    total = sum(
        each.bytes for each in trace.storages if each.category is Category.BUFFER and each.alloc_at == BEFORE_STEP
    )
    if total and passes:
        levels.end(levels.make(Category.COMMUNICATION, total, passes[0].begin), passes[0].begin)


def _reductions(buckets: Sequence[Bucket], passes: Sequence[Pass]) -> ShardSchedule:
    """Every all-reduce, begun when its bucket and those before it are full, waited for when the last backward ends."""
    end = passes[-1].end if passes else 0
    transfers: list[Transfer] = []
    issued = 0
    for bucket in buckets:
        issued = min(max(issued, bucket.ready + 1), end)
        transfers.append(
            Transfer(
                kind=Collective.ALL_REDUCE,
                module="",
                size_bytes=bucket.size_bytes,
                issued=issued,
                needed=end,
                ahead=False,
                stream=Stream.REDUCE,
            )
        )
    each = list(enumerate(transfers))
    begun = [Event(one.issued, EventKind.BEGIN, 0, one.size_bytes, Stream.REDUCE, number) for number, one in each]
    waits = [Event(end, EventKind.WAIT, 0, one.size_bytes, Stream.COMPUTE, number) for number, one in each]
    return ShardSchedule(modules=("",), buffers=(), transfers=tuple(transfers), events=(*begun, *waits))


def _copies_ms(n_bytes: int, device: Device, *, back: bool) -> float:
    """Copies of all gradients into the buckets and back, which nothing hides: each reads and writes every byte."""
    reached = device.memory_bandwidth_bytes_per_s * device.efficiency[Family.COPY].bandwidth
    return 2 * n_bytes * (2 if back else 1) / reached * 1e3
