"""The optimizer's step on the host, where it works on parameters, gradients and state in the host's memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memfit.capture import Phase
from memfit.cost import Runtime
from memfit.hardware import Family, load_device
from memfit.units import display_bytes, display_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStep:
    """The optimizer's step on the host: everything it reads and writes, once, at the bandwidth of one thread."""

    moved_bytes: int
    bandwidth_bytes_per_s: float

    @classmethod
    def of(cls, parameter_bytes: int, state_bytes: int) -> HostStep:
        """Return the host's step: parameters, gradients and state are read, parameters and state written."""
        cpu = load_device("cpu")
        reached = cpu.memory_bandwidth_bytes_per_s * cpu.efficiency[Family.OPTIMIZER].bandwidth
        return cls(moved_bytes=3 * parameter_bytes + 2 * state_bytes, bandwidth_bytes_per_s=reached)

    @property
    def step_ms(self) -> float:
        """How long it takes."""
        return self.moved_bytes / self.bandwidth_bytes_per_s * 1e3

    def __str__(self) -> str:
        return (
            f"{display_ms(self.step_ms)} for the step on the host, {display_bytes(self.moved_bytes)} at "
            f"{self.bandwidth_bytes_per_s / 1e9:.3g} GB/s, memfit's figure of a CPU's thread: more threads take less"
        )


def with_host_step(runtime: Runtime, host: HostStep) -> Runtime:
    """Return the step with its optimizer's ops as long as the host takes, which nothing runs beside."""
    times = runtime.op_ms.copy()
    ours = np.array([op.phase is Phase.OPTIMIZER for op in runtime.trace.ops], bool)
    own_ms = float(times[ours].sum())
    if own_ms:
        times[ours] *= host.step_ms / own_ms
    return Runtime(runtime.trace, times)
