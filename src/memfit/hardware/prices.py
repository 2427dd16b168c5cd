"""What an hour of a device costs where it is rented, with source and date; users give their own prices instead."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

import msgspec

from memfit.errors import InputError
from memfit.hardware.schema import Figure, FigureTable, Source, read_toml

OWN = "your price"
"""The provider of a price that the user gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What one device costs for an hour, of whom, and when that was so."""

    usd_per_hour: float
    provider: str
    product: str = ""
    date: str = ""
    source: str = ""


class _Offer(FigureTable, frozen=True):
    device: str
    provider: str
    product: str
    usd_per_hour: Figure


class _Prices(FigureTable, frozen=True):
    offer: tuple[_Offer, ...]
    sources: dict[str, Source]


def list_prices() -> dict[str, tuple[Price, ...]]:
    """List the prices that are known, by device, the cheapest first; a device without any is not in it."""
    return dict(_shipped())


def find_price(device: str, own: Mapping[str, float] | None = None) -> Price | None:
    """Return the user's price of a device, or the cheapest that is known; None where there is none."""
    if own is not None and device in own:
        return Price(usd_per_hour=own[device], provider=OWN)
    return next(iter(_shipped().get(device, ())), None)


def check_price(device: str, usd_per_hour: object) -> float:
    """Return a price of the user's, or refuse it."""
    number = isinstance(usd_per_hour, int | float) and not isinstance(usd_per_hour, bool)
    if not number or not math.isfinite(usd_per_hour) or usd_per_hour <= 0:
        raise InputError(f"the price of {device} is {usd_per_hour!r}; write dollars for an hour of one device: 2.5")
    return float(usd_per_hour)


@cache
def _shipped() -> dict[str, tuple[Price, ...]]:
    with resources.as_file(resources.files("memfit.hardware") / "data" / "prices.toml") as path:
        table = msgspec.convert(read_toml(path), _Prices)
    found: dict[str, list[Price]] = {}
    for offer in table.offer:
        source = table.sources[offer.usd_per_hour.source]
        price = Price(
            usd_per_hour=check_price(offer.device, offer.usd_per_hour.value),
            provider=offer.provider,
            product=offer.product,
            date=source.date,
            source=source.title,
        )
        found.setdefault(offer.device, []).append(price)
    return {name: tuple(sorted(prices, key=lambda each: each.usd_per_hour)) for name, prices in found.items()}
