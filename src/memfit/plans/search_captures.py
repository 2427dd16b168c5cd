"""The traces of a search's values: a few are captured, those between follow from them (Note [Scaled traces]).

A fit is made of as many captures as a polynomial takes, and every other capture in its range must agree with it. It
gives traces inside its range only; a value outside is captured, and widens it. Where no capture has checked the fit,
`confirm` captures one of the values that the search is about to answer. Where that differs, nothing that the fit gave
is believed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from memfit.capture import ScaledTraces, Trace, fit_traces, is_same_step


@dataclass(kw_only=True)
class SearchCaptures:
    """Traces by value. `degree` is that of the polynomials: 1 for a batch, 2 for a sequence length."""

    capture: Callable[[int], Trace]
    degree: int
    captured: dict[int, Trace] = field(default_factory=dict)
    scaled: dict[int, Trace] = field(default_factory=dict)
    """Those that were not captured, by value."""
    off: bool = False
    """Whether every value is captured."""
    _fit: ScaledTraces | None = None
    _checked: bool = False
    _range: tuple[int, int] = (0, 0)

    def at(self, value: int) -> Trace:
        """Return the trace of a value, from the captures around it where they say what it is."""
        found = self.captured.get(value) or self.scaled.get(value)
        if found is None and self._fit is not None and self._range[0] < value < self._range[1]:
            found = self._fit.at(value)
            if found is not None:
                self.scaled[value] = found
        return self._really(value) if found is None else found

    def knows(self, value: int) -> bool:
        """Return whether the trace of a value is there, or follows from captures."""
        if value in self.captured or value in self.scaled:
            return True
        return self._fit is not None and self._range[0] < value < self._range[1]

    def prepare(self, values: list[int]) -> None:
        """Capture what the traces of these values follow from: the ends; the second too where the first is special."""
        between = [values[len(values) // 2]] if self.degree > 1 else []
        for value in (values[0], *between, values[-1]):
            self.at(value)
        if self._fit is None:
            self.at(values[1])

    def confirm(self, values: Iterable[int]) -> bool:
        """Capture one value that no capture was fitted to, the first of these if any, and compare it with the fit's.

        Returns False where they differ. Nothing is captured where a capture has agreed with the fit before.
        """
        if not self.scaled or self._checked:
            return True
        asked = [value for value in values if value in self.scaled]
        between = sorted(self.scaled)
        value = asked[0] if asked else between[len(between) // 2]
        self.captured[value] = self.capture(value)
        self._checked = is_same_step(self.scaled[value], self.captured[value])
        if self._checked:
            del self.scaled[value]
        return self._checked

    def give_up(self) -> list[int]:
        """Forget what was not captured and capture every value from now on; returns the values that were scaled."""
        forgotten = sorted(self.scaled)
        self.off, self._fit = True, None
        self.scaled.clear()
        return forgotten

    def _really(self, value: int) -> Trace:
        self.captured[value] = self.capture(value)
        if not self.off:
            self._find_fit()
        return self.captured[value]

    def _find_fit(self) -> None:
        """Fit the captures, without the smallest while they do not fit: a size of 1 has kernels of its own."""
        self._fit, sizes, needed = None, sorted(self.captured), self.degree + 1
        for first in range(len(sizes) - needed + 1):
            inside = sizes[first:]
            chosen = {inside[0], inside[-1], inside[len(inside) // 2]} if needed > 2 else {inside[0], inside[-1]}
            fit = fit_traces({size: self.captured[size] for size in chosen})
            others = [size for size in inside if size not in chosen]
            if fit is not None and all(fit.agrees(size, self.captured[size]) for size in others):
                self._fit, self._range, self._checked = fit, (inside[0], inside[-1]), bool(others)
                return
