"""How near the predicted time of a step comes to the measured one, on this CPU, for eight models of the zoo.

First with the times of ops measured by themselves (benchmark mode), then with the roofline after calibration on
other models. Real steps run before and after the ops are timed, and medians are compared. Module times are measured
in whole steps under torch.profiler: forward by what runs inside a module, backward by the sequence numbers that tie
each backward function to its forward op.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import memfit
from memfit import Step
from memfit.capture import Phase, Trace
from memfit.cost import Benchmark, Roofline, Runtime, calibrate
from memfit.hardware import load_device

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.zoo import zoo_models

MODELS = ("llama", "gpt2", "bert", "t5", "vit", "resnet", "unet", "mamba")
STEPS_BEFORE = STEPS_AFTER = 12
PROFILED_STEPS = 9
MARK = "module:"


def seconds_of(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer | None, count: int) -> list[float]:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        step.execute(model, optimizer, "cpu")
        times.append(time.perf_counter() - began)
    return times


@contextmanager
def marked(model: nn.Module) -> Iterator[None]:
    """Every forward of a module is a range in the profile."""
    open_ranges: list[record_function] = []
    handles = []
    for path, module in model.named_modules():

        def enter(_: nn.Module, __: object, path: str = path) -> None:
            open_ranges.append(record_function(f"{MARK}{path}"))
            open_ranges[-1].__enter__()

        def leave(*_: object) -> None:
            open_ranges.pop().__exit__(None, None, None)

        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def measured_modules(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, float]:
    """Milliseconds of each module, forward and backward, the median of several steps."""
    laps: dict[str, list[float]] = defaultdict(list)
    for _ in range(PROFILED_STEPS):
        with marked(model), profile(activities=[ProfilerActivity.CPU]) as recorded:
            step.execute(model, optimizer, "cpu")
        for path, module_ms in _one_profile(recorded).items():
            laps[path].append(module_ms)
    return {path: statistics.median(times) for path, times in laps.items()}


def _one_profile(recorded: profile) -> dict[str, float]:
    events = recorded.events() or []
    ranges = [e for e in events if e.name.startswith(MARK)]
    starts = np.array([e.time_range.start for e in ranges])
    ends = np.array([e.time_range.end for e in ranges])
    times = np.array([e.time_range.elapsed_us() for e in ranges]) / 1e3
    inside: dict[int, np.ndarray] = {}
    for event in events:
        if event.sequence_nr >= 0 and event.scope == 0 and event.fwd_thread in (None, 0):
            within = np.flatnonzero((starts <= event.time_range.start) & (event.time_range.end <= ends))
            if len(within):
                inside[event.sequence_nr] = within
    for event in events:
        if event.scope == 1 and event.sequence_nr in inside:
            times[inside[event.sequence_nr]] += event.time_range.elapsed_us() / 1e3
    found: dict[str, float] = defaultdict(float)
    for each, module_ms in zip(ranges, times.tolist(), strict=True):
        found[each.name.removeprefix(MARK)] += module_ms
    return dict(found)


def spearman(pairs: list[tuple[float, float]]) -> float:
    """Rank correlation; equal values share the mean of their ranks."""

    def ranks(values: np.ndarray) -> np.ndarray:
        return np.array([((values < value).sum() + (values <= value).sum() - 1) / 2 for value in values])

    first, second = np.array(pairs).T
    return float(np.corrcoef(ranks(first), ranks(second))[0, 1])


def module_times(trace: Trace, runtime: Runtime, measured: dict[str, float]) -> list[tuple[float, float]]:
    """Predicted and measured milliseconds of the modules that run at least one op."""
    busy = {
        trace.calls[call].module
        for op in trace.ops
        if op.phase is not Phase.OPTIMIZER
        for call in trace.ancestors(op.call)
    }
    modules = runtime.modules
    return [(modules[path].forward_ms + modules[path].backward_ms, measured[path]) for path in measured if path in busy]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=MODELS, help="names of the zoo, or 'all'")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    names = tuple(zoo_models.STEPS) if options.models == ["all"] else tuple(options.models)
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    zoo_models.resize(batch=options.batch, length=options.length)

    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        calibrated = load_device(str(calibrate("cpu", folder=Path(folder)).save(Path(folder) / "cpu-calibrated.toml")))
        benchmark = Benchmark(folder=Path(folder))
        table = Table(
            title=f"one training step, batch {options.batch}, length {options.length}, {options.threads} thread(s)"
        )
        for heading in ("model", "ops", "measured ms", "benchmark ms", "error", "roofline ms", "error", "module ranks"):
            table.add_column(heading, justify="left" if heading == "model" else "right")
        benchmark_errors, roofline_errors, correlations = [], [], []
        all_modules: list[tuple[float, float]] = []
        for name in names:
            step = zoo_models.STEPS[name]()
            trace = memfit.trace(step, target="cpu")
            model = step.build_model()
            optimizer = step.build_optimizer(model)
            seconds_of(step, model, optimizer, 5)
            seconds = seconds_of(step, model, optimizer, STEPS_BEFORE)
            timed = Runtime.of(trace, benchmark)
            seconds += seconds_of(step, model, optimizer, STEPS_AFTER)
            estimated = Runtime.of(trace, Roofline(device=calibrated))
            real_ms = 1e3 * statistics.median(seconds)
            benchmark_errors.append(timed.total_ms / real_ms - 1)
            roofline_errors.append(estimated.total_ms / real_ms - 1)
            modules = module_times(trace, timed, measured_modules(step, model, optimizer))
            all_modules += modules
            correlations.append(spearman(modules))
            table.add_row(
                name,
                str(len(trace.ops)),
                f"{real_ms:.1f}",
                f"{timed.total_ms:.1f}",
                f"{benchmark_errors[-1]:+.1%}",
                f"{estimated.total_ms:.1f}",
                f"{roofline_errors[-1]:+.1%}",
                f"{correlations[-1]:.3f}",
            )
        console.print(table)
        if benchmark.skipped:
            print("not timed by themselves:", benchmark.skipped)
    inside = f"median {statistics.median(correlations):.3f}, least {min(correlations):.3f}"
    print(f"rank correlation of module times inside a model: {inside}")
    print(f"rank correlation of all {len(all_modules)} modules: {spearman(all_modules):.3f} (must be at least 0.95)")
    print(f"calibrated roofline: {summary(roofline_errors)} (median must be at most 20 %)")
    print(f"benchmark mode: {summary(benchmark_errors)} (must be at most 12 % and 30 %)")


def summary(errors: list[float]) -> str:
    absolute = [abs(error) for error in errors]
    return f"median error {statistics.median(absolute):.1%}, worst {max(absolute):.1%}"


if __name__ == "__main__":
    main()
