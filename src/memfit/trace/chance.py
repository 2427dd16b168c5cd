"""Random values that a step reads: what it does then differs from step to step, and the largest path is captured.

Note [Chance]: a step reads a random value when it branches on one (LayerDrop's `if torch.rand([]) < p`), counts with
one (`.item()`) or takes a shape from one (`x[torch.rand(n) < p]`). Values are followed from the op that draws them,
through tensors whose values are known, to where they are read. A step that reads some is captured several times: with
what a fixed seed draws, with the lowest values, with middle ones and with the highest, and then with those of one line
after another turned round. The capture with the highest peak is kept. Numbers of Python and numpy are read wherever
they are drawn; their generators are given states from which the lowest, middle or highest numbers come.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import torch

from memfit.paths import alike, folded
from memfit.trace.errors import CaptureError
from memfit.trace.generators import Held, HostState, host_state, set_state
from memfit.trace.record import NEVER, Category, Trace
from memfit.units import display_bytes


class Draw(enum.Enum):
    """How random values are drawn."""

    SEEDED = "seeded"
    LOWEST = "lowest"
    MIDDLE = "middle"
    HIGHEST = "highest"


_OPPOSITE = {
    Draw.LOWEST: Draw.HIGHEST,
    Draw.HIGHEST: Draw.LOWEST,
    Draw.MIDDLE: Draw.HIGHEST,
    Draw.SEEDED: Draw.HIGHEST,
}
HOST_LINE = "Python's or numpy's generators"
_MOST_CAPTURES = 12
_COVERED = 0.01
"""Modules that only other paths run may hold this part of the peak."""


@dataclass(slots=True)
class Chance:
    """How values are drawn in one capture, by the line that draws them, and which lines had their values read."""

    draw: Draw = Draw.SEEDED
    of_line: dict[str, Draw] = field(default_factory=dict)
    read: dict[str, str] = field(default_factory=dict)
    """Where values of a line were read first."""

    def draw_of(self, line: str) -> Draw:
        """How values are drawn at a line."""
        return self.of_line.get(line, self.draw)

    def note_read(self, lines: Iterable[str], where: str) -> None:
        """Remember that values drawn at these lines are read."""
        for line in lines:
            self.read.setdefault(line, where)

    def force(self, func: Any, args: Any, results: list[torch.Tensor], line: str) -> None:
        """Replace what an op has drawn."""
        draw = self.draw_of(line)
        if draw is not Draw.SEEDED:
            with torch.no_grad():
                for result in results:
                    _force(func, args, result, draw)

    def force_host(self, held: list[Held]) -> None:
        """Give Python's and numpy's generators the state from which the wanted numbers come next."""
        draw = self.draw_of(HOST_LINE)
        if draw is Draw.SEEDED:
            return
        words = _words(draw)
        for generator in (random, np.random.mtrand._rand, *held):
            if isinstance(generator, torch.Generator):
                continue
            if isinstance(generator, np.random.Generator):
                set_state(generator, _seeded(type(generator.bit_generator), draw).state)
            elif isinstance(generator, np.random.RandomState):
                generator.set_state(("MT19937", words, 0, 0, 0.0))
            else:
                generator.setstate((3, (*map(int, words), 0), None))

    def seed(self, held: list[Held]) -> HostState:
        """Start every generator of the host from a fixed state; return it, for `note_host`."""
        torch.default_generator.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        state = host_state(held)
        self.force_host(held)
        return state

    def note_host(self, seeded: HostState, held: list[Held]) -> None:
        """Remember that numbers were drawn by generators of the host since `seed`."""
        if self.draw_of(HOST_LINE) is Draw.SEEDED:  # otherwise they are given a state again and again
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


_UNIFORM = ("rand", "rand_like", "uniform", "uniform_")
_NORMAL = ("randn", "randn_like", "normal", "normal_", "normal_functional")
_WHOLE = ("randint", "randint_like", "random", "random_")
_COIN = ("bernoulli", "bernoulli_")


def _force(func: Any, args: Any, result: torch.Tensor, draw: Draw) -> None:
    """Give a result the lowest, middle or highest values that its op draws; those of other ops stay as they are."""
    name = func._schema.name.partition("::")[2]
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    highest = draw is Draw.HIGHEST
    if name in _UNIFORM:
        low, high = named.get("from", 0.0), named.get("to", 1.0)
        part = {Draw.LOWEST: 0.0, Draw.MIDDLE: 0.5, Draw.HIGHEST: 1.0}[draw]
        result.fill_(low + (high - low) * part * (1 - torch.finfo(result.dtype).eps / 2))
    elif name in _NORMAL:
        result.copy_(result.abs() if highest else -result.abs())
    elif name in _WHOLE:
        low, high = named.get("low", named.get("from")) or 0, named.get("high", named.get("to"))
        if high is not None:
            result.fill_({Draw.LOWEST: low, Draw.MIDDLE: (low + high - 1) // 2, Draw.HIGHEST: high - 1}[draw])
    elif name in _COIN and draw is not Draw.MIDDLE:
        chance = named.get("p", 0.5)
        if name == "bernoulli" and "p" not in named:
            chance = args[0]
        if isinstance(chance, torch.Tensor):
            result.copy_(chance > 0 if highest else chance >= 1)
        else:
            result.fill_(float(chance > 0 if highest else chance >= 1))


def _seeded(kind: type[Any], draw: Draw) -> Any:
    """Return a bit generator whose next number is the lowest, middle or highest of some tried."""
    aim = {Draw.LOWEST: 0.0, Draw.MIDDLE: 0.5, Draw.HIGHEST: 1.0}[draw]
    seed = min(range(32), key=lambda each: abs(np.random.Generator(kind(each)).random() - aim))
    return kind(seed)


def _words(draw: Draw) -> np.ndarray:
    """Return a state of the Mersenne twister from which 64 times the same word comes, and then any.

    Ones alone are the highest fraction. With a zero in front they are the middle one, and the highest of numbers below
    a power of two, which Python takes from one bit more than it needs.
    """
    words = np.random.RandomState(0).randint(1, 1 << 32, 624, dtype=np.uint32)
    words[:64] = {Draw.LOWEST: 0, Draw.MIDDLE: _MIDDLE_WORD, Draw.HIGHEST: _HIGHEST_WORD}[draw]
    return words


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


_HIGHEST_WORD = _before_tempering(0xFFFFFFFF)
_MIDDLE_WORD = _before_tempering(0x7FFFFFFF)


def largest_path(capture: Callable[[Chance], Trace]) -> Trace:
    """Capture a step; when it reads random values, as often as it takes to find its largest path (Note [Chance])."""
    first = Chance()
    tried: list[tuple[int, Chance, Trace]] = []
    failure: Exception | None = None
    try:
        trace = capture(first)
    except Exception as error:
        if not first.read:
            raise
        failure = error
    else:
        if not first.read:
            return trace
        tried.append((peak_bytes(trace), first, trace))

    def attempt(chance: Chance) -> None:
        try:
            found = capture(chance)
        except Exception:  # a step may be possible with some values only: a loss needs a layer that is not dropped
            return
        if HOST_LINE in first.read:
            chance.note_read([HOST_LINE], "")
        tried.append((peak_bytes(found), chance, found))

    for draw in (Draw.HIGHEST, Draw.LOWEST, Draw.MIDDLE):
        attempt(Chance(draw))
    if not tried and failure is not None:
        raise failure
    same = len(tried) == 4 and len({_path(each) for *_, each in tried}) == 1
    if not same:
        _turn_lines_round(tried, attempt)
    peak, chance, trace = max(tried, key=lambda each: each[0])
    lines = _lines(chance if same else _all_read(tried))
    if same:
        note = f"random values are read in the step ({lines}); the lowest, middle and highest lead through the same ops"
        return msgspec.structs.replace(trace, notes=(*trace.notes, note))
    _check_covered(trace, peak, [each for *_, each in tried], lines)
    least = min(each[0] for each in tried)
    note = (
        f"the step depends on random values ({lines}): the largest of {len(tried)} that were tried was captured, with "
        f"a peak of {display_bytes(peak)} (the smallest has {display_bytes(least)}); steps on other paths need less"
    )
    return msgspec.structs.replace(trace, notes=(*trace.notes, note))


def _turn_lines_round(tried: list[tuple[int, Chance, Trace]], attempt: Callable[[Chance], None]) -> None:
    """Draw the opposite at one line after another, and keep what makes the peak higher."""
    turned: set[str] = set()
    while len(tried) < _MOST_CAPTURES:
        _, best, _ = max(tried, key=lambda each: each[0])
        line = next((line for line in best.read if line not in turned), None)
        if line is None or (len(best.read) == 1 and not best.of_line and best.draw is not Draw.SEEDED):
            return
        turned.add(line)
        of_line = {**{each: best.draw_of(each) for each in best.read}, line: _OPPOSITE[best.draw_of(line)]}
        attempt(replace(best, of_line=of_line, read={}))


def _all_read(tried: list[tuple[int, Chance, Trace]]) -> Chance:
    found = Chance()
    for _, chance, _ in tried:
        found.read = {**chance.read, **found.read}
    return found


def _lines(chance: Chance) -> str:
    lines = [
        f"drawn by {line}" if not where else f"drawn at {line}, read at {where}" if where != line else f"at {line}"
        for line, where in chance.read.items()
    ]
    return "; ".join(lines[:3]) + (f"; and {len(lines) - 3} more" if len(lines) > 3 else "")


def _path(trace: Trace) -> tuple[Any, ...]:
    """What two captures of the same path have in common."""
    modules = [*(call.module for call in trace.calls), ""]
    return tuple((op.name, modules[op.call], op.phase, tuple(ref.shape for ref in op.outputs)) for op in trace.ops)


def _check_covered(largest: Trace, peak: int, others: list[Trace], lines: str) -> None:
    """Refuse a step whose largest path leaves out modules that hold memory in others: no plan would cover those."""
    covered = {call.module for call in largest.calls}
    for other in others:
        held: dict[str, int] = {}
        for storage in other.storages:
            if storage.category is Category.ACTIVATION and storage.module not in covered:
                held[storage.module] = held.get(storage.module, 0) + storage.bytes
        if sum(held.values()) > _COVERED * peak:
            groups: dict[str, list[str]] = {}
            for module in held:
                groups.setdefault(alike(module), []).append(module)
            names = ", ".join(map(folded, groups.values()))
            raise CaptureError(
                f"the step takes one of several paths at random, and the largest does not contain the others: "
                f"{names} hold {display_bytes(sum(held.values()))} in another, which a plan would leave as it is",
                op="a random draw",
                module=next(iter(held)),
                source=lines,
                advice="plan with the choice made, for example with its probability set to 0 or to 1, the larger way",
            )


def peak_bytes(trace: Trace) -> int:
    """Return the highest point of a trace's memory."""
    change = np.zeros(len(trace.ops) + 2, dtype=np.int64)
    for storage in trace.storages:
        change[0 if storage.birth == NEVER else storage.birth] += storage.bytes
        if storage.death != NEVER:
            change[storage.death + 1] -= storage.bytes
    level = np.cumsum(change)[: len(trace.ops)]
    work = np.array([op.workspace_bytes for op in trace.ops], dtype=np.int64)
    return int((level + work).max(initial=0))
