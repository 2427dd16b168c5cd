"""Track the position in the planned step: which of its calls the call of a unit is.

Note [Phase]: a step is one pass of forward and backward, or several. A pass ends with its backward: the first call of a
unit after one begins the next, and counts from 0. Where all passes of the planned step are alike and a unit has the
same policies in each (solve, Note [Micro-batches]), nothing else has to be known: loops may run more passes than
planned, or fewer. Other plans count calls from one step of the optimizer to the next, and need to be given it. A call
beyond those of the step gets the policy that drops the most of the unit's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memfit.capture import is_capturing, is_trained
from memfit.engines.compiled_policy import RunPolicy
from memfit.paths import module_label
from memfit.plans import Checkpoint, Plan
from memfit.torch_private.pytree import tree_leaves

Warn = Callable[[str, str], None]
"""Takes the kind of a warning, which is given once, and its text."""


class StepPosition:
    """Where a training loop is in the step of a plan."""

    def __init__(self, plan: Plan, warn: Warn) -> None:
        self.micro_batches = plan.trace.micro_batches
        self.warn = warn
        self.number = 0
        """Of the pass that runs, from `apply` on: units count their calls anew when it changes."""
        self.step = 0
        self.lost = False
        """Whether calls can no longer be told apart: plans that depend on that drop the most they can from then on."""
        self.calls: list[Calls] = []
        self._passes = 0
        self._begun = False
        self._watched: weakref.ref[nn.Module] | None = None

    def watch(self, module: nn.Module) -> None:
        """Watch the gradients of this module to see whether a new step begins."""
        self._watched = weakref.ref(module)

    def enter(self) -> None:
        """Note that a unit is called in a forward."""
        if self._begun:
            return
        self._begun = True
        self.number += 1
        planned = self.micro_batches
        if planned is None:
            return
        if self._passes >= planned and not self._holds_gradients():
            self._passes = 0
        self._passes += 1
        if self._passes > planned:
            self.warn(
                "more passes",
                f"{self._passes} micro-batches since the optimizer's last step, and {planned} in the plan. "
                + (
                    "All of them run with the policies of the plan, which hold for any number of micro-batches"
                    if planned > 1
                    else "Gradients of earlier ones are held meanwhile, which the plan does not count; plan with "
                    "Step(..., accumulation_steps=...)"
                ),
            )

    def leave(self) -> None:
        """Note that a backward has begun: the next call of a unit in a forward belongs to another pass."""
        self._begun = False

    def leave_after(self, result: Any) -> Any:
        """Hook the output of a call without a policy, so that its backward is noted too."""
        made = (each for each in tree_leaves(result) if isinstance(each, torch.Tensor) and each.grad_fn is not None)
        for tensor in made:
            tensor.register_hook(self._left)
            break
        return result

    def _left(self, _: torch.Tensor) -> None:
        self.leave()

    def end_step(self, *, all_stepped: bool) -> None:
        """Note an optimizer's step.

        Where several step a model, the planned step ends when all of them have stepped and every unit has had its
        calls: one may step more often than another.
        """
        planned = self.micro_batches
        complete = all(each.complete for each in self.calls)
        if planned is None and not complete:
            if not all_stepped:
                return
            self.lose("an optimizer did its step before all calls of the plan's step had been made")
        if not all_stepped:
            return
        if planned is not None and 0 < self._passes < planned:
            self.warn(
                "fewer passes",
                f"the optimizer did its step after {self._passes} of {planned} micro-batches (the last of an epoch?). "
                "They ran with the policies of the plan, which hold for any number of micro-batches",
            )
        self.reset()

    def lose(self, why: str) -> None:
        """Stop telling calls apart."""
        if not self.lost and any(each.by_step for each in self.calls):
            self.lost = True
            self.warn(
                "lost",
                f"{why}: calls of units cannot be told apart, and from now on each runs with the policy that drops the "
                "most, slower than planned. Give apply all optimizers of the step, and run it as it was planned",
            )

    def reset(self) -> None:
        """Begin a new step."""
        self._passes = 0
        self._begun = False
        self.step += 1

    def _holds_gradients(self) -> bool:
        module = None if self._watched is None else self._watched()
        return module is not None and any(each.is_leaf and each.grad is not None for each in module.parameters())


class Calls:
    """The policies of one unit by call, and which call comes next."""

    def __init__(self, position: StepPosition, entries: Sequence[Checkpoint], policies: Mapping[int, Any]) -> None:
        self._position = position
        self.name = module_label(entries[0].module)
        calls = entries[0].calls
        self._period = period_of(calls, position.micro_batches, entries)
        self._policies = policies
        self._most = policies[max(entries, key=lambda entry: entry.discarded_bytes).call]
        self._limit = calls if self._period is None else self._period
        self._count = 0
        self._seen = -1
        position.calls.append(self)

    @property
    def by_step(self) -> bool:
        """Whether calls are counted from one step of the optimizer to the next."""
        return self._period is None

    @property
    def complete(self) -> bool:
        """Whether all calls of the step have been made, where they are counted by step."""
        return self._period is not None or (self._seen == self._position.step and self._count >= self._limit)

    def next(self) -> Any:
        """Return the policy of this call, None for none."""
        position = self._position
        position.enter()
        now = position.step if self._period is None else position.number
        if now != self._seen:
            self._seen, self._count = now, 0
        number = self._count
        self._count = number + 1
        if position.lost and self._period is None:
            return self._most
        if number < self._limit:
            return self._policies.get(number)
        since = "the optimizer's last step" if self._period is None else "the last backward"
        position.warn(
            "more calls",
            f"{self.name!r} is called {number + 1} times since {since}, and {self._limit} times in the plan: this is "
            "an additional forward in train mode, and what it saves for backward is held as long as its output is. Run "
            "it under torch.no_grad() or in eval mode, or plan the step with it",
        )
        if position.micro_batches is None:
            position.lose("more calls were made than the plan's step has")
        return self._most if self._period is None else self._policies.get(number % self._limit)


def period_of(calls: int, micro_batches: int | None, entries: Sequence[Checkpoint]) -> int | None:
    """Return how many calls of a unit a pass has, where its policies are the same in every pass; None elsewhere."""
    policies = {entry.call: RunPolicy.of(entry).content for entry in entries}
    length = 1 if micro_batches is None or calls % micro_batches else calls // micro_batches
    alike = all(policies.get(call) == policies.get(call % length) for call in range(calls))
    return length if alike else None


def needs_step(plan: Plan) -> str | None:
    """Name a unit whose policy depends on which pass of the step it is called in; None when there is none."""
    entries: dict[str, list[Checkpoint]] = {}
    for entry in plan.checkpoint:
        entries.setdefault("<loss>" if entry.is_loss else entry.module, []).append(entry)
    for name, members in entries.items():
        if period_of(members[0].calls, plan.trace.micro_batches, members) is None:
            return module_label(name)
    return None


# -- Whether a unit is being trained: a plan does nothing in evaluation -----------------------------------------------
#
# Models may be trained in eval mode. Plans know which modules were in eval mode when their step was captured; those
# are trained in either mode.


class Mode:
    """Train or eval mode of a unit and of the modules around it.

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
