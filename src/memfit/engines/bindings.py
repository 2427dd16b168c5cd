"""The tensors that the names of a unit's parameters and buffers stand for.

A forward may bind another tensor to a buffer, and `torch.func.functional_call` binds others to parameters for one call.
A second run must find those that the first one found, and leave those that are there now. Parameters that FSDP binds,
sharded or unsharded as its hooks say, are left to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from memfit.capture.random_numbers import held_generators
from memfit.torch_private.modules import buffer_table, parameter_table

_NONE = object()


def _fully_sharded(value: Any) -> bool:
    """Whether this is a shard that FSDP2 keeps; the parameter is another tensor while it is unsharded."""
    return type(value) is not torch.nn.Parameter and hasattr(value, "_spec") and hasattr(value, "_local_tensor")


class Bindings:
    """The names of a unit, looked up once."""

    __slots__ = ("_buffers", "_slots", "generators")

    def __init__(self, unit: nn.Module) -> None:
        self._slots: list[tuple[dict[str, Any], str]] = []
        self._buffers: list[tuple[dict[str, Any], str]] = []
        for module in unit.modules():
            if not isinstance(parameter_table(module), dict):  # a ScriptModule's are not Python's
                continue
            self._buffers += [(buffer_table(module), name) for name in buffer_table(module)]
            self._slots += [(parameter_table(module), name) for name in parameter_table(module)]
        self._slots += self._buffers
        self.generators = held_generators(unit.modules())

    def here(self) -> list[Any]:
        """What the names stand for now."""
        return [table.get(name, _NONE) for table, name in self._slots]

    def buffers(self) -> list[tuple[int, torch.Tensor]]:
        """The buffers that there are now, by number."""
        found = [table.get(name) for table, name in self._buffers]
        return [(number, each) for number, each in enumerate(found) if each is not None]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters that there are now, but for those that FSDP keeps sharded."""
        found = [table.get(name) for table, name in self._slots[: len(self._slots) - len(self._buffers)]]
        return [each for each in found if each is not None and not _fully_sharded(each)]

    @contextlib.contextmanager
    def bound(self, then: list[Any]) -> Iterator[None]:
        """Inside the block the names stand for what they did then; afterwards for what they do now."""
        now = self.here()
        self._bind(then, now)
        try:
            yield
        finally:
            self._bind(now, self.here())

    def _bind(self, wanted: list[Any], found: list[Any]) -> None:
        for (table, name), one, other in zip(self._slots, wanted, found, strict=True):
            if one is other or _fully_sharded(one) or _fully_sharded(other):
                continue
            if one is _NONE:
                del table[name]
            else:
                table[name] = one
