"""Calibration: measures this machine for a few minutes and writes its figures as a device file of the user's own."""

from __future__ import annotations

import datetime
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from memfit.capture import Op, Step, trace
from memfit.cost.benchmark import Benchmark
from memfit.cost.disk import measure_disk
from memfit.cost.host import phases_ms, reference_steps
from memfit.cost.roofline import Float32Precision, Roofline, dtype_of, estimate_work, item_bytes_of, real_flops
from memfit.cost.runtime import Times
from memfit.cost.timing import OpTimer, identity
from memfit.errors import InputError
from memfit.hardware import (
    HALF_BYTES,
    RATE_NAMES,
    Device,
    Efficiency,
    EngineTimes,
    Family,
    FamilyEfficiency,
    HostTimes,
    Link,
    OffloadLink,
    Rates,
    load_device,
    user_device_paths,
)

_COPY_BYTES = 128 << 20
_COPIES = 9
_TELLING_MS = 5.0
_FEWEST_HALF = 6
_LONG_RUN_RANGE = (0.5, 1.1)
STEP_REPEATS = 13
"""How often a whole step is run for its median."""
_RATES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was measured: peaks of this machine, and what its kernels reach of them."""

    name: str
    base: str
    machine: str
    date: str
    flops_per_s: dict[str, float]
    memory_bandwidth_bytes_per_s: float
    efficiency: Efficiency
    samples: int
    link: Link | None = None
    """Between ranks that share the machine, where several were calibrated together."""
    ranks: int = 1
    long_run: float | None = None
    """What ops of a CPU's step keep of the rates that they have by themselves; see `Sustained.long_run`."""
    long_run_half: float | None = None
    engines: tuple[EngineTimes, ...] = ()
    """What engines that shard take beyond the ops, on as many ranks."""
    disk: OffloadLink | None = None
    """What a CPU offloads to; None where it could not be measured, and for a GPU."""

    def device(self) -> Device:
        """Return the device with these figures, as its file describes it."""
        with tempfile.TemporaryDirectory() as folder:
            return load_device(str(self.save(Path(folder) / "calibrated.toml")))

    def to_toml(self) -> str:
        """The device file."""
        source = 'source = "calibrated"'

        def table(name: str, figures: dict[str, float]) -> list[str]:
            rows = [f"{key} = {{ value = {value:.6g}, {source} }}" for key, value in figures.items()]
            return ["", f"[{name}]", *rows]

        lines = [f'name = "{self.name}"', f'base = "{self.base}"', f'title = "{self.machine}, calibrated"']
        lines += table("memory", {"bandwidth_bytes_per_s": self.memory_bandwidth_bytes_per_s})
        lines += table("flops", self.flops_per_s)
        kept = {"long_run": self.long_run, "long_run_half": self.long_run_half}
        if self.long_run is not None:
            lines += table("sustained", {name: figure for name, figure in kept.items() if figure is not None})
        for each in self.efficiency.families:
            figures = {"compute": each.compute, "bandwidth": each.bandwidth, "overhead_ms": each.overhead_ms}
            lines += table(f"efficiency.{each.family.value}", figures)
        for each in self.efficiency.half:
            figures = {"compute": each.compute, "bandwidth": each.bandwidth, "overhead_ms": each.overhead_ms}
            lines += table(f"efficiency.half.{each.family.value}", figures)
        host = self.efficiency.host
        figures = {name: getattr(host, name) for name in HostTimes.__dataclass_fields__}
        lines += table("efficiency.host", {name: figure for name, figure in figures.items() if figure})
        if self.link is not None:
            figures = {"bandwidth_bytes_per_s": self.link.bandwidth_bytes_per_s, "latency_ms": self.link.latency_ms}
            lines += ["", "[links]", f"ranks_per_node = {{ value = {self.ranks}, {source} }}"]
            lines += ["", "[links.peer]", f'kind = "{self.link.kind}"']
            lines += [f"{key} = {{ value = {value:.6g}, {source} }}" for key, value in figures.items()]
            for rate in self.link.collectives:
                figures = {"bandwidth_bytes_per_s": rate.bandwidth_bytes_per_s, "latency_ms": rate.latency_ms}
                lines += table(f"links.peer.collectives.{rate.kind}", figures)
        for each in self.engines:
            figures = {name: getattr(each, name) for name in EngineTimes.__dataclass_fields__ if name != "engine"}
            lines += table(f"engines.{each.engine}", {name: figure for name, figure in figures.items() if figure})
        if self.disk is not None:
            rates = {
                "write_bytes_per_s": self.disk.to_host_bytes_per_s,
                "read_bytes_per_s": self.disk.to_device_bytes_per_s,
                "compute_s_per_byte": self.disk.compute_s_per_byte,
            }
            lines += table("links.disk", {name: figure for name, figure in rates.items() if figure})
        shared = "" if self.link is None else f", {self.ranks} ranks at once"
        lines += [
            "",
            "[sources.calibrated]",
            f'title = "memfit calibrate: {self.samples} ops timed on {self.machine}{shared}"',
            'publisher = "measured here"',
            f'date = "{self.date}"',
            'seen = "measured"',
        ]
        return "\n".join(lines) + "\n"

    def save(self, path: Path | None = None) -> Path:
        """Write the device file, by default among the user's devices, where its name is found from then on."""
        path = path or user_device_paths()[-1] / f"{self.name}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            file.write(self.to_toml())
        os.replace(temporary, path)
        return path


def calibrate(
    device: str | Device = "cpu",
    *,
    name: str | None = None,
    folder: Path | None = None,
    progress: bool = True,
    meet: Callable[[], object] | None = None,
) -> Calibration:
    """Measure reference steps on this machine and fit the efficiency of every family of ops to them.

    `meet` is for processes that are measured at the same time: it returns when all of them have called it. What whole
    steps take is then left to the caller, who may have more of them.
    """
    meet_others = meet or (lambda: None)
    base = load_device(device) if isinstance(device, str) else device
    if base.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"calibration runs on the device itself, and there is no GPU here for {base.name!r}")
    console = Console(stderr=True, quiet=not progress)
    benchmark = Benchmark(folder=folder, progress=progress)
    measured: list[tuple[Op, float]] = []
    for label, step in reference_steps():
        console.print(f"timing {label}")
        captured = trace(step, target=base)
        meet_others()
        kernel_ms = benchmark.kernel_ms(captured).tolist()
        measured += [(op, op_ms) for op, op_ms in zip(captured.ops, kernel_ms, strict=True) if not op.view]
    console.print("timing the host")
    meet_others()
    host = benchmark.host_times(base)
    peaks = _peaks(measured, base)
    efficiency = Efficiency(families=fitted(measured, peaks), host=host)
    efficiency = replace(efficiency, half=fitted_half(measured, replace(peaks, efficiency=efficiency)))
    disk = None
    if base.type == "cpu":
        console.print("timing the disk")
        try:
            disk = measure_disk()
        except OSError as error:
            console.print(f"the disk is not measured, so plans for this device do not offload: {error}")
    found = Calibration(
        name=name or f"{base.name}-calibrated",
        base=base.name,
        machine=identity(base.type),
        date=datetime.date.today().isoformat(),
        flops_per_s={name: rate for name in RATE_NAMES if (rate := getattr(peaks.flops_per_s, name)) is not None},
        memory_bandwidth_bytes_per_s=peaks.memory_bandwidth_bytes_per_s,
        efficiency=efficiency,
        samples=len(measured),
        disk=disk,
    )
    if base.type == "cpu" and meet is None:
        console.print("timing whole steps")
        found = with_long_run(found, lambda step: float(phases_ms(step, "cpu", STEP_REPEATS).sum()))
    return found


def with_long_run(calibration: Calibration, step_ms: Callable[[Step], float]) -> Calibration:
    """Return the calibration with what ops of whole steps keep of the rates that they were timed with.

    An op that is timed again and again finds its inputs in the caches, and its results in pages that are there; in a
    step both are colder. Steps of some milliseconds tell: in smaller ones the host decides.
    """
    device = calibration.device()
    kept: list[float] = []
    halves: list[tuple[float, float, float]] = []
    for _, step in reference_steps():
        captured = trace(step, target=device)
        op_ms, half = Roofline().op_ms(captured), np.array([not op.view and _is_half(op) for op in captured.ops], bool)
        expected = float(op_ms.sum())
        if expected < _TELLING_MS or step.autocast is not None:
            continue
        measured = step_ms(step)
        if half.any():
            halves.append((float(op_ms[half].sum()), float(op_ms[~half].sum()), measured))
        else:
            kept.append(expected / measured)
    long_run = float(np.clip(np.median(kept), *_LONG_RUN_RANGE)) if kept else 1.0
    shares = [of_half / max(_LEAST_MS, measured - of_others / long_run) for of_half, of_others, measured in halves]
    long_run_half = float(np.clip(np.median(shares), *_LONG_RUN_RANGE)) if shares else None
    return replace(calibration, long_run=long_run, long_run_half=long_run_half)


def fitted(measured: Sequence[tuple[Op, float]], device: Device) -> tuple[FamilyEfficiency, ...]:
    """The factors with which the device's roofline comes nearest to measured times of ops; a CPU's of wider numbers."""
    wide = [each for each in measured if device.type == "cuda" or not _is_half(each[0])]
    samples = _samples(wide, device)
    return tuple(fit_family(samples[start.family], start) for start in device.efficiency.families)


def fitted_half(measured: Sequence[tuple[Op, float]], device: Device) -> tuple[FamilyEfficiency, ...]:
    """The factors of a CPU's ops on 16-bit numbers, of families with enough of them; a GPU's are as for wider ones."""
    if device.type == "cuda":
        return ()
    samples = _samples([each for each in measured if _is_half(each[0])], device)
    enough = [each for each in device.efficiency.families if len(samples[each.family]) >= _FEWEST_HALF]
    return tuple(fit_family(samples[start.family], start) for start in enough)


def _samples(measured: Sequence[tuple[Op, float]], device: Device) -> dict[Family, list[Sample]]:
    precision = Float32Precision.of_torch() if device.type == "cuda" else Float32Precision()
    samples: dict[Family, list[Sample]] = defaultdict(list)
    for op, op_ms in measured:
        work = estimate_work(op, device, precision)
        samples[work.family].append(Sample(measured_ms=op_ms, compute_ms=work.compute_ms, memory_ms=work.memory_ms))
    return samples


def _is_half(op: Op) -> bool:
    return item_bytes_of(dtype_of(op)) == HALF_BYTES


def _peaks(measured: Sequence[tuple[Op, float]], base: Device) -> Device:
    """The device with peaks of its own. A GPU's are on its sheet; a CPU's are the highest rates that were seen."""
    if base.type == "cuda":
        return base
    seen: dict[str, float] = {}
    for op, op_ms in measured:
        name = _RATES.get(dtype_of(op))
        if name is not None and op.flops:
            seen[name] = max(seen.get(name, 0.0), real_flops(op) / op_ms * 1e3)
    scale = seen["fp32"] / base.flops_per_s.fp32
    known = {name: getattr(base.flops_per_s, name) for name in RATE_NAMES}
    rates = {name: seen.get(name, rate * scale) for name, rate in known.items() if rate is not None}
    return replace(base, flops_per_s=Rates(**rates), memory_bandwidth_bytes_per_s=_copy_bytes_per_s(base))


def _copy_bytes_per_s(base: Device) -> float:
    """Bytes read and written each second by a copy much larger than the caches."""
    source = torch.ones(_COPY_BYTES // 4, device=base.type)
    target = torch.zeros_like(source)
    return 2 * _COPY_BYTES / OpTimer(base.type).run_ms(lambda: target.copy_(source), _COPIES) * 1e3


# -- Fits a family's efficiency to measured times: part of the peak, part of the bandwidth, and a fixed time ----------


_STEPS = (2.0, 1.3, 1.1, 1.03, 1.01)
_PASSES = 40
_LEAST_MS = 1e-5
_LEAST = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured op: its time, and what its FLOPs and bytes would take at the device's peaks."""

    measured_ms: float
    compute_ms: float
    memory_ms: float


def fit_family(samples: Sequence[Sample], start: FamilyEfficiency) -> FamilyEfficiency:
    """The factors whose roofline is nearest to the samples; `start` where a factor decides none of them.

    Nearest is the least sum of logarithmic errors, each weighed with the root of its time: both the many small ops
    and the few large ones must come out.
    """
    if not samples:
        return start
    measured = np.array([sample.measured_ms for sample in samples])
    compute = np.array([sample.compute_ms for sample in samples])
    memory = np.array([sample.memory_ms for sample in samples])
    weights = np.sqrt(measured)

    def loss(parameters: Times) -> float:
        rate, bandwidth, overhead = parameters
        predicted = np.maximum(compute / rate, memory / bandwidth) + overhead
        return float((weights * np.abs(np.log(predicted / measured))).sum())

    least_ms = max(_LEAST_MS, float(measured.min()))
    beginnings = product(
        {start.compute, max(_LEAST, float((compute / measured).max()))},
        {start.bandwidth, max(_LEAST, float((memory / measured).max()))},
        (least_ms / 2, least_ms),
    )
    best = min((_descended(np.array(each), loss) for each in sorted(beginnings)), key=loss)
    rate, bandwidth, overhead = best.tolist()
    return FamilyEfficiency(
        family=start.family,
        compute=rate if (compute / rate > memory / bandwidth).any() else start.compute,
        bandwidth=bandwidth if (memory / bandwidth >= compute / rate).any() else start.bandwidth,
        overhead_ms=max(_LEAST_MS, overhead),
    )


def _descended(point: Times, loss: Callable[[Times], float]) -> Times:
    """The point reached by multiplying one parameter at a time while that helps, in ever smaller steps."""
    least = loss(point)
    for step in _STEPS:
        for _ in range(_PASSES):
            improved = False
            for place in range(len(point)):
                for factor in (step, 1 / step):
                    candidate = point.copy()
                    candidate[place] *= factor
                    found = loss(candidate)
                    if found < least:
                        point, least, improved = candidate, found, True
            if not improved:
                break
    return point
