"""Element-wise kernels: what TensorIterator makes beside its operands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.capture.rules import Rule, RuleContext
from memfit.torch_private.dispatch import schema_of

_PROMOTING = """add sub rsub mul div remainder fmod atan2 maximum minimum fmax fmin eq ne lt le gt ge where
logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor hypot floor_divide
true_divide add_ sub_ mul_ div_ remainder_ fmod_ eq_ ne_ lt_ le_ gt_ ge_ floor_divide_"""
_OVERLOADS = ("Tensor", "Scalar", "self", "default", "Tensor_Tensor", "Tensor_mode", "Scalar_mode")
_WRAPPED_BYTES = {bool: 1, int: 8, float: 8, complex: 16}
_WRAPPED_DTYPE = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def _operands(args: Any) -> list[Any]:
    return [value for value in args if isinstance(value, (Tensor, bool, int, float, complex))]


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


def _common_dtype(tensors: list[Tensor], numbers: list[Any]) -> torch.dtype:
    """`at::result_type` of the operands; each list is not empty together."""
    values = [*tensors, *numbers]
    common = torch.result_type(values[0], values[-1])
    for value in values[1:-1]:
        common = torch.promote_types(common, torch.result_type(value, values[0]))
    return common


def _mean(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """`mean` divides its sum by a number (ATen/native/ReduceOps.cpp, `mean_out` on CPU).

    A mean of 16-bit numbers is that of a float32 copy; any other copy is to the dtype of the result.
    """
    source = args[0]
    if result.dtype in (torch.float16, torch.bfloat16):
        copied = 4 * source.numel() if source.dtype != torch.float32 else 0
        return 4 * result.numel() + max(copied, 8 + 4)
    copied = source.numel() * result.element_size() if source.dtype != result.dtype else 0
    return max(copied, 8 + result.element_size()) if result.is_floating_point() else copied


def _foreach_numbers(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """CPU goes from tensor to tensor, each time making the number a tensor (ATen/native/ForeachOpsKernels.cpp)."""
    return 8 + max(tensor.element_size() for tensor in args[0])


_FOREACH = [
    f"aten._foreach_{name}.{overload}"
    for name in ("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_")
    for overload in ("Scalar", "ScalarList")
]


def _foreach(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor] | None:
    """One result for each tensor of the first list, or none in place (ATen/native/ForeachOpsKernels.cpp).

    Torch's meta kernels say the same, tensor by tensor, a hundred times slower.
    """
    return [torch.empty_like(tensor) for tensor in args[0]] if schema_of(func).returns else None


_FOREACH_SAME_DTYPE = """add sub mul div addcmul addcdiv lerp sqrt neg reciprocal maximum minimum clamp_max clamp_min
pow sign"""


def _foreach_kernels() -> dict[str, Rule]:
    """Every overload of these ops, in place or not; the dtype of a result is that of its first operand."""
    kernels: dict[str, Rule] = {}
    for name in _FOREACH_SAME_DTYPE.split():
        for packet_name in (f"_foreach_{name}", f"_foreach_{name}_"):
            packet = getattr(torch.ops.aten, packet_name)
            for overload in packet.overloads():
                if not overload.endswith("out") and not (name == "pow" and overload == "ScalarAndTensor"):
                    kernels[f"aten.{packet_name}.{overload}"] = _foreach
    return kernels


KERNELS = {device: _foreach_kernels() for device in ("cpu", "cuda")}
WORKSPACES = {
    "cpu": {
        **{f"aten.{name}.{overload}": _promoted_operands for name in _PROMOTING.split() for overload in _OVERLOADS},
        "aten.pow.Scalar": _promoted_operands,
        "aten.pow.Tensor_Tensor": _promoted_operands,
        **dict.fromkeys(_FOREACH, _foreach_numbers),
        "aten.mean.dim": _mean,
        "aten.mean.default": _mean,
    }
}
