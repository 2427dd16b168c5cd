"""What an op writes to, by its schema and where a schema does not say so."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from memfit.plans.wrappers import is_fully_sharded
from memfit.tradeoff.facts import UPDATES


def written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an op writes to, running statistics included."""
    found: list[Any] = []
    if func._schema.is_mutable:
        for position, argument in enumerate(func._schema.arguments):
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
            state = cast(Any, module)._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # one group, or none, up to torch 2.11
            for group in [state._fsdp_param_group] if groups is None else groups:
                for parameter in () if group is None else group.fsdp_params:
                    found.update(each.untyped_storage()._cdata for each in parameter.all_gather_outputs)
    return found
