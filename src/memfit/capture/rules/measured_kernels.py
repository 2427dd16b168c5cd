"""CPU kernels whose internal allocations change with the machine, or are many small ones: measured on this one.

`probed` is the rule that others use; here are also the decompositions of linear algebra and Fourier transforms, whose
libraries allocate as they like (ATen/native/BatchLinearAlgebra.cpp, SpectralOps.cpp), and `aten._trilinear`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from memfit.capture.arguments import map_tensors, tensors_of
from memfit.capture.kernels import measured_once, probe_workspace, signature
from memfit.capture.rules.base import RuleContext, bytes_of, run_unchanged
from memfit.torch_private.dispatch import schema_of

_PROBE_LIMIT_BYTES = 1 << 28
_PROBE_LIMIT_FLOPS = 1 << 35
_SVD_FLOPS = 20
"""For each element and each of the smaller side: as many as the slowest decomposition takes."""
_WEIGHTS = {"aten::convolution": 1, "aten::convolution_backward": 2}
"""The position of an operand without samples."""
DEPENDS_ON_VALUES = "{}: what it allocates inside itself may depend on values; measured on small ones"


def probed(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """oneDNN reorders operands into layouts that depend on the instruction set (ATen/native/mkldnn).

    A call that is too large or takes too long is measured on fewer samples.
    """
    return _probed(context, func, args, kwargs, result, _flops(func, args, kwargs, result))


def _probed(
    context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any, flops: int, matrix_dims: int = 0
) -> int:
    size = sum(map(bytes_of, tensors_of((*args, result))))
    share = max(size / _PROBE_LIMIT_BYTES, flops / _PROBE_LIMIT_FLOPS)
    if share <= 1:
        return _measured(func, args, kwargs)
    samples = args[0].size(0) if isinstance(args[0], Tensor) and args[0].dim() > matrix_dims else 0
    fewer = int(samples / share) // 4 * 4
    if fewer < 4:
        context.note(f"{func}: too large to run once here; what it allocates inside itself is not counted")
        return 0
    context.note(f"{func}: too large to run once here; what it allocates inside itself is scaled from fewer samples")
    whole, half = (_measured(func, _with_samples(func, args, fewer // part), kwargs) for part in (1, 2))
    return whole + math.ceil((whole - half) * (samples - fewer) / (fewer - fewer // 2))


def _measured(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    return measured_once(signature(func, args, kwargs), lambda: probe_workspace(func, args, kwargs))


def _flops(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    formula = flop_registry.get(func._overloadpacket)
    return formula(*args, **kwargs, out_val=result) if formula is not None else 0


def _with_samples(func: Any, args: Any, count: int) -> tuple[Any, ...]:
    """Return the same call on the first `count` samples of every operand that has them."""
    samples, sizes = args[0].size(0), args[0].dim()

    def fewer(position: int, value: Any) -> Any:
        if position == _WEIGHTS.get(schema_of(func).name):
            return value
        if isinstance(value, Tensor) and value.dim() > 0 and value.size(0) == samples:
            return value[:count]
        whole_size = schema_of(func).arguments[position].name == "input_size" and len(value) == sizes
        return [count, *value[1:]] if whole_size else value

    return tuple(fewer(position, value) for position, value in enumerate(args))


# -- decompositions and transforms ---------------------------------------------------------------------------


_DECOMPOSITIONS = ("aten.linalg_", "aten._linalg_", "aten._fft", "aten.cholesky", "aten.triangular_solve", "aten.geqrf")
_SIMPLE = ("aten.linalg_vector_norm", "aten._linalg_check_errors")


def is_decomposition(name: str) -> bool:
    """Tell whether an op is a decomposition or transform, which takes memory as its library likes."""
    return name.startswith(_DECOMPOSITIONS) and not name.startswith(_SIMPLE)


def _decomposition(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    context.note(DEPENDS_ON_VALUES.format(func))
    args = map_tensors(args, _valid_pivots)
    dims = 0 if "fft" in schema_of(func).name else 2
    return _probed(context, func, args, kwargs, result, _decomposition_flops(func, args), dims)


def _not_counted(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    context.note(f"{func}: what the library allocates inside it is not counted")
    return 0


def is_slow_decomposition(func: Any, args: Any) -> bool:
    """Tell whether a decomposition has more to compute than a measurement of its workspace may take."""
    return _decomposition_flops(func, args) > _PROBE_LIMIT_FLOPS


def _decomposition_flops(func: Any, args: Any) -> int:
    if "fft" in schema_of(func).name:
        return 0
    matrices = (each for each in tensors_of(args) if each.dim() >= 2)
    return max((_SVD_FLOPS * each.numel() * min(each.shape[-2:]) for each in matrices), default=0)


def _valid_pivots(tensor: Tensor) -> Tensor:
    """Row numbers from 1, as the kernels check; other tensors are left to the probe."""
    return torch.ones(tensor.shape, dtype=tensor.dtype) if tensor.dtype == torch.int32 else tensor


DECOMPOSITIONS = {"cpu": _decomposition, "cuda": _not_counted}
FUNCTIONS = {device: dict.fromkeys(("stft", "istft"), run_unchanged) for device in ("cpu", "cuda")}
WORKSPACES = {"cpu": {"aten._trilinear.default": probed}}
