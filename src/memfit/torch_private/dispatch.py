"""The dispatcher: modes, what they are turned off with, and the schema of an op."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
    is_traceable_wrapper_subclass,
)

__all__ = [
    "DeviceContext",
    "DisableAutocast",
    "DisableTorchDispatch",
    "DisableTorchFunction",
    "DispatchMode",
    "EnableTorchFunction",
    "OpOverload",
    "TensorBase",
    "below_autograd",
    "current_dispatch_mode",
    "device_constructors",
    "disable_current_modes",
    "disabled_torch_function",
    "function_modes",
    "global_device_context",
    "schema_of",
]


class DispatchMode(TorchDispatchMode):
    """A mode that sees every aten op (torch/utils/_python_dispatch.py); without it nothing of memfit works.

    Dynamo is never near a mode of memfit's; its guard (`_should_skip_dynamo`) would cost every op some microseconds.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


# OpOverload (torch/_ops.py) is the type of what a mode is called with.

disable_current_modes = _disable_current_modes
"""Run ops for real inside a capture (torch/utils/_python_dispatch.py). Without it kernels could not be measured."""

current_dispatch_mode = _get_current_dispatch_mode
"""The innermost mode (torch/utils/_python_dispatch.py), so that a loss region begins under none of the user's."""

function_modes = _get_current_function_mode_stack
"""The function modes that are active (torch/overrides.py): a `torch.device` block is one of them."""

device_constructors = _device_constructors
"""The functions that `torch.device` blocks redirect (torch/utils/_device.py): the capture answers the same ones."""

DisableTorchFunction = torch._C.DisableTorchFunction
"""Turns `__torch_function__` off (torch/csrc/utils/disable_torch_function.cpp): reads of the capture's own tensors."""

EnableTorchFunction: Any = torch._C._EnableTorchFunction  # type: ignore[attr-defined]
"""Turns it on again (torch/csrc/utils/disable_torch_function.cpp): code of torch that asks tensors for their device."""

DisableTorchDispatch = torch._C._DisableTorchDispatch  # type: ignore[attr-defined]
"""Turns `__torch_dispatch__` off (torch/csrc/autograd/init.cpp): the engine's copies are no ops of a unit."""

DisableAutocast = torch._C._DisableAutocast
"""Turns autocast off (torch/csrc/autograd/init.cpp): a recorded op runs in the dtypes that it ran in."""

below_autograd = torch._C._AutoDispatchBelowAutograd
"""Runs a kernel below autograd (torch/csrc/autograd/init.cpp), where a rule writes the gradient formula itself."""

disabled_torch_function = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a subclass that has none (torch/csrc/utils/disable_torch_function.cpp)."""

TensorBase: Any = torch._C.TensorBase
"""The class below `torch.Tensor` (torch/csrc/autograd/python_variable.cpp):
its getters are what function modes are called with."""


def is_wrapper_subclass(tensor: Any) -> bool:
    """Return whether a tensor is of a subclass that only holds others, and names them by `__tensor_flatten__`.

    `is_traceable_wrapper_subclass` (torch/utils/_python_dispatch.py).
    """
    return is_traceable_wrapper_subclass(tensor)


def inner_tensors(tensor: Any) -> list[torch.Tensor]:
    """Return the tensors that a wrapper subclass holds (torch/utils/_python_dispatch.py says how it names them)."""
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


def schema_of(func: Any) -> Any:
    """Return the schema of an op (`OpOverload._schema`, torch/_ops.py): names of arguments, and which it writes to."""
    return func._schema


def global_device_context() -> Any:
    """Return the context of `torch.set_default_device`, or None (`_GLOBAL_DEVICE_CONTEXT`, torch/__init__.py).

    Without it the default device is taken to be the CPU.
    """
    return getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
