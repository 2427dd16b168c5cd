"""Run times by measurement: each distinct op of a step is timed once on this machine, and remembered on disk."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from memfit.capture import Op, Trace
from memfit.cost.host import measure_host
from memfit.cost.processor_cache import cold_fractions, measure_cache_bytes
from memfit.cost.roofline import Roofline, with_host
from memfit.cost.runtime import Cost, Times
from memfit.cost.timing import OpTime, OpTimer, TimeCache, identity
from memfit.errors import InputError, MissingFeatureError
from memfit.hardware import Device, HostTimes, Target

_HOST_KEY = "host"
_CACHE_KEY = "cache"
_ROUNDS = 4
"""Every op is timed in this many rounds over all ops, so that a burst of other work spoils one of them at most."""


class Benchmark:
    """A cost model that asks the local device. It needs the memory of one op at a time, not of the model.

    `skipped` says which ops could not be run by themselves, and why; they have the roofline's time.
    """

    def __init__(self, *, folder: Path | None = None, progress: bool = True) -> None:
        self.folder = folder
        self.progress = progress
        self.skipped: dict[str, str] = {}

    def op_ms(self, trace: Trace) -> Times:
        """Milliseconds of each op, the host's part included."""
        return with_host(trace, self.kernel_ms(trace), self.host_times(trace.hardware), trace.device_type != "cpu")

    def kernel_ms(self, trace: Trace) -> Times:
        """Milliseconds of each op's kernels as they find the caches in the step."""
        times = self.measure(trace)
        cold = cold_fractions(trace, self._cache_bytes()) if trace.device_type == "cpu" else np.ones(len(trace.ops))
        fallback = None
        found = np.empty(len(trace.ops))
        for index, op in enumerate(trace.ops):
            time = None if op.view else times.get(op_key(op))
            if op.view:
                found[index] = 0.0
            elif time is None:
                fallback = Roofline().kernel_ms(trace.ops, trace.hardware) if fallback is None else fallback
                found[index] = fallback[index]
            else:
                found[index] = time.at(cold[index])
        return found

    def measure(self, trace: Trace) -> dict[str, OpTime]:
        """The time of every distinct op, measured now or known from before."""
        device_type = trace.hardware.type
        if device_type == "cuda" and not torch.cuda.is_available():
            raise InputError(
                f"the trace is for {trace.device} and there is no GPU here to time its ops on; "
                "use the roofline, or capture the step for target 'cpu'"
            )
        cache_bytes = self._cache_bytes() if device_type == "cpu" else None
        cache = TimeCache(identity(device_type), self.folder)
        distinct = {op_key(op): op for op in trace.ops if not op.view}
        missing = {key: op for key, op in distinct.items() if key not in cache.times}
        if missing:
            for key, time in self._time(missing, OpTimer(device_type, cache_bytes)).items():
                cache.times[key] = [time.hot_ms, time.cold_ms]
            cache.save()
        known = {key: cache.times[key] for key in distinct if key in cache.times}
        return {key: OpTime(hot_ms=hot, cold_ms=cold) for key, (hot, cold) in known.items()}

    def _time(self, ops: dict[str, Op], timer: OpTimer) -> dict[str, OpTime]:
        rounds: dict[str, list[OpTime]] = {}
        failed: set[str] = set()
        with _progress(self.progress) as progress:
            for key, op in progress.track(list(ops.items()) * _ROUNDS, description="timing ops"):
                if key in failed:
                    continue
                try:
                    rounds.setdefault(key, []).append(timer.time(op))
                except Exception as error:  # whatever a kernel may raise on made-up values
                    failed.add(key)
                    self.skipped[op.name] = f"{type(error).__name__}: {error}".splitlines()[0]
        if failed:
            names = ", ".join(sorted(self.skipped))
            warnings.warn(
                f"these ops could not be timed by themselves and have the roofline's time: {names}", stacklevel=4
            )
        return {key: OpTime.median(times) for key, times in rounds.items() if times}

    def _cache_bytes(self) -> int:
        """The processor's cache, measured once."""
        cache = TimeCache(identity("cpu"), self.folder)
        if _CACHE_KEY not in cache.times:
            cache.times[_CACHE_KEY] = [float(measure_cache_bytes())]
            cache.save()
        return int(cache.times[_CACHE_KEY][0])

    def host_times(self, device: Device) -> HostTimes:
        """What the host needs to issue ops, measured on small steps where it decides."""
        names = [name for name in HostTimes.__dataclass_fields__ if name != "second_run_ms"]  # measured by no one yet
        cache = TimeCache(identity(device.type), self.folder)
        if _HOST_KEY not in cache.times:
            host = measure_host(self, device)
            cache.times[_HOST_KEY] = [getattr(host, name) for name in names]
            cache.save()
        found = dict(zip(names, cache.times[_HOST_KEY], strict=True))
        return HostTimes(**found, second_run_ms=device.efficiency.host.second_run_ms)


def op_key(op: Op) -> str:
    """A name for an op with its arguments, shapes, strides and dtypes, the same in every process."""
    geometry = [(ref.shape, ref.stride, ref.dtype) for ref in op.inputs]
    content = f"{op.name} {op.arguments} {geometry}"
    return f"{op.name} {hashlib.sha256(content.encode()).hexdigest()[:24]}"


def _progress(show: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not (show and console.is_terminal))


# -- Choosing a cost model by name ------------------------------------------------------------------------------------


MODES = ("operator-level-cost-model", "operator-level-benchmark")
"""What PyTorch's prototypes call the two."""
ROOFLINE = ("roofline", MODES[0])
BENCHMARK = ("benchmark", MODES[1])


def cost_model(mode: str, target: str | Device | Target | None = None) -> Cost:
    """The cost model called 'roofline' or 'benchmark', or by the names that PyTorch's prototypes use.

    The roofline is for the target's device, or for the device of the trace when none is given.
    """
    if mode in ROOFLINE:
        return Roofline() if target is None else Roofline.of(Target.parse(target))
    if mode in BENCHMARK:
        return Benchmark()
    raise MissingFeatureError(f"no cost model is called {mode!r}; write one of {', '.join((*ROOFLINE, *BENCHMARK))}")
