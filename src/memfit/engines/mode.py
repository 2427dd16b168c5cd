"""Whether a unit is being trained: a plan does nothing in evaluation.

Models may be trained in eval mode. Plans know which modules were in eval mode when their step was captured; those are
trained in either mode.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import nn

from memfit.capture.call_stack import is_trained
from memfit.capture.environment import is_capturing


class Mode:
    """The modes of a unit and of the modules around it.

    A unit is trained when it is in train mode, or one around it is: parts that are kept in eval mode in training
    (frozen normalisation) run as planned, and so do parts in train mode of a model in eval mode. `in_eval` says that
    the step was planned with the unit in eval mode.
    """

    __slots__ = ("_in_eval", "_modules")

    def __init__(self, chain: Sequence[nn.Module], *, in_eval: bool = False) -> None:
        self._modules = [weakref.ref(module) for module in chain]
        self._in_eval = in_eval

    @property
    def training(self) -> bool:
        """Whether the unit is being trained; nothing of the plan is done otherwise, nor while a step is captured."""
        return not is_capturing() and (self._in_eval or self._is_trained())

    @property
    def evaluated_unlike_planned(self) -> bool:
        """Whether the unit is in eval mode, and was in train mode when the step was planned."""
        return not is_capturing() and not self._in_eval and not self._is_trained()

    def _is_trained(self) -> bool:
        return is_trained(module for reference in self._modules if (module := reference()) is not None)
