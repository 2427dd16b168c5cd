"""What every schedule keeps to, in either layout, and what differs between devices."""

from __future__ import annotations

from collections import Counter

import pytest
from torch import nn

import memfit
from memfit import Step, spec
from memfit.capture import Trace
from memfit.cost import Roofline, Runtime
from memfit.hardware import Target
from memfit.memory import Stream, Timeline
from memfit.sharding import Sharding, ShardOptions, shard
from memfit.sharding.flat_schedule import Schedule, UnitOptions
from memfit.sharding.schedule import EventKind, Role
from memfit.sharding.sharded_step import FlatOptions

_FLAT = (
    FlatOptions(),
    FlatOptions(schedule=Schedule(forward_prefetch=2, backward_prefetch=2, backward_prefetch_at="after")),
    FlatOptions(units={"1": UnitOptions(keep=True), "2": UnitOptions(reshard_ranks=2)}),
)


def build_trace(accumulation_steps: int = 1) -> Trace:
    blocks = [nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 16)) for width in (24, 40, 33)]
    blocks[1].requires_grad_(False)
    model = nn.Sequential(nn.Linear(16, 16), *blocks, nn.Linear(16, 4))
    step = Step(model, spec((2, 16)), loss=lambda out, _: out.sum(), accumulation_steps=accumulation_steps)
    return memfit.trace(step, target="cpu")


def predict(trace: Trace, flat: FlatOptions | None, device: str = "cpu", ranks: int = 4) -> Sharding:
    timeline, runtime = Timeline.of(trace, 1), Runtime.of(trace, Roofline())
    options = ShardOptions(units=("1", "2", "3"), param_dtype="bfloat16", reduce_dtype="float32")
    return shard(timeline, runtime, Target.parse(device, ranks=ranks), options, flat=flat)


@pytest.mark.parametrize("flat", [None, *_FLAT])
@pytest.mark.parametrize("device", ["cpu", "h100-sxm"])
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_what_is_allocated_is_freed_and_what_is_begun_is_waited_for(
    flat: FlatOptions | None, device: str, accumulation_steps: int
) -> None:
    schedule = predict(build_trace(accumulation_steps), flat, device).schedule
    alive: set[int] = set()
    allocated: Counter[int] = Counter()
    waits: Counter[int] = Counter()
    for event in schedule.events:
        if event.kind is EventKind.ALLOCATE:
            allocated[event.number] += 1
            alive.add(event.number)
        elif event.kind is EventKind.FREE:
            alive.remove(event.number)
        elif event.kind is EventKind.BEGIN:
            assert waits[event.number] == 0
        elif event.kind is EventKind.WAIT:
            waits[event.number] += 1
    assert allocated == Counter(range(len(schedule.buffers)))
    assert waits == Counter(range(len(schedule.transfers)))
    assert not alive, "gradients of the shards go with the step"
    assert [event.moment for event in schedule.events] == sorted(event.moment for event in schedule.events)


def test_parts_of_a_sum_are_one_tensor_on_a_gpu_and_its_output_is_on_the_stream_of_reductions() -> None:
    trace = build_trace()
    apart, together = (predict(trace, FlatOptions(), device).schedule for device in ("cpu", "h100-sxm"))
    for role, whole, parts in ((Role.REDUCE_INPUT, 1, 4), (Role.REDUCE_OUTPUT, 1, 1), (Role.RECEIVED, 0, 2)):
        one, other = (
            [buffer for buffer in schedule.buffers if buffer.role is role and buffer.unit == 3]
            for schedule in (together, apart)
        )
        assert (len(one), len(other)) == (whole, parts)
    inputs, outputs = (
        [buffer for buffer in together.buffers if buffer.role is role]
        for role in (Role.REDUCE_INPUT, Role.REDUCE_OUTPUT)
    )
    assert [each.size_bytes for each in inputs] == [4 * each.size_bytes for each in outputs]
    streams = {buffer.role: buffer.stream for buffer in together.buffers}
    assert streams.pop(Role.REDUCE_OUTPUT) is Stream.REDUCE
    assert set(streams.values()) == {Stream.COMPUTE}


def test_a_unit_that_its_backward_does_not_read_is_not_gathered_again() -> None:
    trace = build_trace()
    unread = FlatOptions(units={"1": UnitOptions(backward_gather=False)})
    gathers = [
        [buffer.unit for buffer in predict(trace, flat).schedule.buffers if buffer.role is Role.PARAMETER]
        for flat in (FlatOptions(), unread)
    ]
    assert (gathers[0].count(1), gathers[1].count(1)) == (2, 1)
    assert gathers[0].count(3) == gathers[1].count(3) == 2


def test_the_flat_layout_takes_no_second_buffer_of_gathered_parameters() -> None:
    trace = build_trace()
    fsdp2, flat = (predict(trace, each, "h100-sxm") for each in (None, FlatOptions()))
    copied = {
        name: sum(e.size_bytes for e in each.schedule.events if e.kind is EventKind.COPY and e.stream is Stream.COMPUTE)
        for name, each in (("fsdp2", fsdp2), ("flat", flat))
    }
    assert copied["flat"] < copied["fsdp2"], "it copies gradients only"
    assert not [buffer for buffer in flat.schedule.buffers if buffer.role is Role.GATHER_OUTPUT]
    gathered = [sum(t.size_bytes for t in each.transfers) for each in (fsdp2, flat)]
    assert gathered[1] == pytest.approx(gathered[0], rel=0.1), "the same collectives, but for padding"
