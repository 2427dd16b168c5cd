"""What `fully_shard` leaves on a module, and how it is taken off again: torch has no way back.

Note [What fully_shard leaves]: hooks in the module's hook tables, all of them functions of its own package; a class of
its own (`FSDPModule`); a state object, in the table that `contract` keeps on the module and in a weak table of the
process (torch/distributed/_composable_state.py); two attributes for Dynamo; and DTensors in the place of parameters,
which are the caller's to replace. Where one of these names is gone in a later torch, the next `fully_shard` of the
module refuses it as sharded before, and the test that shards twice fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed import _composable_state
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from memfit.torch_private.wrappers import own_class

_PACKAGE = "torch.distributed.fsdp._fully_shard"
_FOR_DYNAMO = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
_ORIGINAL = "_fsdp_orig_uid"
"""The number that `fully_shard` gives a parameter, to find those that two groups share
(torch/distributed/fsdp/_fully_shard/_fsdp_param.py)."""


def undo_fully_shard(module: nn.Module) -> None:
    """Remove from one module what `fully_shard` left there, also where it raised midway; its parameters stay."""
    tables = [table for name, table in module.__dict__.items() if "hooks" in name and isinstance(table, dict)]
    ours = {number for table in tables for number, hook in table.items() if _belongs_to_fully_shard(hook)}
    for table in tables:  # some only repeat the numbers of hooks that take keywords, or are always called
        for number in ours & table.keys():
            del table[number]
    if isinstance(module, FSDPModule):
        module.__class__ = own_class(module)
    for name in _FOR_DYNAMO:
        module.__dict__.pop(name, None)
    for key in (STATE_KEY, REGISTRY_KEY):
        table = module.__dict__.get(key)
        if table is None:
            continue
        for entry in [each for each in table if getattr(each, "__name__", each) == fully_shard.__name__]:
            del table[entry]
        if not table:
            del module.__dict__[key]
    _composable_state._module_state_mapping.pop(module, None)


def forget_original(parameter: torch.Tensor) -> None:
    """Remove the number that `fully_shard` gave a parameter which it took from a module."""
    parameter.__dict__.pop(_ORIGINAL, None)


def unit_settings(module: nn.Module) -> tuple[bool | None, torch.dtype | None, torch.dtype | None]:
    """Return whether a fully sharded module reshards after forward, its `param_dtype` and its `reduce_dtype`.

    `FSDPState._mp_policy` and `FSDPParamGroup.post_forward_mesh_info`
    (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py). The first is None where the module's parameters are all
    in modules inside it that are sharded too.
    """
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    policy = state._mp_policy
    reshards = next((group.post_forward_mesh_info is not None for group in _groups(state)), None)
    return reshards, policy.param_dtype, policy.reduce_dtype


def names_prefetched(module: nn.Module) -> bool:
    """Return whether a fully sharded module was told which units to gather ahead, by `set_modules_to_..._prefetch`.

    `FSDPState._states_to_forward_prefetch` and `_states_to_backward_prefetch`
    (torch/distributed/fsdp/_fully_shard/_fsdp_state.py).
    """
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    return bool(state._states_to_forward_prefetch or state._states_to_backward_prefetch)


def reset_iteration(model: nn.Module) -> None:
    """Make every unit of a model sharded and idle again after a forward or backward that ended midway.

    What was being gathered or reduced is dropped, not waited for: its connections are gone. The rest is
    `FSDPState._reset_iter_state` (torch/distributed/fsdp/_fully_shard/_fsdp_state.py, behind the public
    `FSDPModule.reset_iter_state`), which torch up to 2.12 has not, and which leaves whole gradients that no reduction
    has taken: the next backward would add to them.
    """
    states = list({id(state): state for module in model.modules() if (state := _state(module)) is not None}.values())
    for state in states:
        for group in _groups(state):
            group._all_gather_result = None
    for state in states:
        if state._is_root:
            state._reset_iter_state() if hasattr(state, "_reset_iter_state") else _reset_states(state)
    for state in states:
        for group in _groups(state):
            for parameter in group.fsdp_params:
                parameter.to_sharded()  # also one that its group was still unsharding
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None


def holds_whole_gradients(model: nn.Module) -> bool:
    """Return whether `fully_shard` keeps gradients that earlier backwards did not reduce (accumulation without sync).

    `FSDPParam.unsharded_accumulated_grad` (torch/distributed/fsdp/_fully_shard/_fsdp_param.py) and
    `FSDPParamGroup._partial_reduce_output`.
    """
    groups = [group for module in model.modules() if (state := _state(module)) is not None for group in _groups(state)]
    if any(group._partial_reduce_output is not None for group in groups):
        return True
    return any(each.unsharded_accumulated_grad is not None for group in groups for each in group.fsdp_params)


def gradient_hooks(parameter: torch.Tensor) -> bool:
    """Return whether somebody has registered hooks on a parameter (torch/_tensor.py)."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def _state(module: nn.Module) -> Any:
    return module._get_fsdp_state() if isinstance(module, FSDPModule) else None  # type: ignore[operator]


def _reset_states(root: Any) -> None:
    """Do what `FSDPState._reset_iter_state` does, on a torch that has none."""
    context = root._comm_ctx
    context.all_gather_state = None
    for name in ("reduce_scatter_state", "reduce_scatter_states"):
        if hasattr(context, name):
            setattr(context, name, [] if name.endswith("s") else None)
    context.post_forward_order.clear()
    for state in root._state_ctx.all_states:
        state._training_state = TrainingState.IDLE
        getattr(state, "_modules_to_run_forward", set()).clear()
        for group in _groups(state):
            for name in ("_post_reduce_event", "_all_reduce_state", "_reshard_after_forward_event"):
                setattr(group, name, None)
            group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def _groups(state: Any) -> Iterator[Any]:
    """Yield the parameter groups of a module's state; up to torch 2.11 there is one, or none."""
    groups = getattr(state, "_fsdp_param_groups", None)
    for group in [state._fsdp_param_group] if groups is None else groups:
        if group is not None:
            yield group


def _belongs_to_fully_shard(hook: Any) -> bool:
    """Return whether a hook was registered by `fully_shard`; torch may hold it wrapped."""
    function = getattr(hook, "hook", hook)
    return str(getattr(function, "__module__", "")).startswith(_PACKAGE)
