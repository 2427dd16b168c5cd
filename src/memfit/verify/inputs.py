"""Which inputs of a step are not those that its plan was made for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from memfit.plan.record import InputFacts


class Seen(NamedTuple):
    """A tensor that the model was called with."""

    shape: tuple[int, ...]
    dtype: str
    size_bytes: int

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def seen(call: Any) -> tuple[Seen, ...]:
    """The tensors of a call."""
    return tuple(
        Seen(tuple(each.shape), str(each.dtype).removeprefix("torch."), each.untyped_storage().nbytes())
        for each in tree_leaves(call)
        if isinstance(each, torch.Tensor) and each.layout is torch.strided
    )


def different(here: Sequence[Seen], planned: Sequence[InputFacts]) -> tuple[str, ...]:
    """Tensors that have no counterpart in the plan, each with the planned one that it seems to stand for."""
    left = list(planned)
    others = []
    for each in here:
        match = next((fact for fact in left if _same(each, fact)), None)
        if match is None:
            others.append(each)
        else:
            left.remove(match)
    found = []
    for each in others:
        like = next(
            (fact for fact in left if fact.dtype == each.dtype and len(fact.shape or ()) == len(each.shape)), None
        )
        if like is None:
            found.append(f"{each} is none of the plan's")
        else:
            left.remove(like)
            found.append(f"{each} in place of {Seen(tuple(like.shape or ()), each.dtype, like.bytes)}")
    return tuple(found)


def _same(here: Seen, planned: InputFacts) -> bool:
    if planned.shape is None:
        return planned.bytes == here.size_bytes
    return planned.shape == here.shape and planned.dtype == here.dtype
