"""The roofline: an op takes what its FLOPs or its bytes need at the rate that its family reaches, and a fixed time.

Multiply and add are two operations, in the ops and in the devices' rates alike.

Note [Host and device]: on a CPU the host and the kernels take turns, so their times add up. On a GPU the host only
queues kernels and runs ahead. Two clocks follow this: a kernel starts when it is queued and the one before it is
done. An op's time is how far it moves the end of the device's work; waiting for the host counts for the kernel that
waits. Times are whole multiples of 2**-20 ms, so that sums are exact and equal layers have equal times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memfit.capture import Op, Phase, Trace
from memfit.cost.runtime import Times
from memfit.cost.work import Precision, estimate_work
from memfit.errors import InputError
from memfit.hardware import Device, HostTimes, Target

_TICKS_PER_MS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Run times by arithmetic, for the device of the trace or for another of its type; TF32 as torch is set."""

    device: Device | None = None
    precision: Precision | None = None

    @classmethod
    def of(cls, target: str | Device | Target) -> Roofline:
        """The roofline of a target's device."""
        return cls(device=Target.parse(target).device)

    def op_ms(self, trace: Trace) -> Times:
        """Milliseconds of each op."""
        device = self.device or trace.hardware
        if device.type != trace.hardware.type:
            raise InputError(
                f"a step captured for {trace.device} runs other kernels than {device.name} would; "
                f"capture it with target={device.name!r}"
            )
        return with_host(trace, self.kernel_ms(trace.ops, device), device.efficiency.host, device.type != "cpu")

    def kernel_ms(self, ops: Sequence[Op], device: Device) -> Times:
        """Milliseconds of each op's kernels alone; none for views."""
        precision = self.precision or (Precision.of_torch() if device.type == "cuda" else Precision())
        known: dict[tuple[object, ...], float] = {}
        times = np.empty(len(ops))
        for index, op in enumerate(ops):
            key = (op.name, op.phase is Phase.OPTIMIZER, op.flops, op.read_bytes, op.written_bytes, op.arguments)
            key += tuple((ref.shape, ref.dtype) for ref in (*op.inputs[:1], *op.outputs))
            found = known.get(key)
            if found is None:
                found = known[key] = kernel_ms(op, device, precision)
            times[index] = found
        return times


def kernel_ms(op: Op, device: Device, precision: Precision | None = None) -> float:
    """The roofline of one op."""
    if op.view or op.name == "aten._local_scalar_dense.default":
        return 0.0
    work = estimate_work(op, device, precision or Precision())
    factors = device.efficiency[work.family]
    return max(work.compute_ms / factors.compute, work.memory_ms / factors.bandwidth) + factors.overhead_ms


def with_host(trace: Trace, kernel_ms: Times, host: HostTimes, asynchronous: bool) -> Times:
    """Kernel times joined with the host's; see Note [Host and device]."""
    issue = np.rint(issue_ms(trace, host) * _TICKS_PER_MS)
    kernel = np.rint(kernel_ms * _TICKS_PER_MS)
    if not asynchronous:
        return (issue + kernel) / _TICKS_PER_MS
    times = np.zeros(len(kernel))
    queued = done = 0.0
    for index, (host_ticks, kernel_ticks) in enumerate(zip(issue.tolist(), kernel.tolist(), strict=True)):
        queued += host_ticks
        if kernel_ticks:
            wait = max(0.0, queued - done)
            times[index] = wait + kernel_ticks
            done += wait + kernel_ticks
    return times / _TICKS_PER_MS


def issue_ms(trace: Trace, host: HostTimes) -> Times:
    """What the host needs for each op; entering modules counts for the first op inside."""
    by_phase = {
        Phase.FORWARD: host.forward_ms,
        Phase.LOSS: host.forward_ms,
        Phase.BACKWARD: host.backward_ms,
        Phase.OPTIMIZER: host.optimizer_ms,
    }
    times = np.array([host.view_ms if op.view else by_phase[op.phase] for op in trace.ops])
    for call in trace.calls:
        if call.begin < call.end:
            times[call.begin] += host.call_ms
    return times
