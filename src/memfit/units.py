"""Bytes and times: parsed from what people write, displayed for people to read."""

from __future__ import annotations

import math
import numbers
import re
from fractions import Fraction

from memfit.errors import InputError

KiB = 2**10
MiB = 2**20
GiB = 2**30
TiB = 2**40

_UNITS = {
    "": 1,
    "b": 1,
    "byte": 1,
    "bytes": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KiB,
    "mib": MiB,
    "gib": GiB,
    "tib": TiB,
}
_LEAST_BYTES = MiB
"""A number without a unit below this is taken for one whose unit was forgotten: 80 GiB, or 81920 MiB."""
_DISPLAY = {"B": 1, "bytes": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB}
_SIZE = re.compile(r"\s*([+-]?\d[\d_]*(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*([A-Za-z]*|%)\s*")
_HOW = "write for example '72GiB', '80GB', '512 MiB', or a fraction such as 0.9"


def parse_bytes(size: str | int | float, *, total_bytes: int | None = None) -> int:
    """Turn a size into bytes. A float, '0.9' or '90%' is a fraction of `total_bytes`, which must be given.

    A number in a string needs a unit, unless it is so large that it can only be bytes; an int is bytes.
    """
    if isinstance(size, bool) or not isinstance(size, str | float | numbers.Integral):
        raise InputError(f"a size cannot be {size!r}; {_HOW}")
    if isinstance(size, numbers.Integral):
        return _not_negative(int(size), size)
    if isinstance(size, float):
        if 1 < size < math.inf:
            raise InputError(f"{size!r} is a float, which is a fraction, above 0 and at most 1; {_instead(size)}")
        return _fraction_of(size, total_bytes, size)
    match = _SIZE.fullmatch(size)
    if match is None:
        raise InputError(f"cannot read the size {size!r}; {_HOW}")
    number, unit = Fraction(match[1].replace("_", "")), match[2].lower()
    if unit == "%":
        return _fraction_of(number / 100, total_bytes, size)
    if unit in ("k", "m", "g", "t"):
        raise InputError(
            f"{size!r} is ambiguous; write {match[1]}{match[2].upper()}iB or {match[1]}{match[2].upper()}B"
        )
    if unit not in _UNITS:
        raise InputError(f"unknown unit {match[2]!r} in the size {size!r}; {_HOW}")
    if not unit and (number.denominator != 1 or "." in match[1]):
        if number > 1:
            raise InputError(f"{size!r} has no unit, and is no fraction of at most 1; {_with_unit(match[1])}")
        return _fraction_of(number, total_bytes, size)
    if not unit and abs(number) < _LEAST_BYTES:
        raise InputError(f"{size!r} has no unit; {_with_unit(match[1])}")
    return _not_negative(math.floor(number * _UNITS[unit]), size)


def display_bytes(n: int | float, unit: str | None = None) -> str:
    """Show bytes in `unit` ('B', 'KiB', 'MiB', 'GiB', 'TiB'), or in the largest one not above the number."""
    if unit is None:
        unit = next((u for u in ("TiB", "GiB", "MiB", "KiB") if abs(n) >= _DISPLAY[u]), "B")
    if unit not in _DISPLAY:
        raise InputError(f"unknown unit {unit!r}; choose one of {', '.join(_DISPLAY)}")
    if _DISPLAY[unit] == 1:
        return f"{n if isinstance(n, int) else round(n)} {unit}"
    return f"{n / _DISPLAY[unit]:.2f} {unit}"


def display_budget(n: int, space: str = " ") -> str:
    """Show bytes that somebody may copy as a budget: rounded up, so that what is shown is enough."""
    unit = next((u for u in ("TiB", "GiB", "MiB", "KiB") if n >= _DISPLAY[u]), "B")
    if _DISPLAY[unit] == 1:
        return f"{n}{space}{unit}"
    hundredths = -(-n * 100 // _DISPLAY[unit])
    return f"{hundredths // 100}.{hundredths % 100:02d}{space}{unit}"


def display_ms(ms: float) -> str:
    """Show milliseconds in the unit a person would choose, from microseconds to hours."""
    size = abs(ms)
    if size == 0:
        return "0 ms"
    if size < 1:
        return f"{ms * 1e3:.3g} us"
    if size < 1e3:
        return f"{ms:.1f} ms"
    if size < 60e3:
        return f"{ms / 1e3:.2f} s"
    if size < 3600e3:
        return f"{ms / 60e3:.1f} min"
    return f"{ms / 3600e3:.1f} h"


def _fraction_of(fraction: float | Fraction, total_bytes: int | None, written: object) -> int:
    if not 0 < fraction <= 1:
        raise InputError(f"{written!r} is not a fraction above 0 and at most 1; {_HOW}")
    if total_bytes is None:
        raise InputError(f"{written!r} is a fraction of a total that is not known here; write bytes, such as '72GiB'")
    return math.floor(Fraction(fraction) * total_bytes)


def _with_unit(number: str) -> str:
    """Say what to write for a number that may be GiB, MiB or a part of the device."""
    amount = Fraction(number.replace("_", ""))
    if amount <= 0:
        return _HOW
    if amount >= KiB:
        return f"write {number}MiB, {number}MB or {number}B"
    part = f", or {number}% of the device" if amount <= 100 else ""
    return f"write {number}GiB or {number}GB{part}"


def _instead(size: float) -> str:
    """Say what to write for a number above 1: few must be GiB, many bytes."""
    if size < KiB:
        return f"for GiB write '{size:g}GiB'"
    return f"for bytes write {math.floor(size)}, or '{size / 1e9:g}GB'"


def _not_negative(n: int, written: object) -> int:
    if n < 0:
        raise InputError(f"the size {written!r} is negative; {_HOW}")
    return n
