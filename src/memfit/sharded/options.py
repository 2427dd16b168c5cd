"""How a model is sharded and scheduled: the options of `memfit.shard`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from memfit.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The dtypes of a sharded step; None is the parameter's own.

    Parameters are gathered in `param_dtype`, which is then the dtype of compute and of whole gradients; gradients are
    summed in `reduce_dtype`, by default that of the shards. `cast_inputs` casts floating inputs of every unit, of the
    root only, or of none. Buffers get `buffer_dtype` for good, outputs of the root get `output_dtype`. `full_in_eval`
    gathers in the parameters' own dtype where the model is in eval mode. `keep_reduced_gradients` leaves gradients in
    `reduce_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_inputs: Literal["units", "root", "none"] = "units"
    full_in_eval: bool = False
    keep_reduced_gradients: bool = False

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise InputError(
                    f"{name} is {dtype!r}; give a floating dtype of torch, such as torch.bfloat16, or None"
                )
        if self.cast_inputs not in ("units", "root", "none"):
            raise InputError(f"cast_inputs is {self.cast_inputs!r}; give 'units', 'root' or 'none'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When units gather.

    `forward_prefetch` and `backward_prefetch` units are gathered ahead of the one that runs; `backward_prefetch_at`
    says whether that begins before a unit's gradients are worked out or after. `in_flight_bytes` bounds what is
    gathered ahead. `order` names units in the order of the forward where the recorded one should not be used.
    """

    forward_prefetch: int = 1
    backward_prefetch: int = 1
    backward_prefetch_at: Literal["before", "after"] = "before"
    in_flight_bytes: int | None = None
    order: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("forward_prefetch", "backward_prefetch"):
            units = getattr(self, name)
            if not isinstance(units, int) or units < 0:
                raise InputError(f"{name} is {units!r}; give the number of units to gather ahead, 0 for none")
        if self.backward_prefetch_at not in ("before", "after"):
            raise InputError(f"backward_prefetch_at is {self.backward_prefetch_at!r}; give 'before' or 'after'")
        if self.in_flight_bytes is not None and self.in_flight_bytes < 0:
            raise InputError(f"in_flight_bytes is {self.in_flight_bytes}; give bytes, or None for no bound")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitOptions:
    """What one unit does after its forward.

    `keep` leaves its parameters gathered until its backward. `reshard_ranks` keeps one part in that many instead, so
    that the backward gathers from fewer ranks. `backward_gather=False` is for a unit whose backward does not read its
    parameters, such as an embedding.
    """

    keep: bool = False
    reshard_ranks: int | None = None
    backward_gather: bool = True

    def __post_init__(self) -> None:
        if self.reshard_ranks is not None and self.reshard_ranks < 2:
            raise InputError(f"reshard_ranks is {self.reshard_ranks}; give 2 or more, or keep=True for 1")
        if self.keep and self.reshard_ranks is not None:
            raise InputError("keep and reshard_ranks exclude each other: what is kept is not resharded")
