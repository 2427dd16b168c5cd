"""`search`: the best batch size, the longest sequence, what more ranks do; every value with its own fastest plan.

Note [Few captures]: every value is a capture, so few are tried. Up to where values fit is found by growing eightfold,
then by drawing a line through what two values need (the smallest budget of a value grows almost evenly with it) and
trying where it meets the budget, halving every third time. It ends when neighbours on the grid differ. For the fastest
batch the same is done with the peak without a plan, where recomputing begins; powers of two are tried, which kernels
like, unless the line through their neighbours puts them well below the best, and the gaps beside the best are halved
while its neighbours are slower. Few batch sizes are all tried. What fits is taken to fit at smaller values too.
Throughput need not rise and fall once, so among many the best is the best of those tried. Where the largest fits only
with care (the caching allocator would hold more than the device has), the gap to the largest that needs none is halved,
to one part of `_NEAR_CARE`.

Values between captures need none where traces scale (`search_captures.py`), and the best and the largest are captured
before they are returned. Many values that are given are compared in the same way: the ends are captured, and a value
that needs no plan gets none.

Note [Proofs last]: most of the time of a solve goes into the proof that no plan is faster by a thousandth. While values
are compared, a plan that is proven to add at most `_LOOSE_GAP` more than the least is enough. The best of them is then
solved to the end, and so is every other that might be faster yet. Few values that are given are all solved to the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, overload

from memfit.capture import Step, Trace, no_garbage_collection, trace
from memfit.cost import Cost, Runtime
from memfit.errors import InputError
from memfit.hardware import Device, Target
from memfit.memory import Timeline, find_room
from memfit.plans.device_result import DeviceSearch
from memfit.plans.device_search import WatchDevice, search_devices
from memfit.plans.mesh_result import MeshSearch
from memfit.plans.mesh_search import WatchMesh, search_meshes
from memfit.plans.reservation import Reservation, Room, reservation_under, with_room
from memfit.plans.resolve import (
    TargetLike,
    find_cast,
    find_gathered_cast,
    resolve_cost,
    resolve_options,
)
from memfit.plans.search_arguments import GRID, check_aim, check_largest, check_values, count_samples
from memfit.plans.search_captures import SearchCaptures
from memfit.plans.search_result import Over, PointStatus, Search, SearchInterrupted, SearchPoint
from memfit.progress import Progress
from memfit.solve import Limits, Problem, SolveOptions, Status, minimum_budget_bytes, solve
from memfit.text import counted

MakeStep = Callable[[int], Step | Trace]
Watch = Callable[[SearchPoint], None]
Measure = Callable[[SearchPoint], float | None]

_FIRST = {"batch": 1, "seq": 1024}
_GROWTH = 8
_TRIES = 28
_ALL = 8
"""Batch sizes that are all tried when no more than these fit."""
_NEAR = 32
"""The best batch is known to one part of this many."""
_NEAR_CARE = 16
"""So is the largest that needs no care."""
_LOOSE_GAP = 0.01
"""Of the time that a plan adds, while values are compared (Note [Proofs last])."""
_SLOWER = 0.95
"""A batch size is not tried when the line through its neighbours gives it less than this part of the best rate."""
_AS_FAST = 0.99
"""Neighbours with at least this part of the best rate leave nothing to look for between."""
_MANY = 5
"""From so many given values on, their traces follow from captures of a few."""
_DEGREE = {"batch": 1, "seq": 2}
_PROVEN = 4
"""How many values are solved to the end at most, of those that may be the best."""
_STATUS: dict[Status, PointStatus] = {
    Status.OPTIMAL: "optimal",
    Status.FEASIBLE: "feasible",
    Status.INFEASIBLE: "infeasible",
}


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
    tries = _Tries(
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
        _try_values(tries, given, grid, end)
        if not tries.confirm():
            tries.notes[:] = [f"traces do not scale with {over} here: every value was captured"]
            _try_values(tries, given, grid, end)
    except KeyboardInterrupt as interrupt:
        tries.notes.append(f"interrupted after {counted(len(tries.points), 'value')}: the search had not ended")
        raise SearchInterrupted(_found(tries, grid, complete=False)) from interrupt
    return _found(tries, grid, complete=True)


def _try_values(tries: _Tries, given: list[int] | None, grid: int, end: int) -> None:
    if given is not None:
        _in_order(tries, given)
    elif tries.over == "ranks":
        _in_order(tries, [1 << power for power in range(end.bit_length())], all_of_them=True)
    else:
        _search_grid(tries, grid, end)


def _found(tries: _Tries, grid: int, *, complete: bool) -> Search:
    if tries.refused is not None:
        tries.notes.append(f"there is no step for {tries.over} {tries.refused}: {tries.refusal}")
    return Search(
        over=tries.over,
        target=tries.target.device.title,
        ranks=None if tries.over == "ranks" else tries.target.ranks,
        budget_bytes=tries.budget_bytes,
        counts="tokens" if tries.over == "seq" else "samples",
        grid=grid,
        complete=complete,
        refused=tries.refused,
        captured=len(tries.captures.captured),
        points=tuple(tries.points[value] for value in sorted(tries.points)),
        notes=tuple(tries.notes),
    )


@dataclass(kw_only=True)
class _Tries:
    """The values that were tried. A value that cannot be made into a step ends the values, unless it is the first."""

    make_step: MakeStep | Step | Trace
    over: Over
    target: Target
    budget_bytes: int
    lowers: bool
    """Whether the budget is memfit's own, which leaves the caching allocator its room."""
    cost: Cost | str | None
    options: SolveOptions
    show: bool
    watch: Watch | None = None
    loose: bool = False
    """Whether plans need not be proven yet (Note [Proofs last])."""
    quick: bool = False
    """Whether a value that needs no plan gets none, nor its smallest budget."""
    points: dict[int, SearchPoint] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    refused: int | None = None
    refusal: str = ""
    captures: SearchCaptures = field(init=False)
    _captured: dict[bool, Trace] = field(default_factory=dict)
    """The last trace of a step, on one rank and on several."""
    _amounts: dict[int, int | None] = field(default_factory=dict)
    """The samples or tokens of the steps that were made, by value."""
    _fastest: tuple[int, Problem, int | None] | None = None
    """The value with the highest throughput so far, its problem and the samples or tokens of its step."""

    def __post_init__(self) -> None:
        self.captures = SearchCaptures(capture=self._capture, degree=_DEGREE.get(self.over, 1))
        self.captures.off = self.over not in _DEGREE

    def confirm(self) -> bool:
        """Capture the best and the largest value; where a trace is not what was taken for it, forget the others' too.

        Returns False then: the values have to be tried again.
        """
        able = [point for point in self.points.values() if point.fits]
        best = max(able, key=lambda point: (*_merit(point), -point.value), default=None)
        largest = max((point.value for point in able), default=None)
        wanted = [] if best is None or largest is None else list(dict.fromkeys((best.value, largest)))
        with self._working(f"{self.over} {' and '.join(map(str, wanted))}: capturing what is the answer"):
            if self.captures.confirm(wanted):
                return True
        for value in self.captures.give_up():
            self.points.pop(value, None)
        self._fastest = None
        return False

    def at(self, value: int) -> SearchPoint | None:
        """Return the point of a value, None when there is no step for it."""
        if value in self.points:
            return self.points[value]
        if self.refused is not None and value >= self.refused:
            return None
        try:
            with self._working(f"{self.over} {value}: capturing and planning") as say, no_garbage_collection():
                self._try(value, say)
        except InputError as error:
            if not self.points:
                raise
            self.refused, self.refusal = value, str(error).splitlines()[0]
            return None
        return self._hear(value)

    def prove(self, value: int) -> SearchPoint:
        """Solve a value that was tried to the end."""
        with self._working(f"{self.over} {value}: proving that no plan is faster") as say:
            if self._fastest is None or self._fastest[0] != value:
                self._fastest = (value, *self._problem(value))
            self.points[value] = self._point(value, *self._fastest[1:], self.options.limits, say, final=True)
        return self._hear(value)

    def _hear(self, value: int) -> SearchPoint:
        if self.watch is not None:
            self.watch(self.points[value])
        return self.points[value]

    def fits(self, value: int) -> bool:
        """Return whether a plan fits, for a value that has a step."""
        point = self.at(value)
        return point is not None and point.fits

    def _try(self, value: int, say: Callable[[str], None]) -> None:
        problem, amount = self._problem(value)
        given = self.options.limits
        limits = replace(given, gap=max(given.gap, _LOOSE_GAP)) if self.loose else given
        say(f"{self.over} {value}: planning")
        point = self._point(value, problem, amount, limits, say)
        self.points[value] = point
        fastest = None if self._fastest is None else self.points[self._fastest[0]]
        if point.fits and (fastest is None or _merit(point) > _merit(fastest)):
            self._fastest = value, problem, amount

    def _problem(self, value: int) -> tuple[Problem, int | None]:
        captured = self.captures.at(value)
        target, amount = self._target(value), self._amount(value)
        return Problem.of(Runtime.of(captured, resolve_cost(self.cost, target)), target, self.options), amount

    def _point(
        self,
        value: int,
        problem: Problem,
        amount: int | None,
        limits: Limits,
        say: Callable[[str], None],
        *,
        final: bool = False,
    ) -> SearchPoint:
        target, whole = problem.target, problem.replay(())
        allowed_bytes = min(self.budget_bytes, target.usable_bytes) if self.lowers else self.budget_bytes
        point = SearchPoint(
            value=value,
            status="infeasible",
            allowed_bytes=allowed_bytes,
            budget_bytes=allowed_bytes,
            baseline_peak_bytes=whole.peak_bytes,
            ranks=target.ranks,
        )
        base_ms = problem.runtime.total_ms + problem.exposed_ms
        if self.quick and whole.peak_bytes <= allowed_bytes and not self.options.force:
            enough, _ = find_room(target, whole)
            if enough is not None:
                return _planned(replace(point, status="optimal", gap=0.0), whole, enough, base_ms, 0.0, amount)
        problem = problem.with_limits(limits)
        least_bytes = None if self.quick else minimum_budget_bytes(problem)  # first: nothing below it is tried in vain
        solved = solve(problem, allowed_bytes)
        say(f"{self.over} {value}: simulating the caching allocator")
        if self.lowers:
            # No plan with less budget is faster: one that is not the best with all of it need not be worked out.
            best_ms = self._step_ms_of_best(amount)
            thorough = final or not self.quick or base_ms + solved.recompute_ms < best_ms
            solved, reservation = with_room(problem, solved, thorough=thorough)
        else:
            reservation = reservation_under(problem, solved)
        point = replace(
            point,
            status=_STATUS.get(solved.status, "unknown"),
            budget_bytes=solved.budget_bytes,
            minimum_budget_bytes=least_bytes if least_bytes is not None else solved.minimum_budget_bytes,
        )
        if solved.replay is None or reservation is None:
            return point
        point = replace(point, gap=solved.gap)
        return _planned(point, solved.replay, reservation, base_ms, solved.recompute_ms, amount)

    def _step_ms_of_best(self, amount: int | None) -> float:
        """Return how long a step of this amount would take at the highest throughput so far."""
        able = [each for each in self.points.values() if each.throughput_per_s and not each.with_care]
        rates = [(each.throughput_per_s or 0.0) / each.ranks for each in able]
        return amount * 1e3 / max(rates) if amount is not None and rates else math.inf

    def _amount(self, value: int) -> int | None:
        """Return the samples or tokens of one rank's step; None when they are not known."""
        if value in self._amounts:
            return self._amounts[value]
        made, amount = next(iter(self._amounts.items()))
        return None if amount is None else amount * value // made

    def _capture(self, value: int) -> Trace:
        made = self.make_step if isinstance(self.make_step, Step | Trace) else self.make_step(value)
        if not isinstance(made, Step | Trace):
            raise InputError(
                f"make_step({value}) returned a {type(made).__name__}, not a memfit.Step; write for example "
                f"lambda {self.over}: memfit.Step(model, memfit.spec(({self.over}, 512)), loss=...)"
            )
        amount = None
        if isinstance(made, Step):
            samples = value if self.over == "batch" else count_samples(made)
            if samples is not None:
                amount = samples * made.accumulation_steps * (value if self.over == "seq" else 1)
        elif self.over == "batch":
            amount = value
        self._amounts[value] = amount
        if isinstance(made, Trace):
            return made
        target = self._target(value)
        if isinstance(self.make_step, Step) and (known := self._captured.get(target.ranks > 1)) is not None:
            return known
        # cast as `plan` casts it, so that both find the same; on one rank nothing is cast
        options = self.options.shard
        captured = trace(made, target=self.target, cast=find_cast(made, target, options))
        cast = find_gathered_cast(captured, target, options)
        if cast is not None:
            captured = trace(made, target=self.target, cast=cast)
        self._captured[target.ranks > 1] = captured
        return captured

    def prepare(self, values: list[int]) -> None:
        """Capture what the traces of these values follow from, as far as there are steps."""
        with self._working(f"{self.over} {values[0]} to {values[-1]}: capturing what is between"), suppress(InputError):
            self.captures.prepare(values)

    def _target(self, value: int) -> Target:
        return Target.parse(self.target, ranks=value) if self.over == "ranks" else self.target

    @contextmanager
    def _working(self, doing: str) -> Iterator[Callable[[str], None]]:
        """Show on the terminal what is being done; gives what changes the words."""
        fit = [each for each, point in self.points.items() if point.fits]
        so_far = f" ({len(self.points)} tried, up to {max(fit)} fits)" if fit else ""
        with Progress(f"{doing}{so_far}", show=self.show) as progress:
            yield lambda words: progress.update(f"{words}{so_far}")


def _planned(
    point: SearchPoint,
    replay: Timeline,
    reservation: Reservation,
    base_ms: float,
    recompute_ms: float,
    amount: int | None,
) -> SearchPoint:
    """Return the point of a plan that fits; `amount` are the samples or tokens of one rank's step."""
    step_ms = base_ms + recompute_ms
    return replace(
        point,
        peak_bytes=replay.peak_bytes,
        peak_reserved_bytes=reservation.reserved_bytes,
        with_care=reservation.room is not Room.ENOUGH,
        step_ms=step_ms,
        recompute_ms=recompute_ms,
        throughput_per_s=amount * point.ranks * 1e3 / step_ms if step_ms and amount is not None else None,
    )


def _in_order(tries: _Tries, values: list[int], *, all_of_them: bool = False) -> None:
    if len(values) >= _MANY and tries.over != "ranks":
        tries.loose = tries.quick = True
        tries.prepare(values)
    for place, value in enumerate(values):
        if not tries.fits(value) and not all_of_them and tries.refused is None:
            left = values[place + 1 :]
            if left:
                tries.notes.append(f"{_listed(left)} not tried: {tries.over} {value} does not fit")
            break
    if tries.loose:
        _prove_the_fastest(tries)
        largest = max((value for value, point in tries.points.items() if point.fits), default=None)
        if largest is not None and tries.points[largest].with_care:
            tries.prove(largest)


def _search_grid(tries: _Tries, grid: int, end: int) -> None:
    tries.loose = True
    first = max(grid, min(_FIRST[tries.over], end // grid * grid))
    largest = _boundary(tries, first, grid, end // grid * grid, _min_budget)
    if largest is None:
        return
    if largest == end // grid * grid and tries.refused is None:
        tries.notes.append(f"the search ended at {tries.over} {largest}; a larger limit lets it go on (--largest)")
    _without_care(tries, grid)
    if tries.over == "batch":
        _fastest(tries, largest)
        _prove_the_fastest(tries)
    else:
        tries.prove(max(value for value, point in tries.points.items() if point.fits))


def _min_budget(point: SearchPoint) -> float | None:
    return point.minimum_budget_bytes


def _baseline_peak(point: SearchPoint) -> float | None:
    return point.baseline_peak_bytes


def _without_care(tries: _Tries, grid: int) -> None:
    """Narrow the gap between the largest value that the allocator has room for and the next."""
    while len(tries.points) < _TRIES:
        fit = {value: point.with_care for value, point in tries.points.items() if point.fits}
        low = max((value for value, care in fit.items() if not care), default=0)
        high = min((value for value in fit if value > low), default=low)
        if high - low <= max(grid, low // _NEAR_CARE) or tries.at(_round_between(low, high, grid)) is None:
            return


def _round_between(low: int, high: int, grid: int) -> int:
    """Return a value of the grid near the middle of two, as round as there is one: the search may come back to it."""
    first, last = low + -(-(high - low) // 4), high - -(-(high - low) // 4)
    step = grid
    while first <= last // (2 * step) * (2 * step):
        step *= 2
    rounded = (low + high) // 2 // step * step
    return rounded if first <= rounded <= last else max(grid, last // step * step)


def _fastest(tries: _Tries, largest: int) -> None:
    """Try the batch sizes that may be the fastest of those that fit."""
    if largest > _ALL:
        _boundary(tries, 1, 1, largest, _baseline_peak)
    values = range(1, largest + 1) if largest <= _ALL else [1 << power for power in range(largest.bit_length())]
    for value in values:
        if len(tries.points) < _TRIES and (largest <= _ALL or _may_be_fast(tries, value)):
            tries.at(value)
    _narrow(tries)


def _may_be_fast(tries: _Tries, value: int) -> bool:
    """Return False where the line through the step times of its neighbours makes a value much slower than the best."""
    times = {each: point.step_ms for each, point in tries.points.items() if point.step_ms and point.throughput_per_s}
    below = max((each for each in times if each < value), default=None)
    above = min((each for each in times if each > value), default=None)
    best = max((point.throughput_per_s or 0.0 for point in tries.points.values()), default=0.0)
    if value in times or below is None or above is None:
        return True
    step_ms = times[below] + (times[above] - times[below]) * (value - below) / (above - below)
    samples_ms = (tries.points[above].throughput_per_s or 0.0) * times[above] / above  # of a batch of one
    return step_ms <= 0 or value * samples_ms / step_ms >= _SLOWER * best


def _prove_the_fastest(tries: _Tries) -> None:
    """Solve the best to the end, and others while they may be faster (Note [Proofs last])."""
    proven: set[int] = set()
    for _ in range(_PROVEN):
        able = [point for point in tries.points.values() if point.fits and point.throughput_per_s]
        if not able:
            return
        best = max(able, key=lambda point: (*_merit(point), -point.value))
        may = [point for point in able if _merit_at_most(point) > _merit(best) or point is best]
        may = [point for point in may if point.value not in proven and point.gap]
        if not may:
            return
        value = best.value if best in may else max(may, key=_merit_at_most).value
        tries.prove(value)
        proven.add(value)


def _merit_at_most(point: SearchPoint) -> tuple[bool, float]:
    """Return the merit of a value as if its plan took as little time as is proven possible."""
    care, rate = _merit(point)
    step_ms = point.step_ms or 0.0
    least_ms = step_ms - (point.recompute_ms or 0.0) * (point.gap or 0.0)
    return care, rate * step_ms / least_ms if least_ms > 0 else rate


def _boundary(tries: _Tries, first: int, grid: int, end: int, measure: Measure) -> int | None:
    """Find the largest value whose measure is within the budget, None when none is; see Note [Few captures]."""

    def within(value: int) -> bool:
        point = tries.at(value)
        if point is None or measure is _min_budget:
            return point is not None and point.fits
        needed = measure(point)
        return needed is not None and needed <= tries.budget_bytes

    low, high = 0, end + grid  # of each, nothing is known but that the answer lies between
    known = sorted(tries.points)
    for value in known:
        if within(value):
            low = max(low, value)
    above = [value for value in known if value > low and not within(value)]
    high = min([high, *above])
    limit = tries.budget_bytes
    value = first if not known else _guess(tries, low, high, grid, measure, limit, 0, bounded=high <= end)
    turn = 0
    while high - low > grid and len(tries.points) < _TRIES:
        if within(value):
            low = max(low, value)
        else:
            high = min(high, value, *([] if tries.refused is None else [tries.refused]))
        turn += 1
        value = _guess(
            tries, low, high, grid, measure, limit, turn if high <= end else 0, bounded=high <= end or low == 0
        )
    return low or None


def _guess(
    tries: _Tries,
    low: int,
    high: int,
    grid: int,
    measure: Measure,
    limit: float,
    turn: int,
    *,
    bounded: bool = True,
) -> int:
    """Guess the next value between two: where the line through two points meets the limit, or half way (turn 2).

    While nothing is known to lie above the limit (`bounded` is False), at most `_GROWTH` times the last.
    """
    lowest, highest = low + grid, high - grid
    if low:
        highest = min(highest, low * _GROWTH)
    else:
        lowest = grid
    value = (low + high) // 2 if turn % 3 == 2 else None
    line = [(point.value, measure(point)) for point in tries.points.values()]
    line = sorted((at, needs) for at, needs in line if needs is not None)
    if value is None and len(line) > 1:
        near = sorted(line, key=lambda each: abs(each[1] - limit))[:2]
        (first, needs), (second, more) = sorted(near)
        if more > needs:
            value = math.floor(first + (limit - needs) * (second - first) / (more - needs))
    if value is None:
        value = (low + high) // 2 if bounded else low * _GROWTH
    return max(grid, min(max(value // grid * grid, lowest), max(highest, lowest)))


def _narrow(tries: _Tries) -> None:
    """Halve the gaps beside the fastest value, until they are narrow or what is beyond them is as fast."""
    while len(tries.points) < _TRIES:
        able = sorted(value for value, point in tries.points.items() if point.fits and point.throughput_per_s)
        if not able:
            return
        place = max(range(len(able)), key=lambda index: (*_merit(tries.points[able[index]]), -index))
        best = able[place]
        rate = tries.points[best].throughput_per_s or 0.0
        beside = [able[each] for each in (place - 1, place + 1) if 0 <= each < len(able)]
        slower = [each for each in beside if (tries.points[each].throughput_per_s or 0.0) < _AS_FAST * rate]
        wide = [(abs(each - best), each) for each in slower if abs(each - best) > max(1, best // _NEAR)]
        if not wide:
            return
        _, other = max(wide)
        if tries.at(_round_between(min(best, other), max(best, other), 1)) is None:
            return


def _merit(point: SearchPoint) -> tuple[bool, float]:
    """Return the sort key of a point: whether it fits with room to spare, then its throughput."""
    return not point.with_care, point.throughput_per_s or 0.0


def _listed(values: list[int]) -> str:
    shown = ", ".join(map(str, values[:4]))
    return shown if len(values) <= 4 else f"{shown} and {len(values) - 4} more"
