"""Softmax and losses, on CPU and CUDA.

Covers softmax and log-softmax, cross entropy, `aten.nll_loss_forward`, the pointwise losses (`mse_loss`,
`smooth_l1_loss`, `huber_loss`, `binary_cross_entropy`, `soft_margin_loss`), `multi_margin_loss` and CTC. Defined in
torch by ATen/native/SoftMax.cpp and cuda/SoftMax.cu, LossNLL.cpp and cuda/NLLLoss.cu, BinaryOps.cpp and Loss.cpp, and
LossCTC.cpp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.capture.rules.base import LOW_PRECISION, RuleContext, bytes_of, contiguous_copy, input_gradient
from memfit.capture.rules.measured_kernels import probed

_aten = torch.ops.aten


# -- softmax -------------------------------------------------------------------------------------------------


def _contiguous_operands(number: int) -> Any:
    def rule(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
        """The first operands are made contiguous.

        ATen/native/SoftMax.cpp, `softmax_cpu_out` and `softmax_backward_cpu_out`; cuda/SoftMax.cu, `host_softmax`;
        cuda/NLLLoss.cu.
        """
        return sum(contiguous_copy(value) for value in args[:number] if isinstance(value, Tensor))

    return rule


def _contiguous_result(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """The result is contiguous, whatever the layout of the operands."""
    return torch.empty_like(func(*args, **kwargs), memory_format=torch.contiguous_format)


def _softmax_as(name: str) -> Any:
    fused = getattr(_aten, name)

    def rule(context: RuleContext, input: Tensor, dim: Any = None, dtype: Any = None, **_: Any) -> Any:
        """float16 to float32 is part of the kernel, bfloat16 is copied (SoftMax.cpp, `softmax`)."""
        if input.dtype != torch.float16 or dtype != torch.float32 or not isinstance(dim, int):
            return NotImplemented
        return fused(input, dim, True)

    return rule


# -- losses --------------------------------------------------------------------------------------------------


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
    if not torch.is_autocast_enabled("cuda") or not plain or input.dtype not in LOW_PRECISION:
        return NotImplemented
    logarithms = torch.log_softmax(input, 0 if input.dim() == 1 else 1).float()
    weight = None if weight is None else weight.float()
    return _aten.nll_loss_nd(logarithms, target, weight, reduction, ignore_index)


def _reduced_loss(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """The result is first given the unreduced shape, and shrinking it to a scalar keeps that storage."""
    result = func(*args, **kwargs)
    if result.dim() == 0 and args[0].numel() > 1:
        return result.new_empty(args[0].numel()).as_strided((), ())
    return result


def _cpu_pointwise_loss(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """The unreduced loss, then the reduction (ATen/native/BinaryOps.cpp, `mse_loss_out` and its like)."""
    reduction = kwargs.get("reduction", args[2] if len(args) > 2 else 1)
    if reduction == 0:
        return 0
    mean_divisor = 8 + result.element_size() if reduction == 1 else 0
    return args[0].numel() * result.element_size() + mean_divisor


def _cuda_pointwise_loss(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """The loss of each element, before it is reduced (BinaryOps.cpp, `mse_loss_out` and its like)."""
    reduction = kwargs.get("reduction", args[2] if len(args) > 2 else 1)
    return args[0].numel() * result.element_size() if reduction else 0


# -- CTC: the lengths of the targets are values of the batch ---------------------------------------------------


_META = torch.device("meta")


def _ctc_loss(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Losses, and forward variables as wide as the longest target (LossCTC.cpp, `ctc_loss_cpu_template`)."""
    log_probabilities, target_lengths = args[0], args[3]
    longest = int(max(target_lengths))
    steps, batch = log_probabilities.size(0), log_probabilities.size(1)
    dtype = log_probabilities.dtype
    losses = torch.empty(batch, dtype=dtype, device=_META)
    return losses, torch.empty((batch, steps, 2 * longest + 1), dtype=dtype, device=_META)


_ctc_loss.reads_values = True  # type: ignore[attr-defined]


def _ctc_backward_workspace(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """The backward variables, as large as the forward ones."""
    return bytes_of(args[6])


_SOFTMAX = ("aten._softmax.default", "aten._log_softmax.default")
_SOFTMAX_BACKWARD = ("aten._softmax_backward_data.default", "aten._log_softmax_backward_data.default")
_POINTWISE_LOSSES = ("aten.mse_loss.default", "aten.smooth_l1_loss.default", "aten.huber_loss.default")
_CTC = ("aten._ctc_loss.default", "aten._ctc_loss.Tensor")
_CTC_BACKWARD = ("aten._ctc_loss_backward.default", "aten._ctc_loss_backward.Tensor")


_SHRUNK_LOSSES = tuple(
    f"aten.{name}.default" for name in ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
)
FUNCTIONS = {
    "cuda": {
        "softmax": _softmax_as("_softmax"),
        "log_softmax": _softmax_as("_log_softmax"),
        "cross_entropy_loss": _cross_entropy,
    }
}
KERNELS = {
    device: {
        **dict.fromkeys(_SHRUNK_LOSSES, _reduced_loss),
        **dict.fromkeys(_CTC, _ctc_loss),
        **dict.fromkeys(_CTC_BACKWARD, input_gradient),
        "aten.multi_margin_loss_backward.default": input_gradient,
    }
    for device in ("cpu", "cuda")
}
KERNELS["cpu"] |= dict.fromkeys(_SOFTMAX_BACKWARD, _contiguous_result)
WORKSPACES = {
    device: {
        **dict.fromkeys(_SOFTMAX, _contiguous_operands(1)),
        **dict.fromkeys(_SOFTMAX_BACKWARD, _contiguous_operands(2)),
        **dict.fromkeys(_CTC_BACKWARD, _ctc_backward_workspace),
    }
    for device in ("cpu", "cuda")
}
WORKSPACES["cpu"] |= {
    **dict.fromkeys(_POINTWISE_LOSSES, _cpu_pointwise_loss),
    "aten.binary_cross_entropy.default": probed,
    "aten.binary_cross_entropy_backward.default": probed,
    "aten.soft_margin_loss.default": probed,
    "aten.soft_margin_loss_backward.default": probed,
}
WORKSPACES["cuda"] |= {
    **dict.fromkeys(_POINTWISE_LOSSES, _cuda_pointwise_loss),
    "aten.nll_loss_forward.default": _contiguous_operands(2),
    "aten.nll_loss_backward.default": _contiguous_operands(3),
}
