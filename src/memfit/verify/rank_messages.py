"""Messages between all ranks beside the training's collectives, on one Gloo group of memfit's own.

Who verifies and who guards a step both must reach every rank when the groups of the step are closed. They share one
group: each has threads and connections of its own.
"""

from __future__ import annotations

from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from memfit.torch_private.wrappers import default_group

T = TypeVar("T")
_SIGNS = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Application timeout caused pair closure",
    "error_on_collective",  # of the backend that stands for an aborted one (torch_private/process_groups.py)
)
_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def message_group() -> dist.ProcessGroup:
    """Return the group for messages between all ranks; where there is none yet, all ranks must call this together."""
    world = default_group()
    if world not in _groups:
        made = dist.new_group(backend="gloo")
        assert isinstance(made, dist.ProcessGroup)
        _groups[world] = made
    return _groups[world]


def forget_message_group(world: dist.ProcessGroup) -> None:
    """Let the next who asks make another group: this one's connections are closed."""
    _groups.pop(world, None)


def gather_objects(own: T, group: dist.ProcessGroup) -> list[T]:
    """Return what every rank gave, rank 0's first."""
    told: list[Any] = [None] * group.size()
    dist.all_gather_object(told, own, group=group)
    return told


def describe_failure(failure: Exception | None) -> str | None:
    """Return what other ranks are told of a failure, None where there is none."""
    return None if failure is None else f"{type(failure).__name__}: {failure}"


def follows_another(error: BaseException | None) -> bool:
    """Return whether an error says no more than that another rank has gone, itself or in what caused it."""
    from memfit.sharded import CollectiveError  # loads DTensor, for a second

    while error is not None:
        if isinstance(error, CollectiveError) or any(sign in str(error) for sign in _SIGNS):
            return True
        error = error.__cause__
    return False
