"""`memfit search --over device`: which GPU is fastest, cheapest for a sample or token, or the smallest that fits."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memfit.cli.output import say, show_result, write_search
from memfit.cli.problems import STOPPED, UsageError
from memfit.cli.resolve import resolve_steps, solve_options

if TYPE_CHECKING:
    from memfit.cli.commands.search import Search
    from memfit.plans import DevicePoint


@dataclass(frozen=True)
class DeviceSearchRun:
    """One run of the command; `command` has what was written."""

    command: Search

    def run(self) -> int:
        """Search, tell of every device on the error output, and show all of them in the end."""
        given = self.command
        self._check()
        prices = None if given.price is None else _prices(given.price)
        say(f"planning {given.step.step} on every device")  # torch takes seconds to import
        began = time.monotonic()
        from memfit.capture import Step
        from memfit.plans import SearchInterrupted, search

        step = resolve_steps(given.step)(given.step).step
        if not isinstance(step, Step):
            raise UsageError(f"STEP: {given.step.step} is a trace, of one device; give the step it was captured from")

        def tell(point: DevicePoint) -> None:
            say(f"{_told(point)} ({time.monotonic() - began:.0f} s)")

        code = 0
        try:
            found = search(
                step,
                over="device",
                ranks=given.hardware.ranks,
                values=None if given.values is None else [name.strip() for name in given.values.split(",")],
                prices=prices,
                budget=given.hardware.budget,
                cost=given.step.cost,
                options=solve_options(given.solver, None, several_ranks=(given.hardware.ranks or 1) > 1),
                watch=tell,
            )
        except SearchInterrupted as interrupt:
            if not interrupt.found.points:
                raise
            found, code = interrupt.found, STOPPED
        write_search(found, given.html)
        show_result(found, json=given.json)
        return code or (0 if found.fits else 3)

    def _check(self) -> None:
        given = self.command
        if given.hardware.target is not None:
            raise UsageError("--target is what the search finds; leave it out, or write --values DEVICE,DEVICE")
        for name in ("mesh", "rank", "context", "nccl", "margin"):
            if getattr(given.hardware, name) is not None:
                raise UsageError(f"--{name} is of one device; leave it out over devices")
        for name in ("largest", "gpus", "dims", "global_batch"):
            if getattr(given, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} is not for --over device; leave it out")
        for name in ("force", "forbid", "units", "shard_units"):
            if getattr(given.solver, name):
                raise UsageError(f"--{name.replace('_', '-')} is not for --over device; plan that device by itself")
        if given.hardware.expandable_segments:
            raise UsageError("--expandable-segments is not for --over device; plan that device by itself")


def _prices(text: str) -> dict[str, float]:
    """Return prices that were written as `h100-sxm=2.5,l40s=0.9`."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, dollars = part.partition("=")
        try:
            found[name.strip()] = float(dollars)
        except ValueError as error:
            raise UsageError(
                f"--price is {text!r}; write dollars for an hour of a device, as in h100-sxm=2.5,l40s=0.9"
            ) from error
    return found


def _told(point: DevicePoint) -> str:
    """Say in one line what was found for a device."""
    from memfit.report import display_usd
    from memfit.units import display_bytes, display_ms

    if point.status == "impossible":
        return f"{point.device}: cannot be: {point.reason}"
    if point.step_ms is None or point.peak_bytes is None:
        least = point.minimum_budget_bytes
        return f"{point.device}: no plan fits" + ("" if least is None else f", which needs {display_bytes(least)}")
    cost = "" if point.usd_per_step is None else f", {display_usd(point.usd_per_step * 1e3)} for 1,000 steps"
    care = ", with care" if point.with_care else ""
    return f"{point.device}: {display_ms(point.step_ms)} a step{cost}, peak {display_bytes(point.peak_bytes)}{care}"
