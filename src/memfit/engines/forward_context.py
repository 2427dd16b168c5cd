"""What a forward reads besides its inputs, saved for the recompute.

Autocast, attention kernels, random generators, and the tensors that the names of parameters and buffers stand for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import get_device_states, set_device_states

from memfit.capture import held_generators
from memfit.torch_private.distributed_tensors import is_dtensor
from memfit.torch_private.kernels import ATTENTION_SWITCHES
from memfit.torch_private.modules import buffer_table, parameter_table

Generators = tuple[bytes, list[int], list[torch.Tensor]]
"""The state of the CPU's generator, devices, and the states of their generators."""


def generators_of(device_type: str, *tensors: Any) -> Generators:
    """Return the state of the generators that a run with these inputs may use. The CPU's is no tensor."""
    devices, states = get_device_states(*tensors) if device_type != "cpu" else ([], [])
    return torch.get_rng_state().numpy().tobytes(), devices, states


def _set(generators: Generators, device_type: str) -> None:
    state, devices, states = generators
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    if devices:
        set_device_states(devices, states, device_type=device_type)


@contextlib.contextmanager
def with_generators(generators: Generators, device_type: str) -> Iterator[None]:
    """Draw random numbers from this state inside the block, and go on afterwards as if nothing had been drawn."""
    now = torch.get_rng_state().numpy().tobytes(), generators[1], _states(generators[1], device_type)
    _set(generators, device_type)
    try:
        yield
    finally:
        _set(now, device_type)


def _states(devices: list[int], device_type: str) -> list[torch.Tensor]:
    module = getattr(torch, device_type, None)
    return [module.get_rng_state(device) for device in devices] if module is not None and devices else []


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Autocast on the CPU and on the device, and the kernels that attention may use."""

    kinds: tuple[tuple[str, bool, torch.dtype], ...]
    cached: bool
    attention: tuple[bool, ...]

    @classmethod
    def current(cls, device_type: str) -> ForwardContext:
        kinds = ("cpu",) if device_type == "cpu" else ("cpu", device_type)
        return cls(
            tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
            torch.is_autocast_cache_enabled(),
            tuple(enabled() for enabled, _ in ATTENTION_SWITCHES),
        )

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore this context inside the block, with gradients on: autograd runs a backward without either."""
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self.kinds:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.cached))
            for (enabled, enable), wanted in zip(ATTENTION_SWITCHES, self.attention, strict=True):
                if enabled() != wanted:
                    stack.callback(enable, enabled())
                    enable(wanted)
            stack.enter_context(torch.enable_grad())
            yield


# -- The tensors that the names of a unit's parameters and buffers stand for ------------------------------------------
#
# A forward may bind another tensor to a buffer, and `torch.func.functional_call` binds others to parameters for one
# call. A recompute must find those that the forward found, and leave those that are there now. Parameters that
# FSDP binds, sharded or unsharded as its hooks say, are left to it.


_NONE = object()


class Bindings:
    """The names of a unit, looked up once."""

    __slots__ = ("_buffers", "_slots", "_without_dtensors", "generators")

    def __init__(self, unit: nn.Module, *, fully_sharded: bool = True) -> None:
        """`fully_sharded` says whether DTensors are FSDP2's, which binds others while parameters are unsharded."""
        self._without_dtensors = fully_sharded
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
        """Return what the names stand for now."""
        return [table.get(name, _NONE) for table, name in self._slots]

    def buffers(self) -> list[tuple[int, torch.Tensor]]:
        """Return the buffers that there are now, by number."""
        found = [table.get(name) for table, name in self._buffers]
        return [(number, each) for number, each in enumerate(found) if each is not None]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters that there are now, but for those that FSDP keeps sharded."""
        found = [table.get(name) for table, name in self._slots[: len(self._slots) - len(self._buffers)]]
        return [each for each in found if each is not None and not self._is_fsdps(each)]

    def _is_fsdps(self, value: Any) -> bool:
        return self._without_dtensors and is_dtensor(value)

    @contextlib.contextmanager
    def bound(self, then: list[Any]) -> Iterator[None]:
        """Bind the names inside the block to what they stood for then, and afterwards to what they do now."""
        now = self.here()
        self._bind(then, now)
        try:
            yield
        finally:
            self._bind(now, self.here())

    def _bind(self, wanted: list[Any], found: list[Any]) -> None:
        for (table, name), one, other in zip(self._slots, wanted, found, strict=True):
            if one is other or self._is_fsdps(one) or self._is_fsdps(other):
                continue
            if one is _NONE:
                del table[name]
            else:
                table[name] = one
