"""`memfit search --over mesh`: what is the best way to divide so many GPUs among the dimensions of a mesh."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memfit.cli.output import say, show_result
from memfit.cli.problems import STOPPED, UsageError
from memfit.cli.resolve import parse_mesh, resolve_steps, resolve_target, solve_options

if TYPE_CHECKING:
    from memfit.capture import Step
    from memfit.cli.commands.search import Search
    from memfit.plans import MeshPoint


@dataclass(frozen=True)
class MeshSearchRun:
    """One run of the command; `command` has what was written."""

    command: Search

    def run(self) -> int:
        """Search, tell of every shape on the error output, and show all of them in the end."""
        given = self.command
        self._check()
        shapes = None if given.values is None else _shapes(given.values)
        ranks = given.gpus or given.hardware.ranks
        if shapes is not None:
            ranks = _ranks_of(shapes, ranks)
        assert ranks is not None
        say(f"planning the meshes of {ranks} GPUs for {given.step.step}")  # torch takes seconds to import
        began = time.monotonic()
        from memfit.plans import SearchInterrupted, search

        hardware = replace(given.hardware, ranks=ranks)
        target = resolve_target(hardware)
        steps = resolve_steps(given.step)

        def of_batch(batch: int) -> Step:
            found = steps(replace(given.step, batch=batch)).step
            return _own_step(found, given.step.step)

        def tell(point: MeshPoint) -> None:
            say(f"{_told(point)} ({time.monotonic() - began:.0f} s)")

        code = 0
        try:
            found = search(
                of_batch if given.step.batch is None else of_batch(given.step.batch),
                over="mesh",
                target=target,
                ranks=ranks,
                dims=None if given.dims is None else [name.strip() for name in given.dims.split(",")],
                values=shapes,
                global_batch=given.global_batch,
                budget=given.hardware.budget,
                cost=given.step.cost,
                options=solve_options(given.solver, None, several_ranks=ranks > 1),
                watch=tell,
            )
        except SearchInterrupted as interrupt:
            if not interrupt.found.points:
                raise
            found, code = interrupt.found, STOPPED
        show_result(found, json=given.json)
        return code or (0 if found.fits else 3)

    def _check(self) -> None:
        given = self.command
        if given.hardware.mesh is not None:
            raise UsageError("--mesh is one shape; leave it out, or write it as --values")
        if given.hardware.rank is not None:
            raise UsageError("--rank: the first rank is planned, and of a pipeline the last stage too; leave it out")
        if given.gpus is not None and given.hardware.ranks not in (None, given.gpus):
            raise UsageError("--gpus and --ranks differ; leave --ranks out")
        for name, number in (("gpus", given.gpus), ("global-batch", given.global_batch)):
            if number is not None and number < 1:
                raise UsageError(f"--{name} is {number}; write a whole number of at least 1")
        if given.gpus is None and given.hardware.ranks is None and given.values is None:
            raise UsageError("--over mesh needs the number of GPUs: --gpus 64")
        if given.step.batch is not None and given.global_batch is not None:
            raise UsageError("--batch is that of each data-parallel rank, --global-batch that of all; leave one out")
        if given.largest is not None:
            raise UsageError("--largest is for the other searches; leave it out")
        solver = given.solver
        sharding = ("replicas", "shard_units", "param_dtype", "reduce_dtype", "shard_dtype")
        for name in ("force", "forbid", "units", *sharding):
            if getattr(solver, name):
                raise UsageError(f"--{name.replace('_', '-')} is not for --over mesh: the step shards itself")
        if solver.parallel != "fsdp":
            raise UsageError("--parallel is not for --over mesh: the step is parallel itself")


def _own_step(step: object, text: str) -> Step:
    from memfit.capture import Step

    if not isinstance(step, Step):
        raise UsageError(f"STEP: {text} is a trace, of one mesh; give the step it was captured from")
    return step


def _shapes(text: str) -> list[dict[str, int]]:
    try:
        return [parse_mesh(part) or {} for part in text.split("/")]
    except UsageError as error:
        raise UsageError(
            f"--values is {text!r}; write shapes with slashes between, such as dp=32,tp=2/dp=16,tp=4"
        ) from error


def _ranks_of(shapes: list[dict[str, int]], ranks: int | None) -> int:
    import math

    own = {math.prod(shape.values()) for shape in shapes}
    if len(own) > 1 or ranks not in (None, *own):
        shown = " and ".join(map(str, sorted(own | ({ranks} if ranks else set()))))
        raise UsageError(f"--values: the shapes have {shown} GPUs; compare shapes of as many")
    return own.pop()


def _told(point: MeshPoint) -> str:
    """Say in one line what was found for a shape."""
    from memfit.plans import display_mesh
    from memfit.report import display_rate
    from memfit.units import display_bytes, display_ms

    shape = display_mesh(point.mesh)
    if point.status == "impossible":
        return f"{shape}: cannot be: {point.reason}"
    if point.step_ms is None or point.peak_bytes is None:
        least = point.minimum_budget_bytes
        return f"{shape}: no plan fits" + ("" if least is None else f", which needs {display_bytes(least)}")
    rate = "" if point.throughput_per_s is None else f", {display_rate(point.throughput_per_s)}/s in all"
    care = ", with care" if point.with_care else ""
    return f"{shape}: {display_ms(point.step_ms)} a step{rate}, peak {display_bytes(point.peak_bytes)}{care}"
