"""Fused optimizer steps: one kernel that writes to parameters and state and makes nothing.

Some of torch's have no meta kernel (`aten._fused_sgd_`, and all with a learning rate that is a tensor).
"""

from __future__ import annotations

from typing import Any

import torch

from memfit.capture.rules import RuleContext


def writes_in_place(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Return what the op does: nothing, for it only writes to what it is given."""
    return


_FUSED = {
    f"aten.{name}.{overload}": writes_in_place
    for name in ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")
    for overload in ("default", "tensor_lr")
    if overload in getattr(torch.ops.aten, name).overloads()
}
KERNELS = {"cpu": _FUSED, "cuda": _FUSED}
