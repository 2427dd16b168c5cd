"""Matrix products: what torch checks and its meta kernels do not."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from memfit.trace.rules import RuleContext


def _same_dtype(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Operands of a product have one dtype (ATen/native/LinearAlgebra.cpp, `addmm_impl_cpu_`; cuda/Blas.cpp)."""
    operands = [value for value in args if isinstance(value, Tensor)]
    first, second = operands[-2:]
    if first.dtype != second.dtype:
        raise RuntimeError(f"mat1 and mat2 must have the same dtype, but got {first.dtype} and {second.dtype}")
    return func(*args, **kwargs)


_NAMES = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default")
KERNELS = {device: dict.fromkeys(_NAMES, _same_dtype) for device in ("cpu", "cuda")}
