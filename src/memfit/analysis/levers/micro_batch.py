"""A smaller micro-batch, accumulated to the same batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from memfit.analysis.levers.case import Case
from memfit.analysis.levers.lever import Lever
from memfit.torch_private.pytree import tree_flatten, tree_unflatten

_ADVICE = "what has a row for each sample must be halved too: take labels from the batch, or write labels[:len(output)]"
_PLAIN = (int, float, bool, str, type(None))


def micro_batch(case: Case) -> Iterator[Lever]:
    """The step with half of the batch at a time; nothing where the batch cannot be halved."""
    step, what = case.step, "smaller micro-batch"
    if step is None or step.run is not None:
        case.left_out.append(f"{what}: only a Step with a batch can be halved, not a trace or a loop of one's own")
        return
    rows = batch_rows(step.batch)
    if rows is None or rows % 2:
        found = "tensors of different lengths" if rows is None else f"{rows} row{'s' if rows > 1 else ''}"
        case.left_out.append(f"{what}: a batch of {found} cannot be halved")
        return
    times = 2 * step.accumulation_steps
    changed = replace(step.with_batch(halved(step.batch)), accumulation_steps=times)
    captured = case.captured(changed, what=what, advice=_ADVICE)
    if captured is not None:
        yield case.lever(
            f"micro-batch of {rows // 2} instead of {rows}",
            f"(loss / {times}).backward() on {times} micro-batches, then optimizer.step()",
            case.effect(captured),
            "captured",
            option=f"--batch {rows // 2} --accumulation-steps {times}",
        )


def batch_rows(batch: Any) -> int | None:
    """The size of the first dimension that all tensors of a batch have in common; None when there is none."""
    leaves = _leaves(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    strange = [leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, *_PLAIN))]
    sizes = {tensor.shape[0] for tensor in tensors}
    return sizes.pop() if len(sizes) == 1 and not strange else None


def halved(batch: Any) -> Any:
    """The batch with half as many rows, and no data; what is one tensor in two places stays one."""
    leaves, shape = tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)
    halves = {id(leaf): _half(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return tree_unflatten([halves.get(id(leaf), leaf) for leaf in leaves], shape)


def _half(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() == 0:
        return tensor
    return torch.empty((tensor.shape[0] // 2, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")


def _leaves(batch: Any) -> list[Any]:
    return tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)[0]
