"""Describe how steps differ from the one that was planned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from memfit.errors import PlanDrift as PlanDrift
from memfit.plans import InputRecord
from memfit.torch_private.pytree import tree_leaves
from memfit.units import display_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A step that differs from the planned one.

    `kind` is `higher` or `lower` for a peak on a GPU, `growth` for the process on a CPU, whose growth `measured_bytes`
    and `planned_bytes` then are, and `inputs` where no more is known. `inputs` are those that differ.
    """

    kind: str
    step: int
    measured_bytes: int | None
    planned_bytes: int
    inputs: tuple[str, ...]
    rank: int | None = None
    """Of several ranks that train together, the one where it is largest."""

    def __str__(self) -> str:
        who = "" if self.rank is None else f"on rank {self.rank} "
        return who + self._described()

    def _described(self) -> str:
        planned = display_bytes(self.planned_bytes)
        if self.measured_bytes is None:
            text = f"the inputs of step {self.step} are not those of the plan, whose peak is {planned}"
        elif self.kind == "growth":
            grown = display_bytes(self.measured_bytes)
            text = f"the process grew by {grown} in step {self.step}, and the plan has {planned} for what a step adds"
        else:
            measured = display_bytes(self.measured_bytes)
            text = f"the peak of step {self.step} is {measured}, {self.kind} than the {planned} of the plan"
        if self.inputs:
            text += f": {'; '.join(self.inputs)}"
        return text + "; plan the step again as it is now"


# -- Which inputs of a step are not those that its plan was made for --------------------------------------------------


class Seen(NamedTuple):
    """A tensor that the model was called with; `size_bytes` are those of its storage, which it may be a part of."""

    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    partial: bool = False

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def list_tensors(call: Any) -> tuple[Seen, ...]:
    """Return the tensors of a call, each once."""
    tensors = {
        id(each): each for each in tree_leaves(call) if isinstance(each, torch.Tensor) and each.layout is torch.strided
    }
    return tuple(_seen(each) for each in tensors.values())


def find_different(here: Sequence[Seen], planned: Sequence[InputRecord]) -> tuple[str, ...]:
    """Name tensors of the plan that are not there, each with the one that is there in its place.

    Only what is certain is told: a tensor more, or one less, says nothing, because a trace has each storage once and
    none that the loss alone reads, and a plan for a function also has tensors that the model never gets.
    """
    others, left = [], list(planned)
    for each in here:
        match = next((fact for fact in left if _same(each, fact)), None)
        if match is None:
            others.append(each)
        else:
            left.remove(match)
    found = []
    for each in others:
        like = next((fact for fact in left if fact.dtype == each.dtype and _rank(fact) == len(each.shape) > 0), None)
        if like is not None:
            left.remove(like)
            found.append(f"{each} in place of {Seen(tuple(like.shape or ()), each.dtype, like.bytes)}")
    return tuple(found)


def _seen(tensor: torch.Tensor) -> Seen:
    dtype, held = str(tensor.dtype).removeprefix("torch."), tensor.untyped_storage().nbytes()
    return Seen(tuple(tensor.shape), dtype, held, tensor.numel() * tensor.element_size() < held)


def _rank(planned: InputRecord) -> int | None:
    return None if planned.shape is None else len(planned.shape)


def _same(here: Seen, planned: InputRecord) -> bool:
    if planned.shape is None or planned.dtype is None:
        return planned.bytes == here.size_bytes
    if (planned.shape, planned.dtype) == (here.shape, here.dtype):
        return True
    whole_bytes = math.prod(planned.shape) * getattr(torch, planned.dtype).itemsize
    return here.partial and here.size_bytes == planned.bytes == whole_bytes  # rows of a tensor that was planned whole
