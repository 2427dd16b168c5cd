"""`search(over="device")`: on which device a step is fastest, on which it costs least, and which is the smallest.

The step is captured for every device, whose kernels may be others, and gets its own fastest plan there. Prices are
those of `hardware/data/prices.toml`, with source and date, or the user's; without one a device has no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from memfit.capture import Step, trace
from memfit.cost import Cost, Runtime
from memfit.errors import InputError, MemfitError
from memfit.hardware import Device, Target, check_price, find_price, list_devices, load_device
from memfit.plans.device_result import DevicePoint, DeviceSearch
from memfit.plans.reservation import Room, reservation_under, with_room
from memfit.plans.resolve import find_cast, find_gathered_cast, resolve_cost, resolve_options
from memfit.plans.search_arguments import count_amount
from memfit.plans.search_result import SearchInterrupted
from memfit.progress import Progress
from memfit.solve import Problem, SolveOptions, Status, minimum_budget_bytes, solve
from memfit.text import counted

WatchDevice = Callable[[DevicePoint], None]
_STATUS: dict[Status, Literal["optimal", "feasible", "infeasible"]] = {
    Status.OPTIMAL: "optimal",
    Status.FEASIBLE: "feasible",
    Status.INFEASIBLE: "infeasible",
}


def search_devices(
    step: Step,
    *,
    ranks: int | None,
    values: Iterable[str | Device] | None = None,
    prices: Mapping[str, float] | None = None,
    budget: str | int | float | None = None,
    cost: Cost | str | None = None,
    options: SolveOptions | None = None,
    progress: bool = True,
    watch: WatchDevice | None = None,
) -> DeviceSearch:
    """Plan a step on every GPU that is known, or on those of `values`; see `search`."""
    if not isinstance(step, Step):
        raise InputError(f"over='device' takes a memfit.Step, which is the same on all, not a {type(step).__name__}")
    if budget is not None and (not isinstance(budget, str) or not budget.endswith("%")):
        raise InputError(f"budget is {budget!r}; over devices it is a part of each, as in '90%', or left out")
    devices = _devices(values)
    own = {load_device(name).name: check_price(name, usd_per_hour) for name, usd_per_hour in (prices or {}).items()}
    solver = resolve_options(options)
    if solver.optimizer:
        raise InputError("search keeps the optimizer's step as it is; leave optimizer=True out of its options")
    tries = _Tries(
        step=step, ranks=1 if ranks is None else ranks, own=own, budget=budget, cost=cost, options=solver, show=progress
    )
    try:
        for number, device in enumerate(devices):
            point = tries.attempt(device, f"{device.name} ({number + 1} of {len(devices)})")
            if watch is not None:
                watch(point)
    except KeyboardInterrupt as interrupt:
        note = f"interrupted after {counted(len(tries.points), 'device')} of {len(devices)}"
        raise SearchInterrupted(tries.found(complete=False, notes=(note,))) from interrupt
    if tries.raised is not None and all(point.status == "impossible" for point in tries.points):
        raise tries.raised  # it is not the device
    return tries.found(complete=True)


def _devices(values: Iterable[str | Device] | None) -> list[Device]:
    """Return the devices by memory, the smallest first."""
    if values is None:
        found = [device for device in list_devices() if device.type == "cuda"]
    else:
        names = [values] if isinstance(values, str | Device) else list(values)
        found = [load_device(each) if isinstance(each, str) else each for each in names]
    if not found:
        raise InputError("values has nothing in it; write names of devices, such as ['a100-sxm-80gb', 'h100-sxm']")
    by_name = {device.name: device for device in found}
    return sorted(by_name.values(), key=lambda device: (device.memory_total_bytes, device.name))


@dataclass(kw_only=True)
class _Tries:
    """The devices that were tried."""

    step: Step
    ranks: int
    own: Mapping[str, float]
    budget: str | int | float | None
    cost: Cost | str | None
    options: SolveOptions
    show: bool
    points: list[DevicePoint] = field(default_factory=list)
    raised: Exception | None = None

    def attempt(self, device: Device, which: str) -> DevicePoint:
        """Plan the step on one device; what stands in its way is an answer."""
        point = DevicePoint(
            device=device.name,
            title=device.title,
            memory_bytes=device.memory_total_bytes,
            ranks=self.ranks,
            status="impossible",
            price=find_price(device.name, self.own),
        )
        try:
            with Progress(f"{which}: capturing and planning", show=self.show):
                point = self._plan(point, Target.parse(device, ranks=self.ranks))
        except MemfitError as error:
            self.raised = self.raised or error
            point = replace(point, reason=str(error).splitlines()[0])
        self.points.append(point)
        return point

    def found(self, *, complete: bool, notes: tuple[str, ...] = ()) -> DeviceSearch:
        """Return the devices that were tried."""
        unpriced = [point.device for point in self.points if point.price is None and point.fits]
        if unpriced:
            notes += (
                f"no price is known of {', '.join(unpriced)}; give it: prices={{{unpriced[0]!r}: ...}}, or --price",
            )
        return DeviceSearch(
            ranks=self.ranks,
            counts=count_amount(self.step)[1],
            points=tuple(self.points),
            complete=complete,
            notes=notes,
        )

    def _plan(self, point: DevicePoint, target: Target) -> DevicePoint:
        problem = self._problem(target)
        least_bytes = minimum_budget_bytes(problem)
        solved = solve(problem, target.allowed_bytes(self.budget))
        if self.budget is None:
            solved, reservation = with_room(problem, solved)
        else:
            reservation = reservation_under(problem, solved)
        point = replace(
            point,
            status=_STATUS.get(solved.status, "unknown"),
            budget_bytes=solved.budget_bytes,
            minimum_budget_bytes=least_bytes,
        )
        if solved.replay is None or reservation is None:
            return point
        step_ms = problem.runtime.total_ms + problem.exposed_ms + solved.recompute_ms
        amount = count_amount(self.step)[0]
        rate = None if amount is None else amount * self.step.accumulation_steps * self.ranks * 1e3 / step_ms
        return replace(
            point,
            peak_bytes=solved.replay.peak_bytes,
            peak_reserved_bytes=reservation.reserved_bytes,
            with_care=reservation.room is not Room.ENOUGH,
            step_ms=step_ms,
            recompute_ms=solved.recompute_ms,
            throughput_per_s=rate,
        )

    def _problem(self, target: Target) -> Problem:
        options = self.options.shard
        captured = trace(self.step, target=target, cast=find_cast(self.step, target, options))
        cast = find_gathered_cast(captured, target, options)
        if cast is not None:
            captured = trace(self.step, target=target, cast=cast)
        return Problem.of(Runtime.of(captured, resolve_cost(self.cost, target)), target, self.options)
