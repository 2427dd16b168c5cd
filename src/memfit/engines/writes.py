"""What an op writes to, by its schema and where a schema does not say so."""

from __future__ import annotations

from typing import Any

import torch

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
