"""What wraps a model: torch.compile, FSDP1, `fully_shard`, checkpoint wrappers; and the default process group."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from memfit.torch_private.modules import is_compiled, module_table, modules_by_path

INNER_NAMES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
"""The attributes under which wrappers keep a module: torch.compile (torch/_dynamo/eval_frame.py), FSDP1
(torch/distributed/fsdp/_common_utils.py), checkpoint_wrapper
(torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py) and Lightning's Fabric. Where one is gone, a plan's
names are not found in such a model, and `apply` says so."""

DATA_PARALLEL_INNER = {"DistributedDataParallel": "module", "FullyShardedDataParallel": "_fsdp_wrapped_module"}
"""The attributes under which DDP (torch/nn/parallel/distributed.py) and FSDP1 (torch/distributed/fsdp/_common_utils.py)
keep the module that they wrap, by their class. Where one is gone, modules are not found in a captured wrapper."""


def name_in_state(name: str) -> str:
    """Return the name that a parameter has in a state dict: `checkpoint_wrapper` takes its own part out of it.

    `_CHECKPOINT_PREFIX` (torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py).
    """
    return name.replace("_checkpoint_wrapped_module.", "")


def compiled_original(model: nn.Module) -> Any:
    """Return the module that torch.compile wrapped, None where it is no such wrapper (torch/_dynamo/eval_frame.py)."""
    return getattr(model, "_orig_mod", None)


def has_compiled_parts(model: nn.Module) -> bool:
    """Return whether a model or a part of it is compiled (torch/_dynamo/eval_frame.py, torch/nn/modules/module.py)."""
    return any("_orig_mod" in module_table(module) or is_compiled(module) for _, module in modules_by_path(model))


def is_wrapped_by_fsdp1(model: nn.Module) -> bool:
    """Return whether FSDP1 holds parameters of a model (torch/distributed/fsdp/_common_utils.py)."""
    return any("_fsdp_wrapped_module" in module_table(module) for module in model.modules())


def ddp_in_forward() -> nn.Module | None:
    """Return the DDP module whose forward runs (`_active_ddp_module`, torch/nn/parallel/distributed.py), else None."""
    return getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)


def own_class(module: nn.Module) -> type:
    """Return a module's class, its own one where `fully_shard` has swapped it.

    `_orig_cls_mro_index` (torch/distributed/fsdp/_fully_shard/_fully_shard.py); without it the swapped class is taken.
    """
    kind = type(module)
    return kind.__mro__[getattr(kind, "_orig_cls_mro_index", 0)]


def wrapper_class_name(wrapper: nn.Module) -> str:
    """Name a wrapper by the class of torch that it is or is derived from; one that is not torch's by its own class."""
    own = own_class(wrapper)
    bases = itertools.takewhile(lambda kind: kind is not nn.Module, own.__mro__)
    return next((kind for kind in bases if kind.__module__.startswith("torch.")), own).__name__


def is_fully_sharded(module: nn.Module) -> bool:
    """Tell whether `fully_shard` was called on a module, without importing what it is in.

    `FSDPModule` (torch/distributed/fsdp/_fully_shard/_fully_shard.py) is public; importing it takes a second.
    """
    mro = type(module).__mro__
    return any(kind.__name__ == "FSDPModule" and kind.__module__.startswith("torch.") for kind in mro)


def fully_shard_parameters(module: Any) -> Iterator[Any]:
    """Yield what `fully_shard` knows of each parameter that a module's own group holds.

    `FSDPState._fsdp_param_groups` (torch/distributed/fsdp/_fully_shard/_fsdp_state.py); up to torch 2.11 there is one
    group, or none.
    """
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    for group in [state._fsdp_param_group] if groups is None else groups:
        yield from () if group is None else group.fsdp_params


def was_dtensor(parameter: Any) -> bool:
    """Return whether a parameter was a DTensor before `fully_shard` took it, as tensor parallel ones are.

    `FSDPParam.is_dtensor` (torch/distributed/fsdp/_fully_shard/_fsdp_param.py).
    """
    return bool(parameter.is_dtensor)


def is_offloaded_by_fsdp2(module: Any) -> bool:
    """Return whether `fully_shard` keeps a module's shards in host memory.

    `FSDPParam.offload_to_cpu` (torch/distributed/fsdp/_fully_shard/_fsdp_param.py).
    """
    if not is_fully_sharded(module):
        return False
    return any(parameter.offload_to_cpu for parameter in fully_shard_parameters(module))


def default_group() -> Any:
    """Return the default process group (`_get_default_group`, torch/distributed/distributed_c10d.py)."""
    return dist.distributed_c10d._get_default_group()
