"""Cross entropy in chunks, so that only one chunk of log-probabilities and of their gradients exists at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

CHUNKS = 8
_whole = F.cross_entropy  # also while a capture replaces it


def chunked_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    chunks: int = CHUNKS,
) -> torch.Tensor:
    """`F.cross_entropy` of logits (rows, classes) and classes (rows,), a chunk of rows at a time.

    Each chunk is computed in float32, and again in the backward; nothing but its sum is kept. Give logits as the model
    makes them, without `.float()`. What cannot be done in chunks (weights, probabilities, no sum) is done at once.
    """
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    able = logits.dim() == 2 and targets.dim() == 1 and weight is None and reduction in ("mean", "sum")
    if not able:
        return _whole(logits.to(torch.float32), targets, weight, reduction=reduction, **options)
    total: Any = 0.0
    for rows, wanted in zip(logits.chunk(chunks), targets.chunk(chunks), strict=True):
        total = total + checkpoint(_summed, rows, wanted, options, use_reentrant=False, preserve_rng_state=False)
    return total / (targets != ignore_index).sum() if reduction == "mean" else total


def _summed(rows: torch.Tensor, wanted: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    return _whole(rows.to(torch.float32), wanted, reduction="sum", **options)
