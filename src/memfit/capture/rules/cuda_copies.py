"""Operands that CUDA kernels copy because of their layout."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from memfit.capture.rules import RuleContext
from memfit.capture.rules.layout import bytes_of, contiguous_copy, fills_its_memory


def blas_copy(matrix: Tensor) -> int:
    """Bytes of the copy made of a matrix that cuBLAS cannot read.

    cuda/Blas.cpp, `prepare_matrix_for_cublas` and `prepare_batch_matrix_for_cublas`: one of the last two
    dimensions has stride 1 and the other steps over it; the stride of a batch may be 0.
    """
    if matrix.dim() == 2 and fills_its_memory(matrix):
        return 0
    (rows, columns), (row_stride, column_stride) = matrix.shape[-2:], matrix.stride()[-2:]
    readable = (row_stride == 1 and column_stride >= max(1, rows)) or (
        column_stride == 1 and row_stride >= max(1, columns)
    )
    if readable or (matrix.is_contiguous() and 0 not in (row_stride, column_stride)):
        return 0
    return bytes_of(matrix)


def _product(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """`mm` and `bmm` (cuda/Blas.cpp)."""
    return blas_copy(args[0]) + blas_copy(args[1])


def _added_product(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """`addmm` and `baddbmm` (cuda/Blas.cpp)."""
    return blas_copy(args[1]) + blas_copy(args[2])


def _contiguous_operands(number: int) -> Any:
    def rule(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
        """Operands are made contiguous (cuda/SoftMax.cu, `host_softmax`; cuda/NLLLoss.cu)."""
        return sum(contiguous_copy(value) for value in args[:number] if isinstance(value, Tensor))

    return rule


WORKSPACES = {
    "cuda": {
        "aten.mm.default": _product,
        "aten.bmm.default": _product,
        "aten.addmm.default": _added_product,
        "aten.baddbmm.default": _added_product,
        "aten._softmax.default": _contiguous_operands(1),
        "aten._log_softmax.default": _contiguous_operands(1),
        "aten._softmax_backward_data.default": _contiguous_operands(2),
        "aten._log_softmax_backward_data.default": _contiguous_operands(2),
        "aten.nll_loss_forward.default": _contiguous_operands(2),
        "aten.nll_loss_backward.default": _contiguous_operands(3),
    }
}
