"""The elements of a shard as blocks of an N-dimensional tensor: what `torch.distributed.checkpoint` saves and loads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A block of a tensor with as many dimensions, whose elements follow each other in the flattened tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def split_into_boxes(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Return the blocks, in order, that elements `begin` up to `end` of a flattened tensor consist of.

    At most two for every dimension but the last, and one more: the rest of a row, whole rows, the start of a row.
    """
    if end <= begin:
        return []
    if not shape:
        return [Box(offsets=(), sizes=())]
    if len(shape) == 1:
        return [Box(offsets=(begin,), sizes=(end - begin,))]
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:  # inside one row
        return _in_row(shape[1:], last, begin - last * row, end - last * row)
    found: list[Box] = []
    if begin < first * row:
        found += _in_row(shape[1:], first - 1, begin - (first - 1) * row, row)
    if first < last:
        found.append(Box(offsets=(first, *(0 for _ in shape[1:])), sizes=(last - first, *shape[1:])))
    if last * row < end:
        found += _in_row(shape[1:], last, 0, end - last * row)
    return found


def _in_row(shape: Sequence[int], number: int, begin: int, end: int) -> list[Box]:
    return [Box(offsets=(number, *box.offsets), sizes=(1, *box.sizes)) for box in split_into_boxes(shape, begin, end)]
