"""Whether a unit is being trained: a plan does nothing in evaluation."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import nn

from memfit.trace.environment import is_capturing


def is_container(module: nn.Module) -> bool:
    """Whether a module only holds others and is never called: several models were given together."""
    return type(module) in (nn.ModuleDict, nn.ModuleList)


class Mode:
    """The modes of a unit and of the modules around it.

    A unit is trained when it is in train mode, or one around it is: parts that are kept in eval mode in training
    (frozen normalisation) run as planned, and so do parts in train mode of a model in eval mode.
    """

    __slots__ = ("_modules",)

    def __init__(self, chain: Sequence[nn.Module]) -> None:
        self._modules = [weakref.ref(module) for module in chain if not is_container(module)]

    @property
    def training(self) -> bool:
        """Whether the unit is being trained; nothing of the plan is done otherwise, nor while a step is captured."""
        modules = (reference() for reference in self._modules)
        return any(module is not None and module.training for module in modules) and not is_capturing()
