"""Embedding bags on CPU: which of their four results are empty, and what they allocate inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.capture.rules import RuleContext
from memfit.capture.rules.vendor import probed

_SUM, _MAX = 0, 2
_FAST = (torch.float32, torch.float16, torch.bfloat16)


def _embedding_bag(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Sums, the bag of each index, the size of each bag and where maxima were (ATen/native/EmbeddingBag.cpp).

    The second has room for one more (`make_offset2bag_out`).
    """
    weight, indices, offsets, _, mode, _, scales, ends, padding = (*args, *_DEFAULTS[len(args) :])
    bags = offsets.size(0) - ends
    width = weight.size(1)
    quick = mode == _SUM and weight.dtype in _FAST and weight.stride(1) == 1 and padding < 0
    quick = quick and (scales is None or scales.stride(0) == 1)
    return (
        weight.new_empty((bags, width)),
        offsets.new_empty((0,)) if quick else offsets.new_empty((indices.size(0) + 1,))[:-1],
        offsets.new_empty((bags if mode == _MAX else offsets.size(0),)),
        offsets.new_empty((bags, width) if mode == _MAX else (offsets.size(0),)),
    )


def _backward_workspace(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Measured on bags that are not empty: those are left out."""
    sizes = torch.ones(args[4].shape, dtype=args[4].dtype)
    return probed(context, func, (*args[:4], sizes, *args[5:]), kwargs, result)


_DEFAULTS: tuple[Any, ...] = (None, None, None, False, _SUM, False, None, False, -1)
_OPS = ("_embedding_bag", "_embedding_bag_forward_only")

KERNELS = {"cpu": {f"aten.{name}.default": _embedding_bag for name in _OPS}}
WORKSPACES = {
    "cpu": {
        **{f"aten.{name}.default": probed for name in _OPS},
        "aten._embedding_bag_backward.default": _backward_workspace,
    }
}
