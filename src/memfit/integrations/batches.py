"""Batches for planning: the longest that a loader is likely to give, the same at another size; and the best size."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from memfit.capture import Step
from memfit.errors import InputError
from memfit.hardware import Target
from memfit.plans import Search, search
from memfit.sharding import ShardOptions
from memfit.solve import SolveOptions
from memfit.torch_private.pytree import tree_leaves, tree_map_only
from memfit.verify import generators, set_generators

_ROWS = 1024
"""How many rows of a dataset are looked at for the longest."""


def largest_batch(loader: Any, batch_size: int | None = None) -> Any:
    """Return a batch of the longest among the first rows of a loader's dataset, made by its collator.

    Random generators are as before: rows that are drawn or augmented come as without this.
    """
    if not isinstance(loader, DataLoader):
        raise InputError(
            f"the training data is a {type(loader).__name__}, and a batch can be made of a torch DataLoader only; give "
            "the largest batch that comes: MemfitCallback(batch=...)"
        )
    dataset: Any = loader.dataset
    before = generators()
    try:
        count = batch_size or loader.batch_size
        if count is None and loader.batch_sampler is not None:
            count = len(next(iter(loader.batch_sampler)))
        wanted = max(_ROWS, count or 1)
        if isinstance(dataset, IterableDataset):
            rows = list(itertools.islice(iter(dataset), min(wanted, 4 * (count or 1))))
        else:
            rows = [dataset[number] for number in range(min(len(dataset), wanted))]
        if not rows:
            raise InputError("the training dataset has no rows; give a batch: MemfitCallback(batch=...)")
        collate: Callable[[Any], Any] = loader.collate_fn
        longest = sorted(rows, key=_elements, reverse=True)
        if count is None:  # the dataset's rows are batches
            return collate(longest[0])
        return collate([longest[number % len(longest)] for number in range(count)])
    finally:
        set_generators(before)


def resize(batch: Any, size: int) -> Any:
    """Return the batch at another size, without data: the first dimension of tensors that have the batch's there."""
    sizes = [each.shape[0] for each in tree_leaves(batch) if isinstance(each, torch.Tensor) and each.dim()]
    present = max(set(sizes), key=sizes.count, default=None)

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        rows = (size,) if tensor.dim() and tensor.shape[0] == present else tensor.shape[:1]
        return torch.empty((*rows, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")

    return tree_map_only(torch.Tensor, resized, batch)


def find_batch_size(
    make_step: Callable[[Any], Step],
    batch: Any,
    *,
    target: Target,
    budget: str | int | float | None,
    largest: int,
    planned: bool,
) -> Search:
    """Search the batch size of a step: the fastest under a plan, or without one every size that fits as it is.

    Nothing is run: a size is a capture on meta tensors. All ranks find the same.
    """
    shard = ShardOptions(parallel="ddp") if target.ranks > 1 else ShardOptions()
    options = SolveOptions(shard=shard) if planned else SolveOptions(shard=shard, ac_units=())
    return search(
        lambda size: make_step(resize(batch, size)),
        target=target,
        budget=budget,
        largest=largest,
        options=options,
        progress=False,
    )


def _elements(row: Any) -> int:
    return sum(each.numel() if isinstance(each, torch.Tensor) else 1 for each in tree_leaves(row))
