"""What a search over devices found: the fastest, the cheapest for a sample or token, the smallest that fits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import RenderableType

from memfit.hardware import Price
from memfit.plans.search_result import PointStatus
from memfit.text import PrintedDocument

DeviceStatus = PointStatus | Literal["impossible"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePoint:
    """The fastest plan on one device. What a plan has is None where none fits; `impossible` ones say why in `reason`.

    `price` is None where no price is known. The rest is as in `SearchPoint`.
    """

    device: str
    title: str
    memory_bytes: int
    ranks: int
    status: DeviceStatus
    reason: str = ""
    price: Price | None = None
    budget_bytes: int | None = None
    peak_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    with_care: bool = False
    step_ms: float | None = None
    recompute_ms: float | None = None
    throughput_per_s: float | None = None
    minimum_budget_bytes: int | None = None

    @property
    def fits(self) -> bool:
        """Whether a plan stays within what the device has."""
        return self.peak_bytes is not None

    @property
    def usd_per_step(self) -> float | None:
        """What a step costs on all ranks; None without a plan or a price."""
        if self.step_ms is None or self.price is None:
            return None
        return self.price.usd_per_hour * self.ranks * self.step_ms / 3.6e6

    @property
    def usd_per_million(self) -> float | None:
        """What a million samples or tokens cost; None without a plan or a price."""
        if self.throughput_per_s is None or self.price is None:
            return None
        return self.price.usd_per_hour * self.ranks / 3600 / self.throughput_per_s * 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSearch(PrintedDocument):
    """Devices by memory, the smallest first. `counts` is what throughput counts. Answers leave out what needs care."""

    ranks: int
    counts: Literal["samples", "tokens"]
    points: tuple[DevicePoint, ...]
    complete: bool = True
    notes: tuple[str, ...] = ()

    @property
    def over(self) -> Literal["device"]:
        """What was searched."""
        return "device"

    @property
    def fits(self) -> bool:
        """Whether the step fits any device."""
        return any(point.fits for point in self.points)

    @property
    def fastest(self) -> DevicePoint | None:
        """The device with the shortest step."""
        return min(self._able, key=lambda point: point.step_ms or 0.0, default=None)

    @property
    def cheapest(self) -> DevicePoint | None:
        """The device on which a step costs least, of those whose price is known."""
        priced = [point for point in self._able if point.usd_per_step is not None]
        return min(priced, key=lambda point: point.usd_per_step or 0.0, default=None)

    @property
    def smallest(self) -> DevicePoint | None:
        """The device with the least memory, of several the faster one."""
        return min(self._able, key=lambda point: (point.memory_bytes, point.step_ms or 0.0), default=None)

    @property
    def _able(self) -> list[DevicePoint]:
        """Those that fit; with care only where there are no others."""
        fit = [point for point in self.points if point.fits]
        return [point for point in fit if not point.with_care] or fit

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        found = dataclasses.asdict(self)
        for point, values in zip(self.points, found["points"], strict=True):
            values |= {name: getattr(point, name) for name in ("fits", "usd_per_step", "usd_per_million")}
        answers = {name: getattr(self, name) for name in ("fastest", "cheapest", "smallest")}
        named = {name: None if point is None else point.device for name, point in answers.items()}
        return {"over": self.over, "fits": self.fits, **named, **found}

    def __rich__(self) -> RenderableType:
        from memfit.report import device_search_report

        return device_search_report(self)

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{name} {point.device}"
            for name in ("fastest", "cheapest", "smallest")
            if (point := getattr(self, name)) is not None
        )
        return f"DeviceSearch({shown or 'nothing fits'}; devices: {len(self.points)})"
