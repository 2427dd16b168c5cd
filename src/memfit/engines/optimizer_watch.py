"""Hooks on the steps of all optimizers that end when their owner is gone.

Note [One hook]: torch goes over its dictionary of such hooks while they run. One that a garbage collection took out of
it just then would end the user's step with "OrderedDict mutated during iteration". So torch has one hook of memfit's,
which goes over a copy of its watchers; a collection takes a watcher out of these alone. Torch's hook goes with the last
watcher that is removed by a call.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

Watcher = Callable[[torch.optim.Optimizer], None]

_watchers: dict[int, Watcher] = {}
_numbers = itertools.count()
_hooks: list[Any] = []


class OptimizerWatch:
    """Calls a function after every step of any optimizer, until it is removed or `owner` is gone."""

    def __init__(self, watcher: Watcher, owner: object) -> None:
        number = next(_numbers)
        _watchers[number] = watcher
        if not _hooks:
            _hooks.append(register_optimizer_step_post_hook(_after_step))
        self._release = weakref.finalize(owner, _watchers.pop, number, None)

    def remove(self) -> None:
        """Stop watching."""
        self._release()
        while _hooks and not _watchers:
            _hooks.pop().remove()


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for watcher in list(_watchers.values()):  # a list is there before its iterator is: no collection comes between
        watcher(optimizer)
