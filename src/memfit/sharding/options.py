"""How parameters are sharded, and the dtypes that follow from the options and from how the step was captured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch

from memfit.capture import Parameter, Phase, Trace
from memfit.cost import Runtime, item_bytes_of
from memfit.errors import InputError
from memfit.hardware import Device, Family

Parallel = Literal["fsdp", "ddp"]
ShardEngine = Literal["fsdp2", "sharded"]
FIRST_BUCKET_BYTES = 1 << 20
"""DDP's first bucket is small, so that the first all-reduce begins soon (`dist._DEFAULT_FIRST_BUCKET_BYTES`)."""
BUCKET_CAP_BYTES = 25 << 20
ShardDtype = Literal["float64", "float32", "bfloat16", "float16"]
_USUAL = (("replicas", 1), ("reshard_after_forward", True), ("prefetch", 1))
_NAMES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions:
    """How several ranks divide the work; `units` are module paths, by default the repeated blocks, the root always.

    `parallel` is `fsdp`, fully sharded, or `ddp`, replicated: DistributedDataParallel with buckets of up to
    `bucket_cap_bytes` (its `bucket_cap_mb`), beside the gradients unless these are views of them
    (`gradient_as_bucket_view`). Units and dtypes are for `fsdp` alone.

    `replicas` groups of ranks hold all shards each: a hybrid mesh, whose gradients are summed in a group and then over
    the replicas. `reshard_after_forward` is that of every unit but the model itself: True, False, or a number of ranks,
    over which parameters stay sharded until the backward. `prefetch` units are gathered ahead; 1 is what FSDP2 does by
    itself, others are lists (`set_modules_to_forward_prefetch`).

    `keep_last` leaves the unit that runs last in the forward unsharded until its backward, which begins right after:
    `fully_shard(..., reshard_after_forward=False)` for it, as torchtitan does. A number is that of the last so many.

    With `cpu_offload` shards, their gradients and the optimizer's state are in the host's memory, where the optimizer
    steps: `CPUOffloadPolicy` of FSDP2, `offload=True` of memfit's own runtime.

    `shard_dtype` is that of shards, their gradients and optimizer state, `param_dtype` that of gathered parameters and
    whole gradients, `reduce_dtype` that in which gradients are summed. Each is the parameter's own unless given; only
    `param_dtype` of a step captured with autocast is autocast's. Write `param_dtype="float32"` to gather in that; a
    dtype of torch is taken for its name.

    `engine` is what the plan is to be run on, and predicted for: PyTorch's `fully_shard` or memfit's own runtime. None
    leaves it to `Plan.apply`, and is predicted as FSDP2.
    """

    units: tuple[str, ...] | None = None
    shard_dtype: ShardDtype | None = None
    param_dtype: ShardDtype | None = None
    reduce_dtype: ShardDtype | None = None
    parallel: Parallel = "fsdp"
    keep_last: bool | int = False
    bucket_cap_bytes: int = BUCKET_CAP_BYTES
    gradient_as_bucket_view: bool = False
    engine: ShardEngine | None = None
    replicas: int = 1
    reshard_after_forward: bool | int = True
    prefetch: int = 1
    cpu_offload: bool = False

    def shard_ranks(self, ranks: int) -> int:
        """Return over how many of the ranks a parameter is sharded."""
        if ranks % self.replicas or (ranks > 1 and ranks == self.replicas):
            raise InputError(
                f"{ranks} ranks do not divide into {self.replicas} replicas that are sharded; write replicas=... that "
                "divides the ranks, and is smaller, or parallel='ddp' to replicate all"
            )
        return ranks // self.replicas

    @property
    def first_bucket_is_small(self) -> bool:
        """DDP makes its first bucket small only where its cap is left as it is."""
        return self.bucket_cap_bytes == BUCKET_CAP_BYTES

    def __post_init__(self) -> None:
        if self.parallel not in get_args(Parallel):
            raise InputError(f"parallel is {self.parallel!r}; write 'fsdp' (sharded) or 'ddp' (replicated)")
        if self.engine is not None and self.engine not in get_args(ShardEngine):
            raise InputError(f"engine is {self.engine!r}; write 'fsdp2' (PyTorch's) or 'sharded' (memfit's own)")
        if self.parallel == "ddp":
            for name in ("units", "shard_dtype", "param_dtype", "reduce_dtype", "engine"):
                if getattr(self, name) is not None:
                    raise InputError(f"{name} is for sharded parameters, and parallel='ddp' has none; leave one out")
            for name, usual in (("keep_last", False), ("cpu_offload", False), *_USUAL):
                if getattr(self, name) is not usual and getattr(self, name) != usual:
                    raise InputError(f"{name} is for sharded parameters, and parallel='ddp' has none; leave one out")
        elif self.gradient_as_bucket_view or self.bucket_cap_bytes != BUCKET_CAP_BYTES:
            raise InputError("bucket_cap_bytes and gradient_as_bucket_view are for parallel='ddp'; leave them out")
        for name, least in (("replicas", 1), ("prefetch", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"{name} is {value!r}; write a whole number of at least {least}")
        reshards = self.reshard_after_forward
        if not isinstance(reshards, bool) and (not isinstance(reshards, int) or reshards < 2):
            raise InputError(
                f"reshard_after_forward is {reshards!r}; write True, False, or a number of ranks of at least 2"
            )
        if not isinstance(self.keep_last, int) or self.keep_last < 0:
            raise InputError(f"keep_last is {self.keep_last!r}; write True, False, or how many of the last units")
        if self.keep_last and reshards is not True:
            raise InputError(f"keep_last and reshard_after_forward={reshards!r} exclude each other; leave one out")
        if not isinstance(self.cpu_offload, bool):
            raise InputError(f"cpu_offload is {self.cpu_offload!r}; write True or False")
        cap = self.bucket_cap_bytes
        if isinstance(cap, bool) or not isinstance(cap, int) or cap < 1:
            raise InputError(f"bucket_cap_bytes is {cap!r}; write bytes, such as {BUCKET_CAP_BYTES} (25 MiB)")
        for name in ("shard_dtype", "param_dtype", "reduce_dtype"):
            given = getattr(self, name)
            if isinstance(given, torch.dtype):
                object.__setattr__(self, name, str(given).removeprefix("torch."))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardDtypes:
    """The dtypes of a sharded step. None is the parameter's own."""

    shard: str | None
    param: str | None
    reduce: str | None

    @classmethod
    def of(cls, trace: Trace, options: ShardOptions) -> ShardDtypes:
        """Those that are given, else those of the capture.

        With `param_dtype` the other two are named too, where all parameters agree: FSDP2 would reduce in `param_dtype`
        if it were not told.
        """
        for name in ("shard_dtype", "param_dtype", "reduce_dtype"):
            given = getattr(options, name)
            if given is not None and given not in _NAMES:
                raise InputError(f"{name} is {given!r}; give one of {', '.join(map(repr, _NAMES))}, or leave it out")
        cast = trace.cast
        if cast is not None and options.param_dtype not in (None, cast.dtype):
            raise InputError(f"the step was captured in {cast.dtype}, and param_dtype is {options.param_dtype}")
        param = options.param_dtype or trace.autocast or (None if cast is None else cast.dtype)
        own = {parameter.dtype for parameter in trace.parameters if _floats(parameter.dtype)}
        own = own if cast is None else {cast.kept}
        only = own.pop() if param is not None and len(own) == 1 else None
        return cls(shard=options.shard_dtype or only, param=param, reduce=options.reduce_dtype or only)

    def kept(self, parameter: Parameter) -> str:
        """The dtype of a parameter's shard, of its gradient's and of its optimizer state."""
        return _chosen(self.shard, parameter)

    def gathered(self, parameter: Parameter) -> str:
        """The dtype of the gathered parameter and of its whole gradient."""
        return _chosen(self.param, parameter)

    def reduced(self, parameter: Parameter) -> str:
        """The dtype in which the gradient is summed."""
        return _chosen(self.reduce, parameter)


def shard_bytes(parameter: Parameter, ranks: int, dtype: str | None = None) -> int:
    """What one rank keeps of a parameter: whole rows of its first dimension, the last rank's padded."""
    return padded_elements(parameter, ranks) // ranks * item_bytes(dtype or parameter.dtype)


def padded_elements(parameter: Parameter, ranks: int) -> int:
    """Elements with the padding that makes the first dimension a multiple of the ranks."""
    shape = parameter.shape or (1,)
    rows = -(-shape[0] // ranks) * ranks
    return rows * math.prod(shape[1:])


def elements_of_rank(parameter: Parameter, ranks: int, rank: int) -> int:
    """Elements of the rows that a rank has of a parameter, without padding: the last ranks may have fewer or none."""
    shape = parameter.shape or (1,)
    rows = -(-shape[0] // ranks)
    return min(max(shape[0] - rank * rows, 0), rows) * math.prod(shape[1:])


def elements(parameter: Parameter) -> int:
    """Elements of the whole parameter."""
    return math.prod(parameter.shape)


def item_bytes(dtype: str) -> int:
    """Bytes of one element."""
    try:
        return item_bytes_of(dtype)
    except AttributeError as error:
        raise InputError(f"{dtype!r} is no dtype of torch; write for example 'float32' or 'bfloat16'") from error


def _chosen(dtype: str | None, parameter: Parameter) -> str:
    """Mixed precision is for floating point only."""
    return dtype if dtype is not None and _floats(parameter.dtype) else parameter.dtype


def _floats(dtype: str) -> bool:
    return getattr(torch, dtype).is_floating_point


# Times of ops that work on shards: the optimizer of a rank has its part of the elements, and kernels a fixed time.


def on_shards(runtime: Runtime, device: Device, kept_bytes: int) -> Runtime:
    """The same step with the optimizer's ops on one rank's shards, so many bytes of parameters that train."""
    trained = [each for each in runtime.trace.parameters if each.trainable]
    whole = sum(elements(each) * item_bytes(each.dtype) for each in trained)
    if not whole:
        return runtime
    share = kept_bytes / whole
    kernel_ms, host_ms = device.efficiency[Family.OPTIMIZER].overhead_ms, device.efficiency.host.optimizer_ms
    least_ms = kernel_ms + host_ms if device.type == "cpu" else max(kernel_ms, host_ms)
    times = runtime.op_ms.copy()
    ours = np.array([op.phase is Phase.OPTIMIZER for op in runtime.trace.ops], bool)
    times[ours] = np.minimum(times[ours], np.maximum(times[ours] * share, least_ms))
    return Runtime(runtime.trace, times)
