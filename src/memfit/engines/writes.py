"""What an op writes to, by its schema and where a schema does not say so."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memfit.plans.wrappers import is_fully_sharded
from memfit.torch_private.dispatch import schema_of
from memfit.torch_private.storages import storage_key
from memfit.torch_private.wrappers import fully_shard_parameters
from memfit.tradeoff import UPDATES


def written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an op writes to, running statistics included."""
    found: list[Any] = []
    if schema_of(func).is_mutable:
        for position, argument in enumerate(schema_of(func).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                found += value if isinstance(value, list | tuple) else [value]
    elif str(func) in UPDATES:
        positions, training = UPDATES[str(func)]
        if training is None or args[training]:
            found += [args[position] for position in positions]
    return [each for each in found if isinstance(each, torch.Tensor) and each.layout is torch.strided]


def gathered_parameters(unit: nn.Module) -> set[int]:
    """Return the storages into which `fully_shard` gathers parameters of a unit and of modules in it.

    They are kept from step to step, empty between gathers, and every run of the unit gathers anew.
    """
    found: set[int] = set()
    for module in unit.modules():
        if is_fully_sharded(module):
            for parameter in fully_shard_parameters(module):
                found.update(storage_key(each) for each in parameter.all_gather_outputs)
    return found
