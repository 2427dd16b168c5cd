"""What one run of a unit taught: which tensors that autograd packs are dropped, and where saved results come from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from memfit.engines.tour import Visit, Way
from memfit.engines.windows import Window

OpKind = tuple[Any, int]
OpKey = tuple[OpKind, int]
"""An op of a gap: its kind, and how many of that kind came before it in the gap."""

_TO_COPY = torch.ops.aten._to_copy.default


def op_kind(func: Any, args: Any) -> OpKind:
    """An op's overload and, where it casts a parameter, which: autocast leaves those out that it has done before."""
    return func, id(args[0]) if func is _TO_COPY and isinstance(args[0], nn.Parameter) else 0


class FromPack(NamedTuple):
    """A tensor of a saved result that autograd packs anyway: in the storage of which, and in which of the recipe's
    windows."""

    pack: int
    window: int


@dataclass(slots=True)
class Gap:
    """The saved ops of a gap. Those in `fresh` are kept when they run; the tensors of the others are packed anyway."""

    sources: dict[OpKey, tuple[FromPack | None, ...]] = field(default_factory=dict)
    fresh: set[OpKey] = field(default_factory=set)
    instead: dict[OpKey, tuple[OpKey, Window]] = field(default_factory=dict)
    """Ops whose result a later one overwrites, which under a mode makes another: that one's storage stands for both."""
    single: set[OpKey] = field(default_factory=set)
    """Ops whose result is one tensor and no sequence of them."""


@dataclass(slots=True)
class Recipe:
    """`drops` has, for each tensor that autograd packs, its shape if it is dropped and None if it is held."""

    drops: list[torch.Size | None]
    needed: dict[int, Window]
    """Packs that are held and whose storages stand for saved results, with where they lay."""
    storage_bytes: dict[int, int]
    """Sizes of the storages of those packs. A pack may be a view of the saved result, which only this tells from a
    result of another size."""
    windows: list[Window]
    """Where saved results lie in those storages."""
    window_packs: list[int]
    """The pack of each window."""
    compared: frozenset[int]
    """Packs that are dropped and whose values are compared with what a recomputation makes (Note [Samples])."""
    root: Visit
    last: int
    """The last pack that is dropped; -1 when none is."""
    overwrites_inputs: bool
    fresh: int
    """How many saved results have to be kept when they are made."""
    keeping: Way
    """Past the gaps that they are made in."""
    answering: Way | None
    """Past the gaps in which a second run answers for saved ops; None when there are none."""
    reads: frozenset[int] = frozenset()
    """Buffers of the unit, by number, that its recomputation reads: not the running statistics of a normalisation."""
    rewritten: bool = False
    """Whether inputs, parameters or such buffers are written to between forward and backward, and what is recomputed is
    the same all the same: the ops that read them are saved."""
