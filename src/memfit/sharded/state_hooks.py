"""What `state_dict` and `load_state_dict` of a sharded model give and take, under the original names.

Modules hold one-dimensional pieces, which would look like a state dict of a smaller model. Hooks on every module that
holds one put a ShardedValue in their place, and take whole tensors.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from memfit.sharded.flat import FlatShard
from memfit.sharded.runtime import Runtime
from memfit.sharded.sharded_value import ShardedValue
from memfit.sharded.states import State
from memfit.sharded.unit import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A parameter that a module holds."""

    attribute: str
    unit: Unit
    flat: FlatShard
    number: int

    def value(self) -> ShardedValue:
        return sharded_value(self.flat, self.number, self.flat.own(self.number))


def attach_state(runtime: Runtime) -> None:
    """Make the modules of a sharded model give and take state as those of a plain model do."""
    held: dict[nn.Module, list[_Held]] = defaultdict(list)
    for unit in runtime.units:
        for flat in unit.flats:
            for number, places in enumerate(flat.places):
                for place in places:
                    held[place.module].append(_Held(attribute=place.attribute, unit=unit, flat=flat, number=number))
    for module, parameters in held.items():
        _attach(module, parameters)


def sharded_value(flat: FlatShard, number: int, local: torch.Tensor) -> ShardedValue:
    """Something that lies as one parameter of a flat shard does, with its shape."""
    return ShardedValue(local, flat.layout.slots[number], flat.layout, flat.link, flat.device)


def _attach(module: nn.Module, parameters: list[_Held]) -> None:
    def give(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        for each in parameters:
            key = prefix + each.attribute
            if key in state and each.unit.state is not State.SUMMONED:
                state[key] = each.value()

    def take(
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        for each in parameters:
            key = prefix + each.attribute
            given = state.get(key)
            if each.unit.state is State.SUMMONED or not isinstance(given, torch.Tensor):
                continue
            own = each.value()
            if metadata.get("assign_to_params_buffers"):
                errors.append(f"{key} is sharded and cannot be replaced; load without assign=True, which copies")
                metadata["assign_to_params_buffers"] = False
                state[key] = own.local
            elif given.shape != own.shape and not (own.dim() == 0 and given.shape == (1,)):
                errors.append(
                    f"size mismatch for {key}: copying a param with shape {given.shape} from checkpoint, the shape "
                    f"in current model is {own.shape}."
                )
                state[key] = own.local
            elif isinstance(given, ShardedValue):
                state[key] = given.local
            else:
                state[key] = own.of_whole(given.full_tensor() if isinstance(given, DTensor) else given)

    module.register_state_dict_post_hook(give)
    module.register_load_state_dict_pre_hook(take)
