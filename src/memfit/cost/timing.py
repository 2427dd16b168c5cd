"""Times one recorded op on the local device with real tensors of its shape."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from memfit.capture import Op, TensorRef, call_of, real_tensor
from memfit.cost.processor_cache import measure_cache_bytes
from memfit.cost.roofline import index_bound, index_ends
from memfit.errors import InputError
from memfit.hardware import DeviceType

try:
    import resource
except ImportError:  # not on Windows
    resource = None


_REPEATS = 15
_COLD_REPEATS = 5
_BUDGET_S = 0.004
_FEWEST = 5
_FEW_FAULTS = 16
_PATTERN = 65_537
_VALUES = (0.5, 1.0)
"""Probabilities, and near one: an in-place product timed again and again must not sink into slow denormal numbers."""
_SMALL_BYTES = 1 << 16
_FLUSH_CUDA_BYTES = 256 << 20
_FLUSHES = 4
"""Before an op is timed without its tensors in the cache, so many times the cache is touched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTime:
    """Milliseconds of an op whose tensors are in the cache, and of one whose tensors are not."""

    hot_ms: float
    cold_ms: float

    @classmethod
    def median(cls, times: Sequence[OpTime]) -> OpTime:
        """The middle of several measurements, the lower of two: what disturbs a measurement makes it longer."""
        return cls(
            hot_ms=statistics.median_low(time.hot_ms for time in times),
            cold_ms=statistics.median_low(time.cold_ms for time in times),
        )

    def at(self, cold: float) -> float:
        """The time when this part of its bytes is not in the cache."""
        return self.hot_ms + cold * max(0.0, self.cold_ms - self.hot_ms)


class OpTimer:
    """Runs ops by themselves. Tensors of one op are gone before the next is timed.

    `cache_bytes` is the processor's cache, where it was measured before.
    """

    def __init__(self, device_type: DeviceType, cache_bytes: int | None = None) -> None:
        self.device = torch.device(device_type)
        flush_bytes = _FLUSH_CUDA_BYTES if device_type == "cuda" else _FLUSHES * (cache_bytes or measure_cache_bytes())
        self._flush = torch.zeros(flush_bytes // 4, device=self.device)

    def time(self, op: Op) -> OpTime:
        """Median times. Random numbers drawn here do not disturb the caller's generator."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            tensors = [self._tensor(op, i, ref) for i, ref in enumerate(op.inputs)]
            function, args, kwargs = call_of(op, tensors)

            def run() -> Any:
                return function(*args, **kwargs)

            def prepare() -> None:
                if op.name.split(".")[1] == "_grouped_mm" and len(tensors) > 2:
                    _move_ends(tensors[2])

            run()
            if self.device.type == "cuda":
                cold_ms = self._cuda_ms(run)
                return OpTime(hot_ms=cold_ms, cold_ms=cold_ms)
            hot_ms = self._cpu_ms(run, _REPEATS, flush=False, prepare=prepare)
            if op.view or op.read_bytes + op.written_bytes < _SMALL_BYTES:
                return OpTime(hot_ms=hot_ms, cold_ms=hot_ms)
            cold_ms = self._cpu_ms(run, _COLD_REPEATS, flush=True, prepare=prepare)
            return OpTime(hot_ms=hot_ms, cold_ms=cold_ms)

    def run_ms(self, run: Callable[[], Any], repeats: int) -> float:
        """The median of any call, its tensors not in the cache."""
        return self._cuda_ms(run) if self.device.type == "cuda" else self._cpu_ms(run, repeats, flush=True)

    def _cpu_ms(
        self, run: Callable[[], Any], repeats: int, *, flush: bool, prepare: Callable[[], None] = lambda: None
    ) -> float:
        """The median of the runs for which the system had to hand out the fewest new pages.

        A step soon has all its pages; an op by itself may get and lose them in every run, at many times its cost.
        """
        laps: list[tuple[int, float]] = []
        spent = 0.0
        while len(laps) < _FEWEST or (spent < _BUDGET_S and len(laps) < repeats):
            prepare()
            if flush:
                self._flush.add_(1.0)
            faults, began = page_faults(), time.perf_counter()
            result = run()
            seconds = time.perf_counter() - began
            laps.append(((page_faults() - faults) // _FEW_FAULTS, seconds))
            spent += seconds
            del result
        fewest = min(faults for faults, _ in laps)
        return statistics.median(seconds for faults, seconds in laps if faults == fewest) * 1e3

    def _cuda_ms(self, run: Callable[[], Any]) -> float:
        times = []
        for _ in range(_COLD_REPEATS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._flush.zero_()
            begin.record()
            result = run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
            del result
        return statistics.median(times)

    def _tensor(self, op: Op, index: int, ref: TensorRef) -> torch.Tensor:
        """A tensor of the op's geometry. Numbers are positive and differ; indices are valid."""
        tensor = real_tensor(ref)
        flat = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,))
        if tensor.dtype.is_floating_point and flat.numel():
            pattern = torch.empty(min(flat.numel(), _PATTERN)).uniform_(*_VALUES).to(tensor.dtype)
            for begin in range(0, flat.numel(), _PATTERN):
                part = flat[begin : begin + _PATTERN]
                part.copy_(pattern[: part.numel()])
        elif tensor.dtype in (torch.int32, torch.int64) and flat.numel():
            ends = index_ends(op, index)
            if ends is not None:  # equal groups: with zeros a product of groups would have nothing to do
                flat.copy_(torch.linspace(*ends, flat.numel()))
            else:
                flat.random_(0, max(1, index_bound(op, index)))
        return tensor.to(self.device)


def _move_ends(ends: torch.Tensor) -> None:
    """Divide rows into other groups of about the same size, as a router does in every step.

    oneDNN generates code for each number of rows that it has not multiplied before, which equal groups would hide.
    """
    size = int(ends[-1]) // len(ends)
    equal = torch.arange(1, len(ends), device=ends.device, dtype=ends.dtype) * size
    ends[:-1] = equal + torch.randint_like(equal, -(size // 4), size // 4 + 1)


def identity(device_type: DeviceType) -> str:
    """What measured times depend on: the device, torch's version and the threads."""
    if device_type == "cuda":
        return f"{torch.cuda.get_device_name()} torch {torch.__version__}"
    return f"{processor_name()} torch {torch.__version__} threads {torch.get_num_threads()}"


def processor_name() -> str:
    """The processor's name, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def page_faults() -> int:
    """How often this process was given a new page of memory; 0 where the system does not count."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt if resource is not None else 0


# -- Measured times on disk, one file for each device, torch version and number of threads ----------------------------


ENVIRONMENT = "MEMFIT_CACHE"
_FORMAT = 2
"""Times of format 1 had products of groups without rows, or always with the same."""


def cache_folder() -> Path:
    """Where measured times are kept: MEMFIT_CACHE, or memfit in the user's cache folder."""
    given = os.environ.get(ENVIRONMENT)
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memfit"


class TimeCache:
    """Times by key in one file. What others wrote meanwhile is kept when this one is saved."""

    def __init__(self, identity: str, folder: Path | None = None) -> None:
        name = re.sub(r"[^A-Za-z0-9.]+", "-", identity).strip("-")
        self.path = (folder or cache_folder()) / f"times-{_FORMAT}-{name}.json"
        self.times: dict[str, list[float]] = self._read()

    def _read(self) -> dict[str, list[float]]:
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=dict[str, list[float]])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as error:
            raise InputError(f"the measured times in {self.path} cannot be read ({error}); delete the file") from error

    def save(self) -> None:
        """Write what is known, at once or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.times = {**self._read(), **self.times}
        handle, name = tempfile.mkstemp(dir=self.path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.encode(dict(sorted(self.times.items()))))
            os.replace(name, self.path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise
