"""What of DistributedDataParallel and FSDP1 a capture on ranks that are not there must know.

Imported when a step is captured on several ranks, not before. Where one of these names is gone in a later torch, a
model in such a wrapper cannot be built or captured, and the tests of `tests/capture/test_wrapped_ranks.py` say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import (
    Logger,
    Reducer,
    _create_work_from_future,  # type: ignore[attr-defined]  # not in the stubs
)
from torch.distributed.fsdp import FullyShardedDataParallel, _init_utils
from torch.nn.parallel import distributed
from torch.nn.parallel.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel", "FullyShardedDataParallel"]

_Method = tuple[type, str]

REBUILD_BUCKETS: _Method = (Reducer, "_rebuild_buckets")
"""Makes buckets anew from values that the ranks have agreed on (torch/csrc/distributed/c10d/reducer.cpp)."""
LOG_TIMES: _Method = (Logger, "set_runtime_stats_and_log")
"""Measures times (torch/csrc/distributed/c10d/logger.cpp), and warns on devices that are neither CPU nor CUDA."""
CHECK_OF_HOOK: _Method = (DistributedDataParallel, "_check_comm_hook")
"""Refuses communication hooks that the NCCL of this machine could not run (torch/nn/parallel/distributed.py)."""

STARTS: tuple[tuple[ModuleType, str, Any], ...] = (
    (distributed, "_verify_param_shape_across_processes", None),
    (distributed, "_sync_module_states", None),
    (_init_utils, "_sync_module_params_and_buffers", None),
    (_init_utils, "_need_to_materialize_module", (False, False)),
)
"""Functions that compare or send the values with which a model starts (torch/distributed/utils.py), or materialize
parameters (torch/distributed/fsdp/_init_utils.py), and what they return where there are no values."""

FSDP1_STREAMS = {
    "_default_stream": "compute",
    "_pre_unshard_stream": "copy",
    "_unshard_stream": "gather",
    "_post_backward_stream": "reduce",
    "_all_reduce_stream": "reduce",
}
"""The attributes of FSDP1's state that are streams (`_init_streams`, torch/distributed/fsdp/_runtime_utils.py), and
what memfit calls them. Without hybrid sharding the last is the default stream."""

_UNSHARDED = {"_full_param_padded": True, "_full_prec_full_param_padded": True, "_mp_shard": False}
"""The attributes of a `FlatParameter` whose memory comes and goes (torch/distributed/fsdp/_flat_param.py), and whether
they are the gathered parameter. `_mp_shard` is the shard in the dtype in which it is gathered, and the parameter itself
where it is not sharded."""


def finished_work(tensors: Sequence[torch.Tensor]) -> Any:
    """Return the work of a collective that is done, boxed as an op returns it; its future has these tensors.

    `_create_work_from_future` (torch/csrc/distributed/c10d/init.cpp). The work of the fake group has a future without a
    value, and DDP's reducer and its hooks take the reduced bucket from there.
    """
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(list(tensors))
    return _create_work_from_future(future).boxed()


def flat_parameters(module: nn.Module) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yield the tensors of an FSDP1 module whose memory comes and goes, and whether each is its whole parameter.

    There are none before its first forward.
    """
    handle: Any = getattr(module, "_handle", None)
    if handle is None:
        return
    for name, whole in _UNSHARDED.items():
        tensor = getattr(handle.flat_param, name, None)
        if tensor is not None:
            yield tensor, whole or not handle.uses_sharded_strategy


def low_precision_parameters(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the copies in which DDP's mixed precision computes with a module's own parameters.

    `_mp_param` of a parameter (torch/nn/parallel/distributed.py), whose memory comes and goes.
    """
    for parameter in module.parameters(recurse=False):
        copy = getattr(parameter, "_mp_param", None)
        if copy is not None:
            yield copy


def offloads_parameters(module: FullyShardedDataParallel) -> bool:
    """Return whether FSDP1 keeps a module's shards in host memory (`cpu_offload`, torch/distributed/fsdp/api.py)."""
    return bool(module.cpu_offload.offload_params)
