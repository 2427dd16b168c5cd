"""`estimate`: what training a model takes of a device, part by part, without a plan."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.capture import Category, Phase, Trace
from memfit.hardware import Target
from memfit.memory import Timeline, summarize

_STATES = (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER_STATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What one rank holds for a training step as it is.

    Weights, gradients and optimizer state are those of the whole model, as they are when the optimizer steps, and
    `states_bytes` is all of them: what estimates from a model's size count. `peak_bytes` is the most that tensors take
    at once, of which `activation_bytes`, `temporary_bytes` (with workspaces) and `other_bytes` (buffers, the batch) are
    no state. `rounding_bytes` is what the allocator reserves beyond, `outside_bytes` what a process takes beside it.
    """

    parameters: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    temporary_bytes: int
    other_bytes: int
    peak_bytes: int
    rounding_bytes: int
    outside_bytes: int
    needed_bytes: int
    device: str
    device_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def states_bytes(self) -> int:
        """Weights, gradients and optimizer state together."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def fits(self) -> bool:
        """Whether the device has as much as is needed."""
        return self.needed_bytes <= self.device_bytes


def estimate(trace: Trace, *, target: Target) -> Estimate:
    """Return what a captured step takes of one device of the target."""
    summary = summarize(trace, target=target)
    timeline = Timeline.of(trace, target.device.allocator.rounding_bytes)
    first = next((number for number, op in enumerate(trace.ops) if op.phase is Phase.OPTIMIZER), len(trace.ops))
    stepping, after = timeline.by_category_during(first), timeline.by_category_during(len(trace.ops))
    peak = summary.peak_by_category
    temporary = peak.get(Category.TEMPORARY, 0) + peak.get(Category.WORKSPACE, 0)
    activation = peak.get(Category.ACTIVATION, 0)
    return Estimate(
        parameters=sum(_elements(each.shape) for each in trace.parameters),
        weights_bytes=stepping.get(Category.PARAMETER, 0),
        gradients_bytes=stepping.get(Category.GRADIENT, 0),
        optimizer_bytes=after.get(Category.OPTIMIZER_STATE, 0),
        activation_bytes=activation,
        temporary_bytes=temporary,
        other_bytes=summary.peak_bytes - activation - temporary - sum(peak.get(each, 0) for each in _STATES),
        peak_bytes=summary.peak_bytes,
        rounding_bytes=summary.peak_reserved_bytes - summary.peak_bytes,
        outside_bytes=summary.overhead_bytes,
        needed_bytes=summary.needed_bytes,
        device=summary.device_title,
        device_bytes=summary.device_bytes,
        notes=summary.notes,
    )


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
