"""Losses over sequences whose lengths are in the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.capture.rules import RuleContext
from memfit.capture.rules.layout import bytes_of

_META = torch.device("meta")


def _ctc_loss(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Losses, and forward variables as wide as the longest target (LossCTC.cpp, `ctc_loss_cpu_template`)."""
    log_probabilities, target_lengths = args[0], args[3]
    longest = int(max(target_lengths))
    steps, batch = log_probabilities.size(0), log_probabilities.size(1)
    dtype = log_probabilities.dtype
    losses = torch.empty(batch, dtype=dtype, device=_META)
    return losses, torch.empty((batch, steps, 2 * longest + 1), dtype=dtype, device=_META)


_ctc_loss.reads_values = True  # type: ignore[attr-defined]


def _ctc_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """The gradient of the log probabilities (`ctc_loss_backward_cpu_template`)."""
    return torch.empty(args[1].size(), dtype=args[1].dtype, device=_META)


def _ctc_backward_workspace(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """The backward variables, as large as the forward ones."""
    return bytes_of(args[6])


_FORWARD = dict.fromkeys(("aten._ctc_loss.default", "aten._ctc_loss.Tensor"), _ctc_loss)
_BACKWARD = ("aten._ctc_loss_backward.default", "aten._ctc_loss_backward.Tensor")

KERNELS = {device: {**_FORWARD, **dict.fromkeys(_BACKWARD, _ctc_backward)} for device in ("cpu", "cuda")}
WORKSPACES = {device: dict.fromkeys(_BACKWARD, _ctc_backward_workspace) for device in ("cpu", "cuda")}
