"""Dropout, softmax, losses and reductions on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.capture.rules import RuleContext
from memfit.capture.rules.layout import bytes_of

_aten = torch.ops.aten
_FOREACH_CHUNK = 65536


def _dropout(context: RuleContext, input: Tensor, p: float, train: bool) -> Any:
    """One kernel with a mask of a byte an element (ATen/native/Dropout.cpp, `is_fused_kernel_acceptable`)."""
    if not train or not 0 < p < 1 or input.numel() == 0:
        return NotImplemented
    return _aten.native_dropout(input, p, train)[0]


def _native_dropout(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Result and mask in the input's layout (ATen/native/cuda/Dropout.cu, `dropout_cuda`)."""
    source = args[0]
    return torch.empty_like(source), torch.empty_like(source, dtype=torch.bool)


def _softmax_as(name: str) -> Any:
    fused = getattr(_aten, name)

    def rule(context: RuleContext, input: Tensor, dim: Any = None, dtype: Any = None, **_: Any) -> Any:
        """float16 to float32 is part of the kernel, bfloat16 is copied (SoftMax.cpp, `softmax`)."""
        if input.dtype != torch.float16 or dtype != torch.float32 or not isinstance(dim, int):
            return NotImplemented
        return fused(input, dim, True)

    return rule


def _cross_entropy(
    context: RuleContext,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Under autocast, log-softmax stays in the input's dtype and only the loss is float32 (LossNLL.cpp).

    `cross_entropy_loss` calls `log_softmax` with an explicit dtype, which autocast does not touch; `nll_loss`
    is on its float32 list.
    """
    plain = label_smoothing == 0 and target.shape != input.shape
    if not torch.is_autocast_enabled("cuda") or not plain or input.dtype not in (torch.float16, torch.bfloat16):
        return NotImplemented
    logarithms = torch.log_softmax(input, 0 if input.dim() == 1 else 1).float()
    weight = None if weight is None else weight.float()
    return _aten.nll_loss_nd(logarithms, target, weight, reduction, ignore_index)


def _unreduced(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """The loss of each element, before it is reduced (ATen/native/BinaryOps.cpp, `mse_loss_out` and its
    like).
    """
    reduction = kwargs.get("reduction", args[2] if len(args) > 2 else 1)
    return args[0].numel() * result.element_size() if reduction else 0


def _cumulative(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """The input in the dtype of the result (ATen/native/ReduceOps.cpp, `impl_func_cum_ops`)."""
    return bytes_of(result) if args[0].dtype != result.dtype else 0


def _roll(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """Several dimensions are rolled one after the other (TensorTransformations.h, `roll_common`)."""
    dims = args[2] if len(args) > 2 else kwargs.get("dims", ())
    return bytes_of(result) if len(dims) > 1 else 0


def _foreach_norm(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """A float32 sum per chunk of the largest tensor, for every tensor (cuda/ForeachReduceOp.cu,
    `foreach_tensor_norm_cuda`).
    """
    tensors = args[0]
    chunks = max((-(-tensor.numel() // _FOREACH_CHUNK) for tensor in tensors), default=0)
    size = 8 if any(tensor.dtype == torch.float64 for tensor in tensors) else 4
    return len(tensors) * chunks * size


def _convolution(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """cuDNN's workspace is chosen at run time (cudnn/Conv_v8.cpp, `get_plans_from_find` and heuristics)."""
    context.note("convolutions: cuDNN chooses its workspace at run time, and it is not counted")
    return 0


def _in_place(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Nothing is made: the op only writes, and torch has no meta kernel for it (cuda/FusedSgdKernel.cu)."""


_IN_PLACE = (
    "_fused_sgd_.default",
    "_fused_sgd_.tensor_lr",
    "_fused_adagrad_.default",
    "_fused_adagrad_.tensor_lr",
)

FUNCTIONS = {
    "cuda": {
        "dropout": _dropout,
        "softmax": _softmax_as("_softmax"),
        "log_softmax": _softmax_as("_log_softmax"),
        "cross_entropy_loss": _cross_entropy,
    }
}
KERNELS = {
    "cuda": {
        "aten.native_dropout.default": _native_dropout,
        **{f"aten.{name}": _in_place for name in _IN_PLACE},
    }
}
WORKSPACES = {
    "cuda": {
        "aten.mse_loss.default": _unreduced,
        "aten.smooth_l1_loss.default": _unreduced,
        "aten.huber_loss.default": _unreduced,
        "aten.convolution.default": _convolution,
        "aten.cumsum.default": _cumulative,
        "aten.cumprod.default": _cumulative,
        "aten.roll.default": _roll,
        "aten._foreach_norm.Scalar": _foreach_norm,
    }
}
