"""Element-wise ops: operands that are promoted, layouts of results, activations and dropout.

Covers the binary ops that promote their operands, `mish` and dropout. Defined in torch by ATen/TensorIterator.cpp,
ATen/native/Activation.cpp, Dropout.cpp and cuda/Dropout.cu.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.capture.rules.base import LOW_PRECISION, RuleContext
from memfit.torch_private.dispatch import below_autograd, schema_of

_aten = torch.ops.aten


# -- promotion on CPU ----------------------------------------------------------------------------------------


_PROMOTING = """add sub rsub mul div remainder fmod atan2 maximum minimum fmax fmin eq ne lt le gt ge where
logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor hypot floor_divide
true_divide add_ sub_ mul_ div_ remainder_ fmod_ eq_ ne_ lt_ le_ gt_ ge_ floor_divide_"""
_OVERLOADS = ("Tensor", "Scalar", "self", "default", "Tensor_Tensor", "Tensor_mode", "Scalar_mode")
_WRAPPED_BYTES = {bool: 1, int: 8, float: 8, complex: 16}
_WRAPPED_DTYPE = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def _promoted_operands(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """On CPU, operands of another dtype are copied to the common one (ATen/TensorIterator.cpp, `compute_types`).

    A Python number is first a tensor of its own.
    """
    operands = _operands(args)
    if schema_of(func).name == "aten::where":
        operands = operands[1:]
    types = [value for value in operands if not isinstance(value, Tensor)]
    tensors = [value for value in operands if isinstance(value, Tensor)]
    common = _common_dtype(tensors, types)
    divides = schema_of(func).name.startswith(("aten::div", "aten::true_divide", "aten::atan2"))
    if divides and not common.is_floating_point and "rounding_mode" not in kwargs:
        common = torch.get_default_dtype()
    size = torch.empty((), dtype=common, device="meta").element_size()
    held = 0
    for number in types:
        held += _WRAPPED_BYTES[type(number)]
        if _WRAPPED_DTYPE[type(number)] != common:
            held += size
    for tensor in tensors:
        if tensor.dtype != common:
            held += tensor.numel() * size
    if schema_of(func).name.endswith("_") and isinstance(result, Tensor) and result.dtype not in (common, torch.bool):
        held += result.numel() * size
    return held


def _operands(args: Any) -> list[Any]:
    return [value for value in args if isinstance(value, (Tensor, bool, int, float, complex))]


def _common_dtype(tensors: list[Tensor], numbers: list[Any]) -> torch.dtype:
    """`at::result_type` of the operands; each list is not empty together."""
    values = [*tensors, *numbers]
    common = torch.result_type(values[0], values[-1])
    for value in values[1:-1]:
        common = torch.promote_types(common, torch.result_type(value, values[0]))
    return common


# -- layouts that torch's meta kernels get wrong ---------------------------------------------------------------


_BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "atan2")


def _binary(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """An expanded operand has no say in the result's layout (ATen/TensorIterator.cpp, `reorder_dimensions`).

    The meta kernel converts 16-bit operands to float32, which makes an expanded one contiguous, and lets it
    decide.
    """
    result = func(*args, **kwargs)
    operands = [value for value in args if isinstance(value, Tensor)]
    if result.dtype in LOW_PRECISION and len(operands) > 1 and any(map(_expanded, operands)):
        strides = func(*map(_widened, args), **kwargs).stride()
        if strides != result.stride():
            return torch.empty_strided(result.size(), strides, dtype=result.dtype, device="meta")
    return result


def _expanded(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.size(), strict=True))


def _widened(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dtype not in LOW_PRECISION:
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=torch.float32, device="meta")


# -- activations whose derivative is one kernel on the target and a composition on meta tensors -----------------


def _mish(context: RuleContext, input: Tensor) -> Tensor:
    """ATen/native/Activation.cpp, `mish` and `mish_backward`."""
    return _Mish.apply(input)


class _Mish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        ctx.save_for_backward(input)
        with below_autograd():
            return _aten.mish(input)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (input,) = ctx.saved_tensors
        with below_autograd():
            return _aten.mish_backward(grads[0], input)


# -- dropout on CUDA -----------------------------------------------------------------------------------------


def _dropout(context: RuleContext, input: Tensor, p: float, train: bool) -> Any:
    """One kernel with a mask of a byte an element (ATen/native/Dropout.cpp, `is_fused_kernel_acceptable`)."""
    if not train or not 0 < p < 1 or input.numel() == 0:
        return NotImplemented
    return _aten.native_dropout(input, p, train)[0]


def _native_dropout(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Result and mask in the input's layout (ATen/native/cuda/Dropout.cu, `dropout_cuda`)."""
    source = args[0]
    return torch.empty_like(source), torch.empty_like(source, dtype=torch.bool)


FUNCTIONS = {"cpu": {"mish": _mish}, "cuda": {"mish": _mish, "dropout": _dropout}}
KERNELS = {device: {f"aten.{name}.Tensor": _binary for name in _BINARY} for device in ("cpu", "cuda")}
KERNELS["cuda"] |= {"aten.native_dropout.default": _native_dropout}
WORKSPACES = {
    "cpu": {
        **{f"aten.{name}.{overload}": _promoted_operands for name in _PROMOTING.split() for overload in _OVERLOADS},
        "aten.pow.Scalar": _promoted_operands,
        "aten.pow.Tensor_Tensor": _promoted_operands,
    }
}
