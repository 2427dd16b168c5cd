"""`shard_placement_fn` of `fully_shard`: along which dimension of a tensor its ranks should have parts.

FSDP2 shards rows, or with this function columns, say, since a rank there has a block of the tensor. Here a rank has a
range of flattened elements, whatever dimension was asked for: the step, the optimizer's result, whole values and what
`torch.distributed.checkpoint` saves are the same for any of them. So the function is asked and its answers are checked;
what would change more than the layout is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard

from memfit.errors import InputError
from memfit.sharded.wrap_policy import FoundUnit

ShardPlacementFn = Callable[[nn.Parameter], Any]
"""Gives `Shard(dim)` for a parameter, or None."""


def check_placements(found: Iterable[FoundUnit], choose: ShardPlacementFn | None) -> None:
    """Refuse answers that name no dimension of the parameter, or something else than a dimension."""
    if choose is None:
        return
    for member in (member for unit in found for member in unit.members):
        answer, name = choose(member.parameter), member.names[0]
        if answer is None:
            continue
        if type(answer) is not Shard:
            raise InputError(
                f"shard_placement_fn gives {answer!r} for {name!r}; give Shard(dim) or None. A parameter that is to "
                "be on another mesh than that of this call must be a DTensor there before, as expert parallel makes it"
            )
        if not -member.parameter.dim() <= answer.dim < member.parameter.dim():
            raise InputError(
                f"shard_placement_fn gives {answer!r} for {name!r}, which has {member.parameter.dim()} dimensions"
            )
