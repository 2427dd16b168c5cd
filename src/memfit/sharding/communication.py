"""The time of a sharded step's collectives, and how much of it compute does not hide."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.cost import Collective, CollectiveModel, Runtime
from memfit.hardware import Device, Target
from memfit.hardware.efficiency import Family
from memfit.sharding.runtime import Transfer
from memfit.sharding.units import ShardUnit


def communication(
    runtime: Runtime, target: Target, transfers: Sequence[Transfer], program: Sequence[tuple[bool, int]]
) -> tuple[float, float]:
    """Milliseconds of all collectives, and those for which the device waits.

    Collectives run one after another, beside the ops. A gather of the forward begins when the unit before it has its
    parameters, one of the backward when the backward of the unit before it begins, and both are waited for where the
    unit's own run begins: each hides behind the compute of its neighbour. A reduction begins when its unit's backward
    ends and is waited for when that of the next unit ends, or the pass does. What is copied from the host goes before
    its gather and what is copied to it after its reduction, in the same line.
    """
    model, link = CollectiveModel(target), target.device.host_link
    cost: dict[tuple[Collective, int, int], float] = {}
    times = runtime.cumulative_ms
    total = waited = free = copied_out = 0.0
    done = [0.0] * len(transfers)
    for waits, number in program:
        transfer = transfers[number]
        if waits:
            now = float(times[transfer.needed]) + waited
            waited += max(0.0, done[number] - now)
            copied_out = max(now, done[number])
            continue
        key = transfer.kind, transfer.size_bytes, transfer.host_bytes
        if key not in cost:
            host_ms = link.transfer_ms(transfer.host_bytes) if transfer.host_bytes else 0.0
            cost[key] = host_ms + model.collective_ms(transfer.kind, transfer.size_bytes)
        now = float(times[transfer.issued]) + waited
        done[number] = free = max(free, copied_out if transfer.ahead else now) + cost[key]
        total += cost[key]
    return total, waited


def copies_ms(transfers: Sequence[Transfer], units: Sequence[ShardUnit], device: Device) -> float:
    """What FSDP2 copies between its buffers and whole tensors while nothing else computes, at the device's bandwidth.

    A gathered buffer is read and written once to become parameters, whole gradients to become a reduction's input.
    It is not part of `communication`.
    """
    gradients = {unit.module: unit.gradient_bytes for unit in units}
    moved = sum(
        2 * each.size_bytes if each.kind is Collective.ALL_GATHER else gradients[each.module] + each.size_bytes
        for each in transfers
        if each.kind is not Collective.ALL_REDUCE  # DDP's copies are part of its communication
    )
    reached = device.memory_bandwidth_bytes_per_s * device.efficiency[Family.COPY].bandwidth
    return moved / reached * 1e3
