"""The optimizers that a user gives to `apply`, inside what libraries wrap them in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memfit.errors import InputError

OptimizerLike = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def resolve_optimizers(given: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers themselves: one, several or none, without accelerate's, Lightning's or others' wrappers."""
    if given is None:
        return []
    if isinstance(given, (tuple, list)):
        return [optimizer for each in given for optimizer in resolve_optimizers(each)]
    optimizer, seen = given, set()
    while id(optimizer) not in seen:
        seen.add(id(optimizer))
        inner = getattr(optimizer, "optimizer", None)
        if isinstance(inner, torch.optim.Optimizer):
            optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"apply takes the model's optimizer, a torch.optim.Optimizer, or a list of them, not a "
            f"{type(given).__name__}"
        )
    return [optimizer]
