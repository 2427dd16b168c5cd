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
import torch

from memfit.cost.families import Product, executed_flops, family_of
from memfit.cost.runtime import Times
from memfit.hardware import Device, Family, HostTimes, Target
from memfit.trace import Op, Phase, Trace

_TICKS_PER_MS = 1 << 20
_ITEM_BYTES = {"float64": 8, "int64": 8, "complex64": 8, "complex128": 16, "bfloat16": 2, "float16": 2, "int16": 2}
_PRODUCTS = (Family.MATRIX_LARGE, Family.MATRIX_SMALL, Family.MATRIX_UNALIGNED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Run times by arithmetic, for the device of the trace or for another of its type.

    `tf32` is whether float32 matrix products may use TF32; convolutions do, as is torch's default. None asks torch.
    """

    device: Device | None = None
    tf32: bool | None = None

    @classmethod
    def of(cls, target: Target | Device) -> Roofline:
        """The roofline of a target's device."""
        return cls(device=target.device if isinstance(target, Target) else target)

    def op_ms(self, trace: Trace) -> Times:
        """Milliseconds of each op."""
        device = self.device or trace.hardware
        return with_host(trace, self.kernel_ms(trace.ops, device), device.efficiency.host, device.type != "cpu")

    def kernel_ms(self, ops: Sequence[Op], device: Device) -> Times:
        """Milliseconds of each op's kernels alone; none for views."""
        tf32 = bool(torch.backends.cuda.matmul.allow_tf32) if self.tf32 is None else self.tf32
        known: dict[tuple[object, ...], float] = {}
        times = np.empty(len(ops))
        for index, op in enumerate(ops):
            key = (op.name, op.phase is Phase.OPTIMIZER, op.flops, op.read_bytes, op.written_bytes, op.arguments)
            key += tuple(ref.shape for ref in op.outputs)
            found = known.get(key)
            if found is None:
                found = known[key] = kernel_ms(op, device, tf32=tf32)
            times[index] = found
        return times


def kernel_ms(op: Op, device: Device, *, tf32: bool = False) -> float:
    """The roofline of one op."""
    if op.view or op.name == "aten._local_scalar_dense.default":
        return 0.0
    dtype = dtype_of(op)
    family = family_of(op, multiprocessors=device.multiprocessors, item_bytes=item_bytes_of(dtype))
    factors = device.efficiency[family]
    rate = device.peak_flops_per_s(dtype, tf32=tf32 or family is Family.CONVOLUTION) * factors.compute
    if family in _PRODUCTS and device.multiprocessors is not None:
        rate *= min(1.0, Product.of(op).tiles / device.multiprocessors)
    bandwidth = device.memory_bandwidth_bytes_per_s * factors.bandwidth
    return max(executed_flops(op) / rate, moved_bytes(op, family) / bandwidth) * 1e3 + factors.overhead_ms


def moved_bytes(op: Op, family: Family) -> int:
    """Bytes that an op reads and writes; of a table only the rows that it takes."""
    if family is Family.EMBEDDING and not op.name.endswith("backward.default"):
        return 2 * op.written_bytes
    return op.read_bytes + op.written_bytes


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


def dtype_of(op: Op) -> str:
    """The number format in which an op computes."""
    for ref in op.inputs:
        if ref.dtype.startswith(("float", "bfloat", "complex")):
            return ref.dtype
    return op.outputs[0].dtype if op.outputs else "float32"


def item_bytes_of(dtype: str) -> int:
    """Bytes of one element."""
    return _ITEM_BYTES.get(dtype, 4)
