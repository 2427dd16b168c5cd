"""How a model is sharded and scheduled: the options of `memfit.shard`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from memfit.errors import InputError
from memfit.sharding import Schedule, UnitOptions

__all__ = ["GradientHook", "Precision", "Reduction", "Schedule", "UnitOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The dtypes of a sharded step; None is the parameter's own.

    Parameters are gathered in `param_dtype`, which is then the dtype of compute and of whole gradients; gradients are
    summed in `reduce_dtype`, by default that of the shards. `shard_dtype` is that of the shards, and so of the
    optimizer: a model in bfloat16 may be trained with shards in float32. `cast_inputs` casts floating inputs of every
    unit, of the root only, or of none. Buffers get `buffer_dtype` for good, outputs of the root, or with
    `cast_outputs="units"` of every unit, get `output_dtype`. `full_in_eval` gathers in the dtype of the shards where
    the model is in eval mode. `keep_reduced_gradients` leaves gradients in `reduce_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_inputs: Literal["units", "root", "none"] = "units"
    full_in_eval: bool = False
    keep_reduced_gradients: bool = False
    shard_dtype: torch.dtype | None = None
    cast_outputs: Literal["units", "root"] = "root"

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype", "shard_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise InputError(
                    f"{name} is {dtype!r}; give a floating dtype of torch, such as torch.bfloat16, or None"
                )
        if self.cast_inputs not in ("units", "root", "none"):
            raise InputError(f"cast_inputs is {self.cast_inputs!r}; give 'units', 'root' or 'none'")
        if self.cast_outputs not in ("units", "root"):
            raise InputError(f"cast_outputs is {self.cast_outputs!r}; give 'units' or 'root'")


GradientHook = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]
"""Takes the whole gradients of a unit, flat, and the group; gives the sum over ranks of this rank's part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """How gradients are summed over ranks.

    They are divided by `divisor`, by default the number of ranks. `compress` sends them in a smaller dtype. `hook`
    replaces the sum over the shard ranks.
    """

    divisor: float | None = None
    compress: torch.dtype | None = None
    hook: GradientHook | None = None

    def __post_init__(self) -> None:
        if self.divisor is not None and not self.divisor > 0:
            raise InputError(f"divisor is {self.divisor!r}; give a positive number, or None for the number of ranks")
        if self.compress not in (None, torch.bfloat16, torch.float16):
            raise InputError(f"compress is {self.compress!r}; give torch.bfloat16 or torch.float16, or None")
        if self.hook is not None and self.compress is not None:
            raise InputError("hook and compress exclude each other: compress inside of the hook")
