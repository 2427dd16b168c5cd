"""`search`: the best batch size, the longest sequence, what more ranks do; every value with its own fastest plan.

Every value is a capture, so few are tried (Note [Few captures], Note [Bounds]). Values between captures need none where
traces scale (`search_captures.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, overload

from memfit.capture import Step, Trace
from memfit.cost import Cost
from memfit.errors import InputError
from memfit.hardware import Device
from memfit.plans.device_result import DeviceSearch
from memfit.plans.device_search import WatchDevice, search_devices
from memfit.plans.mesh_result import MeshSearch
from memfit.plans.mesh_search import WatchMesh, search_meshes
from memfit.plans.resolve import TargetLike, resolve_options
from memfit.plans.search_arguments import GRID, check_aim, check_largest, check_values
from memfit.plans.search_grid import search_grid
from memfit.plans.search_result import Over, Search, SearchInterrupted
from memfit.plans.search_trials import MakeStep, Trials, Watch
from memfit.plans.search_values import try_in_order, try_values
from memfit.solve import SolveOptions
from memfit.text import counted


@overload
def search(
    make_step: MakeStep | Step,
    *,
    over: Literal["mesh"],
    target: TargetLike,
    ranks: int | None = None,
    budget: str | int | float | None = None,
    values: Iterable[Mapping[str, int]] | None = None,
    largest: None = None,
    cost: Cost | str | None = None,
    options: SolveOptions | None = None,
    progress: bool = True,
    watch: WatchMesh | None = None,
    dims: Iterable[str] | None = None,
    global_batch: int | None = None,
) -> MeshSearch: ...


@overload
def search(
    make_step: Step,
    *,
    over: Literal["device"],
    target: None = None,
    ranks: int | None = None,
    budget: str | int | float | None = None,
    values: Iterable[str | Device] | None = None,
    largest: None = None,
    cost: Cost | str | None = None,
    options: SolveOptions | None = None,
    progress: bool = True,
    watch: WatchDevice | None = None,
    prices: Mapping[str, float] | None = None,
) -> DeviceSearch: ...


@overload
def search(
    make_step: MakeStep | Step | Trace,
    *,
    over: Over = "batch",
    target: TargetLike,
    ranks: int | None = None,
    budget: str | int | float | None = None,
    values: Iterable[int] | None = None,
    largest: int | None = None,
    cost: Cost | str | None = None,
    options: SolveOptions | None = None,
    progress: bool = True,
    watch: Watch | None = None,
    dims: None = None,
    global_batch: None = None,
) -> Search: ...


def search(
    make_step: Any,
    *,
    over: Over | Literal["mesh", "device"] = "batch",
    target: TargetLike | None = None,
    ranks: int | None = None,
    budget: str | int | float | None = None,
    values: Iterable[Any] | None = None,
    largest: int | None = None,
    cost: Cost | str | None = None,
    options: SolveOptions | None = None,
    progress: bool = True,
    watch: Callable[[Any], None] | None = None,
    dims: Iterable[str] | None = None,
    global_batch: int | None = None,
    prices: Mapping[str, float] | None = None,
) -> Search | MeshSearch | DeviceSearch:
    """Find the batch of highest throughput, the longest sequence, what more ranks do, the best mesh or device.

    `make_step(value)` gives the step of a value; over ranks a step alone will do. Without `values`, every batch size or
    every sequence length that 128 divides may be the answer, up to `largest`, and as few as needed are tried; ranks
    double. `values` are tried in order until one does not fit. Nothing that fits is an answer too: `best` is None.

    Over `"mesh"`, all shapes of `ranks` ranks in the dimensions `dims`, outermost first, are captured as they are and
    planned, or those of `values`; `dims` are the factory's own `mesh_dims` unless given. `make_step` is a `Step` whose
    model is a factory, `build(mesh)`, and every data-parallel rank has its batch; or a function of a batch that gives
    one, and `global_batch` (one sample for each rank unless given) is divided among the data-parallel ranks.

    Over `"device"`, a `Step` is planned on every GPU that is known, or on those of `values`, `ranks` of each, and its
    cost is by list prices, with source and date, or by `prices`: dollars for an hour of a device, by name.

    `watch` hears of every value when it has been tried, and of the best again when its plan is proven. A search that is
    interrupted raises `SearchInterrupted`, a `KeyboardInterrupt` that has what was found so far as `found`.
    """
    if prices is not None and over != "device":
        raise InputError("prices are for over='device'; leave them out")
    if over == "device":
        for name, value in (("target", target), ("largest", largest), ("dims", dims), ("global_batch", global_batch)):
            if value is not None:
                raise InputError(f"{name} is not for over='device', whose values are the devices; leave it out")
        return search_devices(
            make_step,
            ranks=ranks,
            values=values,
            prices=prices,
            budget=budget,
            cost=cost,
            options=options,
            progress=progress,
            watch=watch,
        )
    if target is None:
        raise InputError("name the hardware to search for, for example target='h100-sxm'")
    if over == "mesh":
        if largest is not None:
            raise InputError("largest is for the other searches; over='mesh' takes ranks")
        return search_meshes(
            make_step,
            target=target,
            ranks=ranks,
            dims=dims,
            values=values,
            global_batch=global_batch,
            budget=budget,
            cost=cost,
            options=options,
            progress=progress,
            watch=watch,
        )
    if dims is not None or global_batch is not None:
        raise InputError("dims and global_batch are for over='mesh'; leave them out")
    given = check_values(values)
    end = check_largest(over, largest, given)
    aim = check_aim(make_step, over, target, ranks)
    solver = resolve_options(options)
    if solver.optimizer:
        raise InputError("search keeps the optimizer's step as it is; leave optimizer=True out of its options")
    budget_bytes = aim.allowed_bytes(budget)
    trials = Trials(
        make_step=make_step,
        over=over,
        target=aim,
        budget_bytes=budget_bytes,
        lowers=budget is None,
        cost=cost,
        options=solver,
        show=progress,
        watch=watch,
    )
    grid = 0 if given is not None or over == "ranks" else GRID[over]
    try:
        _try_values(trials, given, grid, end)
        if not trials.confirm():
            trials.notes[:] = [f"traces do not scale with {over} here: every value was captured"]
            _try_values(trials, given, grid, end)
    except KeyboardInterrupt as interrupt:
        trials.notes.append(f"interrupted after {counted(len(trials.points), 'value')}: the search had not ended")
        raise SearchInterrupted(_found(trials, grid, complete=False)) from interrupt
    return _found(trials, grid, complete=True)


def _try_values(trials: Trials, given: list[int] | None, grid: int, end: int) -> None:
    if given is not None:
        try_values(trials, given)
    elif trials.over == "ranks":
        try_in_order(trials, [1 << power for power in range(end.bit_length())], all_of_them=True)
    else:
        search_grid(trials, grid, end)


def _found(trials: Trials, grid: int, *, complete: bool) -> Search:
    if trials.refused is not None:
        trials.notes.append(f"there is no step for {trials.over} {trials.refused}: {trials.refusal}")
    return Search(
        over=trials.over,
        target=trials.target.device.title,
        ranks=None if trials.over == "ranks" else trials.target.ranks,
        budget_bytes=trials.budget_bytes,
        counts="tokens" if trials.over == "seq" else "samples",
        grid=grid,
        complete=complete,
        refused=trials.refused,
        captured=len(trials.captures.captured),
        points=tuple(trials.points[value] for value in sorted(trials.points)),
        notes=tuple(trials.notes),
    )
