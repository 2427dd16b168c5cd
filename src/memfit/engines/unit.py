"""A module of a model that has a plan: which call of it runs under which policy."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from memfit.engines.inputs import Changing, kind_of_call
from memfit.engines.learning import Learning
from memfit.engines.policy import RunPolicy
from memfit.engines.recipe import Recipe
from memfit.engines.rerun import Rerun, running_again
from memfit.engines.tape import Tape

if TYPE_CHECKING:
    from memfit.engines.local import Applied


class PlannedUnit:
    """Runs the calls of one module as the plan says; calls that the plan does not name run as they are."""

    def __init__(self, applied: Applied, calls: int, policies: list[RunPolicy]) -> None:
        self._applied = applied
        self._calls = calls
        self._policies = {policy.call: policy for policy in policies}
        self._recipes: dict[tuple[int, Hashable], Recipe | None] = {}
        self._count = 0

    def reset(self) -> None:
        """The next call is the first of a step."""
        self._count = 0

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self._applied.training or running_again():
            return forward(*args, **kwargs)
        number = self._count
        self._count = (number + 1) % self._calls
        policy = self._policies.get(number)
        if policy is None:
            return forward(*args, **kwargs)
        device_type = self._applied.device_type
        try:
            kind = (number, kind_of_call(args, kwargs, device_type))
        except Changing:
            tape = Tape(policy, device_type)
            with saved_tensors_hooks(tape.pack, Tape.unpack), tape:
                return forward(*args, **kwargs)
        run = Rerun(policy.unit, module, forward, device_type)
        if kind not in self._recipes:
            return self._learn(policy, module, kind, run, args, kwargs)
        recipe = self._recipes[kind]
        if recipe is None:
            return run.whole(args, kwargs)
        result, same = run.first(recipe, args, kwargs)
        if not same:
            del self._recipes[kind]
        return result

    def _learn(
        self,
        policy: RunPolicy,
        module: nn.Module,
        kind: tuple[int, Hashable],
        run: Rerun,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        learning = Learning(policy, module, run)
        result, recipe = learning.first(args, kwargs)
        self._recipes[kind] = recipe
        if recipe is None:
            self._applied.warn(policy.unit, learning.differs)
        return result
