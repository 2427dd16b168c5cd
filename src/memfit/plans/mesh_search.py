"""`search(over="mesh")`: how so many ranks are best divided among the dimensions of a mesh.

Every shape is captured as its own code runs it and gets its own fastest plan, under the same budget. Throughput is
only comparable at the same amount of work, so one thing is the same in all shapes: the global batch, which is divided
among the data-parallel ranks, when the step is a function of its batch; the batch of a data-parallel rank, when it is a
step, whose batch is what it is. Shapes that differ in one dimension are captured each by itself: shards, buffers and
what each rank computes all change with them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from memfit.capture import Step, resolve_mesh, trace
from memfit.cost import Cost, Runtime
from memfit.errors import InputError, MemfitError
from memfit.hardware import Target
from memfit.plans.mesh_result import Fixed, MeshPoint, MeshSearch, batches_in, display_mesh
from memfit.plans.reservation import Room, reservation_under, with_room
from memfit.plans.resolve import TargetLike, resolve_cost, resolve_options, resolve_target
from memfit.plans.search_arguments import count_amount, count_samples
from memfit.plans.search_result import SearchInterrupted
from memfit.progress import Progress
from memfit.sharding import Sharding, find_bubbles, group_along
from memfit.solve import Problem, SolveOptions, Status, minimum_budget_bytes, solve
from memfit.text import counted

StepOfBatch = Callable[[int], Step]
WatchMesh = Callable[[MeshPoint], None]
_IN_A_NODE = "tp"
"""The dimension whose groups stay inside a node unless a shape is asked for: it waits for every one of its messages."""
_CONTEXT = "cp"
"""The dimension whose ranks share sequences; models by name shard their parameters over it too."""
_PIPELINE = "pp"
"""The dimension whose ranks hold different modules."""
_STATUS: dict[Status, Literal["optimal", "feasible", "infeasible"]] = {
    Status.OPTIMAL: "optimal",
    Status.FEASIBLE: "feasible",
    Status.INFEASIBLE: "infeasible",
}


def search_meshes(
    step: Step | StepOfBatch,
    *,
    target: TargetLike,
    ranks: int | None,
    dims: Iterable[str] | None = None,
    values: Iterable[Mapping[str, int]] | None = None,
    global_batch: int | None = None,
    budget: str | int | float | None = None,
    cost: Cost | str | None = None,
    options: SolveOptions | None = None,
    progress: bool = True,
    watch: WatchMesh | None = None,
) -> MeshSearch:
    """Plan every shape of a mesh of so many ranks, or those of `values`; see `search`."""
    if not isinstance(step, Step) and (not callable(step) or isinstance(step, torch.nn.Module)):
        raise InputError(
            f"over='mesh' takes a memfit.Step whose model is a factory, build(mesh), or a function of a batch that "
            f"returns one, not a {type(step).__name__}"
        )
    given = None if values is None else [resolve_mesh(each) for each in values]
    if given is not None:
        ranks = _same_ranks(given, ranks)
    if ranks is None:
        raise InputError("over='mesh' needs the number of GPUs: give ranks=64 (--gpus 64), or the shapes as values")
    aim = resolve_target(step, target, ranks)
    solver = resolve_options(options)
    if solver.optimizer:
        raise InputError("search keeps the optimizer's step as it is; leave optimizer=True out of its options")
    if isinstance(step, Step) and global_batch is not None:
        raise InputError(
            "a Step has the batch of one rank; give a function, lambda batch: memfit.Step(...), for a global batch"
        )
    if not isinstance(step, Step):
        global_batch = ranks if global_batch is None else global_batch
        if isinstance(global_batch, bool) or not isinstance(global_batch, int) or global_batch < 1:
            raise InputError(f"global_batch is {global_batch!r}; write a whole number of at least 1")
    tries = _Tries(
        step=step,
        target=aim,
        global_batch=global_batch,
        budget_bytes=aim.allowed_bytes(budget),
        lowers=budget is None,
        cost=cost,
        options=solver,
        show=progress,
        watch=watch,
    )
    names = _dims(step, dims, given, tries)
    shapes = list(shapes_of(ranks, names)) if given is None else given
    try:
        for number, shape in enumerate(shapes):
            tries.attempt(shape, f"{number + 1} of {len(shapes)}", asked=given is not None)
    except KeyboardInterrupt as interrupt:
        tries.notes.append(f"interrupted after {counted(len(tries.points), 'shape')} of {len(shapes)}")
        raise SearchInterrupted(tries.found(names, complete=False)) from interrupt
    reasons = {point.reason for point in tries.points if point.status == "impossible"}
    if tries.captured == 0 and len(reasons) == 1 and tries.raised is not None:
        raise tries.raised  # no shape of this step can be, and all for one reason: it is not the shape
    return tries.found(names, complete=True)


def shapes_of(ranks: int, dims: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yield every way to write a number of ranks as a product over the dimensions, the last ones small first."""
    if not dims:
        if ranks == 1:
            yield {}
        return
    *outer, last = dims
    for size in range(1, ranks + 1):
        if ranks % size == 0 and (outer or size == ranks):
            for rest in shapes_of(ranks // size, outer):
                yield {**rest, last: size}


@dataclass(kw_only=True)
class _Tries:
    """The shapes that were tried."""

    step: Step | StepOfBatch
    target: Target
    global_batch: int | None
    budget_bytes: int
    lowers: bool
    """Whether the budget is memfit's own, which leaves the caching allocator its room."""
    cost: Cost | str | None
    options: SolveOptions
    show: bool
    watch: WatchMesh | None
    points: list[MeshPoint] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    captured: int = 0
    raised: Exception | None = None
    counts: Literal["samples", "tokens"] = "samples"

    def attempt(self, shape: dict[str, int], which: str, *, asked: bool) -> None:
        """Plan one shape; what stands in its way is an answer."""
        with Progress(f"{display_mesh(shape)} ({which}): capturing", show=self.show) as working:
            reason = None if asked else self._too_wide(shape)
            try:
                point = self._impossible(shape, reason) if reason else self._plan(shape, which, working)
            except MemfitError as error:
                self.raised = self.raised or error
                point = self._impossible(shape, str(error).splitlines()[0])
            except Exception as error:  # of the step's own code, or of torch's below it
                self.raised = self.raised or error
                said = str(error).strip().splitlines()
                point = self._impossible(shape, f"{type(error).__name__}: {said[0] if said else 'without a message'}")
        self.points.append(point)
        if self.watch is not None:
            self.watch(point)

    def found(self, dims: Sequence[str], *, complete: bool) -> MeshSearch:
        """Return the shapes, the best first."""
        fixed: Fixed = "batch of a data-parallel rank" if isinstance(self.step, Step) else "global batch"
        samples = count_samples(self.step) if isinstance(self.step, Step) else self.global_batch
        return MeshSearch(
            target=self.target.device.title,
            ranks=self.target.ranks,
            ranks_per_node=min(self.target.ranks, self.target.ranks_per_node),
            dims=tuple(dims),
            budget_bytes=self.budget_bytes,
            fixed=fixed,
            samples=samples,
            counts=self.counts,
            points=tuple(sorted(self.points, key=lambda point: point.order)),
            complete=complete,
            notes=tuple(self.notes),
        )

    def step_of(self, shape: Mapping[str, int]) -> Step:
        """Return the step that one data-parallel rank of a shape runs."""
        if isinstance(self.step, Step):
            return self.step
        assert self.global_batch is not None
        parts = batches_in(shape)
        if self.global_batch % parts:
            raise InputError(f"a global batch of {self.global_batch} cannot be divided among {parts} ranks")
        made = self.step(self.global_batch // parts)
        if not isinstance(made, Step):
            raise InputError(f"the function of the batch returned a {type(made).__name__}, not a memfit.Step")
        return made

    def _too_wide(self, shape: Mapping[str, int]) -> str | None:
        size, node = shape.get(_IN_A_NODE, 1), min(self.target.ranks, self.target.ranks_per_node)
        if size <= node:
            return None
        return f"{_IN_A_NODE} {size} does not lie in a node of {node}; ask for the shape by itself to have it planned"

    def _impossible(self, shape: dict[str, int], reason: str) -> MeshPoint:
        return MeshPoint(mesh=shape, status="impossible", reason=reason)

    def _plan(self, shape: dict[str, int], which: str, working: Progress) -> MeshPoint:
        """Plan a shape; of a pipeline its first and its last stage, and what is worse of either counts.

        These wait for each other: the step takes as long as the schedule does with the times of both.
        """
        step, last = self.step_of(shape), shape.get(_PIPELINE, 1) - 1
        ranks = [self._plan_rank(step, shape, {}, which, working)]
        if last > 0 and ranks[0][0].fits:
            ranks.append(self._plan_rank(step, shape, {_PIPELINE: last}, which, working))
        if not all(point.fits for point, _ in ranks):
            return next(point for point, _ in ranks if not point.fits)
        found = together(ranks)
        largest = max(found, key=lambda point: point.peak_bytes or 0)
        slowest = max(found, key=lambda point: point.step_ms or 0.0)
        times = ("step_ms", "recompute_ms", "recomputed_units", "communication_ms", "exposed_ms", "throughput_per_s")
        care = any(point.with_care for point in found)
        return replace(largest, with_care=care, **{name: getattr(slowest, name) for name in times})

    def _plan_rank(
        self, step: Step, shape: dict[str, int], rank: dict[str, int], which: str, working: Progress
    ) -> tuple[MeshPoint, Sharding | None]:
        working.update(f"{display_mesh(shape)} ({which}): capturing{' its last stage' if rank else ''}")
        with _quiet_dtensor():
            captured = trace(step, target=self.target, mesh=shape, rank=rank or None)
        self.captured += 1
        working.update(f"{display_mesh(shape)} ({which}): planning")
        problem = Problem.of(Runtime.of(captured, resolve_cost(self.cost, self.target)), self.target, self.options)
        least_bytes = minimum_budget_bytes(problem)  # first: no budget below it is tried in vain
        budget_bytes = min(self.budget_bytes, self.target.usable_bytes) if self.lowers else self.budget_bytes
        solved = solve(problem, budget_bytes)
        working.update(f"{display_mesh(shape)} ({which}): simulating the caching allocator")
        if self.lowers:
            solved, reservation = with_room(problem, solved)
        else:
            reservation = reservation_under(problem, solved)
        replay = solved.replay
        step_ms = None if replay is None else problem.runtime.total_ms + problem.exposed_ms + solved.recompute_ms
        amount, self.counts = count_amount(step)
        rate = None
        if step_ms and amount is not None:
            rate = amount * step.accumulation_steps * batches_in(shape) * 1e3 / step_ms
        point = MeshPoint(
            mesh=shape,
            status=_STATUS.get(solved.status, "unknown"),
            batch=count_samples(step),
            nodes=self._nodes(shape),
            budget_bytes=solved.budget_bytes,
            gap=None if replay is None else solved.gap,
            peak_bytes=None if replay is None else replay.peak_bytes,
            peak_reserved_bytes=None if reservation is None else reservation.reserved_bytes,
            with_care=reservation is not None and reservation.room is not Room.ENOUGH,
            step_ms=step_ms,
            recompute_ms=None if replay is None else solved.recompute_ms,
            recomputed_units=None if replay is None else len(solved.chosen),
            communication_ms=0.0 if problem.sharding is None else problem.sharding.communication_ms,
            exposed_ms=problem.exposed_ms,
            throughput_per_s=rate,
            baseline_peak_bytes=problem.baseline_bytes,
            minimum_budget_bytes=least_bytes,
        )
        return point, problem.sharding

    def _nodes(self, shape: Mapping[str, int]) -> dict[str, int]:
        node = min(self.target.ranks, self.target.ranks_per_node)
        sizes = tuple(shape.items())
        return {name: group_along(sizes, (name,), node).nodes for name in shape}


def together(ranks: Sequence[tuple[MeshPoint, Sharding | None]]) -> list[MeshPoint]:
    """Return the ranks of a pipeline with the times that they have beside each other, not beside others like each."""
    points = [point for point, _ in ranks]
    pipelines = [() if sharding is None else sharding.pipelines for _, sharding in ranks]
    if len(ranks) == 1 or not all(len(each) == len(pipelines[0]) > 0 for each in pipelines):
        return points
    runs = len(pipelines[0])
    waited = [0.0] * len(ranks)
    for number in range(runs):
        times = [
            each[number].with_recompute((point.recompute_ms or 0.0) / runs)
            for point, each in zip(points, pipelines, strict=True)
        ]
        for place, bubble in enumerate(find_bubbles(times)):
            waited[place] += bubble.waited_ms
    return [
        _with_bubble(point, waited_ms - (0.0 if sharding is None else sharding.bubble_ms))
        for (point, sharding), waited_ms in zip(ranks, waited, strict=True)
    ]


def _with_bubble(point: MeshPoint, longer_ms: float) -> MeshPoint:
    """Return a point whose bubble is so much longer."""
    if point.step_ms is None or point.exposed_ms is None:
        return point
    step_ms = point.step_ms + longer_ms
    rate = point.throughput_per_s and point.throughput_per_s * point.step_ms / step_ms
    return replace(point, step_ms=step_ms, exposed_ms=point.exposed_ms + longer_ms, throughput_per_s=rate)


def _dims(
    step: Step | StepOfBatch, dims: Iterable[str] | None, given: list[dict[str, int]] | None, tries: _Tries
) -> tuple[str, ...]:
    """Return the dimensions to vary: those that are given, or that the factory says it knows as its `mesh_dims`."""
    if dims is None and given is not None:
        return tuple(dict.fromkeys(name for shape in given for name in shape))
    if dims is None:
        made = step if isinstance(step, Step) else tries.step_of({})
        dims = getattr(made.model, "mesh_dims", None)
        if dims is None:
            raise InputError(
                "say which dimensions of a mesh the model's factory knows, outermost first: dims=('dp', 'tp') "
                "(--dims dp,tp), or set them on the factory: build.mesh_dims = ('dp', 'tp')"
            )
    names = (dims,) if isinstance(dims, str) else tuple(dims)
    if not names or len(set(names)) < len(names) or not all(isinstance(name, str) and name for name in names):
        raise InputError(f"dims is {dims!r}; write the names of a mesh's dimensions, as in ('dp', 'tp')")
    if given is not None:
        raise InputError("dims and values were both given; values name their dimensions, leave dims out")
    names = _ordered(step, names, tries)
    if _IN_A_NODE in names and names[-1] != _IN_A_NODE:
        tries.notes.append(f"{_IN_A_NODE} is not the last dimension: its ranks lie apart, as those of the last do not")
    return names


def _ordered(step: Step | StepOfBatch, names: tuple[str, ...], tries: _Tries) -> tuple[str, ...]:
    """Return dimensions with `cp` in the order that a model by name can be built in, which is the one that it says."""
    if _CONTEXT not in names or _IN_A_NODE not in names:
        return names
    made = step if isinstance(step, Step) else tries.step_of({})
    known = getattr(made.model, "known_dims", ())
    ordered = tuple(name for name in known if name in names)
    if set(ordered) != set(names) or ordered == names:
        return names
    tries.notes.append(f"meshes are {' x '.join(ordered)}, outermost first, the order that this model is built in")
    return ordered


def _same_ranks(given: list[dict[str, int]], ranks: int | None) -> int:
    """Return how many ranks the shapes have, which must be the same for all."""
    if not given:
        raise InputError("values has nothing in it; write shapes such as [{'dp': 32, 'tp': 2}, {'dp': 16, 'tp': 4}]")
    own = {math.prod(shape.values()) for shape in given} | ({ranks} if ranks is not None else set())
    if len(own) > 1:
        raise InputError(f"the shapes have {' and '.join(map(str, sorted(own)))} ranks; compare shapes of as many")
    return own.pop()


@contextmanager
def _quiet_dtensor() -> Iterator[None]:
    """Keep DTensor's advice on the step's collectives, one line of it for each shape, off the error output."""
    logger: Any = logging.getLogger("torch.distributed.tensor._redistribute")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
