"""`MemTracker`, a name that users of `torch.distributed._tools` know, answered from a trace.

The prototype watches code as it runs. memfit captures a whole step first, without a GPU, and this class gives
the prototype's snapshots of it: the same keys, states and units. docs/design/memory.md says where the numbers
differ and why.
"""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from memfit.capture import Category, Phase, Step, Trace, trace
from memfit.compat.step_capture import StepCapture
from memfit.errors import InputError
from memfit.hardware import Device, Target
from memfit.memory import CallMemory, ModuleMemory, Snapshot, Timeline, module_memory

DeviceSnapshot = dict[torch.device, dict[str, int]]

TOTAL = "Total"
_KEYS = {
    Category.PARAMETER: "Parameter",
    Category.BUFFER: "Buffer",
    Category.GRADIENT: "Gradient",
    Category.ACTIVATION: "Activation",
    Category.TEMPORARY: "Temp",
    Category.OPTIMIZER_STATE: "Optstate",
    Category.INPUT: "Other",
    Category.GATHERED_PARAMETER: "Other",
    Category.COMMUNICATION: "Other",
    Category.WORKSPACE: "Other",
}


class ModState(str, enum.Enum):
    """The moments of a module at which its memory is known; `_AC` is a recomputation in backward."""

    PRE_FW = "Pre-Forward"
    POST_FW = "Post-Forward"
    PEAK_FW = "Peak-Forward"
    PRE_BW = "Pre-Backward"
    PRE_FW_AC = "Pre-Forward-AC"
    POST_FW_AC = "Post-Forward-AC"
    POST_BW = "Post-Backward"
    PEAK_BW = "Peak-Backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModMemStats:
    """The memory of one module in bytes; a list of snapshots for each state, one for each call."""

    mod_fqn: str
    parameter_mem: int
    buffer_mem: int
    input_mem: int
    output_mem: int
    local_peak: dict[torch.device, int] = field(default_factory=dict)
    snapshots: dict[ModState, list[DeviceSnapshot]] = field(default_factory=dict)


class MemTracker(StepCapture[Timeline]):
    """Memory of a step by kind and by module, without a GPU.

        with MemTracker(step, target="h100-sxm") as tracker:
            tracker.display_snapshot("peak", units="GiB")
            tracker.display_modulewise_snapshots(depth=2, units="MiB")

    or `tracker.run(function)` for a loop of one's own, or `MemTracker.of(trace)`. `memory_tracking` holds a
    `ModMemStats` for every module that was called, by the module's path in the model.
    """

    _variable = "tracker"

    def __init__(self, step: Step | Callable[[], Any] | None = None, *, target: str | Device | Target = "cpu") -> None:
        super().__init__(step, target=target)
        self.memory_tracking: dict[str, ModMemStats] = {}
        self._external: list[Any] = []

    @classmethod
    def of(cls, trace: Trace, *, rounding_bytes: int | None = None) -> MemTracker:
        """Build the tracker of a step that was captured before; sizes are rounded as the trace's device does."""
        tracker = cls(target=trace.hardware)
        tracker._take(trace, rounding_bytes)
        return tracker

    def track_external(self, *external: nn.Module | torch.optim.Optimizer | torch.Tensor | None) -> None:
        """Name the model, its optimizer and the batch for a function that takes them as arguments."""
        for each in external:
            if each is not None and not isinstance(each, (nn.Module, torch.optim.Optimizer, torch.Tensor)):
                raise InputError(f"track_external got a {type(each).__name__}; give a module, an optimizer or tensors")
        self._external.extend(each for each in external if each is not None)

    def run(self, function: Callable[..., Any]) -> MemTracker:
        """Capture one step made by a function without arguments, which has its model and optimizer itself.

        Or by `function(model, optimizer, batch)`, or the first of these, given what `track_external` was.
        """
        if not inspect.signature(function).parameters:
            self._capture(function)
            return self
        models = [each for each in self._external if isinstance(each, nn.Module)]
        optimizers = [each for each in self._external if isinstance(each, torch.optim.Optimizer)]
        tensors = tuple(each for each in self._external if isinstance(each, torch.Tensor))
        if len(models) != 1 or len(optimizers) > 1:
            raise InputError(
                "MemTracker.run needs one model and at most one optimizer for a function with arguments, and"
                f" has {len(models)} and {len(optimizers)}; name them with track_external(model, optimizer)"
            )
        batch = tensors[0] if len(tensors) == 1 else tensors
        step = Step(models[0], batch, optimizer=optimizers[0] if optimizers else None, run=function)
        self._capture(step)
        return self

    def get_tracker_snapshot(self, type: str = "current") -> DeviceSnapshot:
        """Return bytes by kind at the `"peak"` of the step, or `"current"`: when the step is over."""
        timeline = self._captured()
        if type == "peak":
            by_category = timeline.peak_by_category
        elif type == "current":
            by_category = timeline.by_category_during(len(timeline.trace.ops))
        else:
            raise InputError(f"there is no snapshot of type {type!r}; give 'current' or 'peak'")
        return {self._device: _by_key(by_category)}

    def reset_mod_stats(self) -> None:
        """Forget the statistics of modules."""
        self.memory_tracking.clear()

    def display_snapshot(
        self, type: str = "current", units: str = "B", tabulate: bool = False, console: Console | None = None
    ) -> None:
        """Show a snapshot of the whole device as lines or as a table."""
        snapshot = self.get_tracker_snapshot(type)
        console = console or Console()
        if tabulate:
            console.print(_table([("", snapshot)], units))
        else:
            _print_lines(console, snapshot, units)

    def display_modulewise_snapshots(
        self, depth: int = 2, units: str = "B", tabulate: bool = False, console: Console | None = None
    ) -> None:
        """Show every module's snapshots, down to a depth of nesting (1 is the model itself)."""
        self._captured()
        console = console or Console()
        for stats in sorted(self.memory_tracking.values(), key=lambda each: _natural(each.mod_fqn)):
            if stats.mod_fqn.count(".") + 1 > depth:
                continue
            console.print(f"Module:  {stats.mod_fqn}", highlight=False)
            labelled = [
                (f"{state.value} # {number}", snapshot)
                for state, snapshots in stats.snapshots.items()
                for number, snapshot in enumerate(snapshots, 1)
            ]
            if tabulate:
                console.print(_table(labelled, units))
                continue
            for label, snapshot in labelled:
                console.print(label, highlight=False)
                _print_lines(console, snapshot, units)

    @property
    def _device(self) -> torch.device:
        return torch.device("cuda", 0) if self._captured().trace.device_type == "cuda" else torch.device("cpu")

    def _capture(self, step: Step | Callable[[], Any]) -> None:
        self._take(trace(step, target=self.target))

    def _take(self, trace: Trace, rounding_bytes: int | None = None) -> None:
        if rounding_bytes is None:
            rounding_bytes = trace.hardware.allocator.rounding_bytes
        self._found = Timeline.of(trace, rounding_bytes)
        modules = module_memory(self._found)
        root = modules[""].kind if "" in modules else ""
        self.memory_tracking = {
            path: _stats(module, root, self._device) for path, module in modules.items() if module.calls
        }


def _stats(module: ModuleMemory, root: str, device: torch.device) -> ModMemStats:
    snapshots: dict[ModState, list[DeviceSnapshot]] = {}
    for call in module.calls:
        for state, snapshot in _states(call):
            if snapshot is not None:
                snapshots.setdefault(state, []).append({device: _by_key(snapshot.by_category)})
    return ModMemStats(
        mod_fqn=f"{root}.{module.module}" if root and module.module else module.module or root,
        parameter_mem=module.parameter_bytes,
        buffer_mem=module.buffer_bytes,
        input_mem=module.input_bytes,
        output_mem=module.output_bytes,
        local_peak={device: max(module.forward_peak_bytes, module.backward_peak_bytes)},
        snapshots=snapshots,
    )


def _states(call: CallMemory) -> Iterable[tuple[ModState, Snapshot | None]]:
    if call.phase is Phase.BACKWARD:
        yield ModState.PRE_FW_AC, call.before_forward
        yield ModState.POST_FW_AC, call.after_forward
    else:
        yield ModState.PRE_FW, call.before_forward
        yield ModState.POST_FW, call.after_forward
        yield ModState.PEAK_FW, call.forward_peak
    yield ModState.PRE_BW, call.before_backward
    yield ModState.POST_BW, call.after_backward
    yield ModState.PEAK_BW, call.backward_peak


def _by_key(by_category: dict[Category, int]) -> dict[str, int]:
    snapshot = dict.fromkeys(_KEYS.values(), 0)
    for category, n_bytes in by_category.items():
        snapshot[_KEYS[category]] += n_bytes
    snapshot[TOTAL] = sum(by_category.values())
    return snapshot


def _print_lines(console: Console, snapshot: DeviceSnapshot, units: str) -> None:
    for device, kinds in snapshot.items():
        console.print(f"Device: {device}", highlight=False)
        for kind, n_bytes in kinds.items():
            console.print(f"\t{kind}: {_in_units(n_bytes, units)}", highlight=False)


def _table(labelled: list[tuple[str, DeviceSnapshot]], units: str) -> Table:
    table = Table("State & Call", "Device")
    for key in (*dict.fromkeys(_KEYS.values()), TOTAL):
        table.add_column(key, justify="right")
    for label, snapshot in labelled:
        for device, kinds in snapshot.items():
            table.add_row(label, str(device), *(_in_units(n_bytes, units) for n_bytes in kinds.values()))
    return table


def _in_units(n_bytes: int, units: str) -> str:
    scale = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}.get(units)
    if scale is None:
        raise InputError(f"unknown units {units!r}; give 'B', 'KiB', 'MiB' or 'GiB'")
    return f"{n_bytes if scale == 1 else round(n_bytes / scale, 2)} {units}"


def _natural(path: str) -> list[tuple[int, str]]:
    """Return a sort key under which `layers.10` follows `layers.9`."""
    return [(int(part), "") if part.isdigit() else (-1, part.lower()) for part in re.split("([0-9]+)", path)]
