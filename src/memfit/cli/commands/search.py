"""`memfit search`: the best batch size, the longest sequence, how many ranks, the best mesh, the best device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from memfit.cli.commands.search_device import DeviceSearchRun
from memfit.cli.commands.search_mesh import MeshSearchRun
from memfit.cli.options import Count, HardwareOptions, Json, SolverOptions, StepOptions, TimedStepOptions, arg
from memfit.cli.output import say, show_result, write_search
from memfit.cli.problems import STOPPED, UsageError
from memfit.cli.resolve import ResolvedStep, capture_step, resolve_steps, resolve_target, solve_options

if TYPE_CHECKING:
    from memfit.capture import Step, Trace
    from memfit.plans import SearchPoint

_FIRST = {"batch": 1, "seq": 128, "ranks": 1}
"""Values whose step has the names of units."""
_WHAT = {"batch": "batch size", "seq": "sequence length", "ranks": "number of ranks", "mesh": "mesh"}


@dataclass(frozen=True, kw_only=True)
class Search:
    """The batch size with the highest throughput, the longest sequence, what more ranks do, the best mesh or device.

    Every value gets its own fastest plan, and is told of on the error output when it has been tried. Ctrl-C ends the
    search and shows what was found so far; the exit code is then 130. STEP is a shape, an hf: configuration, or a
    function that takes `batch` or `seq`. The exit code is 3 when nothing fits.

    Over mesh, every shape of --gpus GPUs is captured as it is and planned. The global batch is the same in all of them
    (--global-batch), or with --batch that of each data-parallel rank. A step of your own has a model factory that takes
    `mesh`, and --dims says which dimensions it knows.

    Over device, STEP is planned on every GPU that memfit knows, or on --values; --ranks of each. Prices are list prices
    with source and date, where they are known, or yours (--price).

    examples:
      memfit search llama3-8b --target h100-sxm --ranks 8 --seq 8192
      memfit search llama3-8b --over seq --target h100-sxm --ranks 8 --batch 1
      memfit search train.py:step --over ranks --target a100-sxm-80gb --largest 32
      memfit search llama3-8b --over mesh --gpus 64 --target h100-sxm --seq 8192
      memfit search llama3.2-1b --over device --batch 4 --seq 4096 --price rtx-4090=0.5
    """

    step: TimedStepOptions
    hardware: HardwareOptions
    solver: SolverOptions
    over: Annotated[
        Literal["batch", "seq", "ranks", "mesh", "device"], arg("{batch,seq,ranks,mesh,device}", "batch")
    ] = "batch"
    """What to search for."""
    values: Annotated[str | None, arg("N,N,...")] = None
    """Try these, until one does not fit; over mesh these shapes, as in dp=32,tp=2/dp=16,tp=4; over device these."""
    largest: Annotated[Count, arg("N")] = None
    """Do not go beyond this."""
    gpus: Annotated[Count, arg("N")] = None
    """Over mesh: how many GPUs there are."""
    dims: Annotated[str | None, arg("NAME,NAME,...", "those that the step knows")] = None
    """Over mesh: its dimensions, outermost first, as in dp,tp; the last lies inside a node."""
    global_batch: Annotated[Count, arg("N", "one sample for each GPU")] = None
    """Over mesh: samples of all data-parallel ranks together."""
    price: Annotated[str | None, arg("DEVICE=DOLLARS,...")] = None
    """Over device: what an hour of one device costs you, as in h100-sxm=2.5,l40s=0.9."""
    html: Annotated[Path | None, arg("FILE")] = None
    """Write a page with the frontier as a picture, which opens in a browser."""
    json: Json = False
    """Print JSON."""

    def run(self) -> int:
        if self.over != "device" and self.price is not None:
            raise UsageError("--price is for --over device; leave it out, or add that")
        if self.over == "mesh":
            if self.html is not None:
                raise UsageError("--html is for the other searches; --over mesh prints its table, or --json")
            return MeshSearchRun(self).run()
        if self.over == "device":
            return DeviceSearchRun(self).run()
        self._check()
        for name in ("gpus", "dims", "global_batch"):
            if getattr(self, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} is for --over mesh; leave it out, or add that")
        if self.hardware.rank is not None:
            raise UsageError("--rank: a search plans the sharding itself, alike on all ranks; leave it out")
        if self.hardware.mesh is not None:
            raise UsageError(
                "--mesh: this search plans the sharding itself; give --ranks, plan one mesh at a time, or search "
                "--over mesh"
            )
        say(f"searching for the best {_WHAT[self.over]} of {self.step.step}")  # torch takes seconds to import
        began = time.monotonic()
        from memfit.plans import SearchInterrupted, search

        values = None if self.values is None else _numbers(self.values)
        names = (self.solver.force, self.solver.forbid, self.solver.units, self.solver.shard_units)
        if self.hardware.target is not None:
            resolve_target(self.hardware)
        steps = resolve_steps(self.step)
        first = None
        if self.over == "ranks" or any(names):
            first = self._step_at(steps, min(values) if values else _FIRST[self.over])
        target = resolve_target(self.hardware, first)
        trace = None if first is None or not any(names) else capture_step(first, target, self.hardware)
        options = solve_options(self.solver, trace, several_ranks=self.over == "ranks" or target.ranks > 1)
        code = 0
        try:
            found = search(
                partial(self._step_at, steps) if self.over != "ranks" or first is None else first,
                over=self.over,
                target=target,
                ranks=None if self.over == "ranks" else self.hardware.ranks,
                budget=self.hardware.budget,
                values=values,
                largest=self.largest,
                cost=self.step.cost,
                options=options,
                watch=partial(self._tell, began, set()),
            )
        except SearchInterrupted as interrupt:
            if not interrupt.found.points:
                raise
            found, code = interrupt.found, STOPPED
        write_search(found, self.html)
        show_result(found, json=self.json)
        return code or (0 if found.fits else 3)

    def _tell(self, began: float, told: set[int], point: SearchPoint) -> None:
        """Say what was found for one value, and of the best once more that it is proven."""
        from memfit.report import display_rate
        from memfit.units import display_bytes, display_ms

        seconds = f"{time.monotonic() - began:.0f} s"
        if point.value in told:
            step = "" if point.step_ms is None else f": {display_ms(point.step_ms)} a step"
            say(f"{self.over} {point.value} once more, no plan is faster{step} ({seconds})")
            return
        told.add(point.value)
        if point.least_step_ms is not None:
            at_least = display_ms(point.least_step_ms)
            say(f"{self.over} {point.value}: at least {at_least} a step, not the best ({seconds})")
            return
        if point.step_ms is None or point.peak_bytes is None:
            least = point.minimum_budget_bytes
            needs = "" if least is None else f", which needs {display_bytes(least)}"
            say(f"{self.over} {point.value}: no plan fits{needs} ({seconds})")
            return
        counts = "tokens" if self.over == "seq" else "samples"
        rate = "" if point.throughput_per_s is None else f", {display_rate(point.throughput_per_s)} {counts}/s"
        care = ", with care" if point.with_care else ""
        say(
            f"{self.over} {point.value}: {display_ms(point.step_ms)} a step{rate}, peak "
            f"{display_bytes(point.peak_bytes)}{care} ({seconds})"
        )

    def _check(self) -> None:
        given = self.hardware.ranks if self.over == "ranks" else getattr(self.step, self.over)
        if given is not None:
            raise UsageError(f"--{self.over} is what the search finds; leave it out, or write --largest {given}")
        if self.values is not None and self.largest is not None:
            raise UsageError("--largest: the last of --values is the largest; leave one out")
        if self.largest is not None and self.largest < 1:
            raise UsageError(f"--largest is {self.largest}; write a whole number of at least 1")
        if self.over == "ranks" and self.solver.replicas is not None and self.values is None:
            replicas = self.solver.replicas
            numbers = ",".join(str(replicas * shards) for shards in (2, 4, 8))
            raise UsageError(f"--replicas {replicas} does not divide every number of ranks; add --values {numbers}")
        grid = _FIRST["seq"]
        if self.over == "seq" and self.largest is not None and self.largest < grid:
            raise UsageError(f"--largest is {self.largest}; sequences are searched in steps of {grid}: write more")

    def _step_at(self, steps: Callable[[StepOptions], ResolvedStep], value: int) -> Step | Trace:
        """Return the step of a value; errors in it name --over, since the option of that name was not given."""
        from memfit.presets import NotTaken

        options = self.step
        if self.over == "batch":
            options = replace(options, batch=value)
        elif self.over == "seq":
            options = replace(options, seq=value)
        try:
            return steps(options).step
        except UsageError as error:
            cause = error.__cause__
            said = "; ".join((cause.why, *cause.advice[1:])) if isinstance(cause, NotTaken) else str(error)
            if isinstance(cause, NotTaken) or said.startswith(f"--{self.over}: "):
                said = f"--over {self.over}: {said.removeprefix(f'--{self.over}: ')}"
            raise UsageError(said.replace(f" (--{self.over})", "")) from error


def _numbers(text: str) -> list[int]:
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise UsageError(f"--values is {text!r}; write whole numbers with commas between, such as 1,2,4,8") from error
    if found[0] < 1:
        raise UsageError(f"--values is {text!r}; write whole numbers of at least 1")
    return found
