"""What two steps were made from, where that differs: inputs, parameters, modules, how they were captured."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from memfit.capture import Trace
from memfit.paths import alike, folded, numbered
from memfit.plans import Plan
from memfit.plans.facts import trace_facts
from memfit.plans.record import InputFacts, ParameterFacts, TraceFacts

Row = tuple[str, str | None, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """One thing on both sides in words; None on a side that does not have it."""

    name: str
    first: str | None
    second: str | None


def rows_of(*rows: Row) -> Iterator[Changed]:
    """Those of the rows whose sides differ."""
    for name, first, second in rows:
        if first != second:
            yield Changed(name=name, first=first, second=second)


def changed_facts(first: Plan | Trace, second: Plan | Trace) -> Iterator[Changed]:
    """What tells two steps apart, that which explains most first."""
    one, other = _facts(first), _facts(second)
    found = list(_differences(one, other))
    if not found and one.ops == other.ops and first.fingerprint != second.fingerprint:
        found += rows_of(("fingerprint of the step", first.fingerprint[:12], second.fingerprint[:12]))
    yield from found
    yield from rows_of(("ops", f"{one.ops:,}", f"{other.ops:,}"))


def _facts(each: Plan | Trace) -> TraceFacts:
    return each.trace if isinstance(each, Plan) else trace_facts(each)


def _differences(one: TraceFacts, other: TraceFacts) -> Iterator[Changed]:
    if one.device_type != other.device_type or one.device != other.device:
        yield Changed(name="captured for", first=one.device, second=other.device)
    yield from rows_of(
        ("torch", one.torch, other.torch),
        ("threads", str(one.threads or "any"), str(other.threads or "any")),
        ("autocast", one.autocast or "off", other.autocast or "off"),
        ("optimizer", one.optimizer or "none", other.optimizer or "none"),
    )
    yield from _inputs(one.inputs, other.inputs)
    yield from rows_of(("parameters", _counted(one.parameters), _counted(other.parameters)))
    yield from _parameters(one.parameters, other.parameters)


def _inputs(one: Sequence[InputFacts], other: Sequence[InputFacts]) -> Iterator[Changed]:
    """Tensors of the batch by their place in it."""
    for place in range(max(len(one), len(other))):
        sides = [_input(side[place]) if place < len(side) else None for side in (one, other)]
        yield from rows_of((f"batch tensor {place}", sides[0], sides[1]))


def _input(fact: InputFacts) -> str:
    if fact.shape is None or fact.dtype is None:
        return f"{fact.bytes} bytes that no op reads"
    return _tensor(fact.shape, fact.dtype)


def _counted(parameters: Sequence[ParameterFacts]) -> str:
    return f"{sum(math.prod(each.shape) for each in parameters):,} in {len(parameters):,} tensors"


def _parameters(one: Sequence[ParameterFacts], other: Sequence[ParameterFacts]) -> Iterator[Changed]:
    """Parameters that are not the same; of layers that only one side has, how many there are."""
    sides = [{each.names[0]: _parameter(each) for each in parameters} for parameters in (one, other)]
    return _named_rows("parameter", "parameters", sides[0], sides[1])


def changed_modules(first: Trace, second: Trace) -> Iterator[Changed]:
    """Modules that are not the same kind, or that only one side has."""
    sides = [{each.path or "(model)": each.kind for each in trace.modules} for trace in (first, second)]
    return _named_rows("module", "modules", sides[0], sides[1])


def _named_rows(what: str, several: str, one: dict[str, str], other: dict[str, str]) -> Iterator[Changed]:
    """Things by name; names that differ in numbers only and change in the same way are one row."""
    uneven = _uneven(one, other)
    counts = {(alike(prefix), first, second): None for prefix, (_, first, second) in uneven.items()}
    for prefix, first, second in counts:
        yield Changed(name=f"numbered parts of {prefix or 'the model'}", first=str(first), second=str(second))
    groups: dict[tuple[str, str | None, str | None], list[str]] = defaultdict(list)
    for name in dict.fromkeys((*one, *other)):
        then, now = one.get(name), other.get(name)
        if then != now and not (None in (then, now) and _in_uneven(name, uneven)):
            groups[alike(name), then, now].append(name)
    for (_, then, now), names in groups.items():
        label = f"{what} {names[0]}" if len(names) == 1 else f"{several} {folded(names)} ({len(names)})"
        yield Changed(name=label, first=then, second=now)


def _uneven(one: Iterable[str], other: Iterable[str]) -> dict[str, tuple[set[str], int, int]]:
    """Paths that have another number of numbered parts on each side: which are not on both, and how many there are."""
    sides = [numbered(one), numbered(other)]
    return {
        prefix: (sides[0][prefix] ^ sides[1][prefix], len(sides[0][prefix]), len(sides[1][prefix]))
        for prefix in sides[0]
        if prefix in sides[1] and len(sides[0][prefix]) != len(sides[1][prefix])
    }


def _in_uneven(name: str, uneven: dict[str, tuple[set[str], int, int]]) -> bool:
    """Whether a name belongs to a numbered part that only one side has."""
    parts = name.split(".")
    prefixes = (".".join(parts[:index]) for index in range(len(parts)))
    return any(prefix in uneven and part in uneven[prefix][0] for prefix, part in zip(prefixes, parts, strict=True))


def _parameter(fact: ParameterFacts) -> str:
    parts = [_tensor(fact.shape, fact.dtype)]
    if not fact.trainable:
        parts.append("frozen")
    if len(fact.names) > 1:
        parts.append(f"also called {', '.join(fact.names[1:])}")
    return " ".join(parts)


def _tensor(shape: Sequence[int], dtype: str) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"
