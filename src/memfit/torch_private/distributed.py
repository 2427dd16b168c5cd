"""A process group that sends nothing, and what of DTensor and FSDP2 a capture on such a group must know.

Imported when a step is captured on several ranks, not before: `torch.distributed.tensor` takes a second to load.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup
from torch.distributed.tensor import _random as dtensor_random
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from memfit.torch_private.wrappers import is_fully_sharded

__all__ = ["AsyncCollectiveTensor", "FSDPCommContext", "FSDPParam", "FakeStore"]

# FakeStore (torch/testing/_internal/distributed/fake_pg.py) comes with the backend "fake", whose collectives return at
# once and change nothing. Without it no parallel step can be captured.

# AsyncCollectiveTensor (torch/distributed/_functional_collectives.py) is around the result, `elem`, of a collective
# that nobody has waited for.

# Methods of FSDP2 that a capture calls or replaces, with their owners. FSDPParamGroup and FSDPCommContext are in
# torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, FSDPParam is in _fsdp_param.py beside it. Where one is gone,
# the capture of a fully sharded model ends with an AttributeError.

_Method = tuple[type, str]

CHECK_FOR_META: _Method = (FSDPParamGroup, "_validate_no_meta_params")
"""Refuses parameters that were never materialized, and all of a capture's are on meta."""
UNSHARD_BEFORE_FORWARD: _Method = (FSDPParamGroup, "pre_forward")
"""Gathers parameters before a module's forward."""
PREFETCH: _Method = (FSDPParamGroup, "_prefetch_unshard")
"""Gathers those of another group while one runs; a static method."""
MAKE_STREAMS: _Method = (FSDPCommContext, "lazy_init")
"""Makes the streams, attributes of the context by which they get their names here."""
KEEP_AFTER_FORWARD: _Method = (FSDPParam, "to_sharded_post_forward")
"""Copies what a rank keeps of a parameter until the backward, which is no activation."""

clear_dtensor_caches = _clear_sharding_prop_cache
"""Forget how DTensor has sharded results (torch/distributed/tensor/debug/__init__.py): what it remembers refers to
meshes, and one of a group that is gone would be taken for an equal one that is made later."""

FSDP2_STREAMS = {
    "all_gather_copy_in_stream": "copy",
    "all_gather_stream": "gather",
    "reduce_scatter_stream": "reduce",
    "all_reduce_stream": "all_reduce",
}
"""The attributes of `FSDPCommContext` that are streams, and what memfit calls them."""


class _NoTracker:
    """Stands for DTensor's `_rng_tracker` (torch/distributed/tensor/_random.py) where no random number is drawn.

    The real one is made by the first random op on a DTensor, such as an initialization. It puts the generator's state
    on the GPU and sends it to all ranks, and would outlive the group.
    """

    distribute_region_enabled = False

    def _distribute_region(self, *_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@contextlib.contextmanager
def fake_group(ranks: int, rank: int = 0) -> Iterator[None]:
    """Make this process one of so many ranks that are not there, inside the block."""
    hook = sys.excepthook  # `init_process_group` puts one in its place that names the rank, and leaves it there
    tracker = dtensor_random._rng_tracker
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    dtensor_random._rng_tracker = _NoTracker()  # type: ignore[assignment]
    try:
        yield
    finally:
        dtensor_random._rng_tracker = tracker
        clear_dtensor_caches()
        dist.destroy_process_group()
        sys.excepthook = hook


def fsdp2_comm_context(module: Any) -> FSDPCommContext | None:
    """Return what `fully_shard` shares between the groups of a model, None for a module that it does not know."""
    return module._get_fsdp_state()._comm_ctx if is_fully_sharded(module) else None


def part_kept_after_forward(parameter: FSDPParam) -> Any:
    """Return what a rank keeps of a parameter from its forward to the backward (`_sharded_post_forward_param_data`)."""
    return parameter._sharded_post_forward_param_data


def group_stride(group: Any) -> int:
    """Return how far apart the ranks of a group are, 1 for a group of one."""
    found = _resolve_process_group(group) if isinstance(group, str) else dist.ProcessGroup.unbox(group)  # type: ignore[arg-type]
    ranks = dist.get_process_group_ranks(found)
    return ranks[1] - ranks[0] if len(ranks) > 1 else 1


def group_size(group: Any) -> int:
    """Return how many ranks a collective's group has; an op is given the group itself, boxed, or its name."""
    if isinstance(group, str):
        return _resolve_process_group(group).size()  # type: ignore[arg-type]
    return dist.ProcessGroup.unbox(group).size()


def group_ranks(group: Any) -> list[int]:
    """Return the ranks of a collective's group, as the whole job counts them."""
    found = _resolve_process_group(group) if isinstance(group, str) else dist.ProcessGroup.unbox(group)  # type: ignore[arg-type]
    return dist.get_process_group_ranks(found)
