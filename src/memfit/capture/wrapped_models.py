"""Models that DistributedDataParallel or FSDP1 wraps, built and named on ranks that are not there.

Note [Wrapped models]: the wrappers are PyTorch's own, with DDP's reducer in C++, which works on meta tensors as on any
other. What they do with values when a model starts is left out: comparing parameters between ranks, sending those of
rank 0, materializing. While one is built, tensors are on the target's device for it, by which DDP and FSDP1 decide.

A wrapper is no module of the model: modules and parameters inside it are named as without it, as plans name them. What
it does before and after its module's forward belongs to the call around it; `CallTracker.path` names its module.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from memfit.capture.replacements import patched
from memfit.errors import InputError
from memfit.hardware import Device
from memfit.torch_private.dispatch import DispatchMode, TensorBase, device_constructors
from memfit.torch_private.distributed_tensors import is_distributed, is_local_dtensor
from memfit.torch_private.modules import module_table
from memfit.torch_private.wrappers import (
    DATA_PARALLEL_INNER,
    fully_shard_parameters,
    is_fully_sharded,
    was_dtensor,
    wrapper_class_name,
)

_META = torch.device("meta")


InnerOf = Callable[[nn.Module], nn.Module | None]
"""Returns the module that a wrapper wraps, None for a module that is no wrapper."""


def inner_module(module: nn.Module) -> nn.Module | None:
    """Return the module that DDP or FSDP1 wraps, None where this is no such wrapper."""
    name = _inner_name(type(module))
    return None if name is None else module_table(module).get(name)


@functools.lru_cache(maxsize=1024)
def _inner_name(kind: type) -> str | None:
    """Return the name under which a kind of wrapper keeps its module, None for other modules."""
    for each in kind.__mro__:
        if each.__name__ in DATA_PARALLEL_INNER and each.__module__.startswith("torch."):
            return DATA_PARALLEL_INNER[each.__name__]
    return None


def innermost(module: nn.Module, inner_of: InnerOf = inner_module) -> nn.Module:
    """Return the module inside all wrappers."""
    while (inner := inner_of(module)) is not None:
        module = inner
    return module


def own_modules(
    model: nn.Module, prefix: str = "", inner_of: InnerOf = inner_module
) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module that is no wrapper by its path without wrappers; one that has several, under each."""
    return ((path, module) for path, module, inner in with_wrappers(model, prefix, inner_of) if inner is None)


def wrappers(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield every wrapper by the path of the module that it wraps."""
    return ((path, module) for path, module, inner in with_wrappers(model, prefix) if inner is not None)


def with_wrappers(
    model: nn.Module, prefix: str = "", inner_of: InnerOf = inner_module
) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """Yield every module, also wrappers, by its path without wrappers, with the module that it wraps."""
    left: list[tuple[str, nn.Module]] = [(prefix, model)]
    while left:
        path, module = left.pop()
        inner = inner_of(module)
        yield path, module, inner
        if inner is not None:
            left.append((path, inner))
        elif children := module_table(module):
            above = f"{path}." if path else ""
            left += [(above + name, child) for name, child in children.items() if child is not None][::-1]


def names_of_wrappers(model: nn.Module, inner_of: InnerOf = inner_module) -> tuple[str, ...]:
    """Name what a model is wrapped in or sharded by, the outermost first: `DistributedDataParallel`, `fully_shard`.

    A subclass of a wrapper of torch's has the name of torch's class. `DTensor`, the last, stands for parameters that
    are DTensors without `fully_shard`, as tensor parallel ones are.
    """
    found: dict[str, None] = {}
    sharded: list[nn.Module] = []
    for module in model.modules():
        if inner_of(module) is not None:
            found[wrapper_class_name(module)] = None
        if is_fully_sharded(module):
            sharded.append(module)
            found["fully_shard"] = None
    if sharded:
        distributed = any(was_dtensor(each) for module in sharded for each in fully_shard_parameters(module))
    else:
        distributed = any(is_distributed(type(each)) and not is_local_dtensor(each) for each in model.parameters())
    return (*found, "DTensor") if distributed else tuple(found)


@contextlib.contextmanager
def wrapping(device: Device) -> Iterator[None]:
    """Let DDP and FSDP1 wrap models on meta inside the block, as if these were on the device."""
    from memfit.torch_private.data_parallel import (
        CHECK_OF_HOOK,
        STARTS,
        DistributedDataParallel,
        FullyShardedDataParallel,
    )

    place = torch.device("cuda", 0) if device.type == "cuda" else torch.device("cpu")

    def on_target(init: Callable[..., None]) -> Callable[..., None]:
        def build(wrapper: nn.Module, *args: Any, **kwargs: Any) -> None:
            with _OnTarget(place), _UsedMap() as made:
                init(wrapper, *args, **kwargs)
            if made.tensor is not None:
                _used_maps[wrapper] = made.tensor
            _check(wrapper)

        return build

    with contextlib.ExitStack() as stack:
        for module, name, result in STARTS:
            stack.enter_context(patched(module, name, lambda _, result=result: lambda *a, **k: result))
        for kind in (DistributedDataParallel, FullyShardedDataParallel):
            stack.enter_context(patched(kind, "__init__", on_target))
        if device.type == "cuda":
            stack.enter_context(patched(*CHECK_OF_HOOK, _check_without_nccl))
        yield


_used_maps: weakref.WeakKeyDictionary[nn.Module, torch.Tensor] = weakref.WeakKeyDictionary()


def used_map_of(wrapper: nn.Module) -> torch.Tensor | None:
    """Return the tensor in which DDP notes the parameters that a backward has used; None where it does not.

    It does with `find_unused_parameters` and reads it when the backward ends: its values are always known.
    """
    return _used_maps.get(wrapper)


class _UsedMap(DispatchMode):
    """Finds that tensor while DDP is built; it belongs to the reducer, which shows it to nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.tensor: torch.Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.zeros.default and result.dtype is torch.int32 and not result.is_meta:
            self.tensor = result
        return result


def _check_without_nccl(original: Callable[..., None]) -> Callable[..., None]:
    """Let gradients be sent in bfloat16, for which DDP looks for the NCCL of this machine."""

    def check(wrapper: nn.Module, hook: Callable[..., Any]) -> None:
        if not getattr(hook, "__name__", "").startswith("bf16_compress"):
            original(wrapper, hook)

    return check


def _check(wrapper: nn.Module) -> None:
    from memfit.torch_private.data_parallel import FullyShardedDataParallel, offloads_parameters

    if isinstance(wrapper, FullyShardedDataParallel) and offloads_parameters(wrapper):
        raise InputError(
            "the model is wrapped in FullyShardedDataParallel with CPUOffload(offload_params=True), and shards in host "
            "memory cannot be captured yet; leave cpu_offload out, or give the plain model and ranks=N"
        )


class _OnTarget(TorchFunctionMode):
    """Answers that tensors on meta are on the target's device, and makes those asked for there on meta."""

    def __init__(self, place: torch.device) -> None:
        super().__init__()
        self._factories = device_constructors()
        self._place = place
        self._answers = {
            vars(TensorBase)[name].__get__: answer
            for name, answer in (
                ("device", place),
                ("is_meta", False),
                ("is_cuda", place.type == "cuda"),
                ("is_cpu", place.type == "cpu"),
            )
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._answers and args[0].device.type == "meta":
            return self._answers[func]
        device = kwargs.get("device") if func in self._factories else None
        if device is not None and torch.device(device).type == self._place.type:
            kwargs = {**kwargs, "device": _META}
        return func(*args, **kwargs)
