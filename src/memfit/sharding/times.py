"""Times of ops that work on shards: the optimizer of a rank has its part of the elements, and kernels a fixed time."""

from __future__ import annotations

import numpy as np

from memfit.capture import Phase
from memfit.cost import Runtime
from memfit.hardware import Device
from memfit.hardware.efficiency import Family
from memfit.sharding.options import ShardDtypes, elements, item_bytes, shard_bytes


def on_shards(runtime: Runtime, device: Device, ranks: int, dtypes: ShardDtypes) -> Runtime:
    """The same step with the optimizer's ops on one rank's shards."""
    trained = [each for each in runtime.trace.parameters if each.trainable]
    whole = sum(elements(each) * item_bytes(each.dtype) for each in trained)
    if not whole:
        return runtime
    share = sum(shard_bytes(each, ranks, dtypes.kept(each)) for each in trained) / whole
    kernel_ms, host_ms = device.efficiency[Family.OPTIMIZER].overhead_ms, device.efficiency.host.optimizer_ms
    least_ms = kernel_ms + host_ms if device.type == "cpu" else max(kernel_ms, host_ms)
    times = runtime.op_ms.copy()
    ours = np.array([op.phase is Phase.OPTIMIZER for op in runtime.trace.ops], bool)
    times[ours] = np.minimum(times[ours], np.maximum(times[ours] * share, least_ms))
    return Runtime(runtime.trace, times)
