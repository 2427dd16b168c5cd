"""Classify inputs, and predict compiled policies for shapes at which none was compiled.

Note [Shapes]: batches of random lengths would have a unit compile its policy at each of them. What a compiled policy
says but for sizes (which tensors are dropped, which ops are answered for and from what) is the same for all inputs on
which the unit runs the same ops. Two that were compiled at different sizes and agree in that make a family; sizes,
strides and offsets are constants, multiples of sizes of the inputs or of products of two, or one plus a constant. A
prediction is made only where every size has one value under all formulas that hold for the runs so far, and inputs
differ only in sizes that have differed before; elsewhere one more is compiled. It is checked as a compiled policy
always is: a run whose tensors, or the storages behind those that are held, have other sizes is recomputed whole
(Note [Recompute]), and its family is given up after three. Units that write to what was there before them have no
families, because that would be an error for them.
"""

from __future__ import annotations

import enum
import itertools
import types
from collections.abc import Hashable
from dataclasses import replace
from fractions import Fraction
from typing import Any, cast

import torch
from torch import nn

from memfit.engines.compiled_policy import CallNode, CompiledPolicy
from memfit.engines.tensors import StridedView
from memfit.torch_private.distributed_tensors import layout_of

Sizes = tuple[int, ...]


def dense_stride(size: Sizes, order: Sizes) -> Sizes:
    """Return the strides of a dense tensor whose dimensions lie in memory in this order, the slowest first."""
    stride, step = [0] * len(size), 1
    for dimension in reversed(order):
        stride[dimension] = step
        step *= max(size[dimension], 1)
    return tuple(stride)


def order_of(size: Sizes, stride: Sizes) -> Sizes | None:
    """Return the order in which a dense tensor's dimensions lie in memory; None for others."""
    order = tuple(sorted(range(len(size)), key=lambda dimension: (-stride[dimension], dimension)))
    return order if dense_stride(size, order) == tuple(stride) else None


def structure_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hashable, Sizes] | None:
    """Split the inputs of a call into their structure and the sizes of tensors; None where that cannot be done."""
    sizes: list[int] = []

    def structure(value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            if layout_of(value) is not None:
                raise Changing("sizes of what a rank holds are no multiples of the whole")
            order = order_of(tuple(value.shape), value.stride()) if value.layout is torch.strided else None
            if order is None:
                raise Changing("a tensor with gaps")
            sizes.extend(value.shape)
            few = tuple(min(size, 2) for size in value.shape)  # one row and none are kinds of their own
            return torch.Tensor, order, few, value.dtype, value.requires_grad
        if isinstance(value, tuple | list):
            return type(value), *map(structure, value)
        if isinstance(value, dict):
            return dict, *((key, structure(each)) for key, each in value.items())
        return kind_of(value)

    try:
        return (structure(args), structure(kwargs)), tuple(sizes)
    except Changing:
        return None


class InputFamily:
    """Compiled policies of a unit on inputs of one structure, from which those of other shapes are predicted."""

    def __init__(self) -> None:
        self._open = True
        self._misses = 0
        self._compile: CompiledPolicy | None = None
        self._signature: Hashable = None
        self._seen: dict[Sizes, Sizes] = {}

    def add(self, sizes: Sizes, compiled: CompiledPolicy) -> None:
        """Add a policy that was compiled at these sizes of the inputs."""
        signature = _signature(compiled)
        if signature is None or (self._compile is not None and signature != self._signature):
            self.close()
            return
        self._compile, self._signature = self._compile or compiled, signature
        self._seen[sizes] = _sizes(compiled)

    def miss(self) -> None:
        """Count a prediction that did not hold, or a call that is skipped; three are enough."""
        self._misses += 1
        if self._misses >= 3:
            self.close()

    def close(self) -> None:
        """Stop predicting."""
        self._open = False
        self._compile = None
        self._seen.clear()

    def predict(self, sizes: Sizes) -> CompiledPolicy | None:
        """Return the compiled policy for inputs of these sizes, None where one has to be compiled."""
        if not self._open or self._compile is None or len(self._seen) < 2:
            return None
        inputs = list(self._seen)
        varied = [place for place in range(len(sizes)) if len({each[place] for each in inputs}) > 1]
        if any(sizes[place] != inputs[0][place] for place in range(len(sizes)) if place not in varied):
            return None
        found = []
        for values in zip(*self._seen.values(), strict=True):
            value = _value(values, inputs, sizes, varied)
            if value is None:
                return None
            found.append(value)
        return _with_sizes(self._compile, found)


def _value(values: Sizes, inputs: list[Sizes], sizes: Sizes, varied: list[int]) -> int | None:
    """Return what a size becomes under all formulas that hold so far; None when they disagree, or none holds."""
    if len(set(values)) == 1:
        return values[0]
    found: set[Fraction | int] = set()
    for place in varied:
        if len({value - each[place] for value, each in zip(values, inputs, strict=True)}) == 1:
            found.add(values[0] - inputs[0][place] + sizes[place])
    factors = [(place,) for place in varied]
    factors += list(itertools.combinations_with_replacement(varied, 2))
    for places in factors:
        products = [_product(each, places) for each in inputs]
        if 0 not in products and len({Fraction(v, p) for v, p in zip(values, products, strict=True)}) == 1:
            found.add(Fraction(values[0], products[0]) * _product(sizes, places))
    if len(found) != 1:
        return None
    value = Fraction(found.pop())
    return int(value) if value.denominator == 1 and value >= 0 else None


def _product(sizes: Sizes, places: tuple[int, ...]) -> int:
    product = 1
    for place in places:
        product *= sizes[place]
    return product


def _sizes(compiled: CompiledPolicy) -> Sizes:
    """Return all numbers that a compiled policy has, in one row."""
    found: list[int] = [size for shape in compiled.drops if shape is not None for size in shape]
    for view in (*compiled.needed.values(), *compiled.views):
        found += [*view.size, *view.stride, view.offset]
    ends = _ends_bytes(compiled)
    found += [storage_bytes - ends[pack] for pack, storage_bytes in compiled.storage_bytes.items()]
    return tuple(found)


def _ends_bytes(compiled: CompiledPolicy) -> dict[int, int]:
    """Return, for each pack that stands for saved results, where the last of its views ends."""
    ends = {pack: view.end_bytes for pack, view in compiled.needed.items()}
    for pack, view in zip(compiled.view_packs, compiled.views, strict=True):
        ends[pack] = max(ends[pack], view.end_bytes)
    return ends


def _with_sizes(compiled: CompiledPolicy, sizes: list[int]) -> CompiledPolicy:
    """Return the compiled policy with other numbers, in the order of `_sizes`."""
    left = iter(sizes)

    def view_like(view: StridedView) -> StridedView:
        rank = len(view.size)
        size, stride = torch.Size(itertools.islice(left, rank)), tuple(itertools.islice(left, rank))
        return view._replace(size=size, stride=stride, offset=next(left))

    drops = [None if shape is None else torch.Size(itertools.islice(left, len(shape))) for shape in compiled.drops]
    needed = {pack: view_like(view) for pack, view in compiled.needed.items()}
    found = replace(compiled, drops=drops, needed=needed, views=[view_like(view) for view in compiled.views])
    ends = _ends_bytes(found)
    return replace(found, storage_bytes={pack: ends[pack] + next(left) for pack in compiled.storage_bytes})


def _signature(compiled: CompiledPolicy) -> Hashable:
    """Return everything of a compiled policy but sizes; None where sizes are part of it in other ways."""
    tree = _tree(compiled.root)
    if tree is None:
        return None
    dropped = tuple(None if shape is None else len(shape) for shape in compiled.drops)
    kinds = tuple((pack, len(view.size), view.dtype, view.device) for pack, view in compiled.needed.items())
    views = tuple((len(view.size), view.dtype, view.device) for view in compiled.views)
    return dropped, kinds, views, compiled.last, compiled.fresh, compiled.overwrites_inputs, compiled.offloaded, tree


def _tree(node: CallNode) -> Hashable:
    gaps: list[Hashable] = []
    for gap in node.gaps:
        if gap is None:
            gaps.append(None)
            continue
        if gap.instead:
            return None
        gaps.append((frozenset(gap.sources.items()), frozenset(gap.fresh), frozenset(gap.single)))
    children = [_tree(child) for child in node.children]
    return None if None in children else (id(node.module()), tuple(gaps), tuple(children))


# -- Kinds of inputs: calls whose inputs are alike can use one compiled policy ----------------------------------------


_PLAIN = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)
_FIXED = (nn.Module, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)


class Changing(Exception):
    """Raised for an input that may change while the module runs, so that its code cannot be recomputed."""


def kind_of(value: Any) -> Hashable:
    """Return a key that is equal for inputs that are alike; raise `Changing` for what may change."""
    if isinstance(value, torch.Tensor):
        layout = value.stride() if value.layout is torch.strided else value.layout
        return value.shape, layout, value.dtype, value.requires_grad, layout_of(value)
    if isinstance(value, _PLAIN):
        return cast(Hashable, value)
    if isinstance(value, float | complex):  # may be another in every step
        return type(value)
    if isinstance(value, slice):
        return slice, kind_of(value.start), kind_of(value.stop), kind_of(value.step)
    if isinstance(value, tuple | list):
        return type(value), *map(kind_of, value)
    if isinstance(value, dict):
        return dict, *((key, kind_of(each)) for key, each in value.items())
    if isinstance(value, _FIXED):
        return id(value)
    raise Changing(type(value).__name__)


def kind_of_call(args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str) -> Hashable:
    """Return a key that is equal for calls that are alike; autocast is part of it."""
    autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    names = tuple(kwargs)
    return autocast, tuple(map(kind_of, args)), names, tuple(map(kind_of, kwargs.values()))
