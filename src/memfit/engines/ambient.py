"""What surrounds a run besides its inputs: autocast, choices of kernels, and the generators of random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import get_device_states, set_device_states

from memfit.torch_private.kernels import ATTENTION_SWITCHES

Generators = tuple[bytes, list[int], list[torch.Tensor]]
"""The state of the CPU's generator, devices, and the states of their generators."""


def generators_of(device_type: str, *tensors: Any) -> Generators:
    """The state of the generators that a run with these inputs may use. The CPU's is kept outside of the allocator."""
    devices, states = get_device_states(*tensors) if device_type != "cpu" else ([], [])
    return torch.get_rng_state().numpy().tobytes(), devices, states


def _set(generators: Generators, device_type: str) -> None:
    state, devices, states = generators
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    if devices:
        set_device_states(devices, states, device_type=device_type)


@contextlib.contextmanager
def with_generators(generators: Generators, device_type: str) -> Iterator[None]:
    """Inside the block, random numbers come as they did from this state; afterwards as if nothing had been."""
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
class Ambient:
    """Autocast on the CPU and on the device, and the kernels that attention may use."""

    kinds: tuple[tuple[str, bool, torch.dtype], ...]
    cached: bool
    attention: tuple[bool, ...]

    @classmethod
    def here(cls, device_type: str) -> Ambient:
        kinds = ("cpu",) if device_type == "cpu" else ("cpu", device_type)
        return cls(
            tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
            torch.is_autocast_cache_enabled(),
            tuple(enabled() for enabled, _ in ATTENTION_SWITCHES),
        )

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """The same surroundings, with gradients on: autograd runs a backward without either."""
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
