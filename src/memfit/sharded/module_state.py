"""What `state_dict` and `load_state_dict` of a sharded model give and take, under the original names.

While a unit runs, its modules hold gathered parameters. Hooks on every module that holds one give its flat DTensor all
the same, and take whole tensors, DTensors and those of other ranks' shards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memfit.sharded.flat_dtensor import FlatDTensor
from memfit.sharded.flat_param import FlatShard
from memfit.sharded.unit import ShardedUnit, State


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A parameter that a module holds."""

    attribute: str
    unit: ShardedUnit
    flat: FlatShard
    number: int

    def value(self) -> FlatDTensor:
        return self.flat.flat_specs[self.number].wrap(self.flat.own(self.number))


def attach_state(units: Sequence[ShardedUnit]) -> None:
    """Make the modules of units give and take state as those of a plain model do."""
    held: dict[nn.Module, list[_Held]] = defaultdict(list)
    for unit in units:
        for flat in unit.flats:
            for number, places in enumerate(flat.places):
                for place in places:
                    held[place.module].append(_Held(attribute=place.attribute, unit=unit, flat=flat, number=number))
    for module, parameters in held.items():
        _attach(module, parameters)


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
            if each.unit.state is State.IDLE and each.unit.gathered:  # by unshard(): the values are for the shards
                each.unit.to_sharded()
                each.unit.free()
            own = each.value()
            if metadata.get("assign_to_params_buffers"):  # the shard keeps its memory, and gets the values
                metadata["assign_to_params_buffers"] = False
            if given.shape != own.shape and not (own.dim() == 0 and given.shape == (1,)):
                errors.append(
                    f"size mismatch for {key}: copying a param with shape {given.shape} from checkpoint, the shape "
                    f"in current model is {own.shape}."
                )
                state[key] = own

    module.register_state_dict_post_hook(give)
    module.register_load_state_dict_pre_hook(take)
