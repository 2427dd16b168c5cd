"""Traces of sizes that were not captured, from captures of a few others.

Note [Scaled traces]: where only one size of a step changes, a batch or a sequence length, its ops, storages and module
calls stay the same, and every number in them (sizes, strides, bytes, FLOPs) is a polynomial of that size: of first
degree in a batch, of second in a sequence length, whose attention may be quadratic. `fit_traces` finds these
polynomials from captures of as many sizes as they have coefficients, exactly, in whole numbers and fractions. It finds
none where anything else differs: another kernel, another order, a name.

A fit says nothing of sizes that were not captured: kernels change at thresholds. So it is used between the smallest and
the largest size that it was made of only, and believed when a further capture is equal to what it gives (`agrees`).
Notes of traces are words about sizes and are those of the nearest capture. What kernels allocate inside themselves is
no polynomial (tiles, thresholds): where it changes, the rule that the capture asked is asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

import msgspec
import torch

from memfit.capture.arguments import call_of
from memfit.capture.rules import RuleContext, rules_for
from memfit.capture.trace_types import ModelCall, Op, Storage, TensorRef, Trace

_SAME_IN_OPS = ("name", "phase", "call", "view", "random", "saved", "mutates", "mutated_op", "forward_op")
_SAME = (
    "schema",
    "device",
    "device_type",
    "hardware",
    "threads",
    "autocast",
    "optimizer",
    "calls",
    "modules",
    "parameters",
    "shared",
    "in_eval",
    "no_grad_calls",
    "warm_up",
    "cudnn_benchmark",
    "mesh",
    "cast",
)


@dataclass(frozen=True, kw_only=True)
class ScaledTraces:
    """The traces of all sizes between the smallest and the largest of some captures (Note [Scaled traces])."""

    captured: Mapping[int, Trace]
    _ops: tuple[tuple[int, _ChangingOp], ...] = field(repr=False)
    """The ops that change, by index."""
    _tables: _Tables = field(repr=False)
    _storages: tuple[tuple[int, tuple[Storage, ...]], ...] = field(repr=False)
    """The storages that change, by number, as each capture has them."""

    def covers(self, size: int) -> bool:
        """Return whether a size lies between the captures."""
        return min(self.captured) <= size <= max(self.captured)

    def at(self, size: int) -> Trace | None:
        """Return the trace of a size; None where the fit cannot hold: a number of it would be a fraction."""
        if size in self.captured:
            return self.captured[size]
        base = self.captured[min(self.captured, key=lambda each: abs(each - size))]
        fit = _Fit(sizes=tuple(self.captured), size=size, workspaces=_Workspaces(base))
        ops, storages = list(base.ops), list(base.storages)
        try:
            fit.fill(self._tables)
            for index, op in self._ops:
                ops[index] = fit.op(op)
            for index, storage in self._storages:
                fitted = fit.number(tuple(each.bytes for each in storage))
                storages[index] = msgspec.structs.replace(storage[0], bytes=fitted)
            calls = tuple(
                fit.model_call(versions)
                for versions in zip(*(each.model_calls for each in self.captured.values()), strict=True)
            )
        except _NoFit:
            return None
        return msgspec.structs.replace(base, ops=tuple(ops), storages=tuple(storages), model_calls=calls)

    def agrees(self, size: int, captured: Trace) -> bool:
        """Return whether the capture of a further size is the trace that this gives for it."""
        given = self.at(size)
        return given is not None and is_same_step(given, captured)


def fit_traces(captured: Mapping[int, Trace]) -> ScaledTraces | None:
    """Fit the traces of a step at several sizes; None where they differ in more than numbers."""
    ordered = {size: captured[size] for size in sorted(captured)}
    traces = list(ordered.values())
    first = traces[0]
    if len(traces) < 2 or first.mesh or any(not _same(first, each) for each in traces[1:]):
        return None
    ops, tables = [], _Tables()
    for index, versions in enumerate(zip(*(each.ops for each in traces), strict=True)):
        if all(each == versions[0] for each in versions):
            continue
        if not all(_same_op(versions[0], each) for each in versions[1:]):
            return None
        template = None
        if any(each.arguments != versions[0].arguments for each in versions):
            template = _Template.of([each.arguments for each in versions])
            if template is None:
                return None
        ops.append((index, _ChangingOp.of(versions, template, tables)))
    storages = []
    for index, stored in enumerate(zip(*(each.storages for each in traces), strict=True)):
        if all(each == stored[0] for each in stored):
            continue
        if any(msgspec.structs.replace(each, bytes=stored[0].bytes) != stored[0] for each in stored):
            return None
        storages.append((index, stored))
    return ScaledTraces(captured=ordered, _ops=tuple(ops), _tables=tables, _storages=tuple(storages))


def is_same_step(one: Trace, other: Trace) -> bool:
    """Return whether two traces are the same in all that a step does: everything but notes and sources."""
    return all(getattr(one, name) == getattr(other, name) for name in ("ops", "storages", "model_calls", *_SAME))


def _same(one: Trace, other: Trace) -> bool:
    lengths = all(len(getattr(one, name)) == len(getattr(other, name)) for name in ("ops", "storages", "model_calls"))
    return (
        lengths and all(getattr(one, name) == getattr(other, name) for name in _SAME) and _same_model_calls(one, other)
    )


def _same_model_calls(one: Trace, other: Trace) -> bool:
    return all(
        a.outputs == b.outputs
        and [(len(shape), dtype) for shape, dtype in a.inputs] == [(len(shape), dtype) for shape, dtype in b.inputs]
        for a, b in zip(one.model_calls, other.model_calls, strict=True)
    )


def _same_op(one: Op, other: Op) -> bool:
    return (
        all(getattr(one, name) == getattr(other, name) for name in _SAME_IN_OPS)
        and _same_refs(one.inputs, other.inputs)
        and _same_refs(one.outputs, other.outputs)
    )


def _same_refs(one: tuple[TensorRef, ...], other: tuple[TensorRef, ...]) -> bool:
    return len(one) == len(other) and all(
        a.storage == b.storage and a.dtype == b.dtype and len(a.shape) == len(b.shape)
        for a, b in zip(one, other, strict=True)
    )


class _NoFit(Exception):
    """A number that must be whole is not, or a rule cannot be asked again."""


@dataclass(frozen=True, kw_only=True)
class _Template:
    """The arguments of an op at several sizes: one JSON text, whose numbers are parameters."""

    text: Any
    """The decoded arguments of the first, with `_Hole`s for the numbers that change."""
    numbers: tuple[tuple[int | float, ...], ...]

    @classmethod
    def of(cls, texts: Iterable[str]) -> _Template | None:
        """Find what changes in the arguments; None where that is more than numbers."""
        numbers: list[tuple[int | float, ...]] = []
        try:
            text = _merge([msgspec.json.decode(each) for each in texts], numbers)
        except ValueError:
            return None
        return cls(text=text, numbers=tuple(numbers))

    def fill(self, number: Callable[[tuple[Any, ...]], Any]) -> str:
        return msgspec.json.encode(_fill(self.text, [number(each) for each in self.numbers])).decode()


@dataclass(frozen=True, slots=True)
class _Hole:
    number: int


def _merge(values: list[Any], numbers: list[tuple[int | float, ...]]) -> Any:
    first = values[0]
    if any(type(each) is not type(first) for each in values):
        raise ValueError
    if isinstance(first, list):
        if any(len(each) != len(first) for each in values):
            raise ValueError
        return [_merge(list(parts), numbers) for parts in zip(*values, strict=True)]
    if isinstance(first, dict):
        if any(each.keys() != first.keys() for each in values):
            raise ValueError
        return {key: _merge([each[key] for each in values], numbers) for key in first}
    if all(each == first for each in values):
        return first
    if isinstance(first, bool) or not isinstance(first, int | float):
        raise ValueError
    numbers.append(tuple(values))
    return _Hole(len(numbers) - 1)


def _fill(value: Any, numbers: list[int | float]) -> Any:
    if isinstance(value, _Hole):
        return numbers[value.number]
    if isinstance(value, list):
        return [_fill(each, numbers) for each in value]
    if isinstance(value, dict):
        return {key: _fill(each, numbers) for key, each in value.items()}
    return value


class _ChangingRef(NamedTuple):
    """A tensor whose geometry changes: its storage and dtype, and places of shape, stride and offset in the tables."""

    storage: int
    dtype: str
    shape: int
    stride: int
    offset: int


class _Places(dict[Any, int]):
    """Gives every key the next number when it is first asked for."""

    def __missing__(self, key: Any) -> int:
        self[key] = len(self)
        return self[key]


@dataclass(frozen=True, slots=True)
class _Tables:
    """What changes, each once: numbers, tuples of them and tensors, as all captures have them. Equal layers share."""

    numbers: _Places = field(default_factory=_Places)
    tuples: _Places = field(default_factory=_Places)
    refs: _Places = field(default_factory=_Places)

    def place(self, refs: tuple[TensorRef, ...]) -> int:
        """Return the place of a tensor, given as each capture has it."""
        first = refs[0]
        return self.refs[
            _ChangingRef(
                first.storage,
                first.dtype,
                self.tuples[tuple([each.shape for each in refs])],
                self.tuples[tuple([each.stride for each in refs])],
                self.numbers[tuple([each.offset for each in refs])],
            )
        ]


class _ChangingOp(NamedTuple):
    """An op with different numbers at different sizes: what is the same, and the places of what is not."""

    first: Op
    inputs: tuple[TensorRef | int, ...]
    outputs: tuple[TensorRef | int, ...]
    flops: int
    reads: int
    writes: int
    workspaces: int
    has_workspace: bool
    template: _Template | None

    @classmethod
    def of(cls, versions: tuple[Op, ...], template: _Template | None, tables: _Tables) -> _ChangingOp:
        numbers = tables.numbers
        return cls(
            first=versions[0],
            inputs=_changing([each.inputs for each in versions], tables),
            outputs=_changing([each.outputs for each in versions], tables),
            flops=numbers[tuple([each.flops for each in versions])],
            reads=numbers[tuple([each.read_bytes for each in versions])],
            writes=numbers[tuple([each.written_bytes for each in versions])],
            workspaces=numbers[tuple([each.workspace_bytes for each in versions])],
            has_workspace=any(each.workspace_bytes for each in versions),
            template=template,
        )


def _changing(versions: Sequence[tuple[TensorRef, ...]], tables: _Tables) -> tuple[TensorRef | int, ...]:
    """Return each tensor where it is the same at all sizes, else its place in the tables."""
    found = zip(*versions, strict=True)
    return tuple([refs[0] if all(each == refs[0] for each in refs[1:]) else tables.place(refs) for refs in found])


class _Workspaces:
    """What kernels allocate inside themselves, by the rules of the target's device; each geometry is asked once."""

    def __init__(self, trace: Trace) -> None:
        self._context, self._rules = RuleContext.of(trace.hardware), rules_for(trace.device_type)
        self._known: dict[Any, int] = {}

    def knows(self, op: Op) -> bool:
        return op.name in self._rules.workspaces

    def of(self, op: Op) -> int:
        geometry = [(ref.shape, ref.stride, ref.dtype) for ref in op.inputs]
        key = (op.name, op.arguments, *geometry)
        if key not in self._known:
            function, args, kwargs = call_of(op, [_meta(ref) for ref in op.inputs])
            kernel, rule = self._rules.kernels.get(op.name), self._rules.workspaces[op.name]
            try:
                result = function(*args, **kwargs) if kernel is None else kernel(self._context, function, args, kwargs)
                self._known[key] = rule(self._context, function, args, kwargs, result)
            except Exception as error:  # of torch: a call that cannot be made again outside its capture
                raise _NoFit from error
        return self._known[key]


def _meta(ref: TensorRef) -> torch.Tensor:
    return torch.empty_strided(ref.shape, ref.stride, dtype=getattr(torch, ref.dtype), device="meta")


_later: Any = object()
"""In the place of a number that was not asked for yet."""


class _Fit:
    """The numbers of one size, each computed once."""

    def __init__(self, *, sizes: tuple[int, ...], size: int, workspaces: _Workspaces) -> None:
        self._workspaces = workspaces
        weights = _weights(sizes, size)

        @cache
        def number(values: tuple[Any, ...]) -> Any:
            found = sum((weight * Fraction(value) for weight, value in zip(weights, values, strict=True)), Fraction(0))
            if isinstance(values[0], float):
                return float(found)
            if found.denominator != 1:
                raise _NoFit
            return found.numerator

        @cache
        def numbers(values: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
            return tuple(number(each) for each in zip(*values, strict=True))

        self.number, self._numbers = number, numbers

    def fill(self, tables: _Tables) -> None:
        """Compute everything in the tables."""
        self._filled: list[Any] = [_later] * len(tables.numbers)
        number = self.number
        self._of_numbers = list(tables.numbers)
        tuples = list(map(self._numbers, tables.tuples))
        self._refs = [
            TensorRef(
                storage=ref.storage,
                shape=tuples[ref.shape],
                stride=tuples[ref.stride],
                offset=number(self._of_numbers[ref.offset]),
                dtype=ref.dtype,
            )
            for ref in tables.refs
        ]

    def _number_at(self, place: int) -> int:
        """Return a number of the tables; a workspace may be no polynomial, and is not asked for."""
        found = self._filled[place]
        if found is _later:
            found = self._filled[place] = self.number(self._of_numbers[place])
        return found

    def op(self, op: _ChangingOp) -> Op:
        """Return an op at this size, once the tables are filled."""
        first, refs, number = op.first, self._refs, self._number_at
        ruled = op.has_workspace and self._workspaces.knows(first)
        scaled = Op(
            name=first.name,
            phase=first.phase,
            call=first.call,
            inputs=tuple([refs[each] if isinstance(each, int) else each for each in op.inputs]),
            outputs=tuple([refs[each] if isinstance(each, int) else each for each in op.outputs]),
            arguments=first.arguments if op.template is None else op.template.fill(self.number),
            flops=number(op.flops),
            read_bytes=number(op.reads),
            written_bytes=number(op.writes),
            workspace_bytes=0 if ruled else number(op.workspaces),
            view=first.view,
            random=first.random,
            saved=first.saved,
            mutates=first.mutates,
            mutated_op=first.mutated_op,
            forward_op=first.forward_op,
            source=first.source,
        )
        return msgspec.structs.replace(scaled, workspace_bytes=self._workspaces.of(scaled)) if ruled else scaled

    def model_call(self, versions: tuple[ModelCall, ...]) -> ModelCall:
        first = versions[0]
        inputs = tuple(
            (self._numbers(tuple(shape for shape, _ in each)), each[0][1])
            for each in zip(*(call.inputs for call in versions), strict=True)
        )
        return ModelCall(inputs=inputs, outputs=first.outputs)


def _weights(sizes: tuple[int, ...], size: int) -> list[Fraction]:
    """Return what the value at each of the sizes counts for at another: Lagrange's polynomials."""
    found = []
    for one in sizes:
        weight = Fraction(1)
        for other in sizes:
            if other != one:
                weight *= Fraction(size - other, one - other)
        found.append(weight)
    return found
