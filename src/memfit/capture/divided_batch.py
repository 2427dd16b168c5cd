"""A step whose batch is divided into micro-batches: the same rows in a step, some of them at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from memfit.capture.step import Step
from memfit.errors import InputError
from memfit.torch_private.pytree import tree_flatten, tree_unflatten

_PLAIN = (int, float, bool, str, type(None))


def batch_rows(batch: Any) -> int | None:
    """Return the size of the first dimension that all tensors of a batch have in common; None when there is none."""
    leaves = _flatten(batch)[0]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    strange = [leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, *_PLAIN))]
    sizes = {tensor.shape[0] for tensor in tensors}
    return sizes.pop() if len(sizes) == 1 and not strange else None


def divide_batch(batch: Any, parts: int) -> Any:
    """Return the first of so many equal parts of a batch, without data; a tensor that is in two places stays one."""
    leaves, shape = _flatten(batch)
    found = {id(leaf): _part(leaf, parts) for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return tree_unflatten([found.get(id(leaf), leaf) for leaf in leaves], shape)


def divide_step(step: Step, parts: int) -> Step:
    """Return a step that runs its batch in so many parts and accumulates their gradients: the same rows in a step."""
    rows = batch_rows(step.batch)
    if step.run is not None or rows is None or rows % parts:
        raise InputError(f"a batch of {rows} rows is not divided into {parts} by memfit; give Step a smaller batch")
    return replace(step.with_batch(divide_batch(step.batch, parts)), accumulation_steps=parts * step.accumulation_steps)


def _flatten(batch: Any) -> tuple[list[Any], Any]:
    return tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)


def _part(tensor: torch.Tensor, parts: int) -> torch.Tensor:
    if tensor.dim() == 0:
        return tensor
    return torch.empty((tensor.shape[0] // parts, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
