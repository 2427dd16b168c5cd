"""The frontier of a search as a picture of characters: throughput over the values that were tried."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

_WIDTH, _HEIGHT = 60, 8
_WIDE = 32
"""From this ratio of the largest to the smallest value on, values are drawn by their logarithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A point of a picture: where it lies, what it is drawn as, and how it is coloured."""

    x: float
    y: float
    sign: str
    style: str = ""


def across(values: Sequence[float], size: float) -> dict[float, float]:
    """Return how far right values lie, from 0 to `size`; by their logarithm where they span much."""
    low, high = min(values), max(values)
    by_logarithm = low > 0 and high / low >= _WIDE
    places = {value: math.log(value) if by_logarithm else value for value in values}
    first, last = min(places.values()), max(places.values())
    return {value: size * (place - first) / ((last - first) or 1.0) for value, place in places.items()}


def draw_marks(marks: Sequence[Mark], *, title: str, top: str, left: str, right: str) -> Text:
    """Draw marks over an axis that begins at 0; later ones are drawn over earlier ones."""
    highest = max(mark.y for mark in marks)
    places = across([mark.x for mark in marks], _WIDTH - 1)
    rows: list[list[tuple[str, str]]] = [[(" ", "")] * _WIDTH for _ in range(_HEIGHT)]
    for mark in marks:
        row = _HEIGHT - 1 - round((_HEIGHT - 1) * mark.y / (highest or 1.0))
        rows[row][round(places[mark.x])] = (mark.sign, mark.style)
    text = Text(f"{title}\n")
    for number, row in enumerate(rows):
        text.append(f"{top if number == 0 else '0' if number == _HEIGHT - 1 else '':>9} ┤", style="dim")
        for sign, style in row:
            text.append(sign, style=style)
        text.append("\n")
    text.append(f"{'':>10}└{'─' * _WIDTH}\n{'':>11}{left}{right:>{max(1, _WIDTH - len(left))}}", style="dim")
    return text
