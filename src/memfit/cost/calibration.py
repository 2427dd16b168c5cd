"""Calibration: measures this machine for a few minutes and writes its figures as a device file of the user's own."""

from __future__ import annotations

import datetime
import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from memfit.cost.benchmark import Benchmark
from memfit.cost.families import executed_flops, family_of
from memfit.cost.fitting import Sample, fit_family
from memfit.cost.references import reference_steps
from memfit.cost.roofline import dtype_of, item_bytes_of, moved_bytes
from memfit.cost.timing import OpTimer, identity
from memfit.errors import InputError
from memfit.hardware import Device, Efficiency, Family, HostTimes, load_device
from memfit.hardware.load import user_device_paths
from memfit.trace import Op, trace

_COPY_BYTES = 128 << 20
_COPIES = 9
_RATES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


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

    def to_toml(self) -> str:
        """The device file."""
        source = 'source = "calibrated"'

        def table(name: str, figures: dict[str, float]) -> list[str]:
            rows = [f"{key} = {{ value = {value:.6g}, {source} }}" for key, value in figures.items()]
            return ["", f"[{name}]", *rows]

        lines = [f'name = "{self.name}"', f'base = "{self.base}"', f'title = "{self.machine}, calibrated"']
        lines += table("memory", {"bandwidth_bytes_per_s": self.memory_bandwidth_bytes_per_s})
        lines += table("flops", self.flops_per_s)
        for each in self.efficiency.families:
            figures = {"compute": each.compute, "bandwidth": each.bandwidth, "overhead_ms": each.overhead_ms}
            lines += table(f"efficiency.{each.family.value}", figures)
        host = self.efficiency.host
        lines += table("efficiency.host", {name: getattr(host, name) for name in HostTimes.__dataclass_fields__})
        lines += [
            "",
            "[sources.calibrated]",
            f'title = "memfit calibrate: {self.samples} ops timed on {self.machine}"',
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
    device: str | Device = "cpu", *, name: str | None = None, folder: Path | None = None, progress: bool = True
) -> Calibration:
    """Measure reference steps on this machine and fit the efficiency of every family of ops to them."""
    base = load_device(device) if isinstance(device, str) else device
    if base.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"calibration runs on the device itself, and there is no GPU here for {base.name!r}")
    console = Console(stderr=True, quiet=not progress)
    benchmark = Benchmark(folder=folder, progress=progress)
    measured: list[tuple[Op, float]] = []
    for label, step in reference_steps():
        console.print(f"timing {label}")
        captured = trace(step, target=base)
        kernel_ms = benchmark.kernel_ms(captured).tolist()
        measured += [(op, op_ms) for op, op_ms in zip(captured.ops, kernel_ms, strict=True) if not op.view]
    console.print("timing the host")
    host = benchmark.host_times(base)
    bandwidth = _copy_bytes_per_s(base)
    rates = _rates(measured, base)
    samples = _samples(measured, base, rates, bandwidth)
    families = tuple(fit_family(start.family, samples[start.family], start) for start in base.efficiency.families)
    return Calibration(
        name=name or f"{base.name}-calibrated",
        base=base.name,
        machine=identity(base.type),
        date=datetime.date.today().isoformat(),
        flops_per_s=rates,
        memory_bandwidth_bytes_per_s=bandwidth,
        efficiency=Efficiency(families=families, host=host),
        samples=len(measured),
    )


def _rates(measured: Sequence[tuple[Op, float]], base: Device) -> dict[str, float]:
    """The highest rate seen for each number format; the base's own where it was not seen."""
    rates: dict[str, float] = {}
    for op, op_ms in measured:
        name = _RATES.get(dtype_of(op))
        if name is not None and op.flops:
            rates[name] = max(rates.get(name, 0.0), op.flops / op_ms * 1e3)
    for name in ("tf32", "fp16", "fp8", "int8"):
        known = getattr(base.flops_per_s, name)
        if known is not None and base.flops_per_s.fp32:
            rates.setdefault(name, known / base.flops_per_s.fp32 * rates["fp32"])
    return rates


def _samples(
    measured: Sequence[tuple[Op, float]], base: Device, rates: dict[str, float], bandwidth: float
) -> dict[Family, list[Sample]]:
    samples: dict[Family, list[Sample]] = defaultdict(list)
    for op, op_ms in measured:
        dtype = dtype_of(op)
        family = family_of(op, multiprocessors=base.multiprocessors, item_bytes=item_bytes_of(dtype))
        samples[family].append(
            Sample(
                family=family,
                measured_ms=op_ms,
                compute_ms=executed_flops(op) / rates.get(_RATES.get(dtype, "fp32"), rates["fp32"]) * 1e3,
                memory_ms=moved_bytes(op, family) / bandwidth * 1e3,
            )
        )
    return samples


def _copy_bytes_per_s(base: Device) -> float:
    """Bytes read and written each second by a copy much larger than the caches."""
    source = torch.ones(_COPY_BYTES // 4, device=base.type)
    target = torch.zeros_like(source)
    return 2 * _COPY_BYTES / OpTimer(base.type).run_ms(lambda: target.copy_(source), _COPIES) * 1e3
