"""Random values that a step reads: what it does then differs from step to step, and the largest path is captured.

Note [Random paths]: a step reads a random value when it branches on one (LayerDrop's `if torch.rand([]) < p`), counts
with one (`.item()`) or takes a shape from one (`x[torch.rand(n) < p]`). Values are followed from the op that draws
them, through tensors whose values are known, to where they are read. A step that reads some is captured several times:
with what a fixed seed draws; with the highest, lowest and middle values; with low and high ones in turn; with values
in between, which make an index take each value of a small range; and then with those of one line after another turned
round. The capture with the highest peak is kept. Numbers of Python and numpy are read wherever they are drawn; their
generators are given states from which the wanted numbers come. What was not tried is never called safe: the note in
the trace says whether all values were tried, and which lines draw from a distribution that cannot be chosen from.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from memfit.capture.errors import CaptureError
from memfit.capture.random_numbers import Distribution, HostGenerator, HostState, host_state, set_state
from memfit.capture.trace_types import AFTER_STEP, BEFORE_STEP, Category, Trace
from memfit.paths import alike, folded
from memfit.units import display_bytes


@dataclass(frozen=True, slots=True)
class Draw:
    """How random values are drawn: at a quantile of their distribution, or as a seed gives them."""

    quantile: float | None = None
    seed: int = 0
    alternating: bool = False
    """Whether every second value is drawn at the opposite quantile."""

    @property
    def opposite(self) -> Draw:
        """The other end of the distribution."""
        return LOWEST if self.quantile is not None and self.quantile > 0.5 else HIGHEST


SEEDED = Draw()
LOWEST, MIDDLE, HIGHEST = Draw(0.0, seed=1), Draw(0.5, seed=2), Draw(1.0, seed=3)
_IN_TURN = (Draw(0.0, seed=4, alternating=True), Draw(1.0, seed=5, alternating=True))
_BETWEEN = tuple(Draw((2 * part + 1) / 16, seed=5 + part) for part in range(1, 7))
"""With the lowest and the highest, each value of a range of up to eight."""

SEVERAL_PATHS = "the step depends on random values"
"""Begins the note of a trace that is the largest of several paths."""
HOST_LINE = "Python's or numpy's generators"
_MOST_FLIPPED = 8
_MOST_OPS = 200_000
"""Values in between are tried until captures have recorded this many ops."""
_COVERED = 0.01
"""Modules that only other paths run may hold this part of the peak."""


@dataclass(frozen=True, slots=True)
class DrawnValues:
    """What one call drew: whether it could be chosen and, of a single number out of a few, which of how many."""

    chosen: bool
    count: int | None
    value: float | None


@dataclass(slots=True)
class RandomDraws:
    """How values are drawn in one capture, by the line that draws them, and which lines had their values read."""

    draw: Draw = SEEDED
    of_line: dict[str, Draw] = field(default_factory=dict)
    read: dict[str, str] = field(default_factory=dict)
    """Where values of a line were read first."""
    drawn: dict[str, list[DrawnValues]] = field(default_factory=dict)
    """What was drawn at each line since `seed`, call by call."""

    def draw_of(self, line: str) -> Draw:
        """Return how values are drawn at a line."""
        return self.of_line.get(line, self.draw)

    def note_read(self, lines: Iterable[str], where: str) -> None:
        """Remember that values drawn at these lines are read."""
        for line in lines:
            self.read.setdefault(line, where)

    def note_unseeded(self, line: str) -> None:
        """Remember that a line makes a generator without a seed: its numbers can only be drawn."""
        self.note_read([line], line)
        self.drawn.setdefault(line, []).append(DrawnValues(chosen=False, count=None, value=None))

    def force(self, func: Any, args: Any, kwargs: dict[str, Any], results: list[torch.Tensor], line: str) -> None:
        """Replace what an op has drawn, where its distribution is known."""
        draw = self.draw_of(line)
        calls = self.drawn.setdefault(line, [])
        if draw.quantile is not None and draw.alternating and len(calls) % 2:
            draw = replace(draw, quantile=1 - draw.quantile)
        with torch.no_grad():
            for result in results:
                distribution = Distribution.of(func, args, kwargs, result)
                if distribution is not None and draw.quantile is not None:
                    result.copy_(distribution.at(draw.quantile))
                count = distribution.count if distribution is not None and result.numel() == 1 else None
                calls.append(DrawnValues(distribution is not None, count, result.item() if count is not None else None))

    def force_host(self, held: list[HostGenerator]) -> None:
        """Give Python's and numpy's generators the state from which the wanted numbers come next."""
        draw = self.draw_of(HOST_LINE)
        if draw.quantile is None:
            return
        words = _words(draw)
        for generator in (random, np.random.mtrand._rand, *held):
            if isinstance(generator, torch.Generator):
                continue
            if isinstance(generator, np.random.Generator):
                set_state(generator, _bit_generator(type(generator.bit_generator), draw.quantile).state)
            elif isinstance(generator, np.random.RandomState):
                generator.set_state(("MT19937", words, 0, 0, 0.0))
            else:
                generator.setstate((3, (*map(int, words), 0), None))

    def seed(self, held: list[HostGenerator]) -> HostState:
        """Start every generator of the host from a fixed state; return it, for `note_host`."""
        self.drawn.clear()
        torch.default_generator.manual_seed(self.draw.seed)
        random.seed(self.draw.seed)
        np.random.seed(self.draw.seed)
        state = host_state(held)
        self.force_host(held)
        return state

    def note_host(self, seeded: HostState, held: list[HostGenerator]) -> None:
        """Remember that numbers were drawn by generators of the host since `seed`."""
        if self.draw_of(HOST_LINE).quantile is None:  # otherwise they are given a state again and again
            python, numpy, others = host_state(held)
            changed = not _same(python, seeded[0]) or not _same(numpy, seeded[1])
            for one, other, generator in zip(others, seeded[2], held, strict=True):
                changed = changed or (not isinstance(generator, torch.Generator) and not _same(one, other))
            if changed:
                self.note_read([HOST_LINE], "")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return isinstance(other, dict) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray | torch.Tensor):
        return bool((one == other).all())
    return one == other


def _bit_generator(kind: type[Any], quantile: float) -> Any:
    """Return a bit generator whose next number is nearest to the quantile, of some tried."""
    seed = min(range(32), key=lambda each: abs(np.random.Generator(kind(each)).random() - quantile))
    return kind(seed)


def _words(draw: Draw) -> np.ndarray:
    """Return a state of the Mersenne twister from which 64 words of a quantile come, and then any.

    Fractions take two words each; of numbers below a limit, Python takes the first bits of a word and numpy the last.
    Ones alone are the highest fraction. With a zero in front they are the middle one, and the highest of numbers below
    a power of two, which Python takes from one bit more than it needs.
    """
    assert draw.quantile is not None
    words = np.random.RandomState(draw.seed).randint(1, 1 << 32, 624, dtype=np.uint32)
    words[:64] = _word(draw.quantile)
    if draw.alternating:
        words[2:64:4] = words[3:64:4] = _word(1 - draw.quantile)
    return words


def _word(quantile: float) -> int:
    if quantile in (0.0, 0.5, 1.0):
        return _before_tempering(max(0, int(quantile * (1 << 32)) - 1))
    return _before_tempering(int(quantile * (1 << 32)) & ~7 | int(quantile * 8))


def _before_tempering(word: int) -> int:
    """Undo how the twister makes a number of a word of its state (Matsumoto and Nishimura, 1998)."""
    word ^= word >> 18
    word ^= (word << 15) & 0xEFC60000
    found = word
    for _ in range(5):
        found = word ^ ((found << 7) & 0x9D2C5680)
    word = found & 0xFFFFFFFF
    found = word
    for _ in range(3):
        found = word ^ (found >> 11)
    return found & 0xFFFFFFFF


class _Attempt(NamedTuple):
    """One capture of the step, with the draws that led to it."""

    peak_bytes: int
    draws: RandomDraws
    trace: Trace


def largest_path(capture: Callable[[RandomDraws], Trace]) -> Trace:
    """Capture a step, several times when it reads random values; return its largest path (Note [Random paths])."""
    first = RandomDraws()
    tried: list[_Attempt] = []
    failure: Exception | None = None
    failures = 0
    try:
        trace = capture(first)
    except Exception as error:
        if not first.read:
            raise
        failure, failures = error, 1
    else:
        if not first.read:
            return trace
        tried.append(_Attempt(peak_bytes(trace), first, trace))

    def attempt(draws: RandomDraws) -> None:
        try:
            found = capture(draws)
        except Exception:  # a step may be possible with some values only: a loss needs a layer that is not dropped
            nonlocal failures
            failures += 1
            return
        if HOST_LINE in first.read:
            draws.note_read([HOST_LINE], "")
        tried.append(_Attempt(peak_bytes(found), draws, found))

    for draw in (HIGHEST, LOWEST, MIDDLE):
        attempt(RandomDraws(draw))
    if not tried and failure is not None:
        raise failure
    for draw in (*_IN_TURN, *_BETWEEN):
        if sum(len(each.trace.ops) for each in tried) > _MOST_OPS:
            break
        if not draw.alternating or _draws_again(_all_read(tried)):
            attempt(RandomDraws(draw))
    same = not failures and len({_path(each.trace) for each in tried}) == 1
    if not same:
        _flip_lines(tried, attempt)
    largest = max(tried, key=lambda each: each.peak_bytes)
    everything = _all_read(tried)
    rest = "" if not failures and _all_values_tried(tried) else _untried(everything)
    if same:
        tries = (
            f"the {len(tried)} draws that were tried, from the lowest to the highest values," if rest else "all values"
        )
        lines = _lines(largest.draws)
        note = f"random values are read in the step ({lines}); {tries} lead through the same ops{rest}"
    else:
        _check_covered(largest, [each.trace for each in tried], everything)
        least = min(each.peak_bytes for each in tried)
        note = (
            f"{SEVERAL_PATHS} ({_lines(everything)}): the largest of {len(tried)} that were tried was captured, with "
            f"a peak of {display_bytes(largest.peak_bytes)} (the smallest has {display_bytes(least)})"
            f"{rest or '; steps on other paths need less'}"
        )
    return msgspec.structs.replace(largest.trace, notes=(*largest.trace.notes, note))


def _flip_lines(tried: list[_Attempt], attempt: Callable[[RandomDraws], None]) -> None:
    """Draw the opposite at one line after another, and keep what makes the peak higher."""
    flipped: set[str] = set()
    while len(flipped) < _MOST_FLIPPED:
        best = max(tried, key=lambda each: each.peak_bytes).draws
        line = next((line for line in best.read if line not in flipped), None)
        if line is None or (len(best.read) == 1 and not best.of_line and best.draw is not SEEDED):
            return
        flipped.add(line)
        of_line = {**{each: best.draw_of(each) for each in best.read}, line: best.draw_of(line).opposite}
        attempt(replace(best, of_line=of_line, read={}, drawn={}))


def _draws_again(draws: RandomDraws) -> bool:
    """Return whether a line draws more than once a step, as far as is known."""
    return any(line == HOST_LINE or len(draws.drawn.get(line, ())) > 1 for line in draws.read)


def _all_values_tried(tried: list[_Attempt]) -> bool:
    """Return whether the step reads a single number, which had each of its possible values in some capture."""
    values: set[float | None] = set()
    most = 0
    for draws in (each.draws for each in tried):
        calls = [call for line in draws.read for call in draws.drawn.get(line, ())]
        if len(draws.read) != 1 or len(calls) != 1 or calls[0].count is None:
            return False
        values.add(calls[0].value)
        most = max(most, calls[0].count)
    return len(values) == most


def _untried(everything: RandomDraws) -> str:
    """Say of which paths nothing is known."""
    free = [line for line in everything.read if any(not call.chosen for call in everything.drawn.get(line, ()))]
    if free:
        return (
            f"; values drawn at {free[0]}{f' and {len(free) - 1} more lines' if len(free) > 1 else ''} could not be "
            "chosen, only drawn with other seeds: the paths are not bounded, and other steps may need more"
        )
    return "; other values were not tried, and steps on other paths may need more"


def _all_read(tried: list[_Attempt]) -> RandomDraws:
    found = RandomDraws()
    for draws in (each.draws for each in tried):
        found.read = {**draws.read, **found.read}
        for line, calls in draws.drawn.items():
            found.drawn[line] = max(calls, found.drawn.get(line, []), key=len)
    return found


def _lines(draws: RandomDraws) -> str:
    lines = [
        f"drawn by {line}" if not where else f"drawn at {line}, read at {where}" if where != line else f"at {line}"
        for line, where in draws.read.items()
    ]
    return "; ".join(lines[:3]) + (f"; and {len(lines) - 3} more" if len(lines) > 3 else "")


def _path(trace: Trace) -> tuple[Any, ...]:
    """Return what two captures of the same path have in common."""
    modules = [*(call.module for call in trace.calls), ""]
    return tuple((op.name, modules[op.call], op.phase, tuple(ref.shape for ref in op.outputs)) for op in trace.ops)


def _check_covered(largest: _Attempt, others: list[Trace], draws: RandomDraws) -> None:
    """Refuse a step whose largest path leaves out modules that hold memory in others: no plan would cover those."""
    covered = {call.module for call in largest.trace.calls}
    for other in others:
        held: dict[str, int] = {}
        for storage in other.storages:
            if storage.category is Category.ACTIVATION and storage.module not in covered:
                held[storage.module] = held.get(storage.module, 0) + storage.bytes
        if sum(held.values()) > _COVERED * largest.peak_bytes:
            groups: dict[str, list[str]] = {}
            for module in held:
                groups.setdefault(alike(module), []).append(module)
            names = ", ".join(map(folded, groups.values()))
            raise CaptureError(
                f"the step takes one of several paths at random ({_lines(draws)}), and the largest does not contain "
                f"the others: {names} {'hold' if len(held) > 1 else 'holds'} {display_bytes(sum(held.values()))} in "
                "another, which a plan would leave as it is",
                op="a random draw",
                module=next(iter(held)),
                source=next(filter(None, draws.read.values()), ""),
                advice="plan with the choice made, for example with its probability set to 0 or to 1, the larger way",
            )


def peak_bytes(trace: Trace) -> int:
    """Return the highest point of a trace's memory."""
    change = np.zeros(len(trace.ops) + 2, dtype=np.int64)
    for storage in trace.storages:
        change[0 if storage.alloc_at == BEFORE_STEP else storage.alloc_at] += storage.bytes
        if storage.free_after != AFTER_STEP:
            change[storage.free_after + 1] -= storage.bytes
    level = np.cumsum(change)[: len(trace.ops)]
    work = np.array([op.workspace_bytes for op in trace.ops], dtype=np.int64)
    return int((level + work).max(initial=0))
