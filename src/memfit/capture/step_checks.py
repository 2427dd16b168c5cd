"""Check what users give to `Step` and `spec`; each error says what to write instead."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from memfit.errors import InputError
from memfit.torch_private.modules import buffer_table, modules_by_path, parameter_table
from memfit.torch_private.wrappers import is_offloaded_by_fsdp2

_AUTOCAST: dict[Any, torch.dtype] = {
    **dict.fromkeys((torch.bfloat16, "bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys((torch.float16, "float16", "fp16", "half"), torch.float16),
}
NO_GRADIENT = "does not require grad and does not have a grad_fn"
"""What torch says of a backward that leads nowhere."""
_LABELS = "loss=lambda output, batch: criterion(output, labels)"


def resolve_shape(shape: Any) -> tuple[int, ...]:
    """Return a shape of whole numbers."""
    for size in shape:
        if isinstance(size, bool) or not isinstance(size, numbers.Integral) or size < 0:
            raise InputError(
                f"the shape {tuple(shape)!r} has {size!r} in it; write whole numbers of at least 0, as in spec((8, 3))"
            )
    return tuple(int(size) for size in shape)


def resolve_autocast(autocast: Any) -> torch.dtype | None:
    """Return the dtype of autocast, from itself or its name."""
    if autocast is None:
        return None
    found = _AUTOCAST.get(autocast) if isinstance(autocast, torch.dtype | str) else None
    if found is None:
        shown = repr(autocast) if isinstance(autocast, str) else autocast
        raise InputError(
            f"Step.autocast is {shown}; give torch.bfloat16, torch.float16 (or 'bfloat16', 'float16') or None"
        )
    return found


def check_callables(loss: Any, optimizer: Any, run: Any) -> None:
    """Refuse a loss or a `run` that is no function, and an optimizer that is none and makes none."""
    for name, value, how in (
        ("loss", loss, "a function that is called with the output and the batch, or None for the output's own loss"),
        ("run", run, "a function that is called with model, optimizer and batch, or None"),
    ):
        if value is not None and not callable(value):
            raise InputError(f"Step.{name} is {value!r}, a {type(value).__name__}; give {how}")
    if optimizer is None or callable(optimizer) or isinstance(optimizer, torch.optim.Optimizer):
        return
    known = {name.lower(): name for name, value in vars(torch.optim).items() if isinstance(value, type)}
    name = known.get(str(optimizer).lower(), "AdamW")
    raise InputError(
        f"Step.optimizer is {optimizer!r}, a {type(optimizer).__name__}; give a class such as torch.optim.{name}, an "
        f"optimizer, a function that makes one (lambda parameters: torch.optim.{name}(parameters, lr=1e-3)), or None "
        "for a step without one"
    )


def check_loss_arguments(loss: Callable[..., Any]) -> None:
    """Refuse a loss that does not take two arguments, the output and the batch."""
    function = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise InputError(
            f"the loss takes {signature}, and it is called with two arguments, (output, batch): {error}. Write "
            "loss=lambda output, batch: ..., also where the batch is not used"
        ) from None


def check_numbers(accumulation_steps: Any, clip_grad_norm: Any, resident_batches: Any) -> None:
    """Refuse counts that are not whole numbers of at least 1, and a norm that is not above 0."""
    for name, count in (("accumulation_steps", accumulation_steps), ("resident_batches", resident_batches)):
        if isinstance(count, bool) or not isinstance(count, numbers.Integral) or count < 1:
            raise InputError(f"Step.{name} is {count!r}; it must be a whole number, 1 or more")
    norm = clip_grad_norm
    if norm is None:
        return
    if isinstance(norm, bool) or not isinstance(norm, numbers.Real) or math.isnan(norm) or norm <= 0:
        raise InputError(f"Step.clip_grad_norm is {norm!r}; give a number above 0, such as 1.0, or None not to clip")


def check_batch(batch: Any) -> None:
    """Refuse a shape in the place of a batch, and arrays of numpy."""
    if isinstance(batch, tuple | list) and batch and all(type(each) is int for each in batch):
        shape = tuple(batch)
        raise InputError(
            f"the batch is {shape}: these are ints, and a model takes tensors. For one tensor of this shape write "
            f"memfit.spec({shape})"
        )
    for path, value in _leaves(batch, "batch"):
        if isinstance(value, np.ndarray | np.generic):
            raise InputError(
                f"{path} is an array of numpy ({value.dtype}, shape {value.shape}), and a model takes tensors; write "
                f"torch.as_tensor({path})"
            )


def check_batch_tensors(batch: Any) -> None:
    """Refuse a batch with a tensor that the capture cannot follow."""
    for path, value in _leaves(batch, "batch"):
        problem = _uncapturable(value) if isinstance(value, torch.Tensor) else None
        if problem is not None:
            raise InputError(f"{path} {problem}")


NamedModules = Sequence[tuple[str, nn.Module]]
"""Modules of a model by their paths."""


def check_model(modules: NamedModules) -> None:
    """Refuse a model whose tensors cannot be replaced by stand-ins, before anything of it is touched."""
    _refuse_scripted(modules)
    _refuse_sharded(modules)
    _refuse_wrapped_tensors(modules)


def check_parallel_model(model: nn.Module, device_type: str) -> None:
    """Refuse a model on several ranks that cannot be captured."""
    modules = modules_by_path(model)
    _refuse_scripted(modules)
    for path, module in modules:
        if device_type != "cpu" and is_offloaded_by_fsdp2(module):
            raise InputError(
                f"{_named(path)} keeps its shards in host memory (CPUOffloadPolicy), which is captured for CPU targets "
                "only; leave the policy out, or give the plain model and ranks=N: memfit.explain says what it saves"
            )


_SHARDED = {
    "FSDPModule": "fully_shard",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
}
_WHOLE = (
    "Give the model from before it was sharded: memfit.plan(model, batch, ..., ranks=N) plans the sharding itself, and "
    "plan.apply(model, optimizer) applies it; a model that you sharded yourself gets the checkpoint policies only"
)

_AS_IT_IS = (
    ". To capture it as it is, give a function that builds and shards it on ranks that memfit makes: "
    'memfit.trace(memfit.Step(build, batch), target=..., mesh={"dp": 8}), with build(mesh)'
)


def _refuse_sharded(modules: NamedModules) -> None:
    for path, module in modules:
        if not _SHARDED.keys().isdisjoint(_torch_kinds(type(module))):
            refuse_sharded_module(module, _named(path))
        if not isinstance(module, nn.DataParallel):
            continue
        devices: Any = getattr(module, "device_ids", ())
        if len(devices) > 1:
            raise InputError(
                f"{_named(path)} is an nn.DataParallel on {len(devices)} devices, which one capture cannot follow; "
                "give the model that it wraps (.module)"
            )


@functools.lru_cache(maxsize=1024)
def _torch_kinds(kind: type) -> frozenset[str]:
    """Return the names of torch's classes among those that a class derives from."""
    return frozenset(each.__name__ for each in kind.__mro__ if each.__module__.startswith("torch."))


def refuse_sharded_module(module: nn.Module, name: str) -> None:
    """Refuse a module that `fully_shard` or FSDP has sharded, itself and not one inside it."""
    kinds = _torch_kinds(type(module))
    for kind, how in _SHARDED.items():
        if kind in kinds:
            raise InputError(
                f"{name} is sharded by {how}, and a sharded model cannot be captured: its parameters are "
                f"this rank's parts, gathered by hooks. {_WHOLE}{_AS_IT_IS}"
            )


def _refuse_wrapped_tensors(modules: NamedModules) -> None:
    """Refuse tensors of the model that have no memory of their own, or one that a stand-in would lose."""
    for kind, table in (("parameter", parameter_table), ("buffer", buffer_table), ("attribute", vars)):
        for path, key, tensor in _unusual_tensors(modules, table):
            name = f"{path}.{key}" if path else key
            problem = _uncapturable(tensor)
            if problem is not None:
                raise InputError(f"the {kind} {name!r} {problem}")
            if kind != "attribute" and hasattr(type(tensor), "__tensor_flatten__"):
                raise InputError(
                    f"the {kind} {name!r} is a {type(tensor).__name__} (a tensor subclass that is made of other "
                    "tensors, as quantization libraries make them), which cannot be captured; give the model from "
                    "before it was converted, or one with plain tensors of the same bytes"
                )


_TENSORLESS = frozenset((bool, int, float, str, type(None), dict, OrderedDict, set))
_PLAIN_TENSORS = frozenset((torch.Tensor, nn.Parameter))


def _unusual_tensors(
    modules: NamedModules, table: Callable[[nn.Module], Any]
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield the tensors in a table of each module that are of a subclass, or not dense."""
    for path, module in modules:
        for name, value in table(module).items():
            kind = type(value)
            if kind in _TENSORLESS or (
                kind in _PLAIN_TENSORS and value.layout is torch.strided and not value.is_nested
            ):
                continue
            if isinstance(value, torch.Tensor):
                yield path, name, value


def _uncapturable(tensor: torch.Tensor) -> str | None:
    """Say why the capture cannot follow a tensor, and what to give instead; None for one that it can."""
    kind = type(tensor)
    if is_lazy(tensor):
        return "has no shape yet; call the model once on a batch, so that its lazy modules make their parameters"
    if any(base.__name__ == "DTensor" for base in kind.__mro__):
        return (
            f"is a DTensor (placements {getattr(tensor, 'placements', '')}), distributed over a mesh of devices, and "
            f"cannot be captured. {_WHOLE}. Tensor parallelism is not planned: give memfit the shapes that one rank "
            "has, as plain tensors"
        )
    if any(base.__name__ == "FakeTensor" for base in kind.__mro__):
        return (
            "is a FakeTensor, which follows a mode of its own; make it without FakeTensorMode: a model as a function "
            "that builds it (memfit does so on the meta device), a batch with memfit.spec(shape, dtype)"
        )
    if tensor.is_nested:
        return "is a nested tensor, which cannot be captured; give a padded tensor and its mask"
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}, which cannot be captured; give a dense tensor, or capture without it"
    plain = kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    if not plain and not hasattr(kind, "__tensor_flatten__"):
        return f"is a {kind.__name__}, which handles ops by itself and cannot be captured; give a plain tensor"
    return None


def _named(path: str) -> str:
    return f"module {path!r}" if path else "the model"


def _refuse_scripted(modules: NamedModules) -> None:
    """Refuse TorchScript modules with tensors: these are not Python's to replace, and the ops are others."""
    found: dict[str, nn.Module] = {}
    for path, module in modules:
        if not isinstance(module, torch.jit.ScriptModule):
            continue
        inside = any(not outer or path.startswith(f"{outer}.") for outer in found)
        if not inside and _has_tensors(module):
            found[path] = module
    if not found:
        return
    path, module = next(iter(found.items()))
    more = f" and {len(found) - 1} more are TorchScript modules" if len(found) > 1 else " is a TorchScript module"
    name = getattr(module, "original_name", type(module).__name__)
    raise InputError(
        f"{_named(path)} (a {name}){more}, made by torch.jit.script, torch.jit.trace or "
        "torch.jit.load, and such a module with parameters cannot be captured; give the model with the nn.Module from "
        "before torch.jit, and script it afterwards if you must"
    )


def _has_tensors(module: nn.Module) -> bool:
    return any(True for _ in (*module.parameters(), *module.buffers()))


def loss_failed(loss: Callable[..., Any], batch: Any, error: Exception) -> InputError | None:
    """Return the error to raise instead of torch's, when a loss could not take the batch for labels."""
    made_by_torch = getattr(type(loss) if isinstance(loss, nn.Module) else loss, "__module__", "")
    refused_by_torch = isinstance(error, AssertionError) and _raised_in_torch(error)
    if not refused_by_torch and not str(made_by_torch).startswith("torch.nn."):
        return None
    name = type(loss).__name__ if isinstance(loss, nn.Module) else getattr(loss, "__name__", type(loss).__name__)
    problem = str(error).split("\n")[0]
    return InputError(
        f"the loss {name} failed{': ' if problem else ''}{problem}. It is called with (output, batch), and the batch "
        f"is what the model was given, here {described(batch)}. Labels come from a function: {_LABELS}; or run "
        "the step yourself: Step(model, (x, labels), run=function), called with model, optimizer and batch"
    )


def check_trains(loss: torch.Tensor, model: nn.Module) -> None:
    """Refuse a loss that no gradient flows from, before torch says so in words of its own."""
    if loss.requires_grad:
        return
    check_trainable(model)
    raise InputError(
        "no gradient flows from the loss to the parameters: the loss does not depend on them, or it was cut off by "
        ".detach(), .item() or torch.no_grad(); compute it from the model's output without these"
    )


def check_trainable(model: nn.Module) -> None:
    """Refuse a model without a parameter that requires a gradient."""
    parameters = list(model.parameters())
    if any(parameter.requires_grad for parameter in parameters):
        return
    why = f"all {len(parameters)} are frozen" if parameters else "it has no parameters"
    raise InputError(
        f"no parameter of the model requires a gradient ({why}): there is nothing to train and no backward to plan; "
        "call requires_grad_() on what is to be trained"
    )


def described(value: Any) -> str:
    """Return a value in a few words."""
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def _raised_in_torch(error: Exception) -> bool:
    entry = error.__traceback__
    while entry is not None and entry.tb_next is not None:
        entry = entry.tb_next
    return entry is not None and entry.tb_frame.f_globals.get("__name__", "").partition(".")[0] == "torch"


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}[{key!r}]")
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value
