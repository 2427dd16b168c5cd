"""Ops on lists of tensors, as optimizers use them: `_foreach_*` and the fused optimizer steps.

Defined in torch by ATen/native/ForeachOpsKernels.cpp and cuda/ForeachReduceOp.cu, cuda/FusedSgdKernel.cu and its
siblings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.capture.rules.base import Rule, RuleContext
from memfit.torch_private.dispatch import schema_of

_FOREACH_SAME_DTYPE = """add sub mul div addcmul addcdiv lerp sqrt neg reciprocal maximum minimum clamp_max clamp_min
pow sign"""
_FOREACH_CHUNK = 65536
_FOREACH = [
    f"aten._foreach_{name}.{overload}"
    for name in ("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_")
    for overload in ("Scalar", "ScalarList")
]


def _foreach(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor] | None:
    """One result for each tensor of the first list, or none in place (ATen/native/ForeachOpsKernels.cpp).

    Torch's meta kernels say the same, tensor by tensor, a hundred times slower.
    """
    return [_empty_like(tensor) for tensor in args[0]] if schema_of(func).returns else None


def _empty_like(tensor: Tensor) -> Tensor:
    """Return what `torch.empty_like` does, which is written in Python for meta tensors and takes ten times as long."""
    if not tensor.is_meta or not tensor.is_contiguous():
        return torch.empty_like(tensor)
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _foreach_kernels() -> dict[str, Rule]:
    """Return every overload of these ops, in place or not; the dtype of a result is that of its first operand."""
    kernels: dict[str, Rule] = {}
    for name in _FOREACH_SAME_DTYPE.split():
        for packet_name in (f"_foreach_{name}", f"_foreach_{name}_"):
            packet = getattr(torch.ops.aten, packet_name)
            for overload in packet.overloads():
                if not overload.endswith("out") and not (name == "pow" and overload == "ScalarAndTensor"):
                    kernels[f"aten.{packet_name}.{overload}"] = _foreach
    return kernels


def _foreach_numbers(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """CPU goes from tensor to tensor, each time making the number a tensor (ATen/native/ForeachOpsKernels.cpp)."""
    return 8 + max(tensor.element_size() for tensor in args[0])


def _foreach_norm(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """A float32 sum per chunk of the largest tensor, for every tensor.

    cuda/ForeachReduceOp.cu, `foreach_tensor_norm_cuda`.
    """
    tensors = args[0]
    chunks = max((-(-tensor.numel() // _FOREACH_CHUNK) for tensor in tensors), default=0)
    size = 8 if any(tensor.dtype == torch.float64 for tensor in tensors) else 4
    return len(tensors) * chunks * size


def _write_in_place(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Return nothing: one kernel writes to parameters and state.

    Torch has no meta kernel for some (`aten._fused_sgd_`, and all with a learning rate that is a tensor).
    """


_FUSED_KERNELS = {
    f"aten.{name}.{overload}": _write_in_place
    for name in ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")
    for overload in ("default", "tensor_lr")
    if overload in getattr(torch.ops.aten, name).overloads()
}
KERNELS = {device: {**_foreach_kernels(), **_FUSED_KERNELS} for device in ("cpu", "cuda")}
WORKSPACES = {
    "cpu": dict.fromkeys(_FOREACH, _foreach_numbers),
    "cuda": {"aten._foreach_norm.Scalar": _foreach_norm},
}
