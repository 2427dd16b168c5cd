"""What a search is given: checked, and with what is left out filled in."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch

from memfit.capture import Step, Trace
from memfit.errors import InputError
from memfit.hardware import Target
from memfit.plans.resolve import TargetLike, resolve_target
from memfit.plans.search_result import Over
from memfit.torch_private.pytree import tree_leaves

GRID = {"batch": 1, "seq": 128}
"""The steps in which values are tried."""
_LARGEST = {"batch": 1 << 16, "seq": 1 << 20, "ranks": 64}


def check_aim(make_step: Any, over: Any, target: TargetLike, ranks: int | None) -> Target:
    """Return the target of a search, or refuse what is searched and over what."""
    if over not in get_args(Over):
        raise InputError(f"over is {over!r}; write 'batch', 'seq', 'ranks', 'mesh' or 'device'")
    if not callable(make_step) and not isinstance(make_step, Step | Trace):
        raise InputError(
            f"make_step is a {type(make_step).__name__}; give a function of a value that returns a memfit.Step, such "
            "as lambda batch: memfit.Step(model, memfit.spec((batch, 512)), loss=...)"
        )
    if isinstance(make_step, Step | Trace) and over != "ranks":
        raise InputError(
            f"a {type(make_step).__name__} has one {over}; give a function, lambda {over}: memfit.Step(...), that "
            f"makes the step of any"
        )
    if isinstance(make_step, torch.nn.Module):
        raise InputError("make_step is a model; give a function of a value that returns a memfit.Step")
    if over == "ranks" and ranks is not None:
        raise InputError(f"ranks={ranks} is what the search over ranks finds; leave it out, or give largest={ranks}")
    return resolve_target(make_step, target, ranks)


def check_values(values: Iterable[int] | None) -> list[int] | None:
    """Return the values to try in order, or refuse them."""
    if values is None:
        return None
    try:
        found = sorted(set(values))
    except TypeError as error:
        raise InputError(f"values is {values!r}; write whole numbers of at least 1, such as [1, 2, 4, 8]") from error
    if not found:
        raise InputError("values has nothing in it; write whole numbers of at least 1, such as [1, 2, 4, 8]")
    for value in found:
        _check_count("values has", value)
    return found


def check_largest(over: Any, largest: int | None, values: list[int] | None) -> int:
    """Return where a search ends, or refuse it."""
    if largest is None:
        return _LARGEST.get(over, 1)
    if values is not None:
        raise InputError("values and largest were both given; the last of values is the largest, leave one out")
    _check_count("largest is", largest)
    grid = GRID.get(over, 1)
    if largest < grid:
        raise InputError(f"largest is {largest}; sequences are searched in steps of {grid}: give more, or values")
    return largest


def _check_count(what: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise InputError(f"{what} {value!r}; write whole numbers of at least 1")


def count_samples(step: Step) -> int | None:
    """Return how many samples a batch has: the first size of its first tensor."""
    first = _first_tensor(step)
    return None if first is None else first.shape[0]


def count_amount(step: Step) -> tuple[int | None, Literal["samples", "tokens"]]:
    """Return what a batch has of what throughput counts: tokens where it is rows of whole numbers, else samples."""
    first = _first_tensor(step)
    if first is not None and first.dim() == 2 and not first.is_floating_point():
        return first.numel(), "tokens"
    return (None if first is None else first.shape[0]), "samples"


def _first_tensor(step: Step) -> torch.Tensor | None:
    leaves = (leaf for leaf in tree_leaves(step.batch) if isinstance(leaf, torch.Tensor) and leaf.dim())
    return next(leaves, None)
